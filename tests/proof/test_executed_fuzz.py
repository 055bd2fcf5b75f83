"""The fuzzer of executed PTX finds a kernel that was compiled to other code. Kernels as they are pass it:
tests/fuzz/test_fuzz.py."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

from harness import Wrong

import executed
from ptx_interpreter import run as ptx


def every_bound_one_further(text: str) -> str:
    return re.sub(r"setp\.(lt|ge)\.s32", lambda c: {"lt": "setp.le.s32", "ge": "setp.gt.s32"}[c[1]], text)


def a_product_of_other_registers(text: str) -> str:
    return re.sub(r"(mma\.sync\S+\s+\{[^}]*\}, \{ ?)(%r\d+), (%r\d+)", r"\1\3, \2", text)


@pytest.mark.parametrize(
    ("change", "told"),
    [(every_bound_one_further, "out of bounds"), (a_product_of_other_registers, "units of rounding apart")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_miscompiled_kernel_is_found(
    change: Callable[[str], str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ptx.executed_on
    monkeypatch.setattr(
        ptx, "executed_on", lambda arch, done: whole(arch, done, lambda _, text: change(text))
    )
    case = {"arch": 80, "dtype": "bf16", "feature": "causal", "d": 64, "e": 64, "b": 1, "g": 1, "r": 1}
    case |= {"s_q": 33, "s_kv": 75, "layout": "bhsd", "backward": False, "splits": 1, "seed": 1}
    with pytest.raises(Wrong, match=told):
        executed.TARGET.attempt(case)

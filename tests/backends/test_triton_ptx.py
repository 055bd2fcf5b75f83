"""How a kernel of ours is called by the driver: arguments against the parameters that PTX declares."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import ptx
from attnsel.backends.triton.gate import Configuration, launch_of

CALLS = [(kernel, "all") for kernel in ("forward", "rows", "dkdv", "dq", "dbias")]
CALLS += [(kernel, "causal") for kernel in ("forward", "rows", "dkdv", "dq")]  # no bias, no dbias pass


def with_memory(args: dict[str, Any]) -> dict[str, Any]:
    """Any memory for tensors that have none: only addresses are looked at."""
    return {
        name: torch.zeros(64) if isinstance(value, torch.Tensor) else value for name, value in args.items()
    }


@pytest.mark.parametrize(("kernel", "feature"), CALLS)
def test_arguments_are_the_parameters_of_turings_ptx(kernel: str, feature: str) -> None:
    launch = launch_of(Configuration(kernel, 75, 64, 64, "fp16", feature))
    compiled = ptx.program(launch, 75)
    assert re.search(r"^\.target sm_75$", compiled.ptx, re.MULTILINE)
    assert compiled.threads == 32 * launch.block.warps
    assert f".reqntid {compiled.threads}" in compiled.ptx or f".maxntid {compiled.threads}" in compiled.ptx
    assert compiled.shared_memory <= 64 * 1024
    values = ptx.pack(compiled, with_memory(launch.args))
    assert len(values) == len(ptx.parameters(compiled))
    assert not any(value.value for value in values[len(compiled.arguments) :])
    by_name = dict(zip((name for name, _ in compiled.arguments), values, strict=False))
    for name, value in launch.args.items():
        if name in by_name and not isinstance(value, torch.Tensor):
            assert by_name[name].value == pytest.approx(value), name


def test_arguments_of_another_kernel_are_refused() -> None:
    compiled = ptx.program(launch_of(Configuration("forward", 75, 64, 64, "fp16")), 75)
    args = with_memory(launch_of(Configuration("forward", 75, 64, 64, "fp16")).args)
    with pytest.raises(ValueError, match="declares"):
        ptx.pack(dataclasses.replace(compiled, arguments=compiled.arguments[1:]), args)
    with pytest.raises(ValueError, match="multiples of 16"):
        ptx.pack(compiled, args | {"Q": torch.zeros(64)[1:]})

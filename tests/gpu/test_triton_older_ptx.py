"""Kernels compiled for older architectures, run on the GPU at hand: the driver compiles their PTX for it.

The closest thing to a Turing or Ampere card where there is none: the same PTX, tiles and instructions
(mma.m16n8k8 for sm75), other machine code.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from attention_cases import (
    CAUSAL,
    KITCHEN_SINK,
    Case,
    assert_errs_little_more,
    build,
    carried_out,
    expected,
    onto,
)

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import ptx
from attnsel.backends.triton import compiler as interpret
from attnsel.backends.triton import run as triton_run
from attnsel.backends.triton.launch import Launch

EVERYTHING = {
    "seqlens_q": "b",
    "seqlens_kv": "b",
    "bias": "1 h s_q s_kv",
    "attn_mask": "b 1 s_q s_kv",
    "alibi_slopes": "h",
    "softmax_offset": "h",
}
CASES = [
    *(Case(f"{d}", {}, {}, {"d": d, "e": d}) for d in (64, 128)),
    *(Case(f"{d} causal", CAUSAL, {}, {"d": d, "e": d}) for d in (64, 128)),
    Case("80 and 72, window", {"window_left": 9, "window_right": 0}, {}, {"d": 80, "e": 72}),
    Case("64, everything", KITCHEN_SINK, EVERYTHING, {"d": 64, "e": 64}),
]


AMPERE = [pytest.param(arch, marks=pytest.mark.cuda_only("Turing shows it")) for arch in (80, 86)]


@pytest.mark.parametrize("older", [75, *AMPERE])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ptx_of_older_architectures_gives_the_right_numbers(
    case: Case,
    older: int,
    device: torch.device,
    arch: int | None,
    scale: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the interpreter: with the older tiles, each launch's arguments held against its PTX's parameters."""
    if arch is not None and older >= arch:
        pytest.skip(f"sm{arch} is not newer than sm{older}")
    launched = []

    def through_ptx(launch: Launch, on: torch.device, for_arch: int | None) -> None:
        assert for_arch == older
        launched.append(launch.name)
        if on.type == "cuda":
            ptx.run(launch, older, torch.cuda.current_stream(on).cuda_stream)
        else:
            ptx.pack(ptx.program(launch, older), launch.args)
            interpret.launch(launch.kernel, (launch.programs,), launch.args)

    # All of run.py but the launch itself, with the tiles of the older architecture.
    monkeypatch.setattr(triton_run, "_arch", lambda q: older)
    monkeypatch.setattr(triton_run, "_run", through_ptx)
    spec, inputs = build(case, torch.float16, scale=scale)
    inputs = onto(device, inputs)
    actual, dout, dlse = carried_out(triton_run.forward, triton_run.backward, spec, inputs)
    assert launched[:4] == ["forward", "rows", "dkdv", "dq"]
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, torch.float16))
    assert_errs_little_more(actual, wanted, plain, torch.float16)

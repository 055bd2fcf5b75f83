"""The forward through tensor descriptors, compiled for GPUs not here: warps specialised, nothing spilt."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention_cases import BOTTOM_RIGHT
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.triton import launch as descriptors
from attnsel.backends.triton.blocks import choose_descriptor
from attnsel.backends.triton.launch import descriptor_launch, make_call
from gate import Configuration, configurations, report_on
from machine_code import Compiled, compile_launch

pytestmark = pytest.mark.skipif(not descriptors.tried(), reason="the kernel is not for this Triton")


def assert_specialised(made: Compiled, arch: int, d: int, e: int) -> None:
    block = choose_descriptor(arch, d, e, 2)
    assert block is not None
    assert made.clean
    assert made.specialised
    # Hopper: one warp group copies, two multiply.
    assert made.warps == 12 if arch == 90 else made.warps > block.warps
    assert any(name.startswith("HGMMA" if arch == 90 else "UTCHMMA") for name in made.matrix_instructions)


@pytest.mark.parametrize(
    ("arch", "d", "e", "dtype", "feature"),
    [
        (90, 128, 128, "bf16", "causal"),
        (100, 128, 128, "fp16", "full"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (90, 64, 64, "fp16", "full"),
                (90, 192, 128, "bf16", "causal"),
                (90, 256, 256, "bf16", "causal"),
                (90, 128, 128, "bf16", "window"),
                (100, 64, 64, "bf16", "causal"),
            )
        ),
    ],
)
def test_warps_are_specialised_and_nothing_spills(
    arch: int, d: int, e: int, dtype: str, feature: str
) -> None:
    report = report_on(Configuration("forward_descriptor", arch, d, e, dtype, feature))
    assert report.error is None
    assert report.ok
    assert report.specialised
    assert report.warps == 12 if arch == 90 else report.warps > 8
    assert any(x.startswith("HGMMA" if arch == 90 else "UTCHMMA") for x in report.matrix_instructions)


def test_gate_lists_it_where_it_ships() -> None:
    listed = {(c.arch, c.head_dim_qk) for c in configurations() if c.kernel == "forward_descriptor"}
    assert listed == {(90, 64), (90, 128), (90, 192), (90, 256), (100, 64), (100, 128)}


def test_gate_does_not_pass_what_is_not_specialised() -> None:
    report = report_on(Configuration("forward_descriptor", 90, 128, 128, "bf16", "causal"))
    assert report.ok
    assert not dataclasses.replace(report, specialised=False).ok


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow  # compiles
@pytest.mark.parametrize(
    ("arch", "spec", "tensors", "s"),
    [
        (90, {"window_right": 0}, {}, 4000),
        (100, {"window_right": 0}, {}, 4000),
        (90, {"window_right": 0, "bottom_right": True}, {"seqlens_q": meta(2), "seqlens_kv": meta(2)}, 4096),
        (100, {"window_right": 0, "bottom_right": True}, {"seqlens_q": meta(2), "seqlens_kv": meta(2)}, 4096),
        (
            90,
            {**BOTTOM_RIGHT, "window_left": 2048, "softcap": 30.0, "softmax_type": "learnable"},
            {
                "alibi_slopes": meta(16, dtype=torch.float32),
                "softmax_offset": meta(16, dtype=torch.bfloat16),
                "seqlens_q": meta(2),
                "seqlens_kv": meta(2),
            },
            4096,
        ),
    ],
    ids=["ragged", "ragged, Blackwell", "lengths", "lengths, Blackwell", "everything"],
)
def test_features_do_not_end_the_specialisation(
    arch: int, spec: dict[str, Any], tensors: dict[str, Tensor], s: int
) -> None:
    q, k, v = (meta(2, s, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (16, 4, 4))
    call = make_call(Spec(softmax_scale=0.1, **spec), Inputs(q, k, v, **tensors))
    compiled(call, arch, meta(2, 16, s, dtype=torch.float32))


@pytest.mark.slow
def test_packed_calls_are_specialised() -> None:
    q, k, v = (meta(4096, heads, 128, dtype=torch.float16) for heads in (16, 4, 4))
    cu = meta(9)
    inputs = Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=4096, max_seqlen_kv=4096)
    call = make_call(Spec(softmax_scale=0.1, window_right=0, packed=True), inputs)
    compiled(call, 90, meta(16, 4096, dtype=torch.float32))


def test_sizes_of_one_compile() -> None:
    """Triton turns an argument of 1 into a constant: other types meet in the kernel then."""
    q = meta(1, 1, 1, 64, dtype=torch.float16)
    compiled(make_call(Spec(softmax_scale=0.1), Inputs(q, q, q)), 90, meta(1, 1, 1, dtype=torch.float32))


def compiled(call: Any, arch: int, lse: Tensor) -> None:
    launch = descriptor_launch(call, arch, call.inputs.q, lse, "descriptor")
    assert launch is not None
    assert list(launch.args) == launch.kernel.arg_names
    assert_specialised(compile_launch(launch, arch), arch, call.d, call.e)

"""PyTorch's flash op with lengths, windows and pages, as attnsel calls it, on a GPU against float64.

On a CPU the same cases run on a stand-in for the op: tests/backends/sdpa/test_varlen.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from attention_cases import (
    BOTTOM_RIGHT,
    DROPOUT,
    Case,
    assert_errs_little_more,
    carried_out,
    error,
    expected,
    onto,
    poison,
    upstream,
)
from attnsel import Environment, attention
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa.varlen import PAGE_MULTIPLE, backward, forward
from forward_checks import call_in_pages, check_on_the_cpu
from varlen_cases import USED, made

pytestmark = [pytest.mark.shows("sdpa.varlen"), pytest.mark.cuda_only("the op is CUDA's")]
both_ways = {"also": ("training", "lse")}


@pytest.fixture(autouse=True)
def _ampere(arch: int | None) -> None:
    if arch is not None and arch < 80:
        pytest.skip("SDPA103: the flash kernel needs Ampere or newer")


def wide(case: Case, d: int = 64) -> Case:
    return dataclasses.replace(case, sizes={"d": d, "e": d, **case.sizes})


def check(spec: Spec, inputs: Inputs) -> None:
    actual, dout, _ = carried_out(forward, backward, spec, inputs, dlse=False)
    wanted, plain = (expected(spec, inputs, dout, None, at) for at in (torch.float64, inputs.q.dtype))
    for side in (wanted, plain):
        side.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, inputs.q.dtype)


@pytest.mark.shows("sdpa.varlen", **both_ways)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", USED, ids=lambda case: case.name)
def test_every_feature(case: Case, dtype: torch.dtype, device: torch.device, scale: int) -> None:
    spec, inputs = made(wide(case), dtype, scale)
    check(spec, onto(device, inputs))


@pytest.mark.shows("sdpa.varlen", "bf16", **both_ways)
@pytest.mark.parametrize("d", [32, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["padding", "packed: causal bottom-right", "sliding window, gqa"])
def test_head_dims(name: str, d: int, device: torch.device, arch: int | None, scale: int) -> None:
    if d > 192 and arch in (86, 87, 88, 89, 120, 121):
        pytest.skip("SDPA107: the backward stops at head_dim 192 there")
    cases = {case.name: case for case in USED}
    case = cases.get(name, Case(name, {"window_left": 5, **BOTTOM_RIGHT}))
    spec, inputs = made(wide(case, d), torch.bfloat16, scale)
    check(spec, onto(device, inputs))


@pytest.mark.shows("sdpa.varlen", "lse", also=("training",))
@pytest.mark.parametrize("name", ["plain", "padding", "packed: plain"])
def test_the_gradient_of_lse(name: str, device: torch.device, scale: int) -> None:
    spec, inputs = made(wide(next(case for case in USED if case.name == name)), torch.float16, scale)
    inputs = onto(device, inputs)
    actual, dout, dlse = carried_out(forward, backward, spec, inputs)
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, torch.float16))
    for side in (wanted, plain):
        side.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, torch.float16)


@pytest.mark.shows("sdpa.varlen", "padding", also=("training", "lse"))
def test_what_lies_in_padding_reaches_nothing(device: torch.device, scale: int) -> None:
    spec, inputs = made(wide(next(case for case in USED if case.name == "padding")), torch.float16, scale)
    q, k, v = (
        poison(t, lengths.tolist()).transpose(1, 2).contiguous().transpose(1, 2)
        for t, lengths in zip(inputs[:3], (inputs.seqlens_q, *[inputs.seqlens_kv] * 2), strict=True)
    )
    clean, spoilt = onto(device, inputs), onto(device, inputs._replace(q=q, k=k, v=v))
    result, other = forward(spec, clean), forward(spec, spoilt)
    assert torch.equal(result.out, other.out)
    dout, _ = upstream(result)
    grads = zip(backward(spec, clean, result, dout), backward(spec, spoilt, other, dout), strict=True)
    for one, two in grads:
        if one is not None:
            assert two.isfinite().all()
            assert error(two, one) < 1e-2  # dQ is summed in any order


@pytest.mark.shows("sdpa.varlen", "dropout", also=("training", "lse"))
@pytest.mark.parametrize("name", ["plain", "packed: plain"])
def test_dropout_drops_its_share_and_its_backward_the_same_entries(
    name: str, device: torch.device, scale: int
) -> None:
    """With v = 1 an output is the share of its probabilities that is kept, scaled: its mean is 1. Where dout
    is the same for all, dV says of each key what was kept of it, and both sums are of the same entries."""
    spec, inputs = made(wide(next(case for case in USED if case.name == name)), torch.float16, scale)
    spec = dataclasses.replace(spec, **DROPOUT)
    inputs = onto(device, inputs._replace(v=torch.ones_like(inputs.v)))
    result = forward(spec, inputs)
    grads = backward(spec, inputs, result, torch.ones_like(result.out))
    real = result.lse != -math.inf
    kept = result.out[..., 0].float()
    kept = kept[real.T if spec.packed else real]
    assert abs(kept.mean().item() - 1.0) < 0.02
    assert kept.std() > 0.0
    assert math.isclose(kept.sum().item(), grads.v[..., 0].float().sum().item(), rel_tol=1e-2)


@pytest.mark.shows("sdpa.varlen", "deterministic", also=("training", "lse"))
def test_two_deterministic_runs_are_bitwise_equal(device: torch.device, scale: int) -> None:
    spec, inputs = made(wide(next(case for case in USED if case.name == "padding")), torch.float16, scale)
    spec, inputs = dataclasses.replace(spec, deterministic=True), onto(device, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        one, other = (carried_out(forward, backward, spec, inputs, dlse=False)[0] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@pytest.mark.shows("sdpa.varlen", "paged")
@pytest.mark.parametrize("s_q", [1, 20])
def test_pages(s_q: int, device: torch.device, scale: int) -> None:
    plain, (paged_spec, paged) = call_in_pages(s_q, scale, PAGE_MULTIPLE)
    try:
        result = forward(paged_spec, onto(device, paged))
    except ValueError as refused:
        if "takes no pages" not in str(refused):
            raise
        pytest.skip(str(refused))
    check_on_the_cpu(result, *plain)


@pytest.mark.shows(None)
def test_it_runs_a_window_where_pytorch_is_alone(device: torch.device) -> None:
    """The whole way: chosen, compared on its first call, and nothing copied."""
    q, k, v = (torch.randn(2, 512, 4, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    q.requires_grad_()
    out = attention(q, k, v, attn_mask_type="causal", window_size=(64, 0), backend="sdpa.varlen")
    out.float().sum().backward()
    assert Environment.detect(device).torch_flash == "FA2"
    tiled = attention(q, k, v, attn_mask_type="causal", window_size=(64, 0), backend="tiled")
    assert error(out, tiled) < 2e-2

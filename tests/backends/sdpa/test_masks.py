"""What is folded into a mask, what stays with the kernel, and how large it becomes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.sdpa import masks, ops
from attnsel.backends.sdpa.masks import fold, hidden_score
from attnsel.backends.sdpa.plan import MASK_ALIGNMENT, mask_itemsize, plan_mask
from attnsel.backends.sdpa.run import bind
from tables import each

torch.set_num_threads(1)

B, H, S, T = 2, 4, 6, 9


def inputs(s_q: int = S, s_kv: int = T, dtype: torch.dtype = torch.float32, **optional: Any) -> Inputs:
    q, k = torch.zeros(B, H, s_q, 8, dtype=dtype), torch.zeros(B, H, s_kv, 8, dtype=dtype)
    return Inputs(q, k, k, **optional)


def keys_mask(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5


def lengths(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def folded(call: Inputs, spec: Spec, traits: ops.Traits = ops.MATH) -> Tensor:
    mask = fold(traits, plan_mask(traits, spec, call), spec, call).mask
    assert mask is not None
    return mask


def seen(spec: Spec, given_inputs: Inputs, b: int, h: int, r: int, c: int) -> bool:
    """Visibility by the contract's words, for one pair."""
    s_q, s_kv = given_inputs.q.shape[2], given_inputs.k.shape[2]
    len_q = s_q if given_inputs.seqlens_q is None else int(given_inputs.seqlens_q[b])
    len_kv = s_kv if given_inputs.seqlens_kv is None else int(given_inputs.seqlens_kv[b])
    gap = (c + spec.kv_offset) - (r + spec.q_offset) - (len_kv - len_q if spec.bottom_right else 0)
    if r >= len_q or c >= len_kv or (0 <= spec.window_left < -gap) or (0 <= spec.window_right < gap):
        return False
    mask = given_inputs.attn_mask
    return mask is None or not bool(mask.expand(B, H, s_q, s_kv)[b, h, r, c])


small = st.integers(1, 6)
bound_of_window = st.integers(-1, 6)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([ops.FLASH_CPU, ops.MATH, ops.EFFICIENT, ops.CUDNN]),
    st.tuples(small, small, bound_of_window, bound_of_window, st.booleans()),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.booleans(), st.booleans(), st.sampled_from(["none", "keys", "rows", "all"])),
    st.integers(0, 1000),
)
def test_mask_dead_rows_and_causal_flag_together_are_the_contract(
    traits: ops.Traits,
    shape: tuple[int, int, int, int, bool],
    offsets: tuple[int, int],
    present: tuple[bool, bool, str],
    seed: int,
) -> None:
    s_q, s_kv, left, right, bottom_right = shape
    generator = torch.Generator().manual_seed(seed)
    optional: dict[str, Tensor] = {}
    for name, size, given_length in (("seqlens_q", s_q, present[0]), ("seqlens_kv", s_kv, present[1])):
        if given_length:
            optional[name] = torch.randint(0, size + 1, (B,), generator=generator, dtype=torch.int32)
    shapes = {"keys": (B, 1, 1, s_kv), "rows": (1, H, s_q, 1), "all": (B, H, s_q, s_kv)}
    if present[2] != "none":
        optional["attn_mask"] = torch.rand(shapes[present[2]], generator=generator) < 0.5
    spec = Spec(window_left=left, window_right=right, bottom_right=bottom_right)
    spec = dataclasses.replace(spec, q_offset=offsets[0], kv_offset=offsets[1])
    given_inputs = inputs(s_q, s_kv, **optional)
    plan = plan_mask(traits, spec, given_inputs)
    mask, dead = fold(traits, plan, spec, given_inputs, want_lse=True)
    keep = torch.ones(B, H, s_q, s_kv, dtype=torch.bool)
    if mask is not None:
        keep &= mask > hidden_score(mask.dtype)
    if plan.is_causal:
        keep &= torch.ones(s_q, s_kv, dtype=torch.bool).tril()
    if dead is not None:
        keep &= ~dead
    for b in range(B):
        for h in (0, H - 1):
            expected = [[seen(spec, given_inputs, b, h, r, c) for c in range(s_kv)] for r in range(s_q)]
            assert keep[b, h].tolist() == expected
    all_dead = ~keep.any(-1, keepdim=True)
    assert torch.equal(torch.zeros_like(all_dead) if dead is None else dead.expand_as(all_dead), all_dead)


@each("traits", [ops.FLASH_CPU, ops.MATH, ops.EFFICIENT, ops.CUDNN])
def test_bytes_are_those_of_the_mask_built(traits: ops.Traits) -> None:
    spec = Spec(window_left=2)
    for dtype, optional in itertools.product(
        (torch.float32, torch.bfloat16),
        (
            {},
            {"attn_mask": keys_mask(B, 1, 1, T)},
            {"bias": torch.zeros(H, S, T)},
            {"bias": torch.zeros(H, S, 1), "alibi_slopes": torch.ones(B, H)},
        ),
    ):
        given_inputs = inputs(dtype=dtype, **optional)
        b, h, rows, columns = plan_mask(traits, spec, given_inputs).shape
        if traits is ops.EFFICIENT:
            columns += -columns % MASK_ALIGNMENT
        made = folded(given_inputs, spec, traits).untyped_storage().nbytes()
        assert made == b * h * rows * columns * mask_itemsize(traits, given_inputs)


def test_real_scores_stay_in_float32_where_the_kernel_takes_them() -> None:
    far = inputs(1, 4097, torch.bfloat16, alibi_slopes=torch.full((H,), 1 / 256))
    assert folded(far, Spec(), ops.FLASH_CPU).dtype == torch.float32
    assert folded(far, Spec(), ops.MATH).dtype == torch.float32
    assert folded(far, Spec(), ops.CUDNN).dtype == torch.bfloat16
    hidden = inputs(dtype=torch.bfloat16, attn_mask=keys_mask(S, T))
    assert folded(hidden, Spec()).dtype == torch.bfloat16


@each("traits", [ops.EFFICIENT, ops.CUDNN])
def test_masks_for_cuda_are_finite_even_times_log2e(traits: ops.Traits) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given_inputs = inputs(dtype=dtype, bias=torch.full((S, T), -math.inf, dtype=dtype))
        mask, dead = fold(traits, plan_mask(traits, Spec(), given_inputs), Spec(), given_inputs)
        assert mask is not None
        assert torch.isfinite(mask.float() * 1.4427 + 1e4).all()
        assert dead is not None
        assert dead.all()


@each("width", [1, 7, 8, 9, 24])
def test_masks_for_efficient_have_rows_on_multiples_of_8(width: int) -> None:
    laid_out_badly = torch.zeros(width, S).mT.requires_grad_()
    mask = folded(inputs(S, width, bias=laid_out_badly), Spec(), ops.EFFICIENT)
    assert mask.shape == (B, H, S, width)
    assert mask.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in mask.stride()[:3])
    assert mask.data_ptr() % 16 == 0
    (gradient,) = torch.autograd.grad(mask.sum(), laid_out_badly)
    assert (gradient == B * H).all()


@each("traits", [ops.MATH, ops.EFFICIENT])
def test_a_bias_gets_a_gradient_where_it_is_seen(traits: ops.Traits) -> None:
    bias = torch.randn(1, H, S, T, requires_grad=True)
    hidden = keys_mask(B, 1, S, T)
    mask = folded(inputs(bias=bias, attn_mask=hidden), Spec(), traits)
    seen_part = torch.where(torch.isinf(mask), 0.0, mask).expand(B, H, S, T).sum()
    (gradient,) = torch.autograd.grad(seen_part, bias)
    assert torch.equal(gradient, (~hidden).sum(0, keepdim=True).expand_as(bias).to(gradient))


WINDOW = Spec(window_left=2, window_right=0)


def test_a_mask_that_follows_from_sizes_is_made_once_and_one_that_tensors_decide_anew() -> None:
    """Before, each call and layer made, and autograd kept, one of its own."""
    first = folded(inputs(), WINDOW)
    assert folded(inputs(), WINDOW) is first
    assert folded(inputs(s_kv=8), WINDOW).shape != first.shape
    assert folded(inputs(), Spec(window_left=3, window_right=0)) is not first
    assert folded(inputs(dtype=torch.float64), WINDOW) is not first
    slopes = default_slopes(H, torch.device("cpu"))  # those that alibi uses by itself are sizes
    assert folded(inputs(alibi_slopes=slopes), WINDOW) is folded(inputs(alibi_slopes=slopes), WINDOW)
    for optional in (
        {"seqlens_kv": lengths(9, 4)},
        {"seqlens_q": lengths(6, 4)},
        {"attn_mask": keys_mask(B, 1, 1, T)},
        {"bias": torch.zeros(1, H, S, T)},
        {"alibi_slopes": torch.ones(H)},
    ):
        call = inputs(**optional)
        assert folded(call, WINDOW) is not folded(call, WINDOW), optional


def test_every_layer_of_a_step_shares_one_and_a_large_one_goes_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masks, "KEPT_BYTES", 0)
    monkeypatch.setattr(masks, "_last", {})
    call = bind("sdpa.flash", dataclasses.replace(WINDOW, need_grad=True), inputs(dtype=torch.float64))
    x = torch.randn(B, H, S, 8, dtype=torch.float64, requires_grad=True)
    made: list[Any] = []
    fold_anew = masks._fold
    monkeypatch.setattr(masks, "_fold", lambda *given: made.append(0) or fold_anew(*given))
    k = torch.randn(B, H, T, 8, dtype=torch.float64)
    y = x
    for _ in range(4):
        y = call(y, k, k)
    assert len(made) == 1
    y.sum().backward()
    del y
    call(x.detach(), k, k)
    call(x.detach(), k, k)
    assert len(made) == 3  # nothing holds it between two calls without gradients


def test_one_made_in_inference_mode_serves_a_backward() -> None:
    spec = Spec(window_left=1, window_right=0, need_grad=True)
    with torch.inference_mode():
        first = folded(inputs(), spec, ops.FLASH_CPU)
    assert not first.is_inference()
    q, k = (torch.randn(B, H, s, 8, requires_grad=True) for s in (S, T))
    bind("sdpa.flash", spec, inputs())(q, k, k).sum().backward()

"""``tiled`` against the definition of attention: every feature alone and every two together, forward and
backward, in every float type."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    CASES,
    CAUSAL,
    DROPOUT,
    Case,
    Observed,
    assert_errs_little_more,
    assert_matches,
    build,
    carried_out,
    error,
    expected,
    int32,
)
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled.kernel import backward, forward
from attnsel.backends.tiled.tiles import Blocks
from forward_checks import check_forward, pages_of
from pairwise import PAIRS, Pair
from tables import each

torch.set_num_threads(1)

SMALL_BLOCKS = Blocks(q=8, kv=16, elements=1)  # one key/value head of one batch entry at a time
WIDE_BLOCKS = Blocks(q=16, kv=8, elements=1 << 20)  # whole batch at once


def run(spec: Spec, inputs: Inputs, blocks: Blocks | None) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Forward and backward by name, and the dout and dlse that went in."""
    return carried_out(partial(forward, blocks=blocks), partial(backward, blocks=blocks), spec, inputs)


BLOCKS = (None, SMALL_BLOCKS, WIDE_BLOCKS)
HALF_OR_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
ALONE = [Pair(case, HALF_OR_FLOAT[number % 3]) for number, case in enumerate(CASES)]


@each("pair", [*ALONE, *PAIRS])
def test_equals_the_definition(pair: Pair) -> None:
    """In float64 to the last digits, and in a lower precision with little more error than plain PyTorch."""
    case, dtype = pair
    turn = len(case.name)  # any number that differs from case to case
    spec, inputs = build(case)
    actual, dout, dlse = run(spec, inputs, BLOCKS[turn % 3])
    assert_matches(actual, expected(spec, inputs, dout, dlse))

    spec, inputs = build(case, dtype)
    actual, dout, dlse = run(spec, inputs, BLOCKS[(turn + 1) % 3])
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    assert_errs_little_more(actual, wanted, plain, dtype)
    for name in ("lse", "max_logit"):
        assert actual[name].dtype == torch.float32
        assert error(actual[name], wanted[name]) < 1e-5


@each("dtype", [torch.float64, torch.bfloat16])
def test_results_have_the_dtypes_and_shapes_of_the_inputs(dtype: torch.dtype) -> None:
    spec, inputs = build(Case("", {"softmax_type": "learnable"}, {"softmax_offset": "h"}, {"e": 12}), dtype)
    bias = torch.randn(1, 4, 21, 1, dtype=torch.float32)
    inputs = inputs._replace(bias=bias, q=inputs.q.requires_grad_())
    result = forward(spec, inputs)
    assert (result.out.dtype, result.out.shape) == (dtype, (2, 4, 21, 12))
    grads = backward(spec, inputs, result, result.out)
    assert not result.out.requires_grad
    assert not grads.q.requires_grad
    for name, grad in grads._asdict().items():
        given_tensor = getattr(inputs, name)
        assert (grad.dtype, grad.shape) == (given_tensor.dtype, given_tensor.shape), name


def test_some_heads_drop_what_they_drop_among_all() -> None:
    spec, inputs = build(Case("", DROPOUT))
    heads, groups = inputs.q.shape[1] // 2, inputs.k.shape[1] // 2
    some = inputs._replace(q=inputs.q[:, heads:], k=inputs.k[:, groups:], v=inputs.v[:, groups:])
    part = forward(dataclasses.replace(spec, head_offset=heads), some)
    assert torch.equal(part.out, forward(spec, inputs).out[:, heads:])


@each(
    "spec, tiles",
    [
        ({}, 16 * 16),
        (CAUSAL, 16 * 17 // 2),
        ({"window_left": 16, "window_right": 0}, 2 * 16 - 1),  # the first rows have nothing on their left
        ({**CAUSAL, "kv_offset": 10_000}, 0),
        ({**CAUSAL, "q_offset": 256, "kv_offset": 256}, 16 * 17 // 2),
    ],
)
def test_blocks_outside_the_band_are_skipped(spec: dict[str, Any], tiles: int) -> None:
    call, inputs = build(Case("", spec, {}, {"b": 1, "h": 1, "g": 1, "s_q": 256, "s_kv": 256}))
    with Observed() as observed:
        forward(call, inputs, blocks=Blocks(16, 16, 1 << 20))
    assert observed.calls.get("bmm", 0) == 2 * tiles


@each("pair", PAIRS)
def test_pages_hold_the_keys_of_any_call(pair: Pair) -> None:
    """NaN lies around every row, and a table's other entries are garbage."""
    spec, inputs = build(pair.case, torch.float32)
    blocks = BLOCKS[len(pair.case.name) % 3]
    check_forward(forward(*pages_of(spec, inputs, 5), blocks=blocks), spec, inputs)


def test_autocast_changes_nothing() -> None:
    spec, inputs = build(Case("", {**CAUSAL, "softcap": 1.0}), torch.float32)
    wanted, _, _ = run(spec, inputs, SMALL_BLOCKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _, _ = run(spec, inputs, SMALL_BLOCKS)
    assert_matches(actual, wanted, tolerance=0.0)


@each(
    "message, spec, tensors",
    [
        ("do not divide", {}, dict.fromkeys("kv", torch.randn(2, 3, 27, 8))),
        ("value heads", {}, {"v": torch.randn(2, 1, 27, 8)}),
        ("softmax_type is 'sink'", {"softmax_type": "sink"}, {}),
        ("needs inputs.softmax_offset", {"softmax_type": "learnable"}, {}),
        ("needs inputs.dropout_seed", {"dropout_p": 0.1}, {}),
        ("needs inputs.cu_seqlens_q", {"packed": True}, {}),
    ],
)
def test_impossible_calls_are_refused(message: str, spec: dict[str, Any], tensors: dict[str, Any]) -> None:
    call, inputs = build(Case(""))
    with pytest.raises(ValueError, match=message):
        forward(dataclasses.replace(call, **spec), inputs._replace(**tensors))


@each("cu_seqlens", [[0, 5, 11], [0, 7, 3], [-1, 2, 3]])
def test_cu_seqlens_outside_the_packed_tensors_are_refused(cu_seqlens: list[int]) -> None:
    t, cu = torch.randn(10, 2, 4), int32(cu_seqlens)
    with pytest.raises(ValueError, match="outside 10 packed rows"):
        forward(Spec(packed=True), Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu))

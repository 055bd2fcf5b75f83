"""``tiled`` against the definition of attention: every feature alone and every two together, forward and
backward, in every float type."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    DROPOUT,
    KITCHEN_SINK,
    LENGTHS_KV,
    LENGTHS_Q,
    STRIDES,
    Case,
    Observed,
    assert_errs_little_more,
    assert_matches,
    build,
    calls,
    error,
    expected,
    int32,
    merge,
    packed,
    poison,
    starts,
    upstream,
)
from attnsel.backends.contract import Grads, Inputs, Spec
from attnsel.backends.tiled.kernel import backward, forward
from attnsel.backends.tiled.tiles import Blocks
from pairwise import PAIRS, Pair

torch.set_num_threads(1)

SMALL_BLOCKS = Blocks(q=8, kv=16, elements=1)  # one key/value head of one batch entry at a time
WIDE_BLOCKS = Blocks(q=16, kv=8, elements=1 << 20)  # whole batch at once


def run(
    spec: Spec, inputs: Inputs, blocks: Blocks | None, dlse: bool = True
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Forward and backward by name, and the dout and dlse that went in."""
    result = forward(spec, inputs, blocks=blocks)
    dout, into_lse = upstream(result)
    grads = backward(spec, inputs, result, dout, into_lse if dlse else None, blocks=blocks)
    named = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    named |= {f"d{name}": grad for name, grad in grads._asdict().items()}
    return {k: t for k, t in named.items() if t is not None}, dout, into_lse if dlse else None


# Every feature, every float type

BLOCKS = (None, SMALL_BLOCKS, WIDE_BLOCKS)
HALF_OR_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
ALONE = [Pair(case, HALF_OR_FLOAT[number % 3]) for number, case in enumerate(CASES)]


@pytest.mark.parametrize("pair", [*ALONE, *PAIRS], ids=lambda pair: pair.case.name)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_results_have_the_dtypes_and_shapes_of_the_inputs(dtype: torch.dtype) -> None:
    spec, inputs = build(Case("", {"softmax_type": "learnable"}, {"softmax_offset": "h"}, {"e": 12}), dtype)
    bias = torch.randn(1, 4, 21, 1, dtype=torch.float32)
    inputs = inputs._replace(bias=bias)
    result = forward(spec, inputs)
    assert (result.out.dtype, result.out.shape) == (dtype, (2, 4, 21, 12))
    grads = backward(spec, inputs, result, result.out)
    for name, grad in grads._asdict().items():
        given_tensor = getattr(inputs, name)
        assert (grad.dtype, grad.shape) == (given_tensor.dtype, given_tensor.shape), name


def test_no_gradient_flows_into_the_lse_unless_given() -> None:
    spec, inputs = build(Case("", CAUSAL))
    actual, dout, _ = run(spec, inputs, SMALL_BLOCKS, dlse=False)
    assert_matches(actual, expected(spec, inputs, dout, None))


def test_max_logit_only_when_asked_for() -> None:
    spec, inputs = build(Case("", {"return_max_logit": False}))
    assert forward(spec, inputs).max_logit is None


# Rows without keys, empty tensors


def test_row_that_sees_no_key_gives_zero_and_passes_nothing_back() -> None:
    spec, inputs = build(Case("", {}, {"attn_mask": "1 h s_q 1"}, {"h": 1, "g": 1}))
    hidden = torch.zeros(1, 1, 21, 1, dtype=torch.bool)
    hidden[:, :, 5] = True
    inputs = inputs._replace(attn_mask=hidden)
    result = forward(spec, inputs)
    assert result.lse is not None
    assert (result.out[:, :, 5] == 0).all()
    assert (result.lse[:, :, 5] == -math.inf).all()
    dout, dlse = upstream(result)
    dlse[:, :, 5] = math.nan  # what merging two rows that are both -inf would send
    grads = backward(spec, inputs, result, dout, dlse)
    assert (grads.q[:, :, 5] == 0).all()
    assert all(t.isfinite().all() for t in (grads.q, grads.k, grads.v))


def test_bias_of_minus_infinity_hides_like_a_mask() -> None:
    spec, inputs = build(Case("", CAUSAL, {"attn_mask": "b 1 s_q s_kv"}))
    assert inputs.attn_mask is not None
    inputs.attn_mask[0, 0, 7] = True  # a whole row
    bias = torch.zeros(inputs.attn_mask.shape, dtype=torch.float64).masked_fill(inputs.attn_mask, -math.inf)
    masked, _, _ = run(spec, inputs, SMALL_BLOCKS)
    biased, _, _ = run(spec, inputs._replace(attn_mask=None, bias=bias), SMALL_BLOCKS)
    dbias = biased.pop("dbias")
    assert (dbias[inputs.attn_mask] == 0).all()
    assert_matches(biased, masked)


@pytest.mark.parametrize("empty", ["b", "s_q", "s_kv"])
@pytest.mark.parametrize("sink", ["vanilla", "learnable"])
def test_empty_tensors(empty: str, sink: str) -> None:
    """Without keys a row has its sink alone."""
    tensors = {"bias": "b h s_q s_kv"} | ({"softmax_offset": "h"} if sink == "learnable" else {})
    spec, inputs = build(Case("", {**CAUSAL, "softmax_type": sink}, tensors, {empty: 0}))
    actual, dout, dlse = run(spec, inputs, None)
    assert_matches(actual, expected(spec, inputs, dout, dlse))


def test_packed_call_without_a_row() -> None:
    t, cu = torch.empty(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = forward(Spec(packed=True), inputs)
    assert result.out.shape == (0, 2, 4)
    assert backward(Spec(packed=True), inputs, result, result.out).k.shape == (0, 2, 4)


# Garbage in padding


@pytest.mark.parametrize("spec", [BOTTOM_RIGHT, {"softcap": 1.0, "softmax_type": "off-by-one"}], ids=str)
def test_nan_in_dense_padding_reaches_nothing(spec: dict[str, Any]) -> None:
    padded = {"seqlens_q": "b", "seqlens_kv": "b", "bias": "b 1 s_q s_kv"}
    call, inputs = build(Case("", spec, padded))
    assert inputs.seqlens_q is not None
    assert inputs.seqlens_kv is not None
    assert inputs.bias is not None
    lengths_q, lengths_kv = inputs.seqlens_q.tolist(), inputs.seqlens_kv.tolist()
    clean = forward(call, inputs, blocks=SMALL_BLOCKS)
    dout, dlse = upstream(clean)
    wanted = expected(call, inputs, dout, dlse)
    inputs = inputs._replace(
        q=poison(inputs.q, lengths_q),
        k=poison(inputs.k, lengths_kv),
        v=poison(inputs.v, lengths_kv),
        bias=poison(poison(inputs.bias, lengths_q).transpose(2, 3), lengths_kv).transpose(2, 3),
    )
    result = forward(call, inputs, blocks=SMALL_BLOCKS)
    assert result.lse is not None
    # A result that was merged from parts may hold anything in its padded rows, too.
    used = result._replace(out=poison(result.out, lengths_q), lse=poison(result.lse, lengths_q))
    dout, dlse = poison(dout, lengths_q), poison(dlse, lengths_q)
    grads = backward(call, inputs, used, dout, dlse, blocks=SMALL_BLOCKS)
    assert result.max_logit is not None
    assert grads.bias is not None
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    actual |= {"dq": grads.q, "dk": grads.k, "dv": grads.v, "dbias": grads.bias}
    assert_matches(actual, wanted)


def test_nan_between_packed_sequences_reaches_nothing() -> None:
    spec, inputs = build(packed("", CAUSAL, {"cu_seqlens_padded": ""}))
    result = forward(spec, inputs)
    dout, dlse = upstream(result)
    wanted = expected(spec, inputs, dout, dlse)

    def poison_packed(t: Tensor, lengths: list[int]) -> Tensor:
        poisoned = torch.full_like(t, math.nan)
        for start, length in zip(starts(lengths, gap=3).tolist(), lengths, strict=False):
            poisoned[start : start + length] = t[start : start + length]
        return poisoned

    inputs = inputs._replace(
        q=poison_packed(inputs.q, LENGTHS_Q),
        k=poison_packed(inputs.k, LENGTHS_KV),
        v=poison_packed(inputs.v, LENGTHS_KV),
    )
    result = forward(spec, inputs)
    dlse = poison_packed(dlse.T, LENGTHS_Q).T
    grads = backward(spec, inputs, result, poison_packed(dout, LENGTHS_Q), dlse)
    assert result.lse is not None
    assert result.max_logit is not None
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    assert_matches(actual | {"dq": grads.q, "dk": grads.k, "dv": grads.v}, wanted)


# Splitting a sequence


@pytest.mark.parametrize(
    "spec", [{"window_left": 6, "window_right": 3}, {**CAUSAL, "softcap": 1.5}], ids=["window", "softcap"]
)
def test_parts_of_a_sequence_merge_into_the_whole_with_the_same_dropout(spec: dict[str, Any]) -> None:
    whole_spec, whole = build(Case("", {**spec, **DROPOUT}, {"alibi_slopes": "h"}))
    result = forward(whole_spec, whole)
    dout, dlse = upstream(result)
    wanted = backward(whole_spec, whole, result, dout, dlse)
    grads = Grads(*(torch.zeros_like(t) for t in (whole.q, whole.k, whole.v)))

    for q0, q1 in [(0, 10), (10, 21)]:
        parts = []
        for k0, k1 in [(0, 7), (7, 18), (18, 27)]:
            part_spec = dataclasses.replace(whole_spec, q_offset=q0, kv_offset=k0)
            part = whole._replace(q=whole.q[:, :, q0:q1], k=whole.k[:, :, k0:k1], v=whole.v[:, :, k0:k1])
            parts.append((part_spec, part, slice(k0, k1), forward(part_spec, part, blocks=SMALL_BLOCKS)))
        merged = merge([part_result for *_, part_result in parts])
        assert error(merged.out, result.out[:, :, q0:q1]) < 1e-12
        assert result.lse is not None
        assert merged.lse is not None
        assert error(merged.lse, result.lse[:, :, q0:q1]) < 1e-12
        for part_spec, part, keys, _ in parts:
            share = backward(part_spec, part, merged, dout[:, :, q0:q1], dlse[:, :, q0:q1])
            grads.q[:, :, q0:q1] += share.q
            grads.k[:, :, keys] += share.k
            grads.v[:, :, keys] += share.v
    for name in ("q", "k", "v"):
        assert error(getattr(grads, name), getattr(wanted, name)) < 1e-12, name


# Dropout


def test_some_heads_drop_what_they_drop_among_all() -> None:
    spec, inputs = build(Case("", DROPOUT))
    heads, groups = inputs.q.shape[1] // 2, inputs.k.shape[1] // 2
    some = inputs._replace(q=inputs.q[:, heads:], k=inputs.k[:, groups:], v=inputs.v[:, groups:])
    part = forward(dataclasses.replace(spec, head_offset=heads), some)
    assert torch.equal(part.out, forward(spec, inputs).out[:, heads:])


def test_lse_is_that_of_the_softmax_before_dropout() -> None:
    spec, inputs = build(Case("", DROPOUT))
    without = forward(dataclasses.replace(spec, dropout_p=0.0), inputs)
    assert without.lse is not None
    lse = forward(spec, inputs).lse
    assert lse is not None
    assert torch.equal(lse, without.lse)


def test_dropping_everything_gives_zero() -> None:
    spec, inputs = build(Case("", {"dropout_p": 1.0}))
    result = forward(spec, inputs)
    assert (result.out == 0).all()
    grads = backward(spec, inputs, result, result.out + 1)
    assert all((t == 0).all() for t in (grads.q, grads.k, grads.v))


# Memory, work and side effects


@pytest.mark.parametrize(
    "case",
    [
        Case("alibi", {**CAUSAL, "softcap": 2.0}, {"alibi_slopes": "h"}),
        Case("dropout", DROPOUT, {"bias": "b 1 1 s_kv", "attn_mask": "1 h s_q 1"}),
    ],
    ids=lambda case: case.name,
)
def test_no_tensor_as_large_as_the_score_matrix_is_allocated(case: Case) -> None:
    s = 1024
    sizes = {"b": 1, "h": 2, "g": 1, "s_q": s, "s_kv": s}
    spec, inputs = build(dataclasses.replace(case, sizes=sizes), torch.float32)
    with Observed() as observed:
        result = forward(spec, inputs)
        backward(spec, inputs, result, result.out, result.lse)
    assert observed.largest < s * s


def test_packed_call_allocates_no_score_matrix() -> None:
    s = 1024
    q, kv = torch.randn(2 * s, 2, 8), torch.randn(2 * s, 1, 8)
    cu = int32([0, s, 2 * s])
    inputs = Inputs(q, kv, kv, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with Observed() as observed:
        result = forward(Spec(packed=True, window_right=0), inputs)
        backward(Spec(packed=True, window_right=0), inputs, result, result.out)
    assert observed.largest < s * s


@pytest.mark.parametrize(
    ("spec", "tiles"),
    [
        ({}, 16 * 16),
        (CAUSAL, 16 * 17 // 2),
        ({"window_left": 16, "window_right": 0}, 2 * 16 - 1),  # the first rows have nothing on their left
        ({**CAUSAL, "kv_offset": 10_000}, 0),
        ({**CAUSAL, "q_offset": 256, "kv_offset": 256}, 16 * 17 // 2),
    ],
    ids=["full", "causal", "window", "keys all later", "offsets"],
)
def test_blocks_outside_the_band_are_skipped(spec: dict[str, Any], tiles: int) -> None:
    call, inputs = build(Case("", spec, {}, {"b": 1, "h": 1, "g": 1, "s_q": 256, "s_kv": 256}))
    with Observed() as observed:
        forward(call, inputs, blocks=Blocks(16, 16, 1 << 20))
    assert observed.calls.get("bmm", 0) == 2 * tiles


def test_dense_call_reads_nothing_on_the_host() -> None:
    tensors = {"seqlens_q": "b", "seqlens_kv": "b", "softmax_offset": "h", "attn_mask": "b 1 1 s_kv"}
    spec, inputs = build(Case("", {**KITCHEN_SINK, "softmax_type": "learnable"}, tensors))
    with Observed() as observed:
        result = forward(spec, inputs)
        backward(spec, inputs, result, result.out)
    assert not {"_local_scalar_dense", "item", "nonzero", "equal"} & observed.calls.keys()


def test_no_graph_is_recorded() -> None:
    spec, inputs = build(Case("", CAUSAL))
    inputs = inputs._replace(q=inputs.q.requires_grad_())
    result = forward(spec, inputs)
    assert not result.out.requires_grad
    assert not backward(spec, inputs, result, result.out).q.requires_grad


def test_autocast_changes_nothing() -> None:
    spec, inputs = build(Case("", {**CAUSAL, "softcap": 1.0}), torch.float32)
    wanted, _, _ = run(spec, inputs, SMALL_BLOCKS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, _, _ = run(spec, inputs, SMALL_BLOCKS)
    assert_matches(actual, wanted, tolerance=0.0)


def test_inputs_are_left_as_they_were() -> None:
    spec, inputs = build(next(case for case in CASES if case.name == "everything, dense"))
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    run(spec, inputs, SMALL_BLOCKS)
    for name, then, now in zip(Inputs._fields, before, inputs, strict=True):
        assert then is None or torch.equal(then, now), name


def test_two_runs_are_bitwise_equal() -> None:
    spec, inputs = build(Case("", {**CAUSAL, **DROPOUT}, {"bias": "1 1 s_q s_kv"}), torch.float32)
    first, second = (run(spec, inputs, SMALL_BLOCKS)[0] for _ in range(2))
    assert_matches(first, second, tolerance=0.0)


# Memory layouts


def test_results_take_the_memory_order_of_the_inputs() -> None:
    spec, inputs = build(Case("", sizes={"e": 12}))
    bshd = {name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    inputs = inputs._replace(**bshd)
    result = forward(spec, inputs)
    grads = backward(spec, inputs, result, result.out)
    for t in (result.out, grads.q, grads.k, grads.v):
        assert t.transpose(1, 2).is_contiguous()


def test_gradient_of_an_expanded_key_is_not_expanded() -> None:
    spec, inputs = build(Case("", sizes={"g": 1}))
    expanded = inputs._replace(k=inputs.k.expand(-1, 4, -1, -1), v=inputs.v.expand(-1, 4, -1, -1))
    result = forward(spec, expanded)
    whole = backward(spec, expanded, result, result.out)
    shared = backward(spec, inputs, result, result.out)
    assert error(whole.k.sum(1, keepdim=True), shared.k) < 1e-12


def test_expanded_dout_is_read_as_it_is() -> None:
    spec, inputs = build(Case(""))
    result = forward(spec, inputs)
    expanded = torch.ones((), dtype=torch.float64).expand(result.out.shape)
    wanted = backward(spec, inputs, result, expanded.contiguous())
    assert torch.equal(backward(spec, inputs, result, expanded).q, wanted.q)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=calls(),
    layouts=st.tuples(*[st.sampled_from(sorted(STRIDES))] * 3),
    blocks=st.builds(Blocks, st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 4096, 1 << 20])),
)
def test_any_call_equals_the_definition(case: Case, layouts: tuple[str, ...], blocks: Blocks) -> None:
    spec, inputs = build(case)
    strided = {
        name: STRIDES[layout](getattr(inputs, name)) for name, layout in zip("qkv", layouts, strict=True)
    }
    inputs = inputs._replace(**strided)
    actual, dout, dlse = run(spec, inputs, blocks)
    assert_matches(actual, expected(spec, inputs, dout, dlse))


# Errors


def refused() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """What the message must say, and the fields of Spec and Inputs that bring it about."""
    three_heads = torch.randn(2, 3, 27, 8)
    yield "do not divide", {}, {"k": three_heads, "v": three_heads}
    yield "value heads", {}, {"v": torch.randn(2, 1, 27, 8)}
    yield "softmax_type is 'sink'", {"softmax_type": "sink"}, {}
    yield "needs inputs.softmax_offset", {"softmax_type": "learnable"}, {}
    yield "needs inputs.dropout_seed", {"dropout_p": 0.1}, {}
    yield "needs inputs.cu_seqlens_q", {"packed": True}, {}


@pytest.mark.parametrize(("message", "spec", "tensors"), list(refused()))
def test_impossible_calls_are_refused(message: str, spec: dict[str, Any], tensors: dict[str, Any]) -> None:
    call, inputs = build(Case(""))
    with pytest.raises(ValueError, match=message):
        forward(dataclasses.replace(call, **spec), inputs._replace(**tensors))


@pytest.mark.parametrize("cu_seqlens", [[0, 5, 11], [0, 7, 3], [-1, 2, 3]], ids=str)
def test_cu_seqlens_outside_the_packed_tensors_are_refused(cu_seqlens: list[int]) -> None:
    t, cu = torch.randn(10, 2, 4), int32(cu_seqlens)
    with pytest.raises(ValueError, match="outside 10 packed rows"):
        forward(Spec(packed=True), Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu))


def test_backward_without_an_lse_is_refused() -> None:
    spec, inputs = build(Case(""))
    result = forward(spec, inputs)._replace(lse=None)
    with pytest.raises(ValueError, match="lse"):
        backward(spec, inputs, result, result.out)

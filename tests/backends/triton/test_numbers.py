"""``triton`` against the definition of attention: the kernels themselves, on CPU tensors by the interpreter.

Its cost is the number of tiles, so tiles are the smallest a dot takes, and shapes a few of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    DROPOUT,
    LENGTHS_KV,
    LENGTHS_Q,
    STRIDES,
    Case,
    Observed,
    assert_errs_little_more,
    build,
    carried_out,
    cases,
    error,
    expected,
    int32,
    merge,
    packed,
    poison,
    starts,
    upstream,
)
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled import kernel as tiled
from pairwise import PAIRS, Pair, some
from reference import attention_reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import run as triton_run
from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.run import backward, forward
from attnsel.backends.triton.tile import span

torch.set_num_threads(1)

SMALL = Tiles(*[Block(16, 16)] * 4)
UNEVEN = Tiles(Block(32, 16), Block(16, 32), Block(16, 32), Block(32, 16))


def run(
    spec: Spec, inputs: Inputs, tiles: Tiles | None = SMALL
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Forward and backward by name, and the dout and dlse that went in."""
    return carried_out(partial(forward, tiles=tiles), partial(backward, tiles=tiles), spec, inputs)


def check_case(spec: Spec, inputs: Inputs, tiles: Tiles | None = SMALL) -> None:
    dtype = inputs.q.dtype
    actual, dout, dlse = run(spec, inputs, tiles)
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    assert_errs_little_more(actual, wanted, plain, dtype)


# Every two features, every float type


@some(PAIRS, 16)
def test_errs_little_more_than_plain_pytorch(pair: Pair) -> None:
    """On tiles that are square, uneven, or the default."""
    number = PAIRS.index(pair)
    check_case(*build(pair.case, pair.dtype), (SMALL, UNEVEN, SMALL, None)[number % 4])


@pytest.mark.slow
@cases
def test_every_feature_alone(case: Case) -> None:
    check_case(*build(case, torch.float32))


@pytest.mark.parametrize(("d", "e"), [(192, 128), (40, 72), (256, 256), (1, 17)])
def test_head_dims(d: int, e: int) -> None:
    sizes = {"d": d, "e": e, "b": 1, "h": 2, "g": 1, "s_q": 19, "s_kv": 35}
    check_case(*build(Case("", CAUSAL, {}, sizes), torch.float16), Tiles(*[Block(32, 32)] * 4))


@pytest.mark.parametrize(("d", "e"), [(320, 40)])
def test_wide_heads_without_a_backward(d: int, e: int) -> None:
    sizes = {"d": d, "e": e, "b": 1, "h": 2, "g": 1, "s_q": 19, "s_kv": 35}
    spec, inputs = build(Case("", {**CAUSAL, "need_grad": False}, {}, sizes), torch.bfloat16)
    result = forward(spec, inputs, tiles=SMALL)
    wanted, plain = (attention_reference(spec, inputs, at) for at in (torch.float64, torch.bfloat16))
    unit = torch.finfo(torch.bfloat16).eps * wanted[0].abs().max().item()
    assert error(result.out, wanted[0]) <= 2 * error(plain[0], wanted[0]) + 2 * unit
    assert error(result.lse, wanted[1]) < 1e-5
    with pytest.raises(ValueError, match="stops at head_dim 256"):
        backward(spec, inputs, result, result.out)
    with pytest.raises(ValueError, match="stop at head_dim 256 with a backward"):
        forward(dataclasses.replace(spec, need_grad=True), inputs)


def test_lse_and_max_logit_have_float32_precision() -> None:
    spec, inputs = build(Case("", {**CAUSAL, "softcap": 2.0}, {"bias": "b h s_q s_kv"}), torch.bfloat16)
    result = forward(spec, inputs, tiles=SMALL)
    _, lse, max_logit = attention_reference(spec, inputs)
    assert result.lse is not None
    assert result.max_logit is not None
    assert result.lse.dtype == result.max_logit.dtype == torch.float32
    assert error(result.lse, lse) < 1e-5
    assert error(result.max_logit, max_logit) < 1e-5


def test_gradient_of_the_bias_only_when_required() -> None:
    spec, inputs = build(Case("", {}, {"bias": "b h s_q s_kv"}), torch.float32)
    result = forward(spec, inputs)
    assert backward(spec, inputs, result, result.out).bias is None


def test_max_logit_only_when_asked_for() -> None:
    spec, inputs = build(Case("", {"return_max_logit": False}), torch.float32)
    assert forward(spec, inputs).max_logit is None


# Rows without keys, empty tensors, garbage


def test_row_that_sees_no_key_gives_zero_and_passes_nothing_back() -> None:
    spec, inputs = build(Case("", {}, {"attn_mask": "1 h s_q 1"}, {"h": 1, "g": 1}), torch.float32)
    hidden = torch.zeros(1, 1, 21, 1, dtype=torch.bool)
    hidden[:, :, 5] = True
    inputs = inputs._replace(attn_mask=hidden)
    result = forward(spec, inputs, tiles=SMALL)
    assert result.lse is not None
    assert (result.out[:, :, 5] == 0).all()
    assert (result.lse[:, :, 5] == -math.inf).all()
    dout, dlse = upstream(result)
    dout[:, :, 5] = dlse[:, :, 5] = math.nan
    grads = backward(spec, inputs, result, dout, dlse, tiles=SMALL)
    assert (grads.q[:, :, 5] == 0).all()
    assert all(t.isfinite().all() for t in (grads.q, grads.k, grads.v))


def test_bias_of_minus_infinity_hides_like_a_mask() -> None:
    spec, inputs = build(Case("", CAUSAL, {"attn_mask": "b 1 s_q s_kv"}), torch.float32)
    assert inputs.attn_mask is not None
    inputs.attn_mask[0, 0, 7] = True  # a whole row
    bias = torch.zeros(inputs.attn_mask.shape).masked_fill(inputs.attn_mask, -math.inf)
    masked, _, _ = run(spec, inputs)
    biased, _, _ = run(spec, inputs._replace(attn_mask=None, bias=bias))
    assert (biased["dbias"][inputs.attn_mask] == 0).all()
    assert {name: error(biased[name], masked[name]) for name in masked} == dict.fromkeys(masked, 0.0)


@pytest.mark.parametrize("empty", ["b", "s_q", "s_kv"])
def test_empty_tensors(empty: str) -> None:
    spec = {**CAUSAL, "softmax_type": "learnable"}
    tensors = {"bias": "b h s_q s_kv", "softmax_offset": "h"}
    check_case(*build(Case("", spec, tensors, {empty: 0, "h": 2, "g": 1}), torch.float32))


def test_packed_call_without_a_row() -> None:
    t, cu = torch.empty(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = forward(Spec(packed=True), inputs)
    assert result.out.shape == (0, 2, 4)
    assert backward(Spec(packed=True), inputs, result, result.out).k.shape == (0, 2, 4)


@pytest.mark.parametrize("spec", [{**BOTTOM_RIGHT, "softcap": 1.0, "softmax_type": "off-by-one"}], ids=str)
def test_nan_in_dense_padding_reaches_nothing(spec: dict[str, Any]) -> None:
    padded = {"seqlens_q": "b", "seqlens_kv": "b", "bias": "b 1 s_q s_kv"}
    call, inputs = build(Case("", spec, padded, {"h": 2, "g": 1}), torch.float32)
    assert inputs.seqlens_q is not None
    assert inputs.seqlens_kv is not None
    assert inputs.bias is not None
    lengths_q, lengths_kv = inputs.seqlens_q.tolist(), inputs.seqlens_kv.tolist()
    clean = forward(call, inputs, tiles=SMALL)
    dout, dlse = upstream(clean)
    wanted = expected(call, inputs, dout, dlse)
    plain = expected(call, inputs, dout, dlse, torch.float32)
    bias = poison(poison(inputs.bias, lengths_q).transpose(2, 3), lengths_kv).transpose(2, 3)
    inputs = inputs._replace(
        q=poison(inputs.q, lengths_q),
        k=poison(inputs.k, lengths_kv),
        v=poison(inputs.v, lengths_kv),
        bias=bias.requires_grad_(),
    )
    result = forward(call, inputs, tiles=SMALL)
    assert result.lse is not None
    assert result.max_logit is not None
    # A result that was merged from parts may hold anything in its padded rows, too.
    used = result._replace(out=poison(result.out, lengths_q), lse=poison(result.lse, lengths_q))
    dout, dlse = poison(dout, lengths_q), poison(dlse, lengths_q)
    grads = backward(call, inputs, used, dout, dlse, tiles=SMALL)
    assert grads.bias is not None
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    actual |= {"dq": grads.q, "dk": grads.k, "dv": grads.v, "dbias": grads.bias}
    assert_errs_little_more(actual, wanted, plain, torch.float32)


def test_nan_between_packed_sequences_reaches_nothing() -> None:
    spec, inputs = build(packed("", CAUSAL, {"cu_seqlens_padded": ""}), torch.float32)
    dout, dlse = upstream(forward(spec, inputs, tiles=SMALL))
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, torch.float32))

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
    result = forward(spec, inputs, tiles=SMALL)
    dlse = poison_packed(dlse.T, LENGTHS_Q).T
    grads = backward(spec, inputs, result, poison_packed(dout, LENGTHS_Q), dlse, tiles=SMALL)
    assert result.lse is not None
    assert result.max_logit is not None
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    actual |= {"dq": grads.q, "dk": grads.k, "dv": grads.v}
    assert_errs_little_more(actual, wanted, plain, torch.float32)


@pytest.mark.parametrize("cu_seqlens", [[0, 7, 3], [-1, 2, 3], [0, 4, 1 << 20]], ids=str)
def test_cu_seqlens_outside_the_packed_tensors_stay_in_bounds(cu_seqlens: list[int]) -> None:
    t, cu = torch.randn(10, 2, 4), int32(cu_seqlens)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = forward(Spec(packed=True), inputs, tiles=SMALL)
    assert backward(Spec(packed=True), inputs, result, result.out, tiles=SMALL).q.isfinite().all()


# Splitting a sequence


@pytest.mark.parametrize("spec", [{"window_left": 16, "window_right": 3, "softcap": 1.5}], ids=str)
def test_parts_of_a_sequence_merge_into_the_whole_with_the_same_dropout(spec: dict[str, Any]) -> None:
    case = Case(
        "", {**spec, **DROPOUT}, {"alibi_slopes": "h"}, {"b": 1, "h": 1, "g": 1, "s_q": 40, "s_kv": 43}
    )
    whole_spec, whole = build(case, torch.float32)
    result = forward(whole_spec, whole, tiles=SMALL)
    dout, dlse = upstream(result)
    wanted = backward(whole_spec, whole, result, dout, dlse, tiles=SMALL)
    grads = Grads(*(torch.zeros_like(t) for t in (whole.q, whole.k, whole.v)))

    for q0, q1 in [(0, 18), (18, 40)]:
        parts = []
        for k0, k1 in [(0, 7), (7, 29), (29, 43)]:
            part_spec = dataclasses.replace(whole_spec, q_offset=q0, kv_offset=k0)
            part = whole._replace(q=whole.q[:, :, q0:q1], k=whole.k[:, :, k0:k1], v=whole.v[:, :, k0:k1])
            parts.append((part_spec, part, slice(k0, k1), forward(part_spec, part, tiles=SMALL)))
        merged: Result = merge([part_result for *_, part_result in parts])
        assert error(merged.out, result.out[:, :, q0:q1]) < 5e-6
        assert result.lse is not None
        assert merged.lse is not None
        assert error(merged.lse, result.lse[:, :, q0:q1]) < 5e-6
        for part_spec, part, keys, _ in parts:
            share = backward(part_spec, part, merged, dout[:, :, q0:q1], dlse[:, :, q0:q1], tiles=SMALL)
            grads.q[:, :, q0:q1] += share.q
            grads.k[:, :, keys] += share.k
            grads.v[:, :, keys] += share.v
    for name in ("q", "k", "v"):
        assert error(getattr(grads, name), getattr(wanted, name)) < 2e-5, name


@pytest.mark.parametrize("m", [16, 32])
@pytest.mark.parametrize("n", [16, 32])
def test_blocks_outside_the_band_are_skipped(m: int, n: int) -> None:
    """``span`` is ordinary arithmetic: held against every pair, for every position of the band."""
    tl_like = _PlainLanguage()
    own = dict(span.fn.__globals__) | {"tl": tl_like}
    plain = type(span.fn)(span.fn.__code__, own)
    for low, high in [(None, 0), (None, -40), (-20, 3), (5, 30), (-7, None), (None, None), (40, 60)]:
        for m0 in range(0, 128, m):
            begin, full_begin, full_end, end = plain(
                m0, m, 75, low or 0, high or 0, n, low is not None, high is not None
            )
            assert 0 <= begin <= full_begin <= full_end <= end
            for block in range(0, 96, n):
                pairs = [
                    x < 75 and (low is None or x - y >= low) and (high is None or x - y <= high)
                    for x in range(block, block + n)
                    for y in range(m0, m0 + m)
                ]
                inside = begin <= block < end
                assert inside or not any(pairs)
                assert all(pairs) or not full_begin <= block < full_end
                if full_begin < full_end and all(pairs):
                    assert full_begin <= block < full_end
                assert any(pairs) or not inside or block + n > 75


class _PlainLanguage:
    constexpr = int
    minimum, maximum = min, max

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


# Dropout


def test_drops_the_same_entries_as_tiled() -> None:
    """The identity as values shows every dropped entry as a zero of the output."""
    spec = Spec(dropout_p=0.3, q_offset=5, kv_offset=3)
    q, k = torch.randn(2, 4, 19, 8), torch.randn(2, 2, 32, 8)
    v = torch.eye(32).expand(2, 2, 32, 32)
    seed, offset = torch.tensor(-987654321987654321), torch.tensor(2**40 + 7)
    inputs = Inputs(q, k, v, dropout_seed=seed, dropout_offset=offset)
    dropped = forward(spec, inputs, tiles=SMALL).out == 0
    assert torch.equal(dropped, tiled.forward(spec, inputs).out == 0)
    assert 0 < dropped.float().mean() < 1


def test_dropping_everything_gives_zero() -> None:
    spec, inputs = build(Case("", {"dropout_p": 1.0}), torch.float32)
    result = forward(spec, inputs, tiles=SMALL)
    assert (result.out == 0).all()
    grads = backward(spec, inputs, result, result.out + 1, tiles=SMALL)
    assert all((t == 0).all() for t in (grads.q, grads.k, grads.v))


# Memory, side effects, layouts


def test_no_tensor_as_large_as_the_score_matrix_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_run, "_run", lambda *args: None)  # the interpreter copies its arguments
    s = 512
    sizes = {"b": 1, "h": 2, "g": 1, "s_q": s, "s_kv": s}
    spec = {**DROPOUT, "softcap": 2.0, "softmax_type": "learnable"}
    tensors = {"bias": "b 1 1 s_kv", "attn_mask": "1 h s_q 1", "softmax_offset": "h"}
    call, inputs = build(Case("", spec, tensors, sizes), torch.float32)
    inputs = inputs._replace(bias=inputs.bias.requires_grad_())
    with Observed() as observed:
        result = forward(call, inputs)
        backward(call, inputs, result, result.out, result.lse)
    assert observed.largest < s * s
    assert not {"_local_scalar_dense", "item", "nonzero", "equal"} & observed.calls.keys()


def test_inputs_are_left_as_they_were() -> None:
    case = next(case for case in CASES if case.name == "everything, dense")
    spec, inputs = build(case, torch.float32)
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    run(spec, inputs)
    for name, then, now in zip(Inputs._fields, before, inputs, strict=True):
        assert then is None or torch.equal(then, now), name


def test_two_runs_are_bitwise_equal() -> None:
    case = Case("", {**CAUSAL, **DROPOUT}, {"bias": "1 1 s_q s_kv"}, {"h": 2, "g": 1})
    spec, inputs = build(case, torch.float16)
    first, second = (run(spec, inputs)[0] for _ in range(2))
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()


def test_results_take_the_memory_order_of_the_inputs() -> None:
    spec, inputs = build(Case("", sizes={"e": 12}), torch.float32)
    bshd = {name: getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2) for name in "qkv"}
    inputs = inputs._replace(**bshd)
    result = forward(spec, inputs)
    grads = backward(spec, inputs, result, result.out)
    for t in (result.out, grads.q, grads.k, grads.v):
        assert t.transpose(1, 2).is_contiguous()


def test_strides() -> None:
    spec, inputs = build(Case("", CAUSAL, {}, {"h": 2, "g": 1}), torch.float16)
    layouts = dict(zip("qkv", ("sequence before heads", "at an odd offset", "as made"), strict=True))
    strided = {name: STRIDES[layout](getattr(inputs, name)) for name, layout in layouts.items()}
    check_case(spec, inputs._replace(**strided))


def test_expanded_tensors_are_read_as_they_are() -> None:
    spec, inputs = build(Case("", sizes={"g": 1}), torch.float32)
    expanded = inputs._replace(k=inputs.k.expand(-1, 4, -1, -1), v=inputs.v.expand(-1, 4, -1, -1))
    result, shared = forward(spec, expanded), forward(spec, inputs)
    assert torch.equal(result.out, shared.out)
    dout = torch.ones(()).expand(result.out.shape)
    grads = backward(spec, expanded, result, dout)
    assert error(grads.k.sum(1, keepdim=True), backward(spec, inputs, shared, dout).k) < 1e-5


# The interpreter


def test_compiling_still_works_after_a_launch_on_cpu_tensors() -> None:
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    before = {name: getattr(tl, name) for name in ("dot", "load", "max", "sum", "zeros", "philox")}
    spec, inputs = build(Case("", CAUSAL), torch.bfloat16)
    forward(spec, inputs)
    assert {name: getattr(tl, name) for name in before} == before
    assert isinstance(tl.max, JITFunction)
    assert isinstance(span, triton.JITFunction)


def test_loops_run_with_an_interpreter_that_makes_integers_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As up to Triton 3.6, whose conversion numpy refuses from 2.4 on."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def old(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data) if self.handle.data.ndim == 0 else None

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", old)
    spec, inputs = build(Case("", CAUSAL), torch.float16)
    assert error(forward(spec, inputs).out, attention_reference(spec, inputs, torch.float64)[0]) < 1e-2
    assert interpreter._patch_lang_tensor is old


# Errors


@pytest.mark.parametrize(
    ("message", "tensors"),
    [
        ("innermost stride of k is 2", {"k": torch.randn(2, 2, 27, 16)[..., ::2]}),
        ("must share float16", {"v": torch.randn(2, 2, 27, 8, dtype=torch.float64)}),
        ("differ in head_dim", {"k": torch.randn(2, 2, 27, 9)}),
        ("stop at head_dim 256 with a backward; v has 257", {"v": torch.randn(2, 2, 27, 257)}),
        ("do not divide", {"k": torch.randn(2, 3, 27, 8), "v": torch.randn(2, 3, 27, 8)}),
    ],
)
def test_impossible_calls_are_refused(message: str, tensors: dict[str, Tensor]) -> None:
    spec, inputs = build(Case(""), torch.float32)
    with pytest.raises(ValueError, match=message):
        forward(spec, inputs._replace(**tensors))


def test_dropout_of_heads_that_are_not_the_first_is_refused() -> None:
    spec, inputs = build(Case("", {"dropout_p": 0.5}), torch.float32)
    with pytest.raises(ValueError, match="head_offset 2"):
        forward(dataclasses.replace(spec, head_offset=2), inputs)


def test_backward_without_an_lse_is_refused() -> None:
    spec, inputs = build(Case(""), torch.float32)
    result = forward(spec, inputs)._replace(lse=None)
    with pytest.raises(ValueError, match="lse"):
        backward(spec, inputs, result, result.out)

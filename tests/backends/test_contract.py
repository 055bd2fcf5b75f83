"""What the contract promises beside numbers, of each kernel that carries out every feature on CPU tensors."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    DROPOUT,
    KITCHEN_SINK,
    STRIDES,
    Case,
    Observed,
    assert_errs_little_more,
    build,
    carried_out,
    error,
    expected,
    int32,
    merge,
    packed,
    poison,
    spoilt,
    upstream,
    with_garbage,
)
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled.kernel import backward as tiled_backward
from attnsel.backends.tiled.kernel import forward as tiled_forward
from attnsel.backends.tiled.tiles import Blocks
from tables import each

torch.set_num_threads(1)
HALF_HEADS = {"h": 2, "g": 1}  # the interpreter's time is the number of tiles


class Kernel(NamedTuple):
    forward: Callable[..., Result]
    backward: Callable[..., Grads]


def kernels() -> dict[str, Kernel]:
    blocks = Blocks(q=8, kv=16, elements=1)
    found = {"tiled": Kernel(partial(tiled_forward, blocks=blocks), partial(tiled_backward, blocks=blocks))}
    if importlib.util.find_spec("triton") is not None:
        from attnsel.backends.triton import run
        from attnsel.backends.triton.blocks import Block, Tiles

        tiles = Tiles(*[Block(16, 16)] * 4)
        found["triton"] = Kernel(partial(run.forward, tiles=tiles), partial(run.backward, tiles=tiles))
    return found


KERNELS = kernels()


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return KERNELS[request.param]


def call(spec: dict[str, Any], tensors: dict[str, str] | None = None, **sizes: int) -> tuple[Spec, Inputs]:
    return build(Case("", spec, tensors or {}, HALF_HEADS | sizes), torch.float32)


def assert_right(
    actual: dict[str, Tensor], spec: Spec, inputs: Inputs, dout: Tensor, dlse: Tensor | None
) -> None:
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, torch.float32))
    assert_errs_little_more(actual, wanted, plain, torch.float32)


def test_a_row_that_sees_no_key_gives_zero_and_passes_nothing_back(kernel: Kernel) -> None:
    spec, inputs = call({}, {"attn_mask": "1 1 s_q 1"})
    hidden = torch.zeros(1, 1, 21, 1, dtype=torch.bool)
    hidden[:, :, 5] = True
    inputs = inputs._replace(attn_mask=hidden)
    result = kernel.forward(spec, inputs)
    assert (result.out[:, :, 5] == 0).all()
    assert (result.lse[:, :, 5] == -math.inf).all()
    dout, dlse = upstream(result)
    dlse[:, :, 5] = math.nan  # what merging two rows that are both -inf would send
    grads = kernel.backward(spec, inputs, result, dout, dlse)
    assert (grads.q[:, :, 5] == 0).all()
    assert all(t.isfinite().all() for t in (grads.q, grads.k, grads.v))


def test_a_bias_of_minus_infinity_hides_like_a_mask(kernel: Kernel) -> None:
    spec, inputs = call(CAUSAL, {"attn_mask": "b 1 s_q s_kv"})
    inputs.attn_mask[0, 0, 7] = True  # a whole row
    bias = torch.zeros(inputs.attn_mask.shape).masked_fill(inputs.attn_mask, -math.inf)
    masked, _, _ = carried_out(*kernel, spec, inputs)
    biased, _, _ = carried_out(*kernel, spec, inputs._replace(attn_mask=None, bias=bias))
    assert (biased["dbias"][inputs.attn_mask] == 0).all()
    assert {name: error(biased[name], masked[name]) for name in masked} == dict.fromkeys(masked, 0.0)


@each("empty, sink", [("b", "vanilla"), ("s_q", "learnable"), ("s_kv", "vanilla"), ("s_kv", "learnable")])
def test_empty_tensors(kernel: Kernel, empty: str, sink: str) -> None:
    """Without keys a row has its sink alone."""
    tensors = {"bias": "b h s_q s_kv"} | ({"softmax_offset": "h"} if sink == "learnable" else {})
    spec, inputs = call({**CAUSAL, "softmax_type": sink}, tensors, **{empty: 0})
    actual, dout, dlse = carried_out(*kernel, spec, inputs)
    assert_right(actual, spec, inputs, dout, dlse)


def test_a_packed_call_without_a_row_and_one_of_which_everything_is_dropped(kernel: Kernel) -> None:
    t, cu = torch.empty(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = kernel.forward(Spec(packed=True), inputs)
    assert result.out.shape == (0, 2, 4)
    assert kernel.backward(Spec(packed=True), inputs, result, result.out).k.shape == (0, 2, 4)
    spec, inputs = call({"dropout_p": 1.0})
    result = kernel.forward(spec, inputs)
    grads = kernel.backward(spec, inputs, result, result.out + 1)
    assert not any(t.any() for t in (result.out, *grads[:3]))


def test_nan_in_dense_padding_reaches_nothing(kernel: Kernel) -> None:
    spec, inputs = call(
        {**BOTTOM_RIGHT, "softmax_type": "off-by-one"},
        {"seqlens_q": "b", "seqlens_kv": "b", "bias": "b 1 s_q s_kv"},
    )
    lengths_q, lengths_kv = inputs.seqlens_q.tolist(), inputs.seqlens_kv.tolist()
    dout, dlse = upstream(kernel.forward(spec, inputs))
    bias = poison(poison(inputs.bias, lengths_q).transpose(2, 3), lengths_kv).transpose(2, 3)
    dirty = with_garbage(spec, inputs)._replace(bias=bias.requires_grad_())
    result = kernel.forward(spec, dirty)
    # A result that was merged from parts may hold anything in its padded rows, too.
    used = result._replace(out=poison(result.out, lengths_q), lse=poison(result.lse, lengths_q))
    grads = kernel.backward(spec, dirty, used, poison(dout, lengths_q), poison(dlse, lengths_q))
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    actual |= {"dq": grads.q, "dk": grads.k, "dv": grads.v, "dbias": grads.bias}
    assert_right(actual, spec, inputs, dout, dlse)


def test_nan_between_packed_sequences_reaches_nothing(kernel: Kernel) -> None:
    case = dataclasses.replace(packed("", CAUSAL, {"cu_seqlens_padded": ""}), sizes={"b": 3, **HALF_HEADS})
    spec, inputs = build(case, torch.float32)
    dout, dlse = upstream(kernel.forward(spec, inputs))

    dirty = with_garbage(spec, inputs)
    result = kernel.forward(spec, dirty)
    dirt = spoilt(spec, inputs, dlse.T[..., None], "q")[..., 0].T
    grads = kernel.backward(spec, dirty, result, spoilt(spec, inputs, dout, "q"), dirt)
    actual = {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}
    assert_right(actual | {"dq": grads.q, "dk": grads.k, "dv": grads.v}, spec, inputs, dout, dlse)


@each("spec", [{"window_left": 16, "window_right": 3}, {**CAUSAL, "softcap": 1.5}])
def test_parts_of_a_sequence_merge_into_the_whole_with_the_same_dropout(
    kernel: Kernel, spec: dict[str, Any]
) -> None:
    whole_spec, whole = call({**spec, **DROPOUT}, {"alibi_slopes": "h"}, b=1, h=1, s_q=40, s_kv=43)
    result = kernel.forward(whole_spec, whole)
    dout, dlse = upstream(result)
    wanted = kernel.backward(whole_spec, whole, result, dout, dlse)
    grads = Grads(*(torch.zeros_like(t) for t in whole[:3]))
    for rows in (slice(0, 18), slice(18, 40)):
        parts = []
        for keys in (slice(0, 7), slice(7, 29), slice(29, 43)):
            part_spec = dataclasses.replace(whole_spec, q_offset=rows.start, kv_offset=keys.start)
            part = whole._replace(q=whole.q[:, :, rows], k=whole.k[:, :, keys], v=whole.v[:, :, keys])
            parts.append((part_spec, part, keys, kernel.forward(part_spec, part)))
        merged = merge([part_result for *_, part_result in parts])
        assert error(merged.out, result.out[:, :, rows]) < 5e-6
        assert error(merged.lse, result.lse[:, :, rows]) < 5e-6
        for part_spec, part, keys, _ in parts:
            share = kernel.backward(part_spec, part, merged, dout[:, :, rows], dlse[:, :, rows])
            grads.q[:, :, rows] += share.q
            grads.k[:, :, keys] += share.k
            grads.v[:, :, keys] += share.v
    assert max(error(*pair) for pair in zip(grads[:3], wanted[:3], strict=True)) < 2e-5


def test_results_that_nobody_asked_for_are_not_made(kernel: Kernel) -> None:
    spec, inputs = call({**CAUSAL, "return_max_logit": False})
    result = kernel.forward(spec, inputs)
    assert result.max_logit is None
    dout, _ = upstream(result)
    wanted = expected(spec, inputs, dout, None)  # no gradient of the lse
    grads = kernel.backward(spec, inputs, result, dout)
    assert (grads.bias, grads.softmax_offset) == (None, None)
    assert max(error(grad, wanted[f"d{name}"]) for name, grad in zip("qkv", grads[:3], strict=True)) < 1e-5
    with pytest.raises(ValueError, match="lse"):
        kernel.backward(spec, inputs, result._replace(lse=None), dout)


def test_inputs_are_left_as_they_were_and_two_runs_are_bitwise_equal(kernel: Kernel) -> None:
    case = next(case for case in CASES if case.name == "everything, dense")
    spec, inputs = build(dataclasses.replace(case, sizes=HALF_HEADS), torch.float32)
    before = [t.clone() if isinstance(t, Tensor) else t for t in inputs]
    first, second = (carried_out(*kernel, spec, inputs)[0] for _ in range(2))
    for name, then, now in zip(Inputs._fields, before, inputs, strict=True):
        assert then is None or torch.equal(then, now), name
    assert {name for name in first if not torch.equal(first[name], second[name])} == set()


def test_results_take_the_memory_order_and_expanded_ones_are_read_as_they_are(kernel: Kernel) -> None:
    spec, inputs = call({}, e=12)
    order = STRIDES["sequence before heads"]
    laid = inputs._replace(**{name: order(getattr(inputs, name)) for name in "qkv"})
    result = kernel.forward(spec, laid)
    grads = kernel.backward(spec, laid, result, result.out)
    for t in (result.out, grads.q, grads.k, grads.v):
        assert t.transpose(1, 2).is_contiguous()
    expanded = inputs._replace(k=inputs.k.expand(-1, 2, -1, -1), v=inputs.v.expand(-1, 2, -1, -1))
    result, shared = kernel.forward(spec, expanded), kernel.forward(spec, inputs)
    assert torch.equal(result.out, shared.out)
    dout = torch.ones(()).expand(result.out.shape)
    whole, once = (kernel.backward(spec, i, r, dout) for i, r in ((expanded, result), (inputs, shared)))
    assert error(whole.k.sum(1, keepdim=True), once.k) < 1e-5
    assert torch.equal(whole.q, kernel.backward(spec, expanded, result, dout.contiguous()).q)


@pytest.mark.parametrize("name", KERNELS)
def test_no_score_matrix_is_made_and_nothing_read_on_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = (f.func for f in KERNELS[name])  # on tiles of their own choice
    if name == "triton":  # the interpreter copies its arguments: nothing is launched here
        monkeypatch.setattr("attnsel.backends.triton.run._run", lambda *args: None)
    s = 1024
    tensors = {"bias": "b 1 1 s_kv", "attn_mask": "1 h s_q 1", "softmax_offset": "h", "alibi_slopes": "h"}
    lengths = {"seqlens_q": "b", "seqlens_kv": "b"}
    spec, inputs = call(KITCHEN_SINK, tensors | lengths, b=1, s_q=s, s_kv=s)
    inputs.bias.requires_grad_()
    cu = int32([0, s // 2, s])
    q, k, v = (torch.randn(s, 2, 8) for _ in range(3))
    flat = Inputs(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    with Observed() as observed:
        result = forward(spec, inputs)
        backward(spec, inputs, result, result.out, result.lse)
    assert not {"_local_scalar_dense", "item", "nonzero", "equal"} & observed.calls.keys()
    with observed:
        result = forward(Spec(packed=True, window_right=0), flat)
        backward(Spec(packed=True, window_right=0), flat, result, result.out)
    assert observed.largest < s * s

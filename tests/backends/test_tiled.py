"""``tiled`` against the definition of attention: every feature, forward and backward, in every float type."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled import Blocks, backward, forward
from reference import attention_reference

torch.set_num_threads(1)

SMALL_BLOCKS = Blocks(q=8, kv=16, elements=1)  # one key/value head of one batch entry at a time
WIDE_BLOCKS = Blocks(q=16, kv=8, elements=1 << 20)  # whole batch at once
LENGTHS_Q, LENGTHS_KV = [11, 0, 17], [13, 9, 20]  # of the packed cases
FLOAT_INPUTS = ("q", "k", "v", "bias", "softmax_offset")


@dataclass(frozen=True)
class Case:
    """One feature or combination. ``tensors`` names the optional inputs and, for some, their shape."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # over b 2, h 4, g 2, s_q 21, s_kv 27, d 8, e 8


def packed(name: str, spec: dict[str, Any] | None = None, tensors: dict[str, str] | None = None) -> Case:
    return Case(f"packed: {name}", {"packed": True, **(spec or {})}, tensors or {}, {"b": 3})


DROPOUT = {"dropout_p": 0.3}
CAUSAL = {"window_right": 0}
BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
KITCHEN_SINK = {**BOTTOM_RIGHT, "window_left": 9, "softcap": 1.5, "softmax_type": "learnable", **DROPOUT}
CASES = [
    Case("plain"),
    Case("mha", sizes={"g": 4}),
    Case("mqa", sizes={"g": 1}),
    Case("head_dim_qk < head_dim_v", sizes={"e": 12}),
    Case("head_dim_qk > head_dim_v", sizes={"e": 3}),
    Case("one query row", BOTTOM_RIGHT, sizes={"s_q": 1}),
    Case("causal", CAUSAL),
    Case("causal, more queries than keys", CAUSAL, sizes={"s_q": 40}),
    Case("causal bottom-right", BOTTOM_RIGHT),
    Case("causal bottom-right, rows that see no key", BOTTOM_RIGHT, sizes={"s_q": 40}),
    Case("sliding window", {"window_left": 5, "window_right": 0}),
    Case("window, two-sided", {"window_left": 3, "window_right": 6}),
    Case("window, left bound only", {"window_left": 4}),
    Case("window, bottom-right", {"window_left": 3, "window_right": 2, "bottom_right": True}),
    Case("offsets", {"window_left": 9, "window_right": 2, "q_offset": 10, "kv_offset": 5}),
    Case("offsets beyond every key", {"window_left": 4, "q_offset": 1000}),
    Case("softcap", {"softcap": 1.2}),
    Case("bias", {}, {"bias": "b h s_q s_kv"}),
    Case("bias broadcast over batch", {}, {"bias": "1 h s_q s_kv"}),
    Case("bias broadcast over heads", {}, {"bias": "b 1 s_q s_kv"}),
    Case("bias broadcast over queries", {}, {"bias": "b 1 1 s_kv"}),
    Case("bias broadcast over keys", {}, {"bias": "1 h s_q 1"}),
    Case("bias of two dimensions", {}, {"bias": "s_q s_kv"}),
    Case("bias and softcap", {"softcap": 1.2}, {"bias": "1 h s_q s_kv"}),
    Case("mask", {}, {"attn_mask": "b h s_q s_kv"}),
    Case("mask of keys", CAUSAL, {"attn_mask": "b 1 1 s_kv"}),
    Case("mask of two dimensions", {}, {"attn_mask": "s_q s_kv"}),
    Case("mask of whole rows", {}, {"attn_mask": "1 h s_q 1"}),
    Case("alibi", CAUSAL, {"alibi_slopes": "h"}),
    Case("alibi per sequence, bottom-right", {"bottom_right": True}, {"alibi_slopes": "b h"}),
    Case("off-by-one", {"softmax_type": "off-by-one"}),
    Case("off-by-one, rows that see no key", {**BOTTOM_RIGHT, "softmax_type": "off-by-one"}, {}, {"s_q": 40}),
    Case("learnable", {"softmax_type": "learnable"}, {"softmax_offset": "h"}),
    Case(
        "learnable, rows that see no key",
        {**BOTTOM_RIGHT, "softmax_type": "learnable"},
        {"softmax_offset": "h"},
        {"s_q": 40},
    ),
    Case("dropout", DROPOUT),
    Case("dropout, offset not a multiple of four", {**DROPOUT, **CAUSAL, "q_offset": 7, "kv_offset": 3}),
    Case("padding", {}, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("padding of keys", CAUSAL, {"seqlens_kv": "b"}),
    Case("padding, bottom-right", BOTTOM_RIGHT, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("padding and sinks", {"softmax_type": "off-by-one"}, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case(
        "everything, dense",
        KITCHEN_SINK,
        {
            "seqlens_q": "b",
            "seqlens_kv": "b",
            "bias": "1 h s_q s_kv",
            "attn_mask": "b 1 s_q s_kv",
            "alibi_slopes": "h",
            "softmax_offset": "h",
        },
    ),
    packed("plain"),
    packed("causal bottom-right", BOTTOM_RIGHT),
    packed("padding between sequences", CAUSAL, {"cu_seqlens_padded": ""}),
    packed("dropout", DROPOUT),
    packed("offsets", {"window_left": 6, "window_right": 1, "q_offset": 4, "kv_offset": 2}),
    packed("bias", {}, {"bias": "b h s_q s_kv"}),
    packed("bias and mask, broadcast", {}, {"bias": "1 h 1 s_kv", "attn_mask": "b 1 1 s_kv"}),
    packed(
        "everything",
        KITCHEN_SINK,
        {
            "cu_seqlens_padded": "",
            "bias": "1 h s_q s_kv",
            "attn_mask": "b 1 s_q s_kv",
            "alibi_slopes": "b h",
            "softmax_offset": "h",
        },
    ),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: list[int], gap: int = 0) -> Tensor:
    """cu_seqlens; with ``gap`` unused rows before each sequence, where each starts in memory."""
    sums = [0, *itertools.accumulate(length + gap for length in lengths)]
    return int32([gap + total if gap else total for total in sums])


def build(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Spec, Inputs]:
    """A call with the case's features on normally distributed tensors."""
    gen = torch.Generator().manual_seed(seed)
    size = {"b": 2, "h": 4, "g": 2, "s_q": 21, "s_kv": 27, "d": 8, "e": 8, "1": 1, **case.sizes}

    def normal(*names: str) -> Tensor:
        return torch.randn([size[name] for name in names], generator=gen, dtype=torch.float64).to(dtype)

    spec = Spec(softmax_scale=size["d"] ** -0.5, return_max_logit=True, need_lse=True, need_grad=True)
    spec = dataclasses.replace(spec, **case.spec)
    made: dict[str, Tensor] = {}
    if spec.packed:
        gap = 3 if "cu_seqlens_padded" in case.tensors else 0
        size["s_q"], size["s_kv"] = max(LENGTHS_Q), max(LENGTHS_KV)
        # Two rows more than the sequences take: packed memory may end in rows of no sequence.
        size["t_q"] = sum(LENGTHS_Q) + len(LENGTHS_Q) * gap + 2
        size["t_kv"] = sum(LENGTHS_KV) + len(LENGTHS_KV) * gap + 2
        made |= {"q": normal("t_q", "h", "d"), "k": normal("t_kv", "g", "d"), "v": normal("t_kv", "g", "e")}
        made |= {"cu_seqlens_q": starts(LENGTHS_Q), "cu_seqlens_kv": starts(LENGTHS_KV)}
        if gap:
            made |= {
                "cu_seqlens_q_padded": starts(LENGTHS_Q, gap),
                "cu_seqlens_kv_padded": starts(LENGTHS_KV, gap),
            }
    else:
        made["q"], made["k"] = normal("b", "h", "s_q", "d"), normal("b", "g", "s_kv", "d")
        made["v"] = normal("b", "g", "s_kv", "e")
    for name, shape in case.tensors.items():
        if name in ("bias", "softmax_offset"):
            made[name] = normal(*shape.split())
        elif name == "alibi_slopes":
            made[name] = normal(*shape.split()).float().abs() / 4
        elif name == "attn_mask":
            made[name] = normal(*shape.split()) > 0.3
        elif name == "seqlens_q":
            made[name] = int32([max(0, size["s_q"] - 9 * n) for n in range(size["b"])])
        elif name == "seqlens_kv":
            made[name] = int32([max(0, size["s_kv"] - 8 - 3 * n) for n in range(size["b"])])
    if spec.dropout_p:
        made["dropout_seed"], made["dropout_offset"] = torch.tensor(1234), torch.tensor(5678)
    return spec, Inputs(**made)


def upstream(result: Result, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random gradients of out and lse, in their dtypes."""
    gen = torch.Generator().manual_seed(seed)
    assert result.lse is not None
    dout = torch.randn(result.out.shape, generator=gen, dtype=torch.float64).to(result.out.dtype)
    return dout, torch.randn(result.lse.shape, generator=gen, dtype=torch.float64).to(result.lse.dtype)


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


def expected(
    spec: Spec, inputs: Inputs, dout: Tensor, dlse: Tensor | None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The same names from the reference, its gradients by autograd."""
    leaves = {
        name: t.detach().to(dtype).requires_grad_()
        for name in FLOAT_INPUTS
        if (t := getattr(inputs, name)) is not None
    }
    out, lse, max_logit = attention_reference(spec, inputs._replace(**leaves), dtype)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        # A row with nothing in its softmax has an LSE of -inf, which has no gradient.
        loss = loss + (torch.where(lse == -math.inf, 0.0, lse) * dlse.to(dtype)).sum()
    grads: Iterable[Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:  # without a batch entry nothing depends on anything
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = {"out": out.detach(), "lse": lse.detach(), "max_logit": max_logit}
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        named[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return named


def error(actual: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN or infinite and the other is not the same."""
    actual, wanted = actual.double(), wanted.double()
    difference = torch.where(actual == wanted, 0.0, (actual - wanted).abs())
    return difference.nan_to_num(math.inf, math.inf).max().item() if difference.numel() else 0.0


def assert_matches(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    assert actual.keys() == wanted.keys()
    wrong = {name: error(actual[name], wanted[name]) for name in wanted}
    assert {name: e for name, e in wrong.items() if not e <= tolerance} == {}


# Every feature, every float type


@pytest.mark.parametrize("blocks", [None, SMALL_BLOCKS, WIDE_BLOCKS], ids=["default", "small", "wide"])
@cases
def test_float64_equals_the_definition(case: Case, blocks: Blocks | None) -> None:
    spec, inputs = build(case)
    actual, dout, dlse = run(spec, inputs, blocks)
    assert_matches(actual, expected(spec, inputs, dout, dlse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@cases
def test_lower_precision_errs_little_more_than_plain_pytorch(case: Case, dtype: torch.dtype) -> None:
    spec, inputs = build(case, dtype)
    actual, dout, dlse = run(spec, inputs, SMALL_BLOCKS)
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    eps = torch.finfo(dtype).eps
    for name in wanted:
        factor = 3 if name.startswith("d") else 2
        finite = wanted[name][wanted[name].isfinite()]
        unit = eps * finite.abs().max().item() if finite.numel() else 0.0
        assert error(actual[name], wanted[name]) <= factor * error(plain[name], wanted[name]) + 2 * unit, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@cases
def test_lse_and_max_logit_have_float32_precision(case: Case, dtype: torch.dtype) -> None:
    spec, inputs = build(case, dtype)
    result = forward(spec, inputs, blocks=SMALL_BLOCKS)
    _, lse, max_logit = attention_reference(spec, inputs)
    assert result.lse is not None
    assert result.max_logit is not None
    assert result.lse.dtype == result.max_logit.dtype == torch.float32
    assert error(result.lse, lse) < 1e-5
    assert error(result.max_logit, max_logit) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
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


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_row_that_sees_only_the_sink_gives_zero_and_the_sinks_logit(softmax_type: str) -> None:
    spec, inputs = build(Case("", {"softmax_type": softmax_type}, {"softmax_offset": "h"}, {"s_kv": 0}))
    result = forward(spec, inputs)
    assert result.lse is not None
    assert inputs.softmax_offset is not None
    sink = inputs.softmax_offset if softmax_type == "learnable" else torch.zeros(4, dtype=torch.float64)
    assert (result.out == 0).all()
    assert torch.equal(result.lse, sink[None, :, None].expand(2, 4, 21))


def test_padded_row_has_no_lse_even_with_a_sink() -> None:
    spec, inputs = build(Case("", {"softmax_type": "off-by-one"}, {"seqlens_q": "b"}))
    result = forward(spec, inputs)
    assert result.lse is not None
    assert (result.lse[1, :, 12:] == -math.inf).all()
    assert (result.out[1, :, 12:] == 0).all()


@pytest.mark.parametrize("empty", ["b", "s_q", "s_kv"])
def test_empty_tensors(empty: str) -> None:
    spec, inputs = build(Case("", CAUSAL, {"bias": "b h s_q s_kv"}, {empty: 0}))
    actual, dout, dlse = run(spec, inputs, None)
    assert_matches(actual, expected(spec, inputs, dout, dlse))


def test_packed_call_without_a_row() -> None:
    t, cu = torch.empty(0, 2, 4), torch.zeros(1, dtype=torch.int32)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = forward(Spec(packed=True), inputs)
    assert result.out.shape == (0, 2, 4)
    assert backward(Spec(packed=True), inputs, result, result.out).k.shape == (0, 2, 4)


# Garbage in padding


def poison(t: Tensor, lengths: list[int]) -> Tensor:
    """NaN in the rows of ``[b, h, s, ...]`` past each length."""
    t = t.clone()
    for n, length in enumerate(lengths):
        t[n, :, length:] = math.nan
    return t


@pytest.mark.parametrize("spec", [{}, BOTTOM_RIGHT, {"softcap": 1.0, "softmax_type": "off-by-one"}], ids=str)
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


def merge(parts: list[Result]) -> Result:
    """The whole row's out and lse from those of parts of its keys."""
    lses = torch.stack([part.lse for part in parts])  # type: ignore[misc]
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -math.inf, 0.0))
    return Result(sum(w[..., None] * part.out for w, part in zip(weights, parts, strict=True)), lse)


@pytest.mark.parametrize(
    "spec",
    [{}, CAUSAL, {"window_left": 6, "window_right": 3}, {**CAUSAL, "softcap": 1.5}],
    ids=["full", "causal", "window", "softcap"],
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


def test_dropout_does_not_depend_on_the_tile_size() -> None:
    spec, inputs = build(Case("", DROPOUT))
    results = [forward(spec, inputs, blocks=blocks).out for blocks in (None, SMALL_BLOCKS, WIDE_BLOCKS)]
    assert error(results[0], results[1]) < 1e-14
    assert error(results[0], results[2]) < 1e-14


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


class Observed(TorchDispatchMode):
    """The largest result any operation had, and how often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        # An expanded view has many elements and no memory of its own.
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
        return result


@pytest.mark.parametrize(
    "case",
    [
        Case("sinks", {**CAUSAL, "softcap": 2.0, "softmax_type": "learnable"}, {"softmax_offset": "h"}),
        Case("alibi", CAUSAL, {"alibi_slopes": "h"}),
        Case("dropout", DROPOUT, {"bias": "b 1 1 s_kv", "attn_mask": "1 h s_q 1"}),
        Case("padding", BOTTOM_RIGHT, {"seqlens_q": "b", "seqlens_kv": "b"}),
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


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "as made": lambda t: t,
    "sequence before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second element": lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2],
    "at an odd offset": lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),
}


@st.composite
def calls(draw: st.DrawFn) -> Case:
    """Any combination of features the contract allows."""
    is_packed = draw(st.booleans())
    group = draw(st.integers(1, 3))
    sizes = {"g": draw(st.integers(1, 2)), "d": draw(st.integers(1, 9)), "e": draw(st.integers(1, 9))}
    sizes["h"] = group * sizes["g"]
    if is_packed:
        sizes["b"] = len(LENGTHS_Q)
    else:
        sizes |= {"b": draw(st.integers(1, 3)), "s_q": draw(st.integers(0, 35))}
        sizes["s_kv"] = draw(st.integers(0, 35))
    bound, offset = st.integers(-1, 30), st.integers(0, 12)
    spec = {
        "packed": is_packed,
        "window_left": draw(bound),
        "window_right": draw(bound),
        "bottom_right": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 0.8])),
        "softmax_type": draw(st.sampled_from(["vanilla", "off-by-one", "learnable"])),
        "dropout_p": draw(st.sampled_from([0.0, 0.4])),
        "q_offset": draw(offset),
        "kv_offset": draw(offset),
    }
    pairs = st.tuples(*(st.sampled_from(["1", name]) for name in ("b", "h", "s_q", "s_kv"))).map(" ".join)
    optional = {
        "bias": pairs,
        "attn_mask": pairs,
        "alibi_slopes": st.sampled_from(["h", "b h"]),
        "cu_seqlens_padded" if is_packed else "seqlens_q": st.just("b"),
        "seqlens_kv": st.just("b"),
    }
    if is_packed:
        del optional["seqlens_kv"]
    tensors = {name: draw(shape) for name, shape in optional.items() if draw(st.booleans())}
    if spec["softmax_type"] == "learnable":
        tensors["softmax_offset"] = "h"
    return Case("drawn", spec, tensors, sizes)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
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

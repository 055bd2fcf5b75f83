"""Decode, the kernels for short queries: keys split over programs, and the parts merged."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from attention_cases import (
    BOTTOM_RIGHT,
    CAUSAL,
    DROPOUT,
    STRIDES,
    Case,
    Observed,
    build,
    error,
    int32,
    poison,
)
from attnsel.backends.contract import Inputs, Spec
from forward_checks import check_forward
from pairwise import PAIRS, Pair, some
from tables import each

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import run as triton_run
from attnsel.backends.triton.blocks import MAX_SPLITS, Block, Tiles
from attnsel.backends.triton.run import backward, forward

torch.set_num_threads(1)

SMALL = Tiles(*[Block(16, 16)] * 4)
LONG = {"b": 2, "h": 4, "g": 2, "s_q": 3, "s_kv": 70}


def check(spec: Spec, inputs: Inputs, splits: int, tiles: Tiles | None = SMALL) -> None:
    check_forward(forward(spec, inputs, tiles=tiles, splits=splits), spec, inputs)


@some(PAIRS, 15)
def test_every_two_features_with_split_keys(pair: Pair) -> None:
    check(*build(pair.case, pair.dtype), splits=1 + PAIRS.index(pair) % 3)


@each("s_q, h, g, splits", [(1, 4, 4, 3), (5, 6, 2, 7), (16, 3, 1, 1)])
def test_rows_and_groups(s_q: int, h: int, g: int, splits: int) -> None:
    sizes = {"b": 1, "h": h, "g": g, "s_q": s_q, "s_kv": 50}
    tensors = {"bias": "1 h s_q s_kv", "alibi_slopes": "h"}
    spec = {**BOTTOM_RIGHT, **DROPOUT, "window_left": 20}
    check(*build(Case("", spec, tensors, sizes), torch.float32), splits)


@each("d, e, h", [(192, 128, 2), (40, 72, 4), (576, 512, 20)])
def test_head_dims(d: int, e: int, h: int) -> None:
    """576/512 with one kv head is latent attention: all heads read the same keys."""
    sizes = {"d": d, "e": e, "b": 1, "h": h, "g": 1, "s_q": 1, "s_kv": 70}
    spec, inputs = build(Case("", {**BOTTOM_RIGHT, "need_grad": False}, {}, sizes), torch.bfloat16)
    check(spec, inputs, 2, Tiles(*[Block(32, 32)] * 4))


def test_packed_sequences_of_one_row_or_none() -> None:
    q, kv = torch.randn(4, 4, 8), torch.randn(62, 2, 8)
    inputs = Inputs(q, kv, kv + 1, cu_seqlens_q=int32([0, 1, 1, 3]), cu_seqlens_kv=int32([0, 40, 40, 60]))
    for splits in (1, 4):
        check(Spec(packed=True, return_max_logit=True, **BOTTOM_RIGHT), inputs, splits)


@each(
    "softmax_type, splits", [("vanilla", 1), ("off-by-one", 3), ("learnable", 3), ("off-by-one", MAX_SPLITS)]
)
def test_sequences_without_keys(softmax_type: str, splits: int) -> None:
    sizes = {**LONG, "b": 3, "h": 2, "g": 1}  # of one group of heads: each split is interpreted
    case = Case("", {"softmax_type": softmax_type}, {"softmax_offset": "h"}, sizes)
    spec, inputs = build(case, torch.float32)
    check(spec, inputs._replace(seqlens_kv=int32([0, 70, 1]), seqlens_q=int32([3, 0, 2])), splits)


@each("empty", ["b", "s_q", "s_kv"])
def test_empty_tensors(empty: str) -> None:
    check(*build(Case("", CAUSAL, {}, {**LONG, empty: 0}), torch.float32), splits=2)


def test_nan_in_padding_reaches_nothing() -> None:
    spec, inputs = build(Case("", BOTTOM_RIGHT, {"seqlens_q": "b", "seqlens_kv": "b"}, LONG), torch.float32)
    lengths_q, lengths_kv = [3, 1], [62, 17]
    inputs = inputs._replace(seqlens_q=int32(lengths_q), seqlens_kv=int32(lengths_kv))
    poisoned = inputs._replace(
        q=poison(inputs.q, lengths_q), k=poison(inputs.k, lengths_kv), v=poison(inputs.v, lengths_kv)
    )
    for splits in (1, 2):
        check_forward(forward(spec, poisoned, tiles=SMALL, splits=splits), spec, inputs)


def test_parts_without_keys_leave_memory_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``torch.empty`` gives is NaN here."""

    def nan_parts(*args: Any) -> Any:
        parts = make_parts(*args)
        for t in (parts.out, parts.lse, parts.peak):
            t.fill_(math.nan)
        return parts

    make_parts = triton_run.make_parts
    monkeypatch.setattr(triton_run, "make_parts", nan_parts)
    case = Case("", {**BOTTOM_RIGHT, "window_left": 20}, {"seqlens_q": "b", "seqlens_kv": "b"}, LONG)
    spec, inputs = build(case, torch.float32)
    check(spec, inputs._replace(seqlens_q=int32([3, 1]), seqlens_kv=int32([70, 9])), splits=5)


def test_the_backward_takes_what_a_split_forward_gives_and_two_runs_are_bitwise_equal() -> None:
    sizes = LONG | {"b": 1, "h": 2, "g": 1}
    spec, inputs = build(Case("", {**BOTTOM_RIGHT, **DROPOUT}, {}, sizes), torch.float32)
    whole, split, again = (forward(spec, inputs, tiles=SMALL, splits=n) for n in (0, 3, 3))
    assert torch.equal(split.out, again.out)
    assert torch.equal(split.lse, again.lse)
    dout = torch.ones_like(whole.out)
    for a, b in zip(*(backward(spec, inputs, r, dout, tiles=SMALL) for r in (whole, split)), strict=True):
        assert a is b is None or error(a, b) < 1e-5


def test_strides() -> None:
    spec, inputs = build(Case("", CAUSAL, {}, LONG), torch.float16)
    layouts = dict(zip("qkv", ("at an odd offset", "sequence before heads", "at an odd offset"), strict=True))
    strided = {name: STRIDES[layout](getattr(inputs, name)) for name, layout in layouts.items()}
    check(spec, inputs._replace(**strided), splits=2)


def test_memory_is_a_row_per_split(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter copies its arguments: nothing is launched here.
    monkeypatch.setattr(triton_run, "_run", lambda *args: None)
    sizes = {"b": 1, "h": 2, "g": 1, "s_q": 2, "s_kv": 2048}
    spec, inputs = build(Case("", CAUSAL, {}, sizes), torch.float32)
    with Observed() as observed:
        forward(spec, inputs, splits=4)
    assert observed.largest == inputs.k.numel()  # a view of it
    copying = {"clone", "copy_", "_to_copy", "index", "index_select", "gather", "expand", "repeat"}
    assert not (copying | {"_local_scalar_dense", "item", "nonzero", "equal"}) & observed.calls.keys()


def test_other_counts_of_splits_than_there_are_are_refused() -> None:
    """How many there are by default: test_recorded.py."""
    spec, inputs = build(Case("", {}, {}, LONG), torch.float32)
    for splits in (-1, MAX_SPLITS + 1):
        with pytest.raises(ValueError, match="splits must be 0"):
            forward(spec, inputs, splits=splits)

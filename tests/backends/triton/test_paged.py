"""Keys and values in pages, by the kernel for long queries and by decode."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CAUSAL,
    DROPOUT,
    KITCHEN_SINK,
    Case,
    Observed,
    build,
    int32,
    packed,
)
from attnsel.backends.contract import Inputs, Spec
from forward_checks import check_forward, pages_of
from pairwise import PAIRS, Pair, some
from tables import each

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.run import backward, forward

torch.set_num_threads(1)

SMALL = Tiles(*[Block(16, 16)] * 4)
WIDE = Tiles(*[Block(32, 64)] * 4)
PADDED = {"seqlens_q": "b", "seqlens_kv": "b"}
EVERYTHING = {"bias": "1 h s_q s_kv", "attn_mask": "b 1 s_q s_kv", "alibi_slopes": "h", "softmax_offset": "h"}


def check(
    case: Case, page_size: int, splits: int, tiles: Tiles = SMALL, dtype: torch.dtype = torch.float32
) -> None:
    spec, inputs = build(case, dtype)
    result = forward(*pages_of(spec, inputs, page_size), tiles=tiles, splits=splits)
    check_forward(result, spec, inputs)


@some(PAIRS, 15)
def test_every_two_features(pair: Pair) -> None:
    """Pages of one tile, and of less than a tile; NaN lies around every row."""
    page_size, splits = ((16, 0), (5, 2), (5, 0))[PAIRS.index(pair) % 3]
    check(pair.case, page_size, splits)


@each("page_size, splits", [(1, 3), (17, 0), (64, 1), (256, 0)])
def test_page_sizes(page_size: int, splits: int) -> None:
    case = Case("", KITCHEN_SINK | {"window_left": 50}, EVERYTHING | PADDED, {"s_q": 9, "s_kv": 90})
    check(case, page_size, splits)


@each("page_size, splits", [(16, 2), (128, 0)])
def test_packed_queries(page_size: int, splits: int) -> None:
    check(packed("", {**BOTTOM_RIGHT, **DROPOUT}, {"cu_seqlens_padded": ""}), page_size, splits, WIDE)


def test_pools_may_have_any_strides() -> None:
    """[pages, page_size, g, d], the order in which caches are usually kept, and keys beside values."""
    spec, inputs = build(Case("", CAUSAL, {}, {"h": 2, "g": 1}), torch.float16)
    for layout, page_size in ((_rows_before_heads, 5), (_every_second_page, 16)):
        result = forward(*pages_of(spec, inputs, page_size, layout), tiles=SMALL)
        check_forward(result, spec, inputs)


def _rows_before_heads(pool: Tensor) -> Tensor:
    return pool.transpose(1, 2).contiguous().transpose(1, 2)


def _every_second_page(pool: Tensor) -> Tensor:
    return torch.stack([pool, pool + 1], dim=1).flatten(0, 1)[::2]


def two_sequences(page_size: int = 16) -> tuple[Spec, Inputs]:
    """Two sequences of 3 and 2 pages in a pool of 8."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=gen) for shape in ((2, 4, 3, 8), *[(8, 2, page_size, 8)] * 2))
    table = int32([[6, 1, 4, -1], [6, 1, -1, -1]])
    spec = Spec(return_max_logit=True, **BOTTOM_RIGHT)
    return spec, Inputs(q, k, v, seqlens_kv=int32([37, 30]), block_table=table)


@each("splits", [0, 2])
def test_sequences_may_share_pages(splits: int) -> None:
    spec, inputs = two_sequences()
    assert inputs.seqlens_kv is not None
    k, v = (t[[6, 1, 4]].transpose(0, 1).flatten(1, 2).expand(2, -1, -1, -1) for t in (inputs.k, inputs.v))
    dense = inputs._replace(k=k, v=v, block_table=None)
    check_forward(forward(spec, inputs, tiles=SMALL, splits=splits), spec, dense)


@each("page_size, splits", [(16, 0), (5, 2)])
def test_pages_are_clamped_into_the_pool_where_nothing_checked_them(
    page_size: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the table is not read back: no crash, and nothing but the pool's own numbers."""
    monkeypatch.setattr("attnsel.backends.rows.wrong_page", lambda *args, **sizes: None)
    spec, inputs = two_sequences(page_size)
    wild = inputs._replace(
        block_table=int32([[2**31 - 1, -(2**31), 99, -5]] * 2), seqlens_kv=int32([3 * page_size, 2**31 - 1])
    )
    result = forward(spec, wild, tiles=SMALL, splits=splits)
    clamped = inputs._replace(
        block_table=int32([[7, 0, 7, 0]] * 2), seqlens_kv=int32([3 * page_size, 4 * page_size])
    )
    assert torch.equal(result.out, forward(spec, clamped, tiles=SMALL, splits=splits).out)


def test_max_seqlen_kv_bounds_the_length() -> None:
    spec, inputs = two_sequences()
    bounded, wanted = (
        forward(spec, inputs._replace(**of), tiles=SMALL).out
        for of in ({"max_seqlen_kv": 20}, {"seqlens_kv": int32([20, 20])})
    )
    assert torch.equal(bounded, wanted)


@each("splits", [0, 2])
def test_an_empty_pool_and_an_empty_table(splits: int) -> None:
    spec, inputs = two_sequences()
    nothing = inputs._replace(k=inputs.k[:0], v=inputs.v[:0], seqlens_kv=int32([0, 0]))
    for call in (nothing, nothing._replace(block_table=torch.empty(2, 0, dtype=torch.int32))):
        result = forward(spec, call, tiles=SMALL, splits=splits)
        assert (result.out == 0).all()
        assert result.lse is not None
        assert (result.lse == -math.inf).all()


def test_no_page_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter copies its arguments: nothing is launched here.
    monkeypatch.setattr("attnsel.backends.triton.run._run", lambda *args: None)
    spec, inputs = two_sequences(page_size=256)
    with Observed() as observed:
        forward(spec, inputs)
    assert observed.largest == inputs.k.numel()  # a view of it
    assert not {"clone", "copy_", "_to_copy", "index", "index_select", "gather"} & observed.calls.keys()


@each(
    "message, changed",
    [
        (
            r"block_table\[0, 1\] is 8; allowed: 0 to 7 \(sequence 0 has 37",
            {"block_table": [[6, 8, 4, 0]] * 2},
        ),
        (r"block_table\[1, 0\] is -1; allowed: 0 to 7", {"block_table": [[6, 1, 4, 0], [-1, 1, 4, 0]]}),
        (r"block_table\[1, 2\] is -1", {"seqlens_kv": [37, 33]}),
        (r"block_table\[0, 3\] is -1", {"seqlens_kv": [2**31 - 1, 30]}),
        (r"block_table must be int32 \[2, n\]", {"block_table": [[6, 1, 4, 0]]}),
        (r"seqlens_kv must be int32 \[2\], got torch.int32 \[3\]", {"seqlens_kv": [37, 30, 1]}),
        ("got none", {"seqlens_kv": None}),
        ("got torch.int64", {"block_table": torch.zeros(2, 4, dtype=torch.int64)}),
        ("must be contiguous", {"block_table": torch.zeros(2, 8, dtype=torch.int32)[:, ::2]}),
        ("equal pages", {"v": torch.zeros(8, 2, 8, 8)}),
        ("page_size must be at least 1", dict.fromkeys("kv", torch.zeros(8, 2, 0, 8))),
    ],
)
def test_bad_pages_are_refused_before_any_launch(
    message: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, inputs = two_sequences()
    launched: list[Any] = []
    monkeypatch.setattr("attnsel.backends.triton.run._run", lambda *args: launched.append(args))
    with pytest.raises(ValueError, match=message):
        forward(
            spec, inputs._replace(**{n: int32(v) if isinstance(v, list) else v for n, v in changed.items()})
        )
    assert not launched


def test_pages_have_no_backward() -> None:
    spec, inputs = two_sequences()
    with pytest.raises(ValueError, match="have no backward"):
        forward(dataclasses.replace(spec, need_grad=True), inputs)
    result = forward(spec, inputs)
    with pytest.raises(ValueError, match="have no backward"):
        backward(spec, inputs, result, result.out)

"""``flash_attn_with_kvcache``: the rows it writes into the cache, and its output over the cache then."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import attnsel
from attention_cases import assert_errs_little_more
from attnsel.flash_attn import flash_attn_with_kvcache
from flash_reference import one_sequence

INF = float("inf")
B, H, G, D, ROWS = 3, 4, 2, 32, 40
LENGTHS = [5, 0, 31]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing")


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def turn(x: Tensor, cos: Tensor, sin: Tensor, place: int, interleaved: bool) -> Tensor:
    """One row [heads, d] turned by its place, as complex numbers."""
    half = cos.shape[1]
    part = x[:, : 2 * half].double()
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(1, 2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(
        cos[place].double(), sin[place].double()
    )
    pairs = torch.view_as_real(turned)
    part = pairs.flatten(1) if interleaved else pairs.transpose(1, 2).flatten(1)
    return torch.cat([part.to(x.dtype), x[:, 2 * half :]], dim=1)


@dataclass
class Case:
    """A cache of five entries of 40 rows and three sequences; rows past the lengths hold random numbers."""

    rows_q: int = 1
    new: int = 0
    rotary: int = 0  # rotary_dim
    interleaved: bool = True
    batch_idx: bool = False
    leftpad: bool = False
    paged: bool = False
    int_length: bool = False
    whole: bool = False  # cache_seqlens None
    dtype: torch.dtype = torch.float16
    heads_first: bool = False  # the cache lies in memory as [b, g, s, d]

    def run(self, **args: Any) -> None:
        torch.manual_seed(0)
        q = torch.randn(B, self.rows_q, H, D).to(self.dtype)
        entries = [torch.randn(5, ROWS, G, D).to(self.dtype) for _ in range(2)]
        if self.heads_first:
            entries = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in entries]
        picked = [4, 0, 2] if self.batch_idx else [0, 1, 2]
        lengths = [17] * B if self.int_length else [ROWS] * B if self.whole else LENGTHS
        pads = [2, 0, 9] if self.leftpad else [0] * B
        given: dict[str, Any] = dict(args)
        if not self.whole:
            given["cache_seqlens"] = 17 if self.int_length else int32(lengths)
        if self.batch_idx:
            given["cache_batch_idx"] = int32(picked)
        if self.leftpad:
            given["cache_leftpad"] = int32(pads)
        new = [torch.randn(B, self.new, G, D).to(self.dtype) for _ in range(2)] if self.new else []
        if new:
            given |= {"k": new[0], "v": new[1]}
        cos = sin = torch.zeros(0)
        if self.rotary:
            angles = torch.rand(256 * 2, self.rotary // 2) * 6
            cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
            given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": self.interleaved}
        caches, table = entries, None
        if self.paged:
            caches, table = self._pages(entries)
            given["block_table"] = table
        before = [t.clone() for t in caches]
        out, lse = flash_attn_with_kvcache(q, *caches, **given, return_softmax_lse=True)
        assert not out.requires_grad

        held = [[t[row].clone() for row in picked] for t in entries]  # [k or v][sequence][rows, g, d]
        for n in range(B):
            for i in range(self.new):
                row = [t[n, i] for t in new]
                if self.rotary:
                    row[0] = turn(row[0], cos, sin, lengths[n] + i, self.interleaved)
                for part, value in zip(held, row, strict=True):
                    part[n][lengths[n] + i] = value
        self._check_written(caches, before, held, picked, table, lengths)
        if self.rotary:
            masked = args.get("causal") or tuple(args.get("window_size", (-1, -1))) != (-1, -1)
            q = torch.stack([
                torch.stack([
                    turn(row, cos, sin, lengths[n] + (i if masked else 0), self.interleaved)
                    for i, row in enumerate(q[n])
                ])
                for n in range(B)
            ])  # fmt: skip
        self._check_seen(q, held, [length + self.new for length in lengths], pads, out, lse, args)

    def _pages(self, entries: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Each of the three entries in a page of 256 rows, and a second page that is not needed."""
        pools = [torch.full((7, 256, G, D), torch.nan).to(self.dtype) for _ in range(2)]
        table = int32([[5, 1], [0, 2], [3, 4]])
        for pool, t in zip(pools, entries, strict=True):
            for n in range(B):
                pool[table[n, 0], :ROWS] = t[n]
        return pools, table

    def _check_written(
        self,
        caches: list[Tensor],
        before: list[Tensor],
        held: list[list[Tensor]],
        picked: list[int],
        table: Tensor | None,
        lengths: list[int],
    ) -> None:
        """The new rows are where they belong, and all others are unchanged."""
        for cache, old, rows in zip(caches, before, held, strict=True):
            for n in range(B):
                at = picked[n] if table is None else int(table[n, 0])
                span = slice(lengths[n], lengths[n] + self.new)
                torch.testing.assert_close(cache[at, span], rows[n][span], rtol=2e-3, atol=2e-3)
                rows[n][span] = cache[at, span]  # rounding of the rotation is not under test below
                cache[at, span] = old[at, span]
            assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))

    def _check_seen(
        self,
        q: Tensor,
        held: list[list[Tensor]],
        ends: list[int],
        pads: list[int],
        out: Tensor,
        lse: Tensor,
        args: dict[str, Any],
    ) -> None:
        known = {
            name: args[name] for name in ("softmax_scale", "causal", "window_size", "softcap") if name in args
        }
        wanted = {}
        for dtype in (torch.float64, self.dtype):
            results = [
                one_sequence(
                    q[n].to(dtype),
                    *(part[n][pads[n] : ends[n]].to(dtype) for part in held),
                    slopes=args.get("alibi_slopes"),
                    **known,
                )
                for n in range(B)
            ]
            wanted[dtype] = dict(
                zip(("out", "lse"), (torch.stack(part) for part in zip(*results, strict=True)), strict=True)
            )
        actual = {"out": out, "lse": lse}
        # A rotated q is rounded once more than the one the definition is given.
        ulps = 12 if self.rotary else 4
        assert_errs_little_more(actual, wanted[torch.float64], wanted[self.dtype], self.dtype, ulps=ulps)


CASES = {
    "the whole cache": (Case(whole=True), {}),
    "one length for all": (Case(int_length=True, rows_q=3), {"causal": True}),
    "lengths, causal: rows without keys": (Case(rows_q=9), {"causal": True}),
    "window": (Case(rows_q=4), {"window_size": (3, 1)}),
    "softcap and scale": (Case(rows_q=2), {"softcap": 1.1, "softmax_scale": 0.3}),
    "alibi": (Case(rows_q=4), {"alibi_slopes": SLOPES}),
    "alibi of one causal row": (Case(), {"alibi_slopes": SLOPES, "causal": True}),
    "append several": (Case(rows_q=4, new=4), {"causal": True}),
    "append fewer than are asked": (Case(rows_q=5, new=2), {"causal": True}),
    "cache_batch_idx": (Case(batch_idx=True, rows_q=3), {"causal": True}),
    "cache_leftpad": (Case(leftpad=True, rows_q=3), {}),
    "cache_leftpad, causal, append": (Case(leftpad=True, rows_q=3, new=3), {"causal": True}),
    "cache_leftpad, window, alibi": (
        Case(leftpad=True, rows_q=3),
        {"window_size": (6, 0), "alibi_slopes": SLOPES},
    ),
    "cache_leftpad, heads first": (Case(leftpad=True, heads_first=True, batch_idx=True), {}),
    "cache_leftpad, the whole cache": (Case(leftpad=True, whole=True), {}),
    "pages, append": (Case(paged=True, rows_q=3, new=3), {"causal": True}),
    "pages, append at one length": (Case(paged=True, new=1, int_length=True), {"window_size": (4, 0)}),
    "rotary, causal": (Case(rows_q=3, new=3, rotary=32), {"causal": True}),
    "rotary of a part, halves": (Case(rows_q=3, new=3, rotary=16, interleaved=False), {"causal": True}),
    "rotary, every q row at the length": (Case(rows_q=3, new=3, rotary=32), {}),
    "rotary, window": (Case(rows_q=3, new=3, rotary=32, interleaved=False), {"window_size": (5, 2)}),
    "rotary, pages": (Case(paged=True, rows_q=2, new=2, rotary=16), {"causal": True}),
    "rotary, batch_idx, leftpad": (
        Case(batch_idx=True, leftpad=True, rows_q=2, new=2, rotary=32),
        {"causal": True},
    ),
    "bf16": (Case(rows_q=2, new=2, dtype=torch.bfloat16), {"causal": True}),
}


def run(name: str) -> None:
    case, args = CASES[name]
    case.run(**args)


def test_against_the_definition() -> None:
    for name in CASES:
        run(name)


@needs_triton
@pytest.mark.parametrize("name", ["rotary, pages", pytest.param("alibi", marks=pytest.mark.slow)])
def test_triton_interpreted(name: str) -> None:
    with attnsel.override(backend="triton"):
        run(name)


@pytest.mark.parametrize("num_splits", [1, 128])
def test_num_splits_changes_no_number_beyond_rounding(num_splits: int) -> None:
    torch.manual_seed(0)
    q, cache = torch.randn(2, 1, 4, 32).half(), torch.randn(2, 300, 2, 32).half()
    wanted = flash_attn_with_kvcache(q, cache, cache)
    out = flash_attn_with_kvcache(q, cache, cache, num_splits=num_splits)
    torch.testing.assert_close(out, wanted)
    assert torch.equal(out, flash_attn_with_kvcache(q, cache, cache, num_splits=num_splits))


def test_an_empty_cache_gives_zero_and_plus_infinity() -> None:
    q, cache = torch.randn(2, 1, 4, 32).half(), torch.randn(2, 20, 2, 32).half()
    out, lse = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=0, return_softmax_lse=True)
    assert (out == 0).all()
    assert (lse == INF).all()


def test_decoding_token_by_token_equals_the_whole_sequence_at_once() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 12, heads, 32).half() for heads in (4, 2, 2))
    caches = [torch.full((2, 64, 2, 32), torch.nan).half() for _ in range(2)]
    for cache in caches:
        cache.zero_()
    rows = [
        flash_attn_with_kvcache(
            q[:, i : i + 1], *caches, k=k[:, i : i + 1], v=v[:, i : i + 1], cache_seqlens=i, causal=True
        )
        for i in range(12)
    ]
    wanted = attnsel.flash_attn.flash_attn_func(q, k, v, causal=True)
    torch.testing.assert_close(torch.cat(rows, 1), wanted, rtol=2e-3, atol=2e-3)
    assert torch.equal(caches[0][:, :12], k)


def test_a_growing_cache_is_few_call_signatures() -> None:
    """Lengths on the host are rounded up in steps of 256 rows, so a decode loop hits the cache of kernels."""
    q, cache = torch.randn(1, 1, 4, 32).half(), torch.randn(1, 600, 2, 32).half()
    new = torch.randn(1, 1, 2, 32).half()
    attnsel.clear_cache()
    for length in range(0, 511, 10):
        flash_attn_with_kvcache(q, cache, cache.clone(), k=new, v=new, cache_seqlens=length, causal=True)
    assert attnsel.cache_info().misses == 2


def test_no_gradient_and_no_error_for_inputs_that_require_one() -> None:
    q = torch.randn(1, 1, 4, 32).half().requires_grad_()
    cache = torch.randn(1, 20, 2, 32).half()
    new = torch.randn(1, 1, 2, 32).half().requires_grad_()
    out = flash_attn_with_kvcache(q, cache, cache.clone(), k=new, v=new, cache_seqlens=3)
    assert not out.requires_grad
    assert not cache.requires_grad

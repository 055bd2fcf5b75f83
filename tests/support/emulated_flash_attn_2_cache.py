"""The cache of flash-attn 2: ``fwd_kvcache`` of csrc/flash_attn/flash_api.cpp, on CPU tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from emulated_flash_attn_2 import Call, FlashAttention2
from emulated_flash_math import check, forward, paged, rotated, unwritten


class Cache:
    """``fwd_kvcache``: new keys are written into the cache, then attention over what is in it."""

    def __init__(self, package: FlashAttention2, given: dict[str, Any]) -> None:
        self.package, self.given = package, given
        self.q, self.k_cache, self.v_cache = (given[name] for name in ("q", "k_cache", "v_cache"))
        self.table, self.lengths = given.get("block_table"), given["cache_seqlens"]
        self.batch = self.q.shape[0]
        pages = self.table is not None
        self.capacity = self.k_cache.shape[1] * (self.table.shape[1] if pages else 1)
        self.new = 0 if given["k"] is None else given["k"].shape[1]
        left, right = given["window_size"]
        self.call = Call(
            self.q, self.k_cache, self.v_cache, 0.0, given["softmax_scale"], given["causal"], int(left),
            int(right), given.get("softcap", 0.0), given.get("alibi_slopes"),
            max_seqlen_q=self.q.shape[1], max_seqlen_k=self.capacity,
        )  # fmt: skip

    def run(self) -> tuple[Tensor, Tensor]:
        self.check()
        out = unwritten(self.q)
        lse = torch.full((self.batch, self.q.shape[2], self.q.shape[1]), math.nan)
        for n in range(self.batch):
            before, pad = self.length(n), self.padding(n)
            q = self.appended(n, before)
            at = self.at(n, torch.arange(pad, before + self.new))
            k, v = (t.flatten(0, 1)[at] for t in (self.k_cache, self.v_cache))
            made = forward(q, k, v, self.package._masked(self.call, n))
            out[n] = made.out.to(out.dtype)
            lse[n] = made.lse.masked_fill(made.lse == -math.inf, math.inf).float()
        return out, lse

    def length(self, n: int) -> int:
        return self.capacity if self.lengths is None else int(self.lengths[n])

    def padding(self, n: int) -> int:
        pad = self.given.get("cache_leftpad")
        return 0 if pad is None else int(pad[n])

    def at(self, n: int, positions: Tensor) -> Tensor:
        check(len(positions) == 0 or int(positions[-1]) < self.capacity, "past the cache: memory of others")
        if self.table is not None:
            return paged(self.table[n], self.k_cache.shape[1], positions)
        index = self.given["cache_batch_idx"]
        return (n if index is None else int(index[n])) * self.capacity + positions

    def appended(self, n: int, before: int) -> Tensor:
        """The queries, rotated if need be, after the new keys are in the cache."""
        q, cos = self.q[n], self.given["rotary_cos"]
        if not self.new:
            return q
        k, positions = self.given["k"][n], torch.arange(before, before + self.new)
        if cos is not None:
            angles = cos, self.given["rotary_sin"]
            interleaved = self.given["rotary_interleaved"]
            how = self.package._masked(self.call, n)
            moving = how.left is not None or how.right is not None
            of_queries = before + torch.arange(len(q)) * (moving and len(q) > 1)
            k, q = rotated(k, *angles, positions, interleaved), rotated(q, *angles, of_queries, interleaved)
        at = self.at(n, positions)
        for cache, new in ((self.k_cache, k), (self.v_cache, self.given["v"][n])):
            pages, size = at // cache.shape[1], at % cache.shape[1]
            cache[pages, size] = new
        return q

    def check(self) -> None:
        given, q, k, batch = self.given, self.q, self.k_cache, self.batch
        new = {name: given[name] for name in ("k", "v") if given[name] is not None}
        self.package._check_tensors(q=q, k_cache=k, v_cache=self.v_cache, **new)
        check(q.dim() == k.dim() == 4 and k.shape == self.v_cache.shape, "caches: shape")
        check(q.shape[-1] == k.shape[-1] <= 256, "the head dimension is at most 256, and one")
        check(q.shape[-2] % k.shape[-2] == 0, "heads of keys must divide heads of queries")
        check(given.get("num_splits", 0) <= 128, "num_splits is at most 128")
        if self.table is not None:
            check(given["cache_batch_idx"] is None, "pages with cache_batch_idx")
            check(given.get("cache_leftpad") is None, "pages with cache_leftpad")
            self.package._check_pages(self.table, k, batch)
        for name in ("cache_seqlens", "cache_leftpad", "cache_batch_idx"):
            t = given.get(name)
            if t is not None:
                check(t.dtype == torch.int32 and t.is_contiguous(), f"{name} must be int32 and contiguous")
                check(name == "cache_batch_idx" or t.shape == (batch,), f"{name} must have shape (batch,)")
        if self.table is None and given["cache_batch_idx"] is None:
            check(k.shape[0] >= batch, "a cache of fewer sequences: memory of others is read")
        self.check_new(new)
        self.package._check_slopes(self.call.alibi_slopes, batch, q.shape[-2])

    def check_new(self, new: dict[str, Tensor]) -> None:
        given, cos, sin = self.given, self.given["rotary_cos"], self.given["rotary_sin"]
        if "k" in new:
            check("v" in new and self.lengths is not None, "a new key needs a value and cache_seqlens")
            check(self.q.shape[1] <= self.capacity, "more queries than the cache has rows")
            shape = (self.batch, self.new, *self.k_cache.shape[2:])
            check(given["k"].shape == given["v"].shape == shape, "k, v: shape")
        if cos is None:
            return
        check("k" in new and sin is not None, "rotary needs new keys, and sin")
        check(
            2 * cos.shape[1] <= -(-self.q.shape[-1] // 8) * 8, "rotary_dim must not exceed the head dimension"
        )
        check(2 * cos.shape[1] % 16 == 0, "rotary_dim must be a multiple of 16")
        check(cos.shape[0] >= self.capacity and cos.shape == sin.shape, "cos, sin: shape")
        check(cos.is_contiguous() and sin.is_contiguous(), "cos and sin must be contiguous")
        check(cos.dtype == sin.dtype == self.q.dtype, "cos and sin must have q's dtype")

"""What ``aten::_flash_attention_forward`` and its backward do, from their schema and flash_api.cpp, in plain
PyTorch on a CPU: strict about arguments, and NaN wherever the kernels leave memory as it was.

It shares no code with ``attnsel.backends.sdpa``. ``old`` gives what torch 2.6 gives: lse by sequence, and the
random state as a seed and an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import emulated_flash_math as flash

KEYWORDS = {"scale", "window_size_left", "window_size_right", "seqused_k", "block_table"}


class FlashOp:
    def __init__(self, *, old: bool = False, pages: bool = True) -> None:
        self.old, self.pages, self.calls = old, pages, 0

    def forward(self, *given: Any, **keywords: Any) -> tuple[Tensor, ...]:
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug = given
        self.calls += 1
        self._check(q, k, v, cu_q, cu_k, keywords)
        assert debug is False
        how = self._masked(max_q, max_k, is_causal, keywords)
        seed = int(torch.randint(0, 2**31, ())) if dropout_p else 0
        dense = cu_q is None
        unbounded = how.left is None and how.right is None
        if not dense and max_q == 1 and q.shape[-2] > k.shape[-2] and unbounded and not dropout_p:
            assert q.shape[0] == cu_q.numel() - 1, "shape is invalid for input of size"
        out = torch.full_like(q, math.nan)
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = q.new_full(self._lse_shape(q, cu_q, max_q), math.nan, dtype=wide)
        outs = []
        for n, at, in_lse, ks, vs in self._sequences(q, k, v, cu_q, cu_k, keywords):
            one = flash.forward(q[at], ks, vs, how, self._keep(seed, n, q[at], ks, dropout_p))
            outs.append(one.out[:max_q].to(q.dtype))  # no more than the longest sequence is said to have
            level = one.lse.detach()[:, :max_q]
            lse[in_lse][:, : level.shape[1]] = level.masked_fill(level == -math.inf, math.inf)
            if not dense:
                out = out.index_put((torch.arange(q.shape[0])[at][:max_q],), outs[-1])
        state = [torch.tensor([seed, 0]).to(torch.uint64), torch.tensor(0).to(torch.uint64)]
        if self.old:
            state = [torch.tensor(seed), torch.tensor(0)]
        return torch.stack(outs) if dense else out, lse, *state, q.new_empty(0)

    def backward(self, *given: Any, **keywords: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng, unused = given
        self._check(q, k, v, cu_q, cu_k, keywords)
        assert not {"seqused_k", "block_table"} & set(keywords)
        assert dout.shape == out.shape == q.shape
        assert rng.dtype == unused.dtype == (torch.int64 if self.old else torch.uint64)
        assert tuple(lse.shape) == self._lse_shape(q, cu_q, max_q)
        assert lse.is_contiguous()
        how = self._masked(max_q, max_k, is_causal, keywords)
        seed = int(rng if self.old else rng[0].to(torch.int64))
        made = [torch.full_like(t, math.nan) for t in (q, k, v)]
        for n, at, in_lse, ks, vs in self._sequences(q, k, v, cu_q, cu_k, keywords):
            rows, beyond = q[at].shape[0], max(0, q[at].shape[0] - max_q)
            do, o = (pad(t[at][: rows - beyond], (0, 0, 0, 0, 0, beyond)) for t in (dout, out))
            level = pad(lse[in_lse][:, : rows - beyond], (0, beyond), value=math.inf)
            keep = self._keep(seed, n, q[at], ks, dropout_p)
            grads = flash.backward(do, q[at], ks, vs, o, level, how, keep)
            keys = n if cu_k is None else slice(int(cu_k[n]), int(cu_k[n + 1]))
            for whole, where, grad, most in zip(
                made, (at, keys, keys), grads[:3], (max_q, max_k, max_k), strict=True
            ):
                whole[where][:most] = grad[:most].to(q.dtype)
        return tuple(made)

    def _lse_shape(self, q: Tensor, cu_q: Any, max_q: int) -> tuple[int, ...]:
        if cu_q is None:
            return q.shape[0], q.shape[2], q.shape[1]
        return (cu_q.numel() - 1, q.shape[1], max_q) if self.old else (q.shape[1], q.shape[0])

    def _check(self, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, keywords: dict[str, Any]) -> None:
        assert set(keywords) <= KEYWORDS - (set() if self.pages else {"block_table"})
        assert q.dim() == (4 if cu_q is None else 3)
        assert k.shape == v.shape
        assert q.shape[-1] == k.shape[-1]
        assert q.shape[-2] % k.shape[-2] == 0
        assert all(t.stride(-1) == 1 for t in (q, k, v))
        assert keywords["scale"] > 0
        for t in (cu_q, cu_k):
            assert t is None or (t.dtype == torch.int32 and t.is_contiguous() and t.dim() == 1)
        assert (cu_q is None) == (cu_k is None)
        assert cu_q is None or (cu_q.shape == cu_k.shape and cu_q.numel() > 1)
        table, used = keywords.get("block_table"), keywords.get("seqused_k")
        if table is None:
            assert used is None
            assert k.dim() == q.dim()
        else:
            assert table.dtype == used.dtype == torch.int32
            assert table.is_contiguous()
            assert used.is_contiguous()
            assert table.shape[0] == used.shape[0] == cu_q.numel() - 1
            assert k.dim() == 4
            assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"

    @staticmethod
    def _masked(max_q: int, max_k: int, is_causal: bool, keywords: dict[str, Any]) -> flash.Masked:
        left, right = keywords["window_size_left"], keywords["window_size_right"]
        assert type(left) is type(right) is int
        if max_q == 1:
            assert right <= 0
        elif is_causal:
            right = 0
        bounds = (None if not 0 <= bound < max_k else bound for bound in (left, right))
        return flash.Masked(keywords["scale"], *bounds)

    def _sequences(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, keywords: dict[str, Any]
    ) -> Iterator[tuple[int, Any, Any, Tensor, Tensor]]:
        """Number, where it lies in q and in lse, and its keys and values [n, g, d]."""
        if cu_q is None:
            yield from ((n, n, n, k[n], v[n]) for n in range(q.shape[0]))
            return
        table = keywords.get("block_table")
        for n in range(cu_q.numel() - 1):
            at, keys = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
            ks, vs = k[keys], v[keys]
            if table is not None:
                rows = flash.paged(table[n], k.shape[1], torch.arange(int(keywords["seqused_k"][n])))
                ks, vs = k.flatten(0, 1)[rows], v.flatten(0, 1)[rows]
            yield n, at, n if self.old else (slice(None), at), ks, vs

    @staticmethod
    def _keep(seed: int, number: int, q: Tensor, k: Tensor, dropout_p: float) -> Tensor | None:
        if not dropout_p:
            return None
        generator = torch.Generator().manual_seed(seed + number)
        shape = (q.shape[-2], q.shape[0], k.shape[0])
        return (torch.rand(shape, generator=generator, dtype=torch.float64) >= dropout_p) / (1 - dropout_p)

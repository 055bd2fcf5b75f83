"""What ``aten::_flash_attention_forward`` and its backward do, from their schema and flash_api.cpp, in plain
PyTorch on a CPU: strict about arguments, and NaN wherever the kernels leave memory as it was.

It shares no code with ``attnsel.backends.sdpa``. ``OLD`` gives what torch 2.6 gives: lse by sequence, and the
random state as a seed and an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEYWORDS = {"scale", "window_size_left", "window_size_right", "seqused_k", "block_table"}


class Rows(NamedTuple):
    q: slice
    kv: slice
    pages: Tensor | None  # rows of the pool, flattened


class FlashOp:
    def __init__(self, *, old: bool = False, pages: bool = True) -> None:
        self.old, self.pages, self.calls = old, pages, 0

    # ---- the two operators ----

    def forward(self, *given: Any, **keywords: Any) -> tuple[Tensor, ...]:
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug = given
        self.calls += 1
        self._check(q, k, v, cu_q, cu_k, keywords)
        assert debug is False
        left, right = self._window(max_q, max_k, is_causal, keywords)
        seed = int(torch.randint(0, 2**31, ())) if dropout_p else 0
        dense = cu_q is None
        out = torch.full_like(q, math.nan)
        shape = (q.shape[0], q.shape[2], q.shape[1]) if dense else (q.shape[1], q.shape[0])
        lse = q.new_full(shape, math.nan, dtype=torch.promote_types(q.dtype, torch.float32))
        swapped = max_q == 1 and q.shape[-2] > k.shape[-2] and left < 0 and right < 0 and not dropout_p
        if not dense and swapped:
            assert q.shape[0] == cu_q.numel() - 1, "shape is invalid for input of size"
        outs = []
        for number, rows in enumerate(self._sequences(q, k, cu_q, cu_k, keywords)):
            qs, ks, vs = self._one(q, k, v, number, rows, dense)
            computed = min(qs.shape[1], max_q)
            p, one_lse = self._probabilities(qs, ks, keywords["scale"], left, right)
            keep = self._keep(seed, number, p.shape, dropout_p)
            one = ((p * keep) @ vs).transpose(0, 1).to(q.dtype)
            if dense:
                outs.append(one)
                lse[number] = one_lse.detach()
            else:
                where = slice(rows.q.start, rows.q.start + computed)
                out = out.index_put((torch.arange(where.start, where.stop),), one[:computed])
                lse[:, where] = one_lse.detach()[:, :computed]
        if dense:
            out = torch.stack(outs)
        elif self.old:
            by_sequence = lse.new_full((cu_q.numel() - 1, q.shape[1], max_q), math.nan)
            for number, rows in enumerate(self._sequences(q, k, cu_q, cu_k, keywords)):
                n = min(rows.q.stop - rows.q.start, max_q)
                by_sequence[number, :, :n] = lse[:, rows.q.start : rows.q.start + n]
            lse = by_sequence
        return out, lse, *self._state(seed), q.new_empty(0)

    def backward(self, *given: Any, **keywords: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng, unused = given
        self._check(q, k, v, cu_q, cu_k, keywords)
        assert not {"seqused_k", "block_table"} & set(keywords)
        assert dout.shape == out.shape == q.shape
        assert rng.dtype == unused.dtype == (torch.int64 if self.old else torch.uint64)
        left, right = self._window(max_q, max_k, is_causal, keywords)
        dense, scale = cu_q is None, keywords["scale"]
        wanted = (q.shape[0], q.shape[2], q.shape[1]) if dense else (q.shape[1], q.shape[0])
        if self.old and not dense:
            wanted = (cu_q.numel() - 1, q.shape[1], max_q)
        assert tuple(lse.shape) == wanted
        assert lse.is_contiguous()
        seed = int(rng if self.old else rng[0].to(torch.int64))
        dq, dk, dv = (torch.full_like(t, math.nan) for t in (q, k, v))
        for number, rows in enumerate(self._sequences(q, k, cu_q, cu_k, keywords)):
            qs, ks, vs = self._one(q, k, v, number, rows, dense)
            n = min(qs.shape[1], max_q)
            qs = qs[:, :n]
            at = (number,) if dense else (slice(rows.q.start, rows.q.start + n),)
            do, o = (t[at].transpose(0, 1).to(torch.float64) for t in (dout, out))
            of_sequence = dense or self.old
            one_lse = lse[number, :, :n] if of_sequence else lse[:, at[0]]
            total = rows.q.stop - rows.q.start if not dense else q.shape[1]
            hidden = self._hidden(total, ks.shape[1], left, right)[:n]
            scores = (scale * qs @ ks.transpose(1, 2)).masked_fill(hidden, -math.inf)
            p = torch.exp(scores - one_lse.double()[..., None])
            keep = self._keep(seed, number, (q.shape[-2], total, ks.shape[1]), dropout_p)[:, :n]
            ds = p * (keep * (do @ vs.transpose(1, 2)) - (do * o).sum(-1, keepdim=True))
            groups = (k.shape[-2], -1)
            grads = (
                scale * ds @ ks,
                (scale * ds.transpose(1, 2) @ qs).unflatten(0, groups).sum(1),
                ((p * keep).transpose(1, 2) @ do).unflatten(0, groups).sum(1),
            )
            first = (rows.q.start, rows.kv.start, rows.kv.start)
            for made, grad, start, most in zip(
                (dq, dk, dv), grads, first, (max_q, max_k, max_k), strict=True
            ):
                if dense:
                    made[number] = grad.transpose(0, 1).to(q.dtype)
                else:  # no more than the longest sequence is said to have
                    computed = grad.transpose(0, 1)[:most].to(q.dtype)
                    made[start : start + computed.shape[0]] = computed
        return dq, dk, dv

    # ---- what they check, and what they mean ----

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
    def _window(max_q: int, max_k: int, is_causal: bool, keywords: dict[str, Any]) -> tuple[int, int]:
        left, right = keywords["window_size_left"], keywords["window_size_right"]
        assert type(left) is type(right) is int
        if max_q == 1:
            is_causal = False
            assert right <= 0
        if is_causal:
            right = 0
        return -1 if left >= max_k else left, -1 if right >= max_k else right

    @staticmethod
    def _sequences(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, keywords: dict[str, Any]) -> Iterator[Rows]:
        table = keywords.get("block_table")
        if cu_q is None:
            yield from [Rows(slice(None), slice(None), None)] * q.shape[0]
            return
        for n in range(cu_q.numel() - 1):
            q_rows, kv_rows = slice(int(cu_q[n]), int(cu_q[n + 1])), slice(int(cu_k[n]), int(cu_k[n + 1]))
            pages = None
            if table is not None:
                size = k.shape[1]
                at = torch.arange(int(keywords["seqused_k"][n]))
                pages = table[n].long()[at // size] * size + at % size
            yield Rows(q_rows, kv_rows, pages)

    @staticmethod
    def _one(q: Tensor, k: Tensor, v: Tensor, n: int, rows: Rows, dense: bool) -> tuple[Tensor, ...]:
        """[h, rows, d] in float64, heads of keys repeated."""
        if dense:
            parts = q[n], k[n], v[n]
        elif rows.pages is not None:
            parts = q[rows.q], k.flatten(0, 1)[rows.pages], v.flatten(0, 1)[rows.pages]
        else:
            parts = q[rows.q], k[rows.kv], v[rows.kv]
        qs, ks, vs = (t.transpose(0, 1).to(torch.float64) for t in parts)
        times = qs.shape[0] // ks.shape[0]
        return qs, ks.repeat_interleave(times, 0), vs.repeat_interleave(times, 0)

    @staticmethod
    def _hidden(rows: int, columns: int, left: int, right: int) -> Tensor:
        distance = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
        hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        return hidden

    def _probabilities(
        self, q: Tensor, k: Tensor, scale: float, left: int, right: int
    ) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(q.shape[1], k.shape[1], left, right)
        scores = (scale * q @ k.transpose(1, 2)).masked_fill(hidden, -math.inf)
        lse = scores.logsumexp(-1) if k.shape[1] else q.new_full(q.shape[:2], -math.inf)
        dead = lse == -math.inf
        p = torch.where(
            hidden | dead[..., None], 0.0, torch.exp(scores - lse.masked_fill(dead, 0.0)[..., None])
        )
        return p, lse.masked_fill(dead, math.inf)

    @staticmethod
    def _keep(seed: int, number: int, shape: Any, dropout_p: float) -> Any:
        if not dropout_p:
            return torch.ones(shape, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed + number)
        kept = torch.rand(tuple(shape), generator=generator, dtype=torch.float64) >= dropout_p
        return kept.double() / (1 - dropout_p)

    def _state(self, seed: int) -> tuple[Tensor, Tensor]:
        if self.old:
            return torch.tensor(seed), torch.tensor(0)
        return torch.tensor([seed, 0]).to(torch.uint64), torch.tensor(0).to(torch.uint64)

"""Partial results over different keys, merged by their log-sum-exp in float32 (float64 for float64)."""

from __future__ import annotations

import torch
from torch import Tensor

NEG_INF = float("-inf")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningMerge:
    """out and lse over the keys seen so far. Dense [b, h, s, e], [b, h, s]; packed [t, h, e], [h, t]."""

    def __init__(self, q: Tensor, head_dim_v: int, packed: bool) -> None:
        dtype = accumulation_dtype(q.dtype)
        self.packed, self.dtype = packed, q.dtype
        self.out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=dtype, device=q.device)
        shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
        self.lse = torch.full(shape, NEG_INF, dtype=dtype, device=q.device)

    def add(self, out: Tensor, lse: Tensor, rows: range) -> None:
        """A part's result. ``rows`` are the dense rows it is for; of packed tensors it is for all."""
        mine, my_lse = self.out, self.lse
        if not self.packed:
            mine, my_lse = mine[:, :, rows.start : rows.stop], my_lse[:, :, rows.start : rows.stop]
        merged = torch.logaddexp(my_lse, lse.to(my_lse.dtype))
        base = merged.masked_fill(merged == NEG_INF, 0.0)  # -inf - -inf would be NaN
        mine.mul_(self._per_row((my_lse - base).exp()))
        mine.addcmul_(out.to(mine.dtype), self._per_row((lse - base).exp()))
        my_lse.copy_(merged)

    def add_sink(self, sink: Tensor) -> None:
        """One more key per head, of this logit [h] and of value 0: once, whatever the number of parts."""
        logit = self._heads(sink.to(self.lse.dtype))
        merged = torch.logaddexp(self.lse, logit)
        self.out.mul_(self._per_row((self.lse - merged).exp()))
        self.lse = merged

    def finished(self) -> tuple[Tensor, Tensor]:
        return self.out.to(self.dtype), self.lse

    def _heads(self, sink: Tensor) -> Tensor:
        return sink[:, None] if self.packed else sink[None, :, None]

    def _per_row(self, weight: Tensor) -> Tensor:
        return weight.t()[..., None] if self.packed else weight[..., None]


def sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor, packed: bool) -> Tensor:
    """[h] from the merged out and lse, sinks included: minus the sink's probability times ``out * dout``."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    if packed:
        return -(torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta.t()).sum(1)
    return -(torch.exp(sink.to(lse.dtype)[None, :, None] - lse) * delta).sum((0, 2))

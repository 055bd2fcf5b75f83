"""[..., s, d] as [b, h, s, d]: what stands before the last two dimensions, as F.sdpa reads it.

The third dimension from the end counts heads, what stands before it counts sequences, and both broadcast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """q, k, v as [b, h, s, d] and [b, g, s, d], g dividing h; ``lead``: what [b, h] of the output becomes."""

    q: Tensor
    k: Tensor
    v: Tensor
    lead: tuple[int, ...] | None  # None: [b, h] as it is


def heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Heads | str:
    """The three in four dimensions, or why they do not fit together."""
    rank = q.dim()
    if not rank == k.dim() == v.dim():
        return f"query, key and value of {rank}, {k.dim()} and {v.dim()} dimensions"
    if rank < (3 if enable_gqa else 2):
        return f"{rank} dimensions"
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return "sizes that do not fit together"
    if rank == 4 and q.shape[0] == k.shape[0] == v.shape[0] and _share_heads(q, k, v, enable_gqa):
        return Heads(q, k, v, None)
    if rank == 2:
        return Heads(*_each(lambda t: t[None, None], q, k, v), ())
    batch = _common(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    if batch is None:
        return "leading dimensions that do not broadcast"
    if not _share_heads(q, k, v, enable_gqa):
        shared = None if enable_gqa else _common(*(t.shape[-3:-2] for t in (q, k, v)))
        if shared is None:
            return "numbers of heads that do not fit together"
        q, k, v = _each(lambda t: t.expand(*t.shape[:-3], *shared, *t.shape[-2:]), q, k, v)
    lead = (*batch, q.shape[-3])
    q, k, v = _each(lambda t: t.expand(*batch, *t.shape[-3:]), q, k, v)
    return Heads(*_each(_flat, q, k, v), lead)


def mask_beside(mask: Tensor, lead: tuple[int, ...] | None) -> Tensor:
    """A mask of any number of dimensions, as one that broadcasts to [b, h, s_q, s_kv]."""
    if lead is None or mask.dim() <= 3:
        return mask
    return mask.expand(*lead[:-1], *mask.shape[-3:]).flatten(0, -4)


def _share_heads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    h, g = q.shape[-3], k.shape[-3]
    return g == v.shape[-3] and (g == h or g == 1 or (enable_gqa and h % g == 0))


def _flat(t: Tensor) -> Tensor:
    return t.flatten(0, -4) if t.dim() > 3 else t[None]


def _each(change: Any, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (change(t) for t in tensors)
    return q, k, v


def _common(*shapes: Any) -> tuple[int, ...] | None:
    """What they broadcast to; None where they do not."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        return None

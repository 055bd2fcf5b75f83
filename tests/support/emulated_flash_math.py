"""Attention of one sequence and its gradients in float64, as the kernels of FlashAttention define them, and
where a sequence's rows lie. What the emulated packages (emulated_flash_attn.py) share; nothing of attnsel.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


def last_stride_one(t: Any) -> Any:
    """The copy that the packages' Python makes of what C++ would refuse."""
    return t.contiguous() if t is not None and t.stride(-1) != 1 else t


class Masked(NamedTuple):
    """What is done to the scores of one sequence."""

    scale: float
    left: int | None = None  # open
    right: int | None = None
    softcap: float = 0.0
    chunk: int = 0
    slopes: Tensor | None = None
    slopes_by_column: bool = False  # the causal kernel of FlashAttention 2 adds slope * column to every row
    sink: Tensor | None = None

    def hidden(self, m: int, n: int) -> Tensor:
        """Bottom-right aligned, both bounds inclusive."""
        position = torch.arange(m)[:, None] + n - m
        column = torch.arange(n)[None]
        hidden = torch.zeros(m, n, dtype=torch.bool)
        if self.left is not None:
            hidden |= column < position - self.left
        if self.right is not None:
            hidden |= column > position + self.right
        if self.chunk:
            start = position // self.chunk * self.chunk
            hidden |= (column < start) | (column >= start + self.chunk)
        return hidden

    def scores(self, products: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The scores from q @ k, [h, m, n], and what their gradient is multiplied by before ``scale``."""
        x = products * self.scale
        slope = torch.ones_like(x)
        if self.softcap > 0:
            tanh = torch.tanh(x / self.softcap)
            x, slope = self.softcap * tanh, 1 - tanh**2
        if self.slopes is not None:
            m, n = hidden.shape
            column = torch.arange(n)[None]
            away = (torch.arange(m)[:, None] + n - m - column).abs()
            bias = column if self.slopes_by_column else -away
            x = x + self.slopes.double()[:, None, None] * bias
        return x.masked_fill(hidden, -math.inf), slope


class Forward(NamedTuple):
    out: Tensor  # [m, h, e]
    lse: Tensor  # [h, m], -inf where there is no key (and no sink)
    p: Tensor  # [h, m, n], without dropout
    hidden: Tensor  # [m, n]


def grouped(t: Tensor, heads: int) -> Tensor:
    """[n, g, d] -> [heads, n, d] in float64: query head h uses key head h // (heads / g)."""
    return t.double().transpose(0, 1).repeat_interleave(heads // t.shape[1], 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, how: Masked, keep: Tensor | None = None, qv: Tensor | None = None
) -> Forward:
    """``keep`` [h, m, n]: what dropout multiplies probabilities by. ``qv`` [m, h, e] is multiplied with v."""
    heads = q.shape[1]
    ks, vs = grouped(k, heads), grouped(v, heads)
    products = grouped(q, heads) @ ks.mT
    if qv is not None:
        products = products + grouped(qv, heads) @ vs.mT
    hidden = how.hidden(q.shape[0], k.shape[0])
    x, _ = how.scores(products, hidden)
    if how.sink is not None:
        column = how.sink.double()[:, None, None].expand(heads, q.shape[0], 1)
        lse = torch.cat([x, column], -1).logsumexp(-1)
    else:
        lse = x.logsumexp(-1) if k.shape[0] else x.new_full(x.shape[:2], -math.inf)
    p = torch.where(x == -math.inf, 0.0, torch.exp(x - lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    kept = p if keep is None else p * keep
    return Forward((kept @ vs).transpose(0, 1), lse, p, hidden)


class Backward(NamedTuple):
    dq: Tensor  # [m, h, d]
    dk: Tensor  # [n, g, d]
    dv: Tensor
    dsink: Tensor | None  # [h]
    delta: Tensor  # [h, m]


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    how: Masked,
    keep: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Backward:
    """From what the forward left: ``lse`` is believed, with either infinity for a row without keys."""
    heads, groups = q.shape[1], k.shape[1]
    qs, ks, vs = grouped(q, heads), grouped(k, heads), grouped(v, heads)
    do, o = grouped(dout, heads), grouped(out, heads)
    x, slope = how.scores(qs @ ks.mT, how.hidden(q.shape[0], k.shape[0]))
    level = lse.double()
    level = level.masked_fill(level == -math.inf, math.inf)
    p = torch.where(x == -math.inf, 0.0, torch.exp(x - level[..., None]))
    delta = (do * o).sum(-1)
    if dlse is not None:
        delta = delta - dlse.double()
    dp, kept = do @ vs.mT, p
    if keep is not None:
        dp, kept = dp * keep, p * keep
    ds = p * (dp - delta[..., None]) * slope * how.scale
    dk, dv = (
        t.unflatten(0, (groups, heads // groups)).sum(1).transpose(0, 1) for t in (ds.mT @ qs, kept.mT @ do)
    )
    dsink = None
    if how.sink is not None:
        dsink = -(torch.exp(how.sink.double()[:, None] - lse.double()) * delta).sum(-1)
    return Backward((ds @ ks).transpose(0, 1), dk, dv, dsink, delta)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [rows, h, d], its first 2 * cos.shape[1] features turned by the angles of ``positions`` [rows]."""
    half = cos.shape[1]
    c, s = (t[positions].double()[:, None] for t in (cos, sin))
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    )
    parts = first * c - second * s, first * s + second * c
    joined = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([joined.to(x.dtype), rest], -1)


def paged(table: Tensor, page_size: int, positions: Tensor) -> Tensor:
    """Rows of a flattened pool of pages at the ``positions`` of the sequence whose row of the table it is."""
    return table.long()[positions // page_size] * page_size + positions % page_size

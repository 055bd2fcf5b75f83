"""FlashAttention-2's definition in plain PyTorch, one sequence at a time: in float64 it is the truth.

Written from the package's documentation, not from attnsel, of which nothing is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

DENSE = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
VARLEN = ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func")
CACHE = "flash_attn_with_kvcache"


def one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """q [s_q, h, d], k, v [s_k, g, d], slopes [h], keep bool [h, s_q, s_k] -> (out like q, lse [h, s_q]).

    A row without keys is 0, and its lse +inf.
    """
    (s_q, h, d), (s_k, g, _) = q.shape, k.shape
    k, v = (t.repeat_interleave(h // g, dim=1).transpose(0, 1) for t in (k, v))
    x = (q.transpose(0, 1) @ k.transpose(1, 2)) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        x = torch.tanh(x / softcap) * softcap
    distance = torch.arange(s_k) - torch.arange(s_q)[:, None] - (s_k - s_q)
    if slopes is not None:
        x = x - slopes.to(x.dtype)[:, None, None] * distance.abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    dead = hidden.all(-1)
    # One column more, which is nothing: so no row is empty, and none makes NaN.
    x = torch.cat(
        [x.masked_fill(hidden & ~dead[:, None], -torch.inf), x.new_full((h, s_q, 1), -torch.inf)], -1
    )
    x = torch.where(dead[:, None], 0.0, x)
    lse = torch.logsumexp(x, dim=-1)
    p = torch.softmax(x, dim=-1)[..., :-1].masked_fill(dead[:, None], 0.0)
    if keep is not None:
        p = p * keep / (1 - dropout_p)
    return (p @ v).transpose(0, 1), lse.masked_fill(dead, torch.inf)


def turned(x: Tensor, cos: Tensor, sin: Tensor, places: Sequence[int], interleaved: bool) -> Tensor:
    """Rows [s, h, d] turned by their places, as complex numbers are multiplied."""
    half = cos.shape[1]
    part = x[..., : 2 * half]
    pairs = part.unflatten(-1, (half, 2)) if interleaved else part.unflatten(-1, (2, half)).transpose(-1, -2)
    a, b = pairs.unbind(-1)
    c, s = (t[list(places), None].to(x.dtype) for t in (cos, sin))
    pairs = torch.stack([a * c - b * s, a * s + b * c], dim=-1)
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([part, x[..., 2 * half :]], dim=-1)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def rows_of(cu: Tensor) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(cu.tolist())]

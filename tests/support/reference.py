"""What attention is, written to be obviously right: one sequence at a time, the whole score matrix, autograd.

Shares no code with the backends; their tests and the fuzz targets compare with it. Nothing here is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec


def attention_reference(
    spec: Spec,
    inputs: Inputs,
    dtype: torch.dtype = torch.float64,
    tanh: Callable[[Tensor], Tensor] = torch.tanh,
) -> tuple[Tensor, Tensor, Tensor]:
    """``(out, lse, max_logit)`` in ``dtype``, differentiable in q, k, v, bias and softmax_offset.

    Shapes as in the contract: out ``[b, h, s_q, e]``, lse ``[b, h, s_q]``; packed ``[t_q, h, e]`` and
    ``[h, t_q]``; max_logit ``[h]``. With a lower ``dtype`` it is the same computation in plain PyTorch at
    that precision: the reference for the error to expect there. ``tanh``: the softcap's, to round it.
    """
    h = inputs.q.shape[1]
    out = torch.zeros(*inputs.q.shape[:-1], inputs.v.shape[-1], dtype=dtype, device=inputs.q.device)
    lse_shape = (h, inputs.q.shape[0]) if spec.packed else inputs.q.shape[:3]
    lse = torch.full(lse_shape, -torch.inf, dtype=dtype, device=inputs.q.device)
    max_logit = torch.full((h,), -torch.inf, dtype=dtype, device=inputs.q.device)

    for number, (q_rows, kv_rows) in enumerate(_where_sequences_lie(spec, inputs)):
        if spec.packed:
            q = inputs.q[q_rows].transpose(0, 1)
            k, v = inputs.k[kv_rows].transpose(0, 1), inputs.v[kv_rows].transpose(0, 1)
        else:
            q, k, v = inputs.q[number, :, q_rows], inputs.k[number, :, kv_rows], inputs.v[number, :, kv_rows]
        one = _one_sequence(spec, inputs, number, q.to(dtype), k.to(dtype), v.to(dtype), tanh)
        if spec.packed:
            out[q_rows] = one.out.transpose(0, 1)
            lse[:, q_rows] = one.lse
        else:
            out[number, :, q_rows] = one.out
            lse[number, :, q_rows] = one.lse
        max_logit = torch.maximum(max_logit, one.max_logit)
    return out, lse, max_logit


def _where_sequences_lie(spec: Spec, inputs: Inputs) -> list[tuple[slice, slice]]:
    """The q rows and the k/v rows of each sequence, in its own batch entry or in the packed tensors."""
    if spec.packed:
        cu_q, cu_kv = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_kv.tolist()
        starts_q = cu_q if inputs.cu_seqlens_q_padded is None else inputs.cu_seqlens_q_padded.tolist()
        starts_kv = cu_kv if inputs.cu_seqlens_kv_padded is None else inputs.cu_seqlens_kv_padded.tolist()
        return [
            (
                slice(starts_q[n], starts_q[n] + cu_q[n + 1] - cu_q[n]),
                slice(starts_kv[n], starts_kv[n] + cu_kv[n + 1] - cu_kv[n]),
            )
            for n in range(len(cu_q) - 1)
        ]
    b = inputs.q.shape[0]
    lengths_q = [inputs.q.shape[2]] * b if inputs.seqlens_q is None else inputs.seqlens_q.tolist()
    lengths_kv = [inputs.k.shape[2]] * b if inputs.seqlens_kv is None else inputs.seqlens_kv.tolist()
    return [(slice(0, lengths_q[n]), slice(0, lengths_kv[n])) for n in range(b)]


class _One(NamedTuple):
    out: Tensor  # [h, len_q, e]
    lse: Tensor  # [h, len_q]
    max_logit: Tensor  # [h]


def _one_sequence(
    spec: Spec,
    inputs: Inputs,
    number: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tanh: Callable[[Tensor], Tensor],
) -> _One:
    h, len_q = q.shape[:2]
    len_kv, dtype, device = k.shape[1], q.dtype, q.device
    if h == 0 or len_q == 0:
        return _One(q.new_zeros(h, len_q, v.shape[-1]), q.new_zeros(h, len_q), q.new_full((h,), -torch.inf))
    k = k.repeat_interleave(h // k.shape[0], dim=0)
    v = v.repeat_interleave(h // v.shape[0], dim=0)

    def pairs_of(t: Tensor) -> Tensor:
        """This sequence's part of something broadcastable to [b, h, s_q, s_kv], as [h, len_q, len_kv]."""
        while t.dim() < 4:
            t = t[None]
        t = t[number if t.shape[0] > 1 else 0]
        t = t[:, :len_q] if t.shape[1] > 1 else t
        t = t[:, :, :len_kv] if t.shape[2] > 1 else t
        return t.expand(h, len_q, len_kv)

    i = spec.q_offset + torch.arange(len_q, device=device)[:, None]
    j = spec.kv_offset + torch.arange(len_kv, device=device)[None, :]
    distance = j - i - (len_kv - len_q if spec.bottom_right else 0)

    visible = torch.ones(h, len_q, len_kv, dtype=torch.bool, device=device)
    if spec.window_left >= 0:
        visible = visible & (distance >= -spec.window_left)
    if spec.window_right >= 0:
        visible = visible & (distance <= spec.window_right)
    if inputs.attn_mask is not None:
        visible = visible & ~pairs_of(inputs.attn_mask)

    x = spec.softmax_scale * (q @ k.transpose(-1, -2))
    if spec.softcap:
        x = spec.softcap * tanh(x / spec.softcap)
    if inputs.bias is not None:
        x = x + pairs_of(inputs.bias).to(dtype)
    if inputs.alibi_slopes is not None:
        slopes = inputs.alibi_slopes if inputs.alibi_slopes.dim() == 1 else inputs.alibi_slopes[number]
        x = x - slopes.to(dtype)[:, None, None] * distance.abs()

    # An invisible score is -inf; the softmax then runs over the keys and, if there is one, the sink.
    x = torch.where(visible, x, -torch.inf)
    logits = x
    if spec.softmax_type == "off-by-one":
        logits = torch.cat([x, x.new_zeros(h, len_q, 1)], dim=-1)
    elif spec.softmax_type == "learnable":
        sink = inputs.softmax_offset.to(dtype)[:, None, None].expand(h, len_q, 1)
        logits = torch.cat([x, sink], dim=-1)

    # Rows with nothing at all would be NaN, in autograd too: compute them on zeros, then discard them.
    nothing = (logits == -torch.inf).all(-1)
    lse = torch.logsumexp(torch.where(nothing[..., None], 0.0, logits), dim=-1) if logits.shape[-1] else None
    if lse is None:
        return _One(
            q.new_zeros(h, len_q, v.shape[-1]),
            q.new_full((h, len_q), -torch.inf),
            q.new_full((h,), -torch.inf),
        )
    p = torch.where(x == -torch.inf, 0.0, torch.exp(x - lse[..., None]))
    lse = torch.where(nothing, -torch.inf, lse)
    if spec.dropout_p:
        keep = keep_mask_reference(spec, inputs, number, h, len_q, len_kv)
        scale = 0.0 if spec.dropout_p == 1.0 else 1.0 / (1.0 - spec.dropout_p)
        p = p * torch.from_numpy(keep).to(device=device, dtype=dtype) * scale
    max_logit = x.detach().flatten(1).max(-1).values if len_kv else q.new_full((h,), -torch.inf)
    return _One(p @ v, lse, max_logit)


def keep_mask_reference(
    spec: Spec, inputs: Inputs, number: int, h: int, len_q: int, len_kv: int
) -> np.ndarray:
    """Which entries of one sequence dropout keeps: bool ``[h, len_q, len_kv]``.

    An entry's 32-bit word comes from counter (key position // 4, query position, head, sequence), and is
    output word key position % 4 under the key seed XOR (offset rotated left by 32 bits).
    """
    seed = int(inputs.dropout_seed) % 2**64
    offset = 0 if inputs.dropout_offset is None else int(inputs.dropout_offset) % 2**64
    key = seed ^ ((offset << 32 | offset >> 32) % 2**64)
    keep = np.empty((h, len_q, len_kv), dtype=bool)
    positions = spec.kv_offset + np.arange(len_kv)
    for head in range(h):
        for row in range(len_q):
            counter = [
                positions // 4,
                np.full(len_kv, spec.q_offset + row),
                np.full(len_kv, spec.head_offset + head),
                np.full(len_kv, number),
            ]
            words = philox4x32_10(key, counter)
            word = words[positions % 4, np.arange(len_kv)]
            keep[head, row] = word >= round(spec.dropout_p * 2**32)
    return keep


def philox4x32_10(key: int, counter: list[np.ndarray]) -> np.ndarray:
    """Philox4x32-10 as Random123 writes it: a 64-bit key, four counter words ``[n]`` -> ``[4, n]`` uint64."""
    word = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) & word for c in counter)
    k0, k1 = key % 2**32, key >> 32
    for _ in range(10):
        product_0 = np.uint64(0xD2511F53) * c0
        product_1 = np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ np.uint64(k0),
            product_1 & word,
            (product_0 >> shift) ^ c3 ^ np.uint64(k1),
            product_0 & word,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3])

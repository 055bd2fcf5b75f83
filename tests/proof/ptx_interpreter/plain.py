"""Attention in plain PyTorch with whole score matrices: the error to expect of a call at its own precision.

What is right is said by ``tiled`` in float64. This computes the same in float16 or bfloat16, gradients by
autograd, and a kernel may err twice as much as it does (gradients thrice).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled.tiles import four_dims, keep_mask, keep_scale, make_key

DIFFERENTIABLE = ("q", "k", "v", "bias", "softmax_offset")


def plain(
    spec: Spec, inputs: Inputs, dtype: torch.dtype, dout: Tensor | None, dlse: Tensor | None
) -> dict[str, Tensor]:
    """out, lse and, with ``dout``, a gradient ``d...`` of every tensor that has one."""
    leaves = {
        name: t.detach().to(dtype).requires_grad_()
        for name in DIFFERENTIABLE
        if (t := getattr(inputs, name)) is not None
    }
    out, lse, largest = _attention(spec, inputs._replace(**leaves))
    made = {"out": out.detach(), "lse": lse.detach()}
    if spec.return_max_logit:
        made["max_logit"] = largest.detach()
    if dout is not None:
        loss = (out * dout.to(dtype)).sum()
        if dlse is not None:
            # The LSE of a row that sees nothing is -inf and has no gradient.
            loss = loss + (torch.where(lse == -math.inf, 0.0, lse) * dlse.to(dtype)).sum()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            made[f"d{name}"] = torch.zeros_like(leaf) if grad is None else grad
    return made


def _attention(spec: Spec, i: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    h = i.q.shape[1]
    out = i.q.new_zeros(*i.q.shape[:-1], i.v.shape[-1])
    lse = i.q.new_full((h, i.q.shape[0]) if spec.packed else i.q.shape[:3], -math.inf)
    largest = i.q.new_full((h,), -math.inf)
    for number, (rows, cols) in enumerate(_sequences(spec, i)):
        if spec.packed:
            one = _sequence(spec, i, number, *(t.transpose(0, 1) for t in (i.q[rows], i.k[cols], i.v[cols])))
            out[rows], lse[:, rows] = one[0].transpose(0, 1), one[1]
        else:
            q, k, v = i.q[number, :, rows], i.k[number, :, cols], i.v[number, :, cols]
            one = _sequence(spec, i, number, q, k, v)
            out[number, :, rows], lse[number, :, rows] = one[0], one[1]
        largest = largest.maximum(one[2])
    return out, lse, largest


def _sequences(spec: Spec, i: Inputs) -> Iterator[tuple[slice, slice]]:
    """Rows of q and of k of each sequence, in its batch entry or in the packed tensors."""
    if not spec.packed:
        for number in range(i.q.shape[0]):
            q = i.q.shape[2] if i.seqlens_q is None else int(i.seqlens_q[number])
            kv = i.k.shape[2] if i.seqlens_kv is None else int(i.seqlens_kv[number])
            yield slice(0, q), slice(0, kv)
        return
    assert i.cu_seqlens_q is not None
    assert i.cu_seqlens_kv is not None
    for number in range(i.cu_seqlens_q.numel() - 1):
        parts = []
        for cu, padded in (
            (i.cu_seqlens_q, i.cu_seqlens_q_padded),
            (i.cu_seqlens_kv, i.cu_seqlens_kv_padded),
        ):
            begin = int((cu if padded is None else padded)[number])
            parts.append(slice(begin, begin + int(cu[number + 1] - cu[number])))
        yield parts[0], parts[1]


def _sequence(
    spec: Spec, i: Inputs, number: int, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Out [h, s_q, e], lse [h, s_q] and the largest scores [h] of one sequence."""
    h, s_q, s_kv = q.shape[0], q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(h // t.shape[0], dim=0) for t in (k, v))

    def pairs(t: Tensor) -> Tensor:
        t = four_dims(t)
        t = t[number if t.shape[0] > 1 else 0]
        t = t[:, :s_q] if t.shape[1] > 1 else t
        return t[..., :s_kv] if t.shape[2] > 1 else t

    rows, cols = torch.arange(s_q)[:, None] + spec.q_offset, torch.arange(s_kv)[None] + spec.kv_offset
    distance = cols - rows - (s_kv - s_q if spec.bottom_right else 0)
    hidden = torch.zeros(h, s_q, s_kv, dtype=torch.bool)
    if spec.window_left >= 0:
        hidden = hidden | (distance < -spec.window_left)
    if spec.window_right >= 0:
        hidden = hidden | (distance > spec.window_right)
    if i.attn_mask is not None:
        hidden = hidden | pairs(i.attn_mask)
    x = spec.softmax_scale * (q @ k.transpose(-1, -2))
    if spec.softcap:
        x = spec.softcap * torch.tanh(x / spec.softcap)
    if i.bias is not None:
        x = x + pairs(i.bias)
    if i.alibi_slopes is not None:
        slopes = i.alibi_slopes if i.alibi_slopes.dim() == 1 else i.alibi_slopes[number]
        x = x - slopes.to(x.dtype)[:, None, None] * distance.abs()
    x = x.masked_fill(hidden, -math.inf)
    largest = x.flatten(1).amax(1) if x.numel() else q.new_full((h,), -math.inf)
    logits = x
    if spec.softmax_type != "vanilla":
        sink = i.softmax_offset if i.softmax_offset is not None else x.new_zeros(h)
        logits = torch.cat([x, sink[:, None, None].expand(h, s_q, 1)], dim=-1)
    dead = (logits == -math.inf).all(-1)  # computed on zeros: autograd would make NaN of it
    if not logits.shape[-1]:
        return q.new_zeros(h, s_q, v.shape[-1]), q.new_full((h, s_q), -math.inf), largest
    lse = torch.logsumexp(logits.masked_fill(dead[..., None], 0.0), dim=-1)
    p = torch.exp(x - lse[..., None])
    lse = lse.masked_fill(dead, -math.inf)
    if spec.dropout_p and i.dropout_seed is not None:
        key = make_key(i.dropout_seed, i.dropout_offset)
        span = [range(spec.q_offset, spec.q_offset + s_q), range(spec.kv_offset, spec.kv_offset + s_kv)]
        keep = keep_mask(key, spec.dropout_p, range(number, number + 1), range(h), *span)[0]
        p = p * keep.to(p.dtype) * keep_scale(spec.dropout_p)
    return p @ v, lse, largest

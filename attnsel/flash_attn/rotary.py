"""Rotary position embedding under ``flash_attn.layers.rotary``'s names, in plain PyTorch operations.

Angles come as cos and sin [rows, rotary_dim / 2]; the first rotary_dim entries of each head are rotated, the
rest is copied. ``interleaved`` rotates the pairs (0, 1), (2, 3), ... (GPT-J), else entry i is paired with
entry i + rotary_dim / 2 (GPT-NeoX). Computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.flash_attn.options import refuse


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((-b, a), dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The definition, in x's own precision. cos and sin are [s, rotary_dim / 2] or [b, s, rotary_dim / 2]."""
    width = 2 * cos.shape[-1]
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1).unsqueeze(-2) for t in (cos, sin))
    else:
        cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
    front = x[..., :width] * cos + rotate_half(x[..., :width], interleaved) * sin
    return torch.cat((front, x[..., width:]), dim=-1)


def rotated(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    interleaved: bool = False,
    *,
    conjugate: bool = False,
    inplace: bool = False,
) -> Tensor:
    """``x`` [..., h, d] rotated by the rows ``positions`` [...] of cos and sin, backwards if ``conjugate``.

    At positions past the last row nothing is rotated, as in flash_attn's kernel.
    """
    half = cos.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    beyond = (positions >= cos.shape[0])[..., None]
    row = positions.clamp(0, cos.shape[0] - 1)
    c = cos[row].to(wide).masked_fill(beyond, 1.0).unsqueeze(-2)
    s = sin[row].to(wide).masked_fill(beyond, 0.0).unsqueeze(-2)
    if conjugate:
        s = -s
    out = x if inplace else torch.empty_like(x)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    out[..., first], out[..., second] = (a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype)
    if not inplace:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def _positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The position of every row: int64 [b | 1, s], or packed [t]."""
    at = torch.arange(x.shape[1 if cu_seqlens is None else 0], device=x.device)
    if cu_seqlens is None:
        if isinstance(seqlen_offsets, Tensor):
            return at + seqlen_offsets.long()[:, None]
        return (at + seqlen_offsets)[None]
    sequence = torch.searchsorted(cu_seqlens[1:].long(), at, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    offsets = seqlen_offsets.long()[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
    return at - cu_seqlens.long()[sequence] + offsets


def _check(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None, rows: int
) -> None:
    if x.dim() != (4 if cu_seqlens is None else 3):
        shape = "[b, s, h, d]" if cu_seqlens is None else "[t, h, d] with cu_seqlens"
        refuse("x.shape", tuple(x.shape), f"must be {shape}")
    if cos.dim() != 2 or sin.shape != cos.shape:
        refuse("sin.shape", tuple(sin.shape), f"must be cos's, and that [rows, rotary_dim / 2]: {cos.shape}")
    if 2 * cos.shape[1] > x.shape[-1]:
        refuse("rotary_dim", 2 * cos.shape[1], f"must be at most the head dimension, {x.shape[-1]}")
    if isinstance(seqlen_offsets, int):
        if seqlen_offsets < 0 or rows + seqlen_offsets > cos.shape[0]:
            refuse(
                "cos.shape", tuple(cos.shape), f"must have a row for each of {rows} + {seqlen_offsets} places"
            )
        return
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if seqlen_offsets.shape != (sequences,) or seqlen_offsets.dtype not in (torch.int32, torch.int64):
        found = f"{seqlen_offsets.dtype} {tuple(seqlen_offsets.shape)}"
        refuse("seqlen_offsets", found, f"must be an int, or integers [{sequences}]")


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, inplace: bool
    ) -> Tensor:
        ctx.save_for_backward(cos, sin, positions)
        ctx.interleaved = interleaved
        if inplace:
            ctx.mark_dirty(x)
        return rotated(x, cos, sin, positions, interleaved, inplace=inplace)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        cos, sin, positions = ctx.saved_tensors
        return rotated(dout, cos, sin, positions, ctx.interleaved, conjugate=True), *[None] * 5


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """``x`` [b, s, h, d], or packed [t, h, d] with cu_seqlens [b + 1], rotated by its rows' positions.

    seqlen_offsets: added to the positions, an int or integers [b]. max_seqlen: the longest packed sequence,
    for all of whose rows cos must have angles. ``inplace`` writes into x and returns it. Only x gets a
    gradient. Raises FlashAttentionError naming the argument.
    """
    rows = x.shape[1] if cu_seqlens is None else int(max_seqlen or 0)
    if cu_seqlens is not None and max_seqlen is None:
        refuse("max_seqlen", None, "must be given with cu_seqlens")
    _check(x, cos, sin, seqlen_offsets, cu_seqlens, rows)
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    out: Tensor = _Rotate.apply(x, cos, sin, positions, interleaved, inplace)
    return out


apply_rotary_emb_func = apply_rotary_emb


# ---- packed projections -----------------------------------------------------------------------------


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotates q and k (by cos_k if given) of qkv [b, s, 3, h, d] or [b, s, num_heads_q + 2 g, d] in place."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif qkv.dim() == 4:
        if num_heads_q is None or (qkv.shape[2] - num_heads_q) % 2 or qkv.shape[2] <= num_heads_q:
            refuse("num_heads_q", num_heads_q, f"must leave k and v their part of the {qkv.shape[2]} heads")
        last = num_heads_q + (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:last]
    else:
        refuse("qkv.shape", tuple(qkv.shape), "must be [b, s, 3, h, d] or [b, s, num_heads_q + 2 g, d]")
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    _check(k, cos_k, sin_k, seqlen_offsets, None, qkv.shape[1])  # before q is changed
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotates k of kv [b, s, 2, h, d] in place."""
    if kv.dim() != 5 or kv.shape[2] != 2:
        refuse("kv.shape", tuple(kv.shape), "must be [b, s, 2, h, d]")
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Angles ``position * base ** (-2 i / dim)``, and their application to packed projections in place.

    scale_base: XPos (arXiv:2212.10554), where q's angles are scaled by a factor and k's by its inverse.
    Tables grow as needed and are kept in the dtype of the last qkv.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = self._compute_scale(device) if scale_base is not None else None
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-even / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (even + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        have = self._cos_cached
        if (
            have is not None
            and seqlen <= self._seq_len_cached
            and have.device == torch.device(device or have.device)
            and have.dtype == (dtype or have.dtype)
            and not (self.training and have.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        # In a module that was cast to 16 bits the frequencies are rounded too: they are computed again.
        exact = self.inv_freq.dtype == torch.float32
        freqs = self.inv_freq.to(device) if exact else self._compute_inv_freq(device)
        angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), freqs)
        cos, sin = angles.cos(), angles.sin()
        self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
        if self.scale is not None and self.scale_base is not None:
            scale = self.scale.to(device) if exact else self._compute_scale(device)
            place = torch.arange(seqlen, device=device, dtype=torch.float32) - seqlen // 2
            power = scale ** (place / self.scale_base)[:, None]
            self._cos_cached, self._sin_cached = (cos * power).to(dtype), (sin * power).to(dtype)
            self._cos_k_cached, self._sin_k_cached = (cos / power).to(dtype), (sin / power).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv as ``apply_rotary_emb_qkv_`` takes it; with kv [b, s, 2, h, d], qkv is q [b, s, h, d].

        max_seqlen: how long the tables must be when seqlen_offset is a tensor. Returns the tensors rotated in
        place, a pair with kv.
        """
        rows = qkv.shape[1]
        if isinstance(seqlen_offset, int):
            rows += seqlen_offset
        elif max_seqlen is not None:
            rows = max_seqlen
        self._update_cos_sin_cache(rows, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        cos_k, sin_k = self._cos_k_cached, self._sin_k_cached
        assert cos is not None
        assert sin is not None
        how = {"interleaved": self.interleaved, "seqlen_offsets": seqlen_offset}
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **how)  # type: ignore[arg-type]
        q = apply_rotary_emb(qkv, cos, sin, inplace=True, **how)  # type: ignore[arg-type]
        cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, **how)  # type: ignore[arg-type]

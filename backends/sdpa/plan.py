"""What of a call's visibility a kernel expresses itself, and what a folded mask must say.

Pure Python: shapes in, a plan out, nothing allocated. ``masks.py`` builds the tensors of a plan.

A column c is visible to a row r iff ``lo <= c - r <= hi`` (``None``: no bound) and both are inside
their sequence, where with ``D = q_offset - kv_offset + (s_kv - s_q if bottom_right else 0)`` the
bounds are ``lo = D - window_left`` and ``hi = D + window_right``. With per-row lengths a
bottom-right shift differs between the rows of a batch: ``per_row`` bounds are then relative to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnsel.backends.contract import Inputs, Spec

Shape4 = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Traits:
    """What one aten op can do. Sources: torch 2.13 native_functions.yaml and derivatives.yaml.

    ``causal`` is the corner at which the op's ``is_causal`` starts when s_q != s_kv.
    ``dead_rows_zero``: a row whose mask is all -inf gives 0 and zero gradients (tested on CPU).
    ``wide_mask``: a float32 mask is accepted beside float16 and bfloat16 inputs.
    """

    kernel: str
    device: str  # a torch device type; "" stands for every device
    causal: str = "top_left"  # or "bottom_right"
    takes_mask: bool = True
    mask_with_causal: bool = False
    mask_grad: bool = False
    returns_lse: bool = True
    native_gqa: bool = True
    dropout: bool = True
    dead_rows_zero: bool = False
    wide_mask: bool = False
    equal_head_dims: bool = False  # head_dim_v must equal head_dim_qk
    head_dim_room: int | None = None  # a head_dim that every release and GPU has a kernel for; None: any


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """How one call is expressed. ``shape`` is the folded mask's, None when no mask is needed."""

    is_causal: bool
    shape: Shape4 | None
    lo: int | None  # bounds on c - r that the mask must draw; see ``per_row``
    hi: int | None
    diagonal: int  # D, the offset of ALiBi's zero (less the shift when per_row)
    per_row: bool  # add len_kv - len_q of each batch row to lo, hi and diagonal
    kv_lengths: bool  # the mask hides columns at and after seqlens_kv
    q_lengths: bool  # rows at and after seqlens_q are zeroed after the kernel
    same_lengths: bool  # the plan relies on seqlens_q and seqlens_kv being one tensor
    may_be_dead: bool  # some row of the mask may hide every column


def shape4(shape: tuple[int, ...]) -> Shape4:
    """``shape`` with leading ones up to four dimensions. Raises ValueError above four."""
    if len(shape) > 4:
        raise ValueError(f"a mask or bias has at most 4 dimensions, got shape {list(shape)}")
    return (1,) * (4 - len(shape)) + tuple(shape)  # type: ignore[return-value]


def band(spec: Spec, s_q: int, s_kv: int, shift: int | None) -> tuple[int | None, int | None, int]:
    """(lo, hi, D) of a call; bounds that hide nothing are None. ``shift`` None: it differs per row."""
    diagonal = spec.q_offset - spec.kv_offset + (shift or 0)
    lo = None if spec.window_left < 0 else diagonal - spec.window_left
    hi = None if spec.window_right < 0 else diagonal + spec.window_right
    if shift is not None:
        if lo is not None and lo <= 1 - s_q:
            lo = None
        if hi is not None and hi >= s_kv - 1:
            hi = None
    return lo, hi, diagonal


def plan_mask(traits: Traits, spec: Spec, inputs: Inputs) -> MaskPlan:
    """The plan of one call from the shapes in ``inputs``. Raises ValueError when the kernel has no mask."""
    b, h, s_q, _ = inputs.q.shape
    s_kv = inputs.k.shape[2]
    q_lengths = inputs.seqlens_q is not None
    # One tensor for both: every shift is 0, and a causal row inside its sequence ends before the padding.
    same = q_lengths and inputs.seqlens_q is inputs.seqlens_kv
    per_row = spec.bottom_right and not same and (q_lengths or inputs.seqlens_kv is not None)
    shift = None if per_row else (s_kv - s_q if spec.bottom_right and not same else 0)
    lo, hi, diagonal = band(spec, s_q, s_kv, shift)
    same = same and (spec.bottom_right or (hi is not None and hi <= 0))
    kv_lengths = inputs.seqlens_kv is not None and not (same and hi is not None and hi <= 0)

    parts = [shape4(tuple(t.shape)) for t in (inputs.attn_mask, inputs.bias) if t is not None]
    if kv_lengths:
        parts.append((b, 1, 1, s_kv))
    if inputs.alibi_slopes is not None:
        parts.append((b if inputs.alibi_slopes.dim() == 2 else 1, h, s_q, s_kv))

    corner = 0 if traits.causal == "top_left" else s_kv - s_q
    native = lo is None and hi == corner and corner >= 0 and not per_row
    # Beside a mask the op's own causal flag pays only while the mask has one row for all queries.
    if native and parts and not (traits.mask_with_causal and all(p[2] == 1 for p in parts)):
        native = False
    if native:
        lo = hi = None
    elif lo is not None or hi is not None:
        parts.append((b if per_row else 1, 1, s_q, s_kv))
    if parts and not traits.takes_mask:
        raise ValueError(
            f"{traits.kernel} on {traits.device} takes no mask: window, lengths of keys, attn_mask, bias "
            "and alibi_slopes cannot be expressed (causal can, from the bottom-right corner)"
        )
    # Broadcast: sizes are 1 or all the same, which may be 0.
    shape = tuple(next((p[i] for p in parts if p[i] != 1), 1) for i in range(4)) if parts else None
    if shape is not None and shape[3] == 1:
        shape = (*shape[:3], s_kv)  # the fused CUDA kernels read a mask's columns with stride 1
    empty_rows = (hi is not None and hi < 0) or (lo is not None and s_q - 1 + lo > s_kv - 1)
    data = kv_lengths or inputs.attn_mask is not None or inputs.bias is not None
    return MaskPlan(
        is_causal=native,
        shape=shape,  # type: ignore[arg-type]
        lo=lo,
        hi=hi,
        diagonal=diagonal,
        per_row=per_row,
        kv_lengths=kv_lengths,
        q_lengths=q_lengths,
        same_lengths=same,
        may_be_dead=bool(parts) and (data or per_row or empty_rows),
    )


def mask_itemsize(traits: Traits, inputs: Inputs) -> int:
    """Bytes per element of the folded mask: float32 for real scores where the kernel takes it."""
    real = inputs.bias is not None or inputs.alibi_slopes is not None
    itemsize: int = inputs.q.dtype.itemsize
    return max(4, itemsize) if real and traits.wide_mask else itemsize


MASK_ALIGNMENT = 8  # elements; mem_eff_alignment in aten/src/ATen/native/transformers/attention.cpp

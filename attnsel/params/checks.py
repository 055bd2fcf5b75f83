"""What the fields of a question say to each other: contradictions, and the one form of equal questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.errors import InvalidInput

if TYPE_CHECKING:
    from attnsel.params import AttentionParams

LARGEST = 2**63 - 1
"""What int64 holds: sizes in bytes, shapes, strides and windows."""
MOST = 2**40
"""Of any one size of a question; products of them are floats without overflow."""
MOST_RANKS = 2**13
LARGEST_SOFTCAP = 1e30
"""Beyond it score / softcap soon leaves float32's normal numbers, and softcap float32 itself: 0 * inf."""


def check_params(p: AttentionParams) -> None:
    """Contradictions between fields. Raises InvalidInput naming one of them."""
    if p.num_heads % p.num_gqa_groups:
        raise InvalidInput(
            "num_gqa_groups", p.num_gqa_groups, f"must divide num_heads = {p.num_heads} without remainder"
        )
    if p.softcap > LARGEST_SOFTCAP:
        raise InvalidInput(
            "softcap", p.softcap, f"must be at most {LARGEST_SOFTCAP:g}, which caps nothing; 0 is off"
        )
    if not p.has_bias:
        if p.core_attention_bias_shape is not None:
            raise InvalidInput(
                "core_attention_bias_shape",
                p.core_attention_bias_shape,
                "must be left out unless core_attention_bias_type is pre_scale_bias or post_scale_bias",
            )
        if p.core_attention_bias_requires_grad:
            raise InvalidInput(
                "core_attention_bias_requires_grad",
                True,
                "must be False unless core_attention_bias_type is pre_scale_bias or post_scale_bias",
            )
    if p.alibi_slopes_shape is not None:
        allowed = ((p.num_heads,), (p.batch_size, p.num_heads))
        if p.core_attention_bias_type != "alibi":
            raise InvalidInput(
                "alibi_slopes_shape", p.alibi_slopes_shape, "needs core_attention_bias_type 'alibi'"
            )
        if p.alibi_slopes_shape not in allowed:
            raise InvalidInput("alibi_slopes_shape", p.alibi_slopes_shape, f"must be one of {allowed}")
    if p.qkv_format == "thd" and not p.padding:
        raise InvalidInput(
            "attn_mask_type",
            p.attn_mask_type,
            f"must be padding, padding_causal or padding_causal_bottom_right with layout {p.qkv_layout!r}",
        )
    if p.pad_between_seqs and p.qkv_format != "thd":
        raise InvalidInput("pad_between_seqs", True, f"needs a thd layout, not {p.qkv_layout!r}")
    if p.layout.paged != (p.kv_cache == "paged"):
        raise InvalidInput(
            "kv_cache",
            p.kv_cache,
            f"must be 'paged' exactly when qkv_layout is a paged_kv_… layout; here it is {p.qkv_layout!r}",
        )
    if (p.kv_cache == "paged") != (p.page_size is not None):
        raise InvalidInput("page_size", p.page_size, "must be given exactly when kv_cache is 'paged'")
    if p.kv_cache != "none" and p.is_training:
        raise InvalidInput("is_training", True, "must be False with a kv_cache: a cache has no backward")


def check_ranks(p: AttentionParams) -> None:
    """Specs of q, k and v have the dimensions of the layout, a mask's at most four. Raises InvalidInput."""
    tensors, kv = p.tensors, "bshd" if p.layout.paged else p.layout.kv_format
    for name, spec, form in (
        ("q", tensors.q, p.qkv_format),
        ("k", tensors.k, kv),
        ("v", tensors.v, kv),
    ):
        if spec is not None and len(spec.shape) != len(form):
            raise InvalidInput(
                f"tensors.{name}.shape", spec.shape, f"must have {len(form)} dimensions, {form}"
            )
    if tensors.mask is not None and len(tensors.mask.shape) > 4:
        raise InvalidInput("tensors.mask.shape", tensors.mask.shape, "must have at most 4 dimensions, bhss")


def normalise_window(window: tuple[int, int], attn_mask_type: str) -> tuple[int, int]:
    """TransformerEngine's reading of a window: a causal mask type closes the right side.

    Raises InvalidInput for bounds below -1 or beyond int64, and for (-1, 0) without a causal mask type.
    """
    left, _ = window
    if min(window) < -1 or max(window) > LARGEST:
        raise InvalidInput(
            "window_size", window, f"each bound must be -1 (none) or at least 0, at most {LARGEST}"
        )
    if "causal" in attn_mask_type:
        return (left, 0)
    if window == (-1, 0):
        raise InvalidInput(
            "window_size",
            window,
            f"must be (-1, -1) with attn_mask_type {attn_mask_type!r}; for causal attention say so there",
        )
    return window


def diagonal_of(attn_mask_type: str, bottom_right_diagonal: bool | None) -> bool:
    """Where the diagonal is anchored: the mask type decides, else what was stated, else bottom right.

    Raises InvalidInput when a causal mask type and what was stated contradict each other.
    """
    if "causal" not in attn_mask_type:
        return True if bottom_right_diagonal is None else bottom_right_diagonal
    anchored = "bottom_right" in attn_mask_type
    if bottom_right_diagonal is not None and bottom_right_diagonal != anchored:
        raise InvalidInput(
            "bottom_right_diagonal",
            bottom_right_diagonal,
            f"must be {anchored} with attn_mask_type {attn_mask_type!r}, which decides it",
        )
    return anchored

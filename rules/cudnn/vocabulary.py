"""Words the cuDNN families share: architectures, examples, and what a rule is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attnsel.rules.api import rule
from attnsel.verdict import AtMost, Bad

if TYPE_CHECKING:
    from attnsel.params import AttentionParams
    from attnsel.rules.api import Body

AMPERE_ADA = range(80, 90)
HOPPER = {90}
BLACKWELL = range(100, 110)  # datacentre
BLACKWELL_THOR = range(100, 120)
CONSUMER_BLACKWELL = range(120, 130)
ANY_BLACKWELL = range(100, 130)

# Fragments of examples.
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
PAGED = {
    "qkv_layout": "paged_kv_bshd_bshd_bshd",
    "kv_cache": "paged",
    "page_size": 64,
    "is_training": False,
    "attn_mask_type": "padding",
}
WINDOW = {"window_size": (128, 0)}


def half_precision(code: str, **about: Any) -> Callable[[Body], Body]:
    """``@rule`` on ``cudnn`` for FP16/BF16/FP32 attention; FP8 attention has rules of its own (CUDNN3xx)."""
    return rule(code, "cudnn", fp8=False, **about)


def any_precision(code: str, **about: Any) -> Callable[[Body], Body]:
    """``@rule`` on ``cudnn`` for FP8 attention too: both kinds of graph are asked for it alike."""
    return rule(code, "cudnn", **about)


def widest(p: AttentionParams) -> str:
    """The field of the larger head dimension."""
    return "head_dim_qk" if p.head_dim_qk >= p.head_dim_v else "head_dim_v"


def wider_than(p: AttentionParams, limit: int) -> Bad | None:
    """The larger head dimension, if it is beyond the limit."""
    field = widest(p)
    width = getattr(p, field)
    return Bad(field, width, AtMost(limit)) if width > limit else None


def steps_are_shorter(p: AttentionParams) -> bool:
    """Ranks that exchange keys make calls of their own on parts of the sequence: its length is in none."""
    return p.cp_size > 1 and p.cp_comm_type != "a2a"

"""Words the cuDNN families share: architectures, examples, and what a rule is about."""

from __future__ import annotations

from attnsel.params import AttentionParams
from attnsel.params.exchanges import EXCHANGES

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


def widest(p: AttentionParams) -> str:
    """The field of the larger head dimension."""
    return "head_dim_qk" if p.head_dim_qk >= p.head_dim_v else "head_dim_v"


def beyond_128(p: AttentionParams) -> bool:
    """The larger head dimension is more than 128, where many kernels end."""
    return max(p.head_dim_qk, p.head_dim_v) > 128


def steps_are_shorter(p: AttentionParams) -> bool:
    """Ranks that exchange keys make calls of their own on parts of the sequence: its length is in none."""
    return p.cp_size > 1 and bool(EXCHANGES[p.cp_comm_type].keys)

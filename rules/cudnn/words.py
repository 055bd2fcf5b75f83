"""Which rules stand for what libcudnn and its frontend say when they refuse.

Learnt by asking: 1,500 random questions to libcudnn 9.28.0 (frontend 1.23) for five GPUs; beside each
sentence stand the rules that refused the same questions. For a refusal that no rule foresaw, they are the
closest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.params import AttentionParams
from attnsel.params.options import EXCHANGES

# The first that matches counts: the narrower sentence stands before the wider one.
WORDS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), codes)
    for pattern, codes in (
        (r"hidden_dim .*when d_qk != d_v|d_v should be equal to 128 if d_qk is 192", ("CUDNN237",)),
        (r"hidden_dim should be less than or equal to", ("CUDNN235", "CUDNN233")),
        (r"hidden_dim should be multiple of 8", ("CUDNN005", "CUDNN006")),
        (r"stride for the last dimension", ("CUDNN007",)),
        (r"Bottom right causal mask does not support max_s_q > max_s_kv", ("CUDNN010",)),
        (r"Bottom right causal mask is only supported with is_bias=False", ("CUDNN011", "CUDNN012")),
        (r"Sliding window attention is only supported with max_s_q <= max_s_kv", ("CUDNN014",)),
        (r"alibi mask is used, diagonal_band_right_bound needs to be", ("CUDNN021",)),
        (r"not supported with sink_token", ("CUDNN140",)),
        (r"Paged caches can only be used in combination with padding mask", ("CUDNN171",)),
        (r"block size needs to be non-zero and a power of 2", ("CUDNN172",)),
        (r"With dropout, this engine only supports fprop inference", ("CUDNN243",)),
        (r"s_q = s_kv = 1 is not supported", ("CUDNN250",)),
        (r"Deterministic algorithm is not supported for bprop thd", ("CUDNN264",)),
        (r"Deterministic algorithm is not supported on blackwell", ("CUDNN261", "CUDNN262")),
        (r"dbias with ragged is not supported", ("CUDNN274",)),
    )
)


def rules_that_say(message: str) -> tuple[str, ...]:
    """Codes of the rules that stand for a sentence in ``message``; none where nobody has met it."""
    return next((codes for pattern, codes in WORDS if pattern.search(message)), ())


class Asked(NamedTuple):
    """What libcudnn answered about one rule: a row of ``data/asked.csv``, where its columns are explained."""

    code: str
    answers: str
    on: str
    remark: str


@lru_cache(maxsize=1)
def what_was_asked() -> Mapping[str, Asked]:
    """By the code of the rule; read when a page wants it."""
    return {row["code"]: Asked(**row) for row in read_rows("attnsel.rules.cudnn", "asked")}


# ---- Words the cuDNN families share: architectures, examples, and what a rule is about -----------------


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

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


@lru_cache(maxsize=1)
def sentences() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Patterns, and the codes of the rules that stand for them: the rows of ``data/sentences.csv``."""
    rows = read_rows("attnsel.rules.cudnn", "sentences")
    return tuple((row["pattern"], tuple(row["codes"].split())) for row in rows)


def rules_that_say(message: str) -> tuple[str, ...]:
    """Codes of the rules that stand for a sentence in ``message``; none where nobody has met it."""
    return next((codes for pattern, codes in sentences() if re.search(pattern, message)), ())


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

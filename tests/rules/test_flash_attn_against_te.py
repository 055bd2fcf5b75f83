"""TransformerEngine's choice among FlashAttention 2, 3, 4, cuDNN and its own softmax, beside attnsel's first.

``te_configurations.json`` has 99 calls; those with ``te`` were put to TransformerEngine's own selection code.
FlashAttention is taken to be installed as its images have it. Where attnsel goes another way, the row says
where and why, and the reason is tested too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.rules.orders import BY_SPEED, LEADS
from tables import each

_LEADS = [lead.code for lead in LEADS]
ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row
    for row in json.loads(Path(__file__).with_name("te_configurations.json").read_text(encoding="utf-8"))
}
THEIRS = {
    "FusedAttention": "fused",
    "UnfusedDotProductAttention": "unfused",
    **{f"FlashAttention {n}": f"flash_attn.{n}" for n in (2, 3, 4)},
}
OURS = {"cudnn": "fused", "sdpa.cudnn": "fused", "sdpa.math": "unfused", "tiled": "unfused", None: "none"}
"""What attnsel's candidates are in TransformerEngine's words; it has none of the others."""

SWITCHED = {
    "fused": ("cudnn", "sdpa.cudnn"),
    "flash": ("flash_attn.2", "flash_attn.3", "flash_attn.4"),
    "unfused": ("sdpa.math", "tiled"),
}


@cache
def asked(number: str) -> Any:
    row = ROWS[number]
    installed = {"transformer_engine": "2.19.0", **row["installed"]}
    env = Environment.describe(f"sm{row['arch']}", cudnn=row["cudnn"], **installed)
    off = row.get("off", ())
    deny = tuple(name for family in off for name in SWITCHED[family])
    switches = {f"NVTE_{family.upper()}_ATTN": "0" for family in off}
    p = AttentionParams(**row["fields"])
    return select(p, env, policy=Policy(deny=deny), dispatcher="te", switches=switches)


def theirs(number: str) -> str:
    chosen = asked(number).dispatched.chosen
    return "none" if chosen is None else THEIRS[chosen.name]


@each("number", [number for number, row in ROWS.items() if "te" in row])
def test_their_choice_is_what_was_measured(number):
    assert theirs(number) == ROWS[number]["te"], ROWS[number]["what"]


# ---- the differences ------------------------------------------------------------------------------------


class Why(NamedTuple):
    """A reason, and what has to be true of a selection for it to be one."""

    text: str
    holds: Callable[[Any, dict[str, Any]], bool]


WHY = {
    "CONTESTED": Why(
        "on Hopper FlashAttention 3 and cuDNN are contested, and an installed 3 goes first (PREF013); "
        "TransformerEngine puts cuDNN first from sm90 on (utils.py, 1647 to 1653)",
        lambda s, row: row["arch"] == 90 and s["cudnn"].placed_by == "PREF013",
    ),
    "IN_TORCH": Why(
        "torch's own FlashAttention 2 has fewer layers in front of it than the package (PREF009)",
        lambda s, row: (
            CANDIDATES[s.backend].kernel_family == "flash"
            and s["flash_attn.2"].placed_by in ("PREF009", "PREF012")
        ),
    ),
    "FIGURES": Why(
        "published figures put it before what TransformerEngine takes, or are contested (rules/orders.py)",
        lambda s, row: any(c.placed_by in (BY_SPEED, "PREF013", *_LEADS) for c in s.ranked),
    ),
    "LIBRARY": Why(
        "cuDNN takes it, and the table before it does not: cudnn_against_te.json",
        lambda s, row: s.backend == "cudnn" and not s.ranked[0].adaptations,
    ),
    "ADAPTED": Why(
        "cuDNN takes it once it is padded or unpacked, which attnsel does and TransformerEngine does not",
        lambda s, row: s.backend == "cudnn" and bool(s.ranked[0].adaptations),
    ),
    "NO_CUDNN": Why(
        "attnsel refuses cuDNN, by a rule of its own",
        lambda s, row: row["fused"] and s["cudnn"].verdict == "refused",
    ),
    "BEYOND": Why(
        "a kernel that TransformerEngine does not have takes it, and faster than what is left there",
        lambda s, row: s.backend.startswith(("sdpa.", "triton")) and not CANDIDATES[s.backend].last_resort,
    ),
    "FEWER_COPIES": Why(
        "FlashAttention 2 needs V padded by half; a kernel that takes it as it is goes first (PREF008)",
        lambda s, row: not s.ranked[0].adaptations and bool(s["flash_attn.2"].adaptations),
    ),
    "NO_FP8": Why(
        "FP8 through FlashAttention 3 is not built",
        lambda s, row: s.backend is None and [r.code for r in s["flash_attn.3"].reasons] == ["FLASH300"],
    ),
}


def test_every_difference_is_listed_and_its_reason_is_the_reason():
    for number, row in ROWS.items():
        selection = asked(number)
        ours = selection.backend
        if OURS.get(ours, ours) == theirs(number):
            assert "why" not in row, f"{number} is no longer a difference"
            continue
        assert (row.get("theirs"), row.get("attnsel")) == (theirs(number), ours), (
            "it needs a reason, or a rule"
        )
        why = WHY[row["why"]]
        told = [(c.name, c.placed_by, [r.code for r in c.reasons]) for c in selection]
        assert why.holds(selection, row), (row["what"], why.text, told)

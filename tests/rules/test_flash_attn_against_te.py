"""TransformerEngine's choice among FlashAttention 2, 3, 4, cuDNN and its own softmax, beside attnsel's first.

``te_configurations.json`` has 99 calls: those with ``te`` were put to TransformerEngine's own selection code,
of the others its query of cuDNN was (``fused``), and FlashAttention is taken to be installed as its images
have it. ``te_choice.py`` states its filters; it is held to what was measured. Where attnsel goes another way,
the row stands below with the reason, and the reason is tested too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from tables import each
from te_choice import choice

ROWS: dict[str, dict[str, Any]] = {
    row["id"]: row
    for row in json.loads(Path(__file__).with_name("te_configurations.json").read_text(encoding="utf-8"))
}
OURS = {"cudnn": "fused", "sdpa.cudnn": "fused", "sdpa.math": "unfused", "tiled": "unfused", None: "none"}
"""What attnsel's candidates are in TransformerEngine's words; it has none of the others."""

SWITCHED = {
    "fused": ("cudnn", "sdpa.cudnn"),
    "flash": ("flash_attn.2", "flash_attn.3", "flash_attn.4"),
    "unfused": ("sdpa.math", "tiled"),
}


def question(row: dict[str, Any]) -> tuple[AttentionParams, Environment, tuple[str, ...]]:
    env = Environment.describe(f"sm{row['arch']}", cudnn=row["cudnn"], **row["installed"])
    return AttentionParams(**row["fields"]), env, tuple(row.get("off", ()))


@cache
def asked(number: str) -> Any:
    p, env, off = question(ROWS[number])
    return select(p, env, policy=Policy(deny=tuple(name for family in off for name in SWITCHED[family])))


def theirs(number: str) -> str:
    row = ROWS[number]
    p, env, off = question(row)
    return choice(p, env, row["fused"], off)


@each("number", [number for number, row in ROWS.items() if "te" in row])
def test_the_filters_say_what_was_measured(number):
    assert theirs(number) == ROWS[number]["te"], ROWS[number]["what"]


# ---- the differences ------------------------------------------------------------------------------------


class Why(NamedTuple):
    """A reason, and what has to be true of a selection for it to be one."""

    text: str
    holds: Callable[[Any, dict[str, Any]], bool]


CONTESTED = Why(
    "on Hopper FlashAttention 3 and cuDNN are contested, and an installed 3 goes first (PREF013); "
    "TransformerEngine puts cuDNN first from sm90 on (utils.py, 1647 to 1653)",
    lambda s, row: row["arch"] == 90 and s["cudnn"].placed_by == "PREF013",
)
IN_TORCH = Why(
    "torch's own FlashAttention 2 has fewer layers in front of it than the package (PREF009)",
    lambda s, row: (
        CANDIDATES[s.backend].kernel_family == "flash"
        and s["flash_attn.2"].placed_by in ("PREF009", "PREF012")
    ),
)
SM120 = Why(
    "on sm120 nobody has published figures of FlashAttention 4, so 2 goes first (PREF005)",
    lambda s, row: row["arch"] == 120 and s["flash_attn.4"].placed_by == "PREF005",
)
LIBRARY = Why(
    "cuDNN takes it, and the table before it does not: test_cudnn_against_te.py",
    lambda s, row: s.backend == "cudnn" and not s.ranked[0].adaptations,
)
ADAPTED = Why(
    "cuDNN takes it once it is padded or unpacked, which attnsel does and TransformerEngine does not",
    lambda s, row: s.backend == "cudnn" and bool(s.ranked[0].adaptations),
)
NO_CUDNN = Why(
    "attnsel refuses cuDNN, by a rule of its own",
    lambda s, row: row["fused"] and s["cudnn"].verdict == "refused",
)
BEYOND = Why(
    "a kernel that TransformerEngine does not have takes it, and faster than what is left there",
    lambda s, row: s.backend.startswith(("sdpa.", "triton")) and not CANDIDATES[s.backend].last_resort,
)
FEWER_COPIES = Why(
    "FlashAttention 2 needs V padded by half; a kernel that takes it as it is goes first (PREF008)",
    lambda s, row: not s.ranked[0].adaptations and bool(s["flash_attn.2"].adaptations),
)
NO_FP8 = Why(
    "FP8 through FlashAttention 3 is not built",
    lambda s, row: s.backend is None and [r.code for r in s["flash_attn.3"].reasons] == ["FLASH300"],
)


def all_of(rows: str, why: Why) -> dict[str, Why]:
    return dict.fromkeys(rows.split(), why)


# By TransformerEngine's choice and attnsel's.
DIFFERENCES: dict[tuple[str, str | None], dict[str, Why]] = {
    ("fused", "flash_attn.3"): {
        **all_of("c005 c015 c017 c019 c020 c024 c037 c041", CONTESTED),
        **all_of("c043 c055 c069 c071 c073 c075 c076", CONTESTED),
        "c045": NO_CUDNN,
    },
    ("fused", None): {"c062": NO_CUDNN},
    ("fused", "sdpa.flash"): {"p002": BEYOND},
    ("fused", "sdpa.efficient"): {"c029": BEYOND},
    ("flash_attn.2", "sdpa.flash"): {
        **all_of("c000 c001 c002 c006 c007 c008 c009 c021 c022 p001 p005", IN_TORCH),
    },
    ("flash_attn.2", "sdpa.varlen"): all_of("c035 c044", IN_TORCH),
    ("flash_attn.2", "triton"): {"c066": FEWER_COPIES},
    ("flash_attn.2", "cudnn"): {"c047": LIBRARY},
    ("flash_attn.3", None): {"p012": NO_FP8},
    ("flash_attn.4", "cudnn"): all_of("c023 c033 c057", LIBRARY),
    ("flash_attn.4", "sdpa.flash"): {"c039": SM120},
    ("flash_attn.4", "sdpa.varlen"): {"c038": SM120},
    ("unfused", "cudnn"): all_of("c046 c050 c052 p019 p020", LIBRARY),
    ("unfused", "sdpa.cudnn"): {"p007": BEYOND},
    ("unfused", "sdpa.efficient"): all_of("c028 c049 c068 p006", BEYOND),
    ("unfused", "sdpa.flash"): all_of("p003 p004 p016 p017", BEYOND),
    ("unfused", "triton"): {"p014": BEYOND},
    ("none", "cudnn"): {"c060": ADAPTED, "c063": LIBRARY, "c065": ADAPTED},
    ("none", "sdpa.flash"): {"p018": BEYOND},
    ("none", "sdpa.varlen"): {"p021": BEYOND},
    ("none", "triton"): {"p008": BEYOND},
}
LISTED = {(number, *pair): why for pair, rows in DIFFERENCES.items() for number, why in rows.items()}


def test_every_difference_is_listed_and_every_listed_one_is_there():
    found = set()
    for number in ROWS:
        ours = asked(number).backend
        if OURS.get(ours, ours) != theirs(number):
            found.add((number, theirs(number), ours))
    assert {one for one in found if one not in LISTED} == set(), "give it a reason, or a rule"
    assert set(LISTED) - found == set(), "no longer a difference"


@each("number, reason", [(row[0], why) for row, why in LISTED.items()])
def test_its_reason_is_the_reason(number, reason):
    selection = asked(number)
    told = [(c.name, c.placed_by, [r.code for r in c.reasons]) for c in selection]
    assert reason.holds(selection, ROWS[number]), (ROWS[number]["what"], reason.text, told)

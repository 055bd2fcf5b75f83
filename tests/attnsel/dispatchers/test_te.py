"""What TransformerEngine would choose, held against TransformerEngine.

``te_answers.json`` holds answers of its own ``get_attention_backend``; tests/proof/te_answers.py asks anew.
What that record does not reach: answers.txt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.te import SWITCHES, held
from attnsel.dispatchers.te.asked import EVERY, FUSED

ANSWERS = Path(__file__).with_name("te_answers.json")
_FAMILIES = ("FlashAttention", "FusedAttention", "Unfused")


def ours(row: dict[str, Any]) -> list[Any]:
    """The choice, and which of the families are left."""
    dispatch = dispatched_by(
        "te", AttentionParams(**row["params"]), Environment.describe(**row["machine"]), row["switches"]
    )
    alive = [any(o.taken for o in dispatch.offers if o.name.startswith(family)) for family in _FAMILIES]
    return ["none" if dispatch.chosen is None else dispatch.chosen.name, alive]


def test_it_is_what_transformer_engine_answered():
    rows = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert len({row["machine"]["transformer_engine"] for row in rows}) >= 4
    assert {row["chosen"].rstrip(" 234") for row in rows} == {*(f.rstrip(" 234") for f in EVERY), "none"}
    assert [row for row in rows if ours(row) != [row["chosen"], row["alive"]]] == []


def test_switches_are_read_and_named(monkeypatch):
    for switch in SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)
    env = Environment.describe("H100", cudnn="9.10.2", transformer_engine="2.18.0", flash_attn="2.8.3")
    assert held(env) == {}
    assert dispatched_by("te", AttentionParams(), env).chosen.name == FUSED
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "yes")  # none of its values
    dispatch = dispatched_by("te", AttentionParams(), env)
    assert dispatch.switches == (("NVTE_FUSED_ATTN", "0"),)
    assert dispatch.chosen.name == "FlashAttention 2"
    assert dispatch.offers[0].refusals[0].switch == "NVTE_FUSED_ATTN=0"

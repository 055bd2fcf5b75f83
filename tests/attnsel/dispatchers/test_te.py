"""What TransformerEngine would choose, held against TransformerEngine.

``te_answers.json`` holds answers of its own ``get_attention_backend`` (tests/proof/te_answers.py asks anew),
``te_rows.json`` single clauses with the line that has them, and the change that ``fix`` makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.dispatchers.te import SWITCHES, held, selected
from attnsel.dispatchers.te.asked import EVERY, FUSED

ANSWERS, ROWS = (Path(__file__).with_name(f"te_{name}.json") for name in ("answers", "rows"))


def ours(row: dict[str, Any], **changes: Any) -> Dispatch:
    params, machine = ({**row[part], **changes.get(part, {})} for part in ("params", "machine"))
    return dispatched_by("te", AttentionParams(**params), Environment.describe(**machine), row["switches"])


def test_it_is_what_transformer_engine_answered():
    rows = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert {row["chosen"].rstrip(" 234") for row in rows} == {*(f.rstrip(" 234") for f in EVERY), "none"}
    assert [row for row in rows if selected(ours(row)) != (row["chosen"], tuple(row["alive"]))] == []


def test_each_clause_is_told_and_its_way_out_leads_on():
    for row in json.loads(ROWS.read_text(encoding="utf-8")):
        dispatch, after = ours(row), ours(row, **row["fix"])
        of = {offer.name: [refusal.text for refusal in offer.refusals] for offer in dispatch.offers}
        assert [of.get(row["kernel"], [dispatch.error]), dispatch.error] == [row["says"], row["error"]], row[
            "id"
        ]
        assert any(o.taken for o in after.offers if o.name == row["kernel"]) == (
            not row["says"] or bool(row["fix"])
        ), row["id"]


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

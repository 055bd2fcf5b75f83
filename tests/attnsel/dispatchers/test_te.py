"""What TransformerEngine would choose, held against TransformerEngine.

``te_answers.json`` holds answers of its own ``get_attention_backend``; tests/proof/te_answers.py asks anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import te_questions
from attnsel import AttentionParams, Environment, select
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.te import FILTERS, READ, SWITCHES, held
from attnsel.dispatchers.te.asked import EVERY, FUSED, Asked
from attnsel.dispatchers.te.query import CLAUSES, FP8_CLAUSES
from attnsel.environment.versions import Version
from tables import each

ANSWERS = Path(__file__).with_name("te_answers.json")
MEASURED = [
    row
    for row in json.loads(
        (Path(__file__).parents[2] / "rules/te_configurations.json").read_text(encoding="utf-8")
    )
    if "te" in row
]
_FAMILIES = ("FlashAttention", "FusedAttention", "Unfused")


def ours(p: AttentionParams, env: Environment, switches: dict[str, str]) -> tuple[str, list[bool]]:
    dispatch = dispatched_by("te", p, env, switches)
    chosen = "none" if dispatch.chosen is None else dispatch.chosen.name
    alive = [any(o.taken for o in dispatch.offers if o.name.startswith(family)) for family in _FAMILIES]
    return chosen, alive


def asked(row: dict[str, Any]) -> tuple[AttentionParams, Environment, dict[str, str]]:
    return AttentionParams(**row["params"]), Environment.describe(**row["machine"]), row["switches"]


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if list(ours(*asked(row))) != [row["chosen"], row["alive"]]]


def test_it_is_what_transformer_engine_answered():
    rows = json.loads(ANSWERS.read_text(encoding="utf-8"))
    assert len(rows) >= 500
    assert len({row["machine"]["transformer_engine"] for row in rows}) >= 4
    assert {row["chosen"].rstrip(" 234") for row in rows} == {*(f.rstrip(" 234") for f in EVERY), "none"}
    assert differences(rows) == []


@each("row", MEASURED)
def test_it_is_what_was_measured_on_curated_calls(row):
    env = Environment.describe(f"sm{row['arch']}", cudnn=row["cudnn"], **row["installed"])
    switches = {f"NVTE_{family.upper()}_ATTN": "0" for family in row.get("off", ())}
    chosen, _ = ours(AttentionParams(**row["fields"]), env, switches)
    names = {"fused": FUSED, "unfused": "UnfusedDotProductAttention", "none": "none"}
    assert chosen == names.get(row["te"], row["te"].replace("flash_attn.", "FlashAttention ")), row["what"]


CACHE = {"is_training": False, "kv_cache": "paged", "page_size": 256, "qkv_layout": "paged_kv_thd_bshd_bshd"}
PADDED = {"attn_mask_type": "padding"}
DELAYED = {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}}
FP8_MHA = {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_mha": True}}}
RARE = (
    ({**CACHE, **PADDED, "cp_size": 2}, "H100", "9.10.2"),
    ({**CACHE, **PADDED, **FP8_MHA}, "H100", "9.10.2"),
    ({**CACHE, **PADDED, "pad_between_seqs": True, "qkv_layout": "paged_kv_thd_bshd_bshd"}, "H100", "9.10.2"),
    ({**DELAYED, "deterministic": True}, "B200", "9.17.0"),
    ({"head_dim_qk": 128, "head_dim_v": 104}, "B200", "9.20.0"),
    ({**DELAYED, "return_max_logit": True}, "H100", "9.20.0"),
    ({"head_dim_qk": 256, "window_size": (64, 0)}, "B200", "9.20.0"),
    ({"qkv_layout": "thd", **PADDED, "max_seqlen_q": 1 << 24}, "H100", "9.1.0"),
    ({}, "H100", "8.8.0"),
)


def test_every_filter_refuses_some_question():
    """None is there that no question reaches."""
    reached = set()
    for te in sorted({str(one) for one in READ} | {"2.9.0", "2.10.0", "2.15.0", "2.16.0"}):
        rare = [
            (AttentionParams(**fields), Environment.describe(gpu, cudnn=cudnn), {"NVTE_FLASH_ATTN": "0"})
            for fields, gpu, cudnn in RARE
        ]
        for p, env, switches in (*rare, *te_questions.questions(11, 500, te)):
            question = Asked(p, env, Version.parse(te), switches)
            filters = [*FILTERS, *(FP8_CLAUSES if question.fp8 else CLAUSES)]
            reached |= {one.check for one in filters if one.holds(question.te) and one.check(question)}
    every = {one.check for one in (*FILTERS, *CLAUSES, *FP8_CLAUSES)}
    named = {check.__name__ for check in every - reached}
    # One switch for each kernel of FlashAttention's, which the questions do not turn.
    assert named <= {f"nvte_flash_attn_v{n}" for n in (2, 3, 4)}, named


def test_all_reasons_are_told_where_transformer_engine_gives_none():
    env = Environment.describe("A100", cudnn="9.3.0", transformer_engine="2.18.0", flash_attn=None)
    p = AttentionParams(qkv_layout="thd", attn_mask_type="padding_causal", head_dim_qk=192)
    dispatch = dispatched_by("te", p, env, {})
    fused = next(offer for offer in dispatch.offers if offer.name == FUSED)
    assert len(fused.refusals) == 3
    assert all("without a reason" in refusal.told for refusal in fused.refusals)
    assert dispatch.chosen.name == "UnfusedDotProductAttention"


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


@each(
    "te, read, words",
    [
        (None, "2.20.0", "no version was stated"),
        ("2.18.0", "2.18.0", ""),
        ("2.15.0", "2.14.0", "looked up"),
        ("1.13.0", "2.8.0", "older"),
        ("2.30.0", "2.20.0", "newer"),
    ],
)
def test_it_says_which_release_was_read(te, read, words):
    env = Environment.describe("H100", cudnn="9.10.2", **({} if te is None else {"transformer_engine": te}))
    dispatch = dispatched_by("te", AttentionParams(), env, {})
    assert dispatch.read == read
    assert words in dispatch.inferred
    assert bool(words) == bool(dispatch.inferred)


def test_what_it_cannot_be_asked_is_said():
    env = Environment.describe("H100")
    assert "no softcap" in dispatched_by("te", AttentionParams(softcap=30.0), env, {}).error
    cpu = Environment.describe("cpu")
    assert "CUDA" in select(AttentionParams(), cpu, dispatcher="te").dispatched.error

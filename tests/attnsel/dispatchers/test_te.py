"""What TransformerEngine would choose, held against TransformerEngine.

``te_answers.json`` holds answers of its own ``get_attention_backend``; tests/proof/te_answers.py asks anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attnsel import AttentionParams, Environment, select
from attnsel.dispatchers import dispatched_by
from attnsel.dispatchers.te import FILTERS, SWITCHES, held
from attnsel.dispatchers.te.asked import EVERY, FUSED, Asked
from attnsel.dispatchers.te.query import CLAUSES, FP8_CLAUSES
from attnsel.environment.versions import Version
from tables import each

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


CACHE = {"is_training": False, "kv_cache": "paged", "page_size": 256, "qkv_layout": "paged_kv_thd_bshd_bshd"}
CACHE |= {"attn_mask_type": "padding"}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding"}
DELAYED = {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}}
FP8_MHA = {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_mha": True}}}
ONE_ROW = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "111s"}
ONE_ROW |= {"core_attention_bias_requires_grad": True}
BOTH_SIDES = {"attn_mask_type": "padding", "window_size": (128, 128)}


@each(
    "te, fields, gpu, cudnn, name",
    [
        ("2.10.0", {**CACHE, "cp_size": 2}, "H100", "9.10.2", "cache_over_ranks"),
        ("2.10.0", {**CACHE, **FP8_MHA}, "H100", "9.10.2", "cache_with_fp8_mha"),
        ("2.10.0", {**CACHE, **FP8_MHA}, "H100", "9.10.2", "fp8_cache"),
        ("2.10.0", {**CACHE, "pad_between_seqs": True}, "H100", "9.10.2", "cache_with_gaps"),
        (
            "2.10.0",
            {**CACHE, **DELAYED, "qkv_layout": "paged_kv_sbhd_sbhd_sbhd"},
            "A100",
            "8.9.0",
            "fp8_cache_unpacked",
        ),
        ("2.15.0", {**DELAYED, "deterministic": True}, "B200", "9.17.0", "delayed_and_deterministic"),
        ("2.10.0", {"head_dim_qk": 128, "head_dim_v": 104}, "B200", "9.20.0", "backward_of_flash_4"),
        ("2.18.0", {"head_dim_qk": 256, "window_size": (64, 0)}, "B200", "9.20.0", "window_of_256"),
        ("2.10.0", {**PACKED, "max_seqlen_q": 1 << 24}, "H100", "9.1.0", "offsets"),
        ("2.10.0", {}, "H100", "8.8.0", "oldest"),
        ("2.10.0", {"head_dim_qk": 256}, "sm120", "9.1.0", "wide_training_on_sm120"),
        ("2.10.0", {**PACKED, "return_max_logit": True}, "RTX 3090", "9.21.0", "packed_max_logit"),
        ("2.10.0", {**PACKED, **DELAYED}, "sm120", "9.7.0", "any_packed_on_sm120"),
        ("2.14.0", {"head_dim_qk": 192, "head_dim_v": 512}, "sm120", "9.5.0", "mla_on_sm120"),
        ("2.10.0", {"head_dim_qk": 256, "head_dim_v": 128}, "H100", "9.22.0", "unlike_heads_on_hopper"),
        ("2.10.0", {**BOTH_SIDES, "max_seqlen_kv": 8192}, "H100", "9.14.0", "window_of_9_14"),
        ("2.10.0", {"max_seqlen_q": 1000, "cuda_graph": True}, "H100", "9.13.1", "graph_of_uneven_lengths"),
        ("2.13.0", ONE_ROW, "sm120", "9.5.1", "gradient_of_one_row"),
    ],
)
def test_a_filter_that_the_record_does_not_reach(te, fields, gpu, cudnn, name):
    installed = {"flash_attn": "2.7.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b24"}
    env = Environment.describe(gpu, cudnn=cudnn, **installed)
    asked = Asked(AttentionParams(**fields), env, Version.parse(te), {})
    filters = [*FILTERS, *(FP8_CLAUSES if asked.fp8 else CLAUSES)]
    assert name in {one.check.__name__ for one in filters if one.holds(asked.te) and one.check(asked)}


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

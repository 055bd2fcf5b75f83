"""Edges within a rule's body, a row each: GPU, versions, question, and the codes that fire there.

``fires_on`` and ``passes`` of a rule stand at its declaration (test_every_rule.py); a row here is for an edge
that one example cannot show. Bugs: by their issues, each on both sides.
"""

from __future__ import annotations

from typing import Any

from attnsel.environment import Environment
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.cudnn import fp8
from attnsel.rules.cudnn.vocabulary import PAGED as PAGED_FP8
from attnsel.verdicts.requirements import Multiple
from tables import each

load_all()
INFERENCE = {"is_training": False}
MLA = {"head_dim_qk": 192, "head_dim_v": 128}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
GROUPED = {"num_heads": 32, "num_gqa_groups": 8}
BIAS = {"core_attention_bias_type": "post_scale_bias"}
BIAS_GRADIENT = {**BIAS, "core_attention_bias_requires_grad": True}
ALIBI = {"core_attention_bias_type": "alibi"}
NO_MASK = {"attn_mask_type": "no_mask"}
BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right"}
PADDED_BOTTOM_RIGHT = {"attn_mask_type": "padding_causal_bottom_right"}
CROSS = {"max_seqlen_q": 1024, "max_seqlen_kv": 4096}
PAGED = {**INFERENCE, "qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 64}
PAGED |= {"attn_mask_type": "padding"}
WINDOW = {"window_size": (128, 0)}


def fired(module: str, env: Environment, **fields: Any) -> set[str]:
    """Codes of the rules of modules that begin so."""
    p = AttentionParams(**fields)
    return {
        rule.code
        for rule in REGISTRY.rules.values()
        if rule.module.startswith(f"attnsel.rules.{module}")
        and rule.applies(env)
        and rule.concerns(p)
        and rule.find(p, env) is not None
    }


# ---- cuDNN below 9.8 ------------------------------------------------------------------------------------

BEFORE_9_8: list[Any] = [
    # devices
    ("H100", "8.8.1", {}, {"CUDNN101"}),
    ("RTX 3090", "8.9.2", {}, {"CUDNN102"}),
    ("RTX 3090", "8.9.3", {}, set()),
    ("H100", "8.9.2", {}, {"CUDNN103"}),
    ("T4", "9.1.0", {}, {"CUDNN106"}),
    ("B200", "9.6.0", {}, {"CUDNN104"}),
    ("B200", "9.7.0", {}, set()),
    ("RTX 5090", "9.7.0", {}, {"CUDNN105"}),
    ("B300", "9.7.0", {}, {"CUDNN105"}),
    # element types, heads, lengths
    ("H100", "9.1.0", {"dtype": "fp32"}, {"CUDNN107"}),
    ("H100", "8.9.6", GROUPED, {"CUDNN108"}),
    ("H100", "8.9.7", GROUPED, set()),
    (
        "H100",
        "8.9.7",
        {"max_seqlen_q": 2048, "max_seqlen_kv": 2049, "attn_mask_type": "no_mask"},
        {"CUDNN110"},
    ),
    # head dimensions
    ("H100", "9.1.0", {"head_dim_qk": 100}, {"CUDNN111", "CUDNN112"}),
    ("H100", "8.9.5", {"head_dim_qk": 96}, {"CUDNN113"}),
    ("H100", "8.9.6", {"head_dim_qk": 96}, set()),
    ("H100", "8.9.5", {"head_dim_v": 64}, {"CUDNN114"}),
    ("H100", "9.0.0", MLA, {"CUDNN116", "CUDNN204"}),
    ("H100", "9.5.0", MLA, set()),
    ("H100", "9.5.0", {"head_dim_qk": 256}, set()),
    ("H100", "9.5.0", {"head_dim_qk": 512}, {"CUDNN117"}),
    ("A100", "9.5.0", {"head_dim_qk": 256}, {"CUDNN115"}),
    ("A100", "9.7.0", {"head_dim_qk": 256, **INFERENCE}, {"CUDNN115"}),
    ("B200", "9.7.0", {"head_dim_qk": 256, **INFERENCE}, {"CUDNN118"}),
    # bias
    ("H100", "8.9.5", BIAS, {"CUDNN119"}),
    ("A100", "8.9.7", BIAS, {"CUDNN120"}),
    ("A100", "9.0.0", BIAS, set()),
    ("H100", "8.9.7", BIAS, set()),
    ("H100", "9.1.0", {"core_attention_bias_type": "pre_scale_bias"}, {"CUDNN121"}),
    ("H100", "9.7.0", {**BIAS, "attn_mask_type": "padding"}, {"CUDNN122"}),
    ("A100", "9.1.0", ALIBI, {"CUDNN123"}),
    ("H100", "9.1.0", ALIBI, set()),
    ("H100", "9.1.0", {**ALIBI, "attn_mask_type": "no_mask"}, {"CUDNN124"}),
    ("H100", "9.7.0", {**ALIBI, "attn_mask_type": "padding_causal"}, {"CUDNN124"}),
    ("H100", "9.7.0", {**ALIBI, **BOTTOM_RIGHT}, {"CUDNN408"}),
    ("H100", "9.1.0", {**ALIBI, "alibi_slopes_shape": (16,)}, {"CUDNN125"}),
    # softmax
    ("H100", "9.7.0", {"softmax_type": "off-by-one"}, {"CUDNN126"}),
    ("H100", "9.7.0", {"return_max_logit": True}, {"CUDNN127"}),
    ("H100", "9.7.0", {"softcap": 30.0}, {"CUDNN128"}),
    # masks
    ("H100", "9.7.0", {"attn_mask_type": "arbitrary"}, {"CUDNN401"}),
    ("A100", "8.9.5", {"attn_mask_type": "no_mask"}, {"CUDNN402"}),
    ("A100", "8.9.6", {"attn_mask_type": "no_mask"}, set()),
    ("A100", "8.9.6", {"attn_mask_type": "padding"}, set()),
    ("H100", "9.2.1", {**BOTTOM_RIGHT}, {"CUDNN403"}),
    ("H100", "9.3.0", {**BOTTOM_RIGHT}, set()),
    ("H100", "9.6.0", {**BOTTOM_RIGHT, **CROSS}, set()),
    ("H100", "9.6.0", {"attn_mask_type": "padding_causal_bottom_right", **CROSS}, set()),
    ("H100", "9.3.0", {**BOTTOM_RIGHT, "max_seqlen_q": 1000}, {"CUDNN405", "CUDNN406"}),
    ("H100", "9.7.0", {**BOTTOM_RIGHT, "max_seqlen_kv": 1024}, {"CUDNN407"}),
    ("H100", "9.7.0", {"attn_mask_type": "padding_causal_bottom_right", "max_seqlen_kv": 1024}, set()),
    ("H100", "9.7.0", {**BOTTOM_RIGHT, "attention_dropout": 0.1}, {"CUDNN409"}),
    ("H100", "9.7.0", {"max_seqlen_q": 1, "max_seqlen_kv": 64, **INFERENCE}, {"CUDNN410"}),
    (
        "H100",
        "9.7.0",
        {"max_seqlen_q": 1, "max_seqlen_kv": 64, **INFERENCE, "attn_mask_type": "no_mask"},
        set(),
    ),
    # windows
    ("H100", "9.1.0", {"window_size": (128, 0)}, {"CUDNN411"}),
    ("H100", "9.2.0", {"window_size": (128, 0)}, set()),
    ("H100", "9.2.0", {"window_size": (128, 0), "attention_dropout": 0.1}, {"CUDNN416"}),
    ("H100", "9.2.0", {"window_size": (128, 0), **BIAS}, {"CUDNN417"}),
    ("H100", "9.2.0", {"window_size": (128, 0), "max_seqlen_kv": 1024}, {"CUDNN418"}),
    ("H100", "9.5.0", {"window_size": (128, 0), "attn_mask_type": "padding_causal"}, {"CUDNN412"}),
    ("H100", "9.6.0", {"window_size": (128, 0), "attn_mask_type": "padding_causal"}, set()),
    ("H100", "9.6.0", {"window_size": (128, 0), **PACKED}, set()),
    ("H100", "9.6.0", {"window_size": (128, -1), "attn_mask_type": "no_mask"}, {"CUDNN415"}),
    # a right bound of 0 is a bound, and anchored like any other
    ("H100", "9.3.0", {"window_size": (128, 0), "attn_mask_type": "no_mask"}, {"CUDNN413"}),
    ("H100", "9.6.0", {"window_size": (128, 0), "attn_mask_type": "no_mask"}, {"CUDNN419"}),
    ("H100", "9.6.0", {"window_size": (128, 0), **BOTTOM_RIGHT, **CROSS}, set()),
    ("B200", "9.7.0", {"window_size": (128, 0), **BOTTOM_RIGHT, **CROSS}, {"CUDNN420"}),
    ("B200", "9.7.1", {"window_size": (128, 0), **BOTTOM_RIGHT, **CROSS}, set()),
    # packed sequences
    ("H100", "9.0.0", PACKED, {"CUDNN430"}),
    ("H100", "9.1.0", PACKED, set()),
    ("A100", "9.7.0", PACKED, {"CUDNN431"}),
    ("H100", "9.1.1", {**PACKED, **GROUPED}, {"CUDNN214"}),
    ("H100", "9.1.1", {**PACKED, **GROUPED, **INFERENCE}, {"CUDNN432"}),
    ("H100", "9.6.0", {**PACKED, **GROUPED}, set()),
    # paged caches
    ("H100", "9.6.0", PAGED, set()),
    ("H100", "9.4.0", PAGED, {"CUDNN435", "CUDNN440"}),
    ("H100", "9.6.0", {**PAGED, "attn_mask_type": "no_mask"}, {"CUDNN436"}),
    ("H100", "9.6.0", {**PAGED, "head_dim_qk": 256}, {"CUDNN437"}),
    ("L4", "9.6.0", PAGED, {"CUDNN438"}),
    # backward
    ("A100", "8.9.7", {"deterministic": True}, {"CUDNN203"}),
    ("A100", "9.1.0", {"deterministic": True}, {"CUDNN205"}),
    ("H100", "8.9.4", {"deterministic": True}, {"CUDNN201"}),
    ("H100", "9.1.0", {"deterministic": True}, set()),
    ("H100", "9.7.0", {**BIAS_GRADIENT, "deterministic": True}, {"CUDNN202"}),
    ("B200", "9.7.0", {"deterministic": True}, {"CUDNN206"}),
    ("B200", "9.7.0", {"deterministic": True, **INFERENCE}, set()),
    ("B200", "9.7.0", {**BIAS, "attention_dropout": 0.1}, {"CUDNN211"}),
    ("H100", "9.1.0", {**BIAS_GRADIENT, "attn_mask_type": "padding"}, {"CUDNN122", "CUDNN207"}),
    ("H100", "9.1.0", {**BIAS_GRADIENT, "max_seqlen_q": 1000}, {"CUDNN208", "CUDNN209"}),
    ("H100", "9.7.0", {**BIAS_GRADIENT, "core_attention_bias_shape": "111s"}, {"CUDNN210"}),
    ("H100", "9.7.0", {"max_seqlen_q": 1000, "cuda_graph": True}, {"CUDNN212"}),
    ("H100", "9.7.0", {"max_seqlen_q": 1, "attn_mask_type": "no_mask"}, {"CUDNN213"}),
]


@each("gpu, cudnn, fields, expected", BEFORE_9_8)
def test_cudnn_before_9_8(gpu: str, cudnn: str, fields: dict[str, Any], expected: set[str]) -> None:
    assert fired("cudnn.before_9_8", Environment.describe(gpu, cudnn=cudnn), **fields) == expected


def test_its_rules_end_at_9_8_and_leave_fp8_alone() -> None:
    rules = [rule for rule in REGISTRY.rules.values() if ".before_9_8" in rule.module]
    assert len(rules) > 50
    for gpu in ("T4", "A100", "L4", "H100", "B200", "RTX 5090"):
        env = Environment.describe(gpu, cudnn="9.8.0")
        assert not [rule.code for rule in rules if rule.applies(env)]
    assert not [rule.code for rule in rules if rule.concerns(AttentionParams(dtype="fp8_e4m3"))]


LONG = {**PACKED, "qkv_layout": "t3hd", "num_heads": 64}
INTERLEAVED = {name: {"shape": (65536, 64, 128), "stride": (24576, 384, 1)} for name in "qkv"}


@each(
    "cudnn, fields, unknown",
    [
        ("9.1.0", {"max_seqlen_q": 131072, "batch_size": 1}, False),  # alone: 3 * 64 * 128 * 131072 elements
        ("9.1.0", {"max_seqlen_q": 65536, "batch_size": 1}, None),
        ("9.1.0", {"max_seqlen_q": 65536, "batch_size": 2}, True),  # a full batch would be too much
        ("9.6.0", {"max_seqlen_q": 131072, "batch_size": 1}, None),
        (
            "9.1.0",
            {"max_seqlen_q": 65536, "batch_size": 2, "tensors": INTERLEAVED},
            None,
        ),
    ],
)
def test_ragged_offsets_of_32_bits(cudnn: str, fields: dict[str, Any], unknown: bool | None) -> None:
    env, p = Environment.describe("H100", cudnn=cudnn), AttentionParams(**LONG, **fields)
    rules = [rule for rule in REGISTRY.rules.values() if rule.code.startswith("CUDNN") and rule.applies(env)]
    found = [f for rule in rules if rule.concerns(p) and (f := rule.find(p, env))]
    assert [type(f).__name__ == "Unknown" for f in found] == ([] if unknown is None else [unknown])


def test_a_length_of_16534_is_rounded_up_on_both_sides() -> None:
    env = Environment.describe("A100", cudnn="8.9.7")
    p = AttentionParams(batch_size=48, max_seqlen_q=16534, num_heads=18, head_dim_qk=128)
    rules = [rule for rule in REGISTRY.rules.values() if ".before_9_8" in rule.module]
    found = [f for rule in rules if rule.applies(env) and rule.concerns(p) and (f := rule.find(p, env))]
    assert {(f.field, f.required) for f in found} == {
        (f"max_seqlen_{of}", Multiple(64)) for of in ("q", "kv")
    }
    assert [next(f.required.repairs(16534)) for f in found] == [16576, 16576]


# ---- cuDNN from 9.8 on ------------------------------------------------------------------------------------

FEW = {"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.1}


@each(
    "gpu, fields, refused",
    [
        ("H100", {}, True),
        ("H100", {"is_training": False}, False),
        ("H100", {"core_attention_bias_type": "alibi"}, False),
        ("H100", {"softmax_type": "learnable"}, False),
        ("H100", {"softmax_type": "off-by-one", "core_attention_bias_type": "alibi"}, False),
        ("H100", {"max_seqlen_q": 2}, False),
        ("B200", {"max_seqlen_q": 7}, True),
        ("B200", {"max_seqlen_q": 8}, False),
        ("B200", {"max_seqlen_q": 64, "head_dim_qk": 192, "head_dim_v": 128}, True),
        ("B200", {"max_seqlen_q": 65, "head_dim_qk": 192, "head_dim_v": 128}, False),
    ],
)
def test_9_13_1_has_no_dropout_over_few_queries_but_beside_alibi_or_a_sink(
    gpu: str, fields: dict[str, Any], refused: bool
) -> None:
    env = Environment.describe(gpu, cudnn="9.13.1")
    assert ("CUDNN143" in fired("cudnn", env, **{**FEW, **fields})) is refused


# ---- FP8 in cuDNN -----------------------------------------------------------------------------------------

DECODE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 4096}
SINK_AND_LOGIT = {"softmax_type": "learnable", "return_max_logit": True}
LEARNT_AND_GROUPED = {"softmax_type": "learnable", "num_gqa_groups": 4}
LEARNT_AND_DROPOUT = {"softmax_type": "learnable", "attention_dropout": 0.1}
DELAYED, CURRENT, MXFP8 = fp8.DELAYED, fp8.CURRENT, fp8.MXFP8
TENSORS = {"dtype": "fp8_e4m3", **DELAYED}
LEAVES_IT_ALONE: tuple[dict[str, Any], ...] = (
    {},
    {"fp8": True},
    {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed"}}},
    {"fp8": True, "fp8_meta": {"recipe": {"kind": "block"}}},
    {"fp8": False, "fp8_meta": DELAYED["fp8_meta"]},
)
FP8: list[Any] = [
    *(("A100", "8.9.7", {**fields, "head_dim_qk": 40, "softcap": 30.0}, set()) for fields in LEAVES_IT_ALONE),
    (
        "A100",
        "9.20.0",
        {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_mha": True}}},
        {"CUDNN304"},
    ),
    ("B200", "9.28.0", fp8.recipe("block"), {"CUDNN302"}),
    # formats
    ("H100", "9.20.0", {"dtype": "fp8_e4m3", "fp8_meta": {"recipe": {"kind": "delayed"}}}, {"CUDNN301"}),
    ("H100", "9.20.0", TENSORS, set()),
    ("H100", "9.7.0", {**TENSORS, "dtype": "fp8_e5m2"}, {"CUDNN303"}),
    ("H100", "9.8.0", {**TENSORS, "dtype": "fp8_e5m2"}, set()),
    # devices and versions
    ("L40S", "9.15.1", DELAYED, {"CUDNN304"}),
    ("H100", "9.0.0", DELAYED, {"CUDNN305"}),
    ("H100", "9.1.0", DELAYED, {"CUDNN306"}),
    ("H100", "9.2.1", DELAYED, set()),
    ("B200", "9.6.0", {**DELAYED, **INFERENCE}, {"CUDNN307"}),
    ("B200", "9.7.0", {**DELAYED, **INFERENCE}, set()),
    ("H100", "9.10.0", DELAYED, {"CUDNN308"}),
    ("H100", "9.10.1", DELAYED, set()),
    ("B200", "9.18.1", DELAYED, {"CUDNN309"}),
    ("B200", "9.19.0", DELAYED, set()),
    ("RTX 5090", "9.28.0", DELAYED, {"CUDNN310"}),
    ("RTX 5090", "9.13.0", {**DELAYED, **INFERENCE}, {"CUDNN311"}),
    ("sm110", "9.20.0", {**DELAYED, **INFERENCE}, {"CUDNN312"}),
    # recipes
    ("H100", "9.15.1", CURRENT, {"CUDNN313"}),
    ("RTX 5090", "9.28.0", {**CURRENT, **INFERENCE}, {"CUDNN313"}),
    ("B200", "9.10.2", {**CURRENT, **INFERENCE}, {"CUDNN314"}),
    ("B200", "9.13.0", {**CURRENT, **INFERENCE}, set()),
    ("B200", "9.19.0", CURRENT, set()),
    ("H100", "9.21.0", MXFP8, {"CUDNN315"}),
    ("B200", "9.20.0", MXFP8, {"CUDNN316"}),
    ("B200", "9.21.0", MXFP8, set()),
    ("B200", "9.22.0", MXFP8, set()),
    ("B200", "9.23.0", MXFP8, {"CUDNN316"}),
    ("B200", "9.23.1", MXFP8, {"CUDNN316"}),
    ("B200", "9.23.2", MXFP8, set()),
    ("B200", "9.21.0", fp8.recipe("mxfp8", fp8_mha=True), {"CUDNN317"}),
    # head dimensions and lengths
    ("H100", "9.7.0", {**DELAYED, **INFERENCE, "head_dim_qk": 72}, {"CUDNN320", "CUDNN321"}),
    ("H100", "9.2.1", {**DELAYED, **INFERENCE, "head_dim_qk": 64}, {"CUDNN322"}),
    ("H100", "9.7.0", {**DELAYED, **INFERENCE, "head_dim_qk": 64}, set()),
    ("H100", "9.7.0", {**DELAYED, "head_dim_qk": 64}, {"CUDNN323"}),
    ("H100", "9.7.0", {**DELAYED, **INFERENCE, "head_dim_qk": 512}, {"CUDNN324"}),
    ("B200", "9.7.0", {**DELAYED, **INFERENCE, "head_dim_qk": 64}, set()),
    ("B200", "9.20.0", {**DELAYED, "head_dim_qk": 256}, {"CUDNN325"}),
    ("B200", "9.18.1", {**DELAYED, **INFERENCE, "head_dim_qk": 192, "head_dim_v": 128}, {"CUDNN325"}),
    ("B200", "9.21.0", {**DELAYED, "head_dim_qk": 192, "head_dim_v": 128}, set()),
    ("H100", "9.2.1", {**DELAYED, "max_seqlen_q": 1000}, {"CUDNN326", "CUDNN327"}),
    ("H100", "9.7.0", {**DELAYED, "max_seqlen_q": 1000}, set()),
    # masks and windows
    ("H100", "9.20.0", {**DELAYED, "attn_mask_type": "arbitrary"}, {"CUDNN330"}),
    ("H100", "9.4.0", {**DELAYED, "attn_mask_type": "padding"}, {"CUDNN331"}),
    ("H100", "9.7.0", {**DELAYED, "attn_mask_type": "padding"}, set()),
    ("H100", "9.20.0", {**DELAYED, **BOTTOM_RIGHT}, {"CUDNN332"}),
    ("B200", "9.21.0", {**DELAYED, **BOTTOM_RIGHT}, set()),
    ("B200", "9.21.0", {**DELAYED, **BOTTOM_RIGHT, "max_seqlen_kv": 1024}, {"CUDNN335"}),
    ("B200", "9.21.0", {**DELAYED, **BOTTOM_RIGHT, "max_seqlen_q": 1000}, {"CUDNN336", "CUDNN337"}),
    ("H100", "9.28.0", {**DELAYED, **NO_MASK, "window_size": (128, 0)}, {"CUDNN332"}),
    ("H100", "9.28.0", {**DELAYED, **NO_MASK, "window_size": (128, -1)}, set()),
    ("B200", "9.28.0", {**INFERENCE, **DELAYED, **PADDED_BOTTOM_RIGHT, "max_seqlen_kv": 1024}, set()),
    ("B200", "9.28.0", {**DELAYED, **PADDED_BOTTOM_RIGHT, "max_seqlen_kv": 1024}, {"CUDNN335"}),
    ("H100", "9.7.0", {**DELAYED, **WINDOW}, {"CUDNN338"}),
    ("H100", "9.8.0", {**DELAYED, **WINDOW}, set()),
    ("B200", "9.7.0", {**DELAYED, **INFERENCE, **WINDOW}, {"CUDNN339"}),
    ("B200", "9.8.0", {**DELAYED, **INFERENCE, **WINDOW}, set()),
    ("B200", "9.21.0", {**DELAYED, **WINDOW}, set()),
    ("B200", "9.21.0", {**DELAYED, **WINDOW, "max_seqlen_kv": 1024}, {"CUDNN340"}),
    ("B200", "9.21.0", {**DELAYED, **INFERENCE, **WINDOW, "max_seqlen_kv": 1024}, set()),
    ("H100", "9.18.1", {**DELAYED, **WINDOW, "attn_mask_type": "padding_causal"}, {"CUDNN374"}),
    ("H100", "9.26.1", {**DELAYED, **WINDOW, "attn_mask_type": "padding_causal"}, set()),
    ("H100", "9.18.1", {**DELAYED, **WINDOW, "attention_dropout": 0.1}, {"CUDNN374"}),
    ("H100", "9.18.1", {**DELAYED, **WINDOW, "softmax_type": "learnable"}, {"CUDNN374"}),
    ("H100", "9.18.1", {**DELAYED, **WINDOW, "softmax_type": "off-by-one"}, set()),
    # one query
    ("H100", "9.8.0", {**DELAYED, **DECODE}, set()),
    ("H100", "9.10.2", {**DELAYED, **DECODE}, {"CUDNN370"}),
    ("H100", "9.28.0", {**DELAYED, **DECODE, "softmax_type": "learnable"}, set()),
    ("H100", "9.28.0", {**DELAYED, **DECODE, "core_attention_bias_type": "alibi"}, set()),
    ("RTX 5090", "9.28.0", {**DELAYED, **DECODE}, {"CUDNN370"}),
    ("B200", "9.28.0", {**DELAYED, **DECODE}, set()),
    ("B200", "9.28.0", {**DELAYED, **DECODE, "head_dim_qk": 192, "head_dim_v": 128}, {"CUDNN371"}),
    ("B200", "9.10.2", {**DELAYED, **DECODE, **PACKED}, {"CUDNN372"}),
    ("B200", "9.26.1", {**MXFP8, **DECODE}, {"CUDNN373"}),
    ("B200", "9.28.0", {**MXFP8, **DECODE}, set()),
    # scores and softmax
    ("H100", "9.20.0", {**DELAYED, "core_attention_bias_type": "post_scale_bias"}, {"CUDNN350"}),
    ("H100", "9.20.0", {**DELAYED, "core_attention_bias_type": "alibi"}, {"CUDNN350"}),
    ("H100", "9.20.0", {**DELAYED, **INFERENCE, "core_attention_bias_type": "alibi"}, set()),
    ("B200", "9.28.0", {**MXFP8, **INFERENCE, "core_attention_bias_type": "alibi"}, {"CUDNN350"}),
    ("H100", "9.20.0", {**DELAYED, "softcap": 30.0}, {"CUDNN351"}),
    ("B200", "9.10.2", {**DELAYED, **INFERENCE, "return_max_logit": True}, {"CUDNN352"}),
    ("B200", "9.28.0", {**DELAYED, "return_max_logit": True}, set()),
    ("B200", "9.28.0", {**MXFP8, "return_max_logit": True}, {"CUDNN366"}),
    ("H100", "9.10.2", {**DELAYED, "softmax_type": "learnable"}, {"CUDNN353"}),
    ("H100", "9.13.0", {**DELAYED, "softmax_type": "learnable"}, set()),
    ("B200", "9.18.1", {**DELAYED, **INFERENCE, **SINK_AND_LOGIT}, {"CUDNN376"}),
    ("B200", "9.21.0", {**DELAYED, **INFERENCE, **SINK_AND_LOGIT}, set()),
    ("B200", "9.28.0", {**DELAYED, **LEARNT_AND_GROUPED, "attn_mask_type": "padding_causal"}, {"CUDNN375"}),
    ("B200", "9.28.0", {**DELAYED, **LEARNT_AND_GROUPED, "attn_mask_type": "padding"}, set()),
    ("H100", "9.28.0", {**DELAYED, **LEARNT_AND_DROPOUT, "attn_mask_type": "padding"}, {"CUDNN375"}),
    ("H100", "9.28.0", {**DELAYED, **LEARNT_AND_DROPOUT}, set()),
    # dropout and determinism
    ("B200", "9.21.0", {**DELAYED, "attention_dropout": 0.1}, {"CUDNN355"}),
    ("H100", "9.21.0", {**DELAYED, "attention_dropout": 0.1}, set()),
    ("H100", "9.4.0", {**DELAYED, "attention_dropout": 0.1}, {"CUDNN356"}),
    ("H100", "9.18.1", {**DELAYED, "deterministic": True}, {"CUDNN357"}),
    ("H100", "9.19.0", {**DELAYED, "deterministic": True}, set()),
    ("H100", "9.18.1", {**DELAYED, **INFERENCE, "deterministic": True}, set()),
    ("B200", "9.19.0", {**DELAYED, "deterministic": True}, set()),
    # layouts and caches
    ("H100", "9.15.1", {**TENSORS, **PACKED}, {"CUDNN361"}),
    ("H100", "9.15.1", {**TENSORS, **INFERENCE, **PACKED}, set()),
    ("H100", "9.7.0", {**TENSORS, **INFERENCE, **PACKED}, {"CUDNN363"}),
    ("RTX 5090", "9.28.0", {**TENSORS, **INFERENCE, **PACKED}, set()),
    ("B200", "9.28.0", {**MXFP8, "dtype": "fp8_e5m2"}, {"CUDNN381"}),
    ("H100", "9.20.0", {**DELAYED, "qkv_layout": "sbhd"}, set()),
    ("H100", "9.20.0", {**DELAYED, "kv_cache": "contiguous", **INFERENCE}, set()),
    ("H100", "9.7.0", {**DELAYED, "kv_cache": "contiguous", **INFERENCE}, {"CUDNN364"}),
    ("H100", "9.14.0", {**DELAYED, **PAGED_FP8}, {"CUDNN379"}),
    ("H100", "9.18.1", {**DELAYED, **PAGED_FP8}, set()),
    ("B200", "9.8.0", {**DELAYED, **PAGED_FP8}, {"CUDNN380"}),
    ("B200", "9.10.2", {**DELAYED, **PAGED_FP8}, set()),
    ("B200", "9.28.0", {**MXFP8, **PAGED_FP8}, {"CUDNN365"}),
]


@each("gpu, cudnn, fields, expected", FP8)
def test_fp8(gpu: str, cudnn: str, fields: dict[str, Any], expected: set[str]) -> None:
    env = Environment.describe(gpu, cudnn=cudnn, cudnn_frontend="1.28.0")
    assert fired("cudnn.fp8", env, **fields) == expected


@each(
    "frontend, fields, expected",
    [
        ("1.20.0", {**DELAYED, "softmax_type": "learnable"}, {"CUDNN382"}),
        ("1.21.0", {**DELAYED, "softmax_type": "learnable"}, set()),
        ("1.27.0", {**MXFP8, "attn_mask_type": "padding"}, {"CUDNN367"}),
        ("1.27.0", {**MXFP8, **PACKED}, {"CUDNN362", "CUDNN367"}),
        ("1.28.0", {**MXFP8, "attn_mask_type": "padding"}, set()),
    ],
)
def test_fp8_with_a_frontend(frontend: str, fields: dict[str, Any], expected: set[str]) -> None:
    env = Environment.describe("B200", cudnn="9.28.0", cudnn_frontend=frontend)
    assert fired("cudnn.fp8", env, **fields) == expected


# ---- known bugs -------------------------------------------------------------------------------------------


def at(gpu: str, cudnn: str | None = None, torch: str = "2.13.0", **more: str) -> Environment:
    return Environment.describe(gpu, torch=torch, **({"cudnn": cudnn} if cudnn else {}), **more)


MASKED = {"attn_mask_type": "arbitrary"}
ONE = {**NO_MASK, "max_seqlen_q": 1, "max_seqlen_kv": 128}
BOTH_SIDES = {**NO_MASK, "window_size": (512, 512)}
SINK = {**PACKED, "softmax_type": "learnable", "head_dim_qk": 192}
LONG_CACHE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 2048, "num_heads": 28}
FEW_HEADS = {**LONG_CACHE, "num_gqa_groups": 4}
HALF_TILE = {**MASKED, "max_seqlen_q": 704}
BIASED = {**BIAS, "max_seqlen_q": 704}
DECODE_THD = {**INFERENCE, **PACKED, "max_seqlen_q": 1, "max_seqlen_kv": 300, "num_gqa_groups": 4}
BUGS: list[Any] = [
    # pytorch#193893: B200, few key/value heads, decoding
    ("BUG005", "sdpa.cudnn", at("B200", "9.19.0"), FEW_HEADS, True),
    ("BUG005", "cudnn", at("B200", "9.20.0"), FEW_HEADS, True),
    ("BUG005", "sdpa.cudnn", at("B200", "9.18.1"), FEW_HEADS, False),
    ("BUG005", "sdpa.cudnn", at("RTX 5090", "9.19.0"), FEW_HEADS, False),
    ("BUG005", "sdpa.cudnn", at("B200", "9.19.0"), {**LONG_CACHE, "num_gqa_groups": 14}, False),
    ("BUG005", "sdpa.cudnn", at("B200", "9.19.0"), {**FEW_HEADS, "max_seqlen_q": 64}, False),
    # pytorch#196678: H100, mask, keys % 128 == 64
    ("BUG006", "sdpa.cudnn", at("H100", "9.20.0"), HALF_TILE, True),
    ("BUG006", "sdpa.cudnn", at("H200", "9.20.0"), HALF_TILE, True),
    ("BUG006", "sdpa.cudnn", at("H100", "9.25.1"), {**MASKED, "max_seqlen_q": 64}, True),
    ("BUG006", "sdpa.cudnn", at("H100", "9.26.0"), HALF_TILE, False),
    ("BUG006", "sdpa.cudnn", at("H100", "9.20.0"), {**MASKED, "max_seqlen_q": 768}, False),
    ("BUG006", "sdpa.cudnn", at("H100", "9.20.0"), {"max_seqlen_q": 704}, False),
    ("BUG006", "sdpa.cudnn", at("H100", "9.20.0"), {**HALF_TILE, "is_training": False}, False),
    ("BUG006", "sdpa.cudnn", at("A100", "9.20.0"), HALF_TILE, False),
    ("BUG006", "cudnn", at("H100", "9.20.0"), BIASED, True),
    # cudnn-frontend#160
    ("BUG007", "cudnn", at("H100", "9.12.0", cudnn_frontend="1.14.0"), {"max_seqlen_q": 1000}, True),
    ("BUG007", "cudnn", at("H100", "9.12.0", cudnn_frontend="1.15.0"), {"max_seqlen_q": 1000}, False),
    ("BUG007", "cudnn", at("H100", "9.15.1", cudnn_frontend="1.14.0"), {"max_seqlen_q": 1000}, False),
    # cudnn-frontend#1072 and #1071
    ("BUG008", "cudnn", at("H200", "9.26.0"), {**ONE, "num_heads": 2}, True),
    ("BUG008", "cudnn", at("H200", "9.26.0"), {**ONE, "max_seqlen_kv": 97}, False),
    ("BUG008", "cudnn", at("H200", "9.26.0"), {**ONE, "attn_mask_type": "padding"}, False),
    ("BUG009", "cudnn", at("A100", "9.28.0"), {**ONE, "batch_size": 1, "num_heads": 1}, True),
    ("BUG009", "cudnn", at("A100", "9.18.1"), {**ONE, "batch_size": 1, "num_heads": 1}, False),
    ("BUG009", "cudnn", at("A100", "9.28.0"), {**ONE, "batch_size": 1, "num_heads": 2}, False),
    # cudnn-frontend#1083
    ("BUG010", "cudnn", at("A100", "9.26.0"), {**DECODE_THD, "return_lse": True}, True),
    ("BUG010", "cudnn", at("A100", "9.26.0"), DECODE_THD, False),
    ("BUG010", "cudnn", at("A100", "9.26.0"), {**DECODE_THD, "num_gqa_groups": 16}, False),
    ("BUG010", "cudnn", at("A100", "9.25.0"), {**DECODE_THD, "return_lse": True}, False),
    # TransformerEngine#2186, #3249
    ("BUG011", "cudnn", at("H100", "9.7.1"), {**PACKED, "pad_between_seqs": True}, True),
    ("BUG011", "cudnn", at("H100", "9.18.0"), {**PACKED, "pad_between_seqs": True}, False),
    ("BUG011", "cudnn", at("B200", "9.8.0"), {**PACKED, "pad_between_seqs": True}, False),
    ("BUG012", "cudnn", at("H100", "9.21.1"), SINK, True),
    ("BUG012", "cudnn", at("H100", "9.21.1"), {**SINK, "softmax_type": "off-by-one"}, False),
    ("BUG012", "cudnn", at("H100", "9.26.0"), SINK, False),
    # withdrawn and graph-captured releases
    ("BUG001", "cudnn", at("H100", "9.10.1"), {}, True),
    ("BUG001", "sdpa.cudnn", at("H100", "9.10.0"), {}, True),
    ("BUG001", "cudnn", at("H100", "9.10.2"), {}, False),
    ("BUG001", "cudnn", at("H100", "9.9.0"), {}, False),
    ("BUG002", "cudnn", at("H100", "9.14.0"), BOTH_SIDES, True),
    ("BUG002", "cudnn", at("H100", "9.14.0"), {**BOTH_SIDES, "max_seqlen_q": 1024}, False),
    ("BUG002", "cudnn", at("H100", "9.15.0"), BOTH_SIDES, False),
    ("BUG003", "cudnn", at("H100", "9.15.0"), {"cuda_graph": True, "max_seqlen_q": 1000}, True),
    ("BUG003", "cudnn", at("H100", "9.15.1"), {"cuda_graph": True, "max_seqlen_q": 1000}, False),
    ("BUG003", "cudnn", at("H100", "9.15.0"), {"max_seqlen_q": 1000}, False),
    # PyTorch
    ("BUG004", "sdpa.cudnn", at("H100", "9.10.2", "2.9.1"), {"max_seqlen_q": 261}, True),
    ("BUG004", "sdpa.cudnn", at("H100", "9.9.0", "2.9.1"), {"max_seqlen_q": 261}, False),
    ("BUG004", "sdpa.cudnn", at("H100", "9.10.2", "2.9.1"), {"max_seqlen_q": 256}, False),
    ("BUG030", "sdpa.cudnn", at("H100", "9.1.0", "2.5.0"), {}, True),
    ("BUG030", "sdpa.cudnn", at("H100", "9.1.0", "2.5.1"), {}, False),
    ("BUG032", "sdpa.efficient", at("A100"), {**MASKED, "batch_size": 1, "max_seqlen_q": 53936}, True),
    ("BUG032", "sdpa.efficient", at("A100"), {"batch_size": 1, "max_seqlen_q": 53936}, False),
]  # fmt: skip


@each("code, candidate, env, fields, fires", BUGS)
def test_a_known_bug(
    code: str, candidate: str, env: Environment, fields: dict[str, Any], fires: bool
) -> None:
    rule = REGISTRY.rules[code]
    p = AttentionParams(**fields)
    assert candidate in rule.candidates
    assert (rule.applies(env) and rule.concerns(p) and rule.find(p, env) is not None) is fires


def shared_kv(stride: int) -> dict[str, Any]:
    kv = TensorSpec(shape=(1, 512, 64, 64), stride=(512 * 64 * 64, 64, stride, 1))
    return {"tensors": Tensors(k=kv, v=kv), "max_seqlen_kv": 512, "batch_size": 1, "head_dim_qk": 64}


@each(
    "torch, fields, fires",
    [
        ("2.13.0", {**NO_MASK, "num_heads": 64, "max_seqlen_q": 1}, True),
        ("2.14.1", {**NO_MASK, "num_heads": 64, "max_seqlen_q": 1}, False),
        ("2.13.0", {**NO_MASK, "num_heads": 16, "max_seqlen_q": 1}, False),
        ("2.13.0", {"num_heads": 16, "max_seqlen_q": 65, "attn_mask_type": "causal"}, True),
        ("2.13.0", {**NO_MASK, "num_heads": 64, "max_seqlen_q": 2}, False),
        ("2.13.0", {**NO_MASK, "num_heads": 64, "max_seqlen_q": 1, "return_lse": True}, False),
    ],
)
def test_one_kv_head_in_memory_for_many_query_heads(torch: str, fields: dict[str, Any], fires: bool) -> None:
    env = at("A100", torch=torch)
    assert ("BUG031" in fired("", env, **INFERENCE, **fields, **shared_kv(0))) is fires
    assert "BUG031" not in fired("", env, **INFERENCE, **fields, **shared_kv(512 * 64))

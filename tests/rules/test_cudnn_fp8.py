"""What attnsel says of FP8 attention in cuDNN, recipe by recipe."""

from __future__ import annotations

from typing import Any

import pytest

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY
from attnsel.rules.cudnn import fp8, fp8_features, fp8_shapes, fp8_since_9_8
from attnsel.rules.cudnn.vocabulary import PAGED
from attnsel.verdicts.verdict import Reason

RULES = [
    rule
    for rule in REGISTRY.rules.values()
    if rule.module in {module.__name__ for module in (fp8, fp8_features, fp8_shapes, fp8_since_9_8)}
]
INFERENCE = {"is_training": False}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right"}
WINDOW = {"window_size": (128, 0)}
NO_MASK = {"attn_mask_type": "no_mask"}
PADDED_BOTTOM_RIGHT = {"attn_mask_type": "padding_causal_bottom_right"}
DECODE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 4096}
SINK_AND_LOGIT = {"softmax_type": "learnable", "return_max_logit": True}
GROUPED = {"softmax_type": "learnable", "num_gqa_groups": 4}
LEARNT_AND_DROPOUT = {"softmax_type": "learnable", "attention_dropout": 0.1}
BLOCK = fp8.recipe("block")
DELAYED, CURRENT, MXFP8 = fp8.DELAYED, fp8.CURRENT, fp8.MXFP8
TENSORS = {"dtype": "fp8_e4m3", **DELAYED}


def reasons(gpu: str, cudnn: str, frontend: str = "1.28.0", **fields: Any) -> list[Reason]:
    env = Environment.describe(gpu=gpu, cudnn=cudnn, cudnn_frontend=frontend)
    params = AttentionParams(**fields)
    found = ((rule, rule.find(params, env)) for rule in RULES if rule.applies(env) and rule.concerns(params))
    return [Reason(rule, finding) for rule, finding in found if finding is not None]


def verdict(found: list[Reason]) -> str:
    if any(not reason.unknown for reason in found):
        return "refused"
    return "unknown" if found else "accepted"


def codes(found: list[Reason]) -> set[str]:
    return {reason.code for reason in found}


# What an FP8 question is.


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"fp8": True},
        {"fp8": True, "fp8_meta": {"recipe": {"kind": "delayed"}}},
        {"fp8": True, "fp8_meta": {"recipe": {"kind": "block"}}},
        {"fp8": False, "fp8_meta": DELAYED["fp8_meta"]},
    ],
    ids=["plain", "no recipe", "linear layers only", "block scaling, linear layers only", "outside autocast"],
)
def test_a_recipe_that_leaves_attention_alone_is_no_fp8_question(fields: dict[str, Any]) -> None:
    assert reasons("A100", "8.9.7", **fields, head_dim_qk=40, softcap=30.0) == []


def test_fp8_mha_covers_attention_too() -> None:
    recipe = {"recipe": {"kind": "delayed", "fp8_mha": True}}
    assert codes(reasons("A100", "9.20.0", fp8=True, fp8_meta=recipe)) == {"CUDNN304"}


def test_fp8_tensors_without_a_recipe_are_told_what_is_missing() -> None:
    (reason,) = reasons("H100", "9.20.0", dtype="fp8_e4m3")
    assert (reason.code, reason.field) == ("CUDNN301", "fp8_meta")
    assert "a recipe of kind delayed, current or mxfp8, with fp8_dpa" in reason.message


def test_block_scaling_is_told_which_kinds_there_are() -> None:
    (reason,) = reasons("B200", "9.28.0", **BLOCK)
    assert (reason.code, reason.observed) == ("CUDNN302", "block")
    assert "delayed, current or mxfp8" in reason.required


# Feature by feature: gpu, cuDNN, question, codes.
TABLE = [
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
    ("B200", "9.28.0", {**DELAYED, **GROUPED, "attn_mask_type": "padding_causal"}, {"CUDNN375"}),
    ("B200", "9.28.0", {**DELAYED, **GROUPED, "attn_mask_type": "padding"}, set()),
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
    ("H100", "9.14.0", {**DELAYED, **PAGED}, {"CUDNN379"}),
    ("H100", "9.18.1", {**DELAYED, **PAGED}, set()),
    ("B200", "9.8.0", {**DELAYED, **PAGED}, {"CUDNN380"}),
    ("B200", "9.10.2", {**DELAYED, **PAGED}, set()),
    ("B200", "9.28.0", {**MXFP8, **PAGED}, {"CUDNN365"}),
]


@pytest.mark.parametrize(("gpu", "version", "fields", "expected"), TABLE)
def test_table(gpu: str, version: str, fields: dict[str, Any], expected: set[str]) -> None:
    assert codes(reasons(gpu, version, **fields)) == expected


@pytest.mark.parametrize(
    ("frontend", "fields", "expected"),
    [
        ("1.20.0", {**DELAYED, "softmax_type": "learnable"}, {"CUDNN382"}),
        ("1.21.0", {**DELAYED, "softmax_type": "learnable"}, set()),
        ("1.27.0", {**MXFP8, "attn_mask_type": "padding"}, {"CUDNN367"}),
        ("1.27.0", {**MXFP8, **PACKED}, {"CUDNN362", "CUDNN367"}),
        ("1.28.0", {**MXFP8, "attn_mask_type": "padding"}, set()),
    ],
)
def test_an_input_that_came_with_a_frontend(
    frontend: str, fields: dict[str, Any], expected: set[str]
) -> None:
    assert codes(reasons("B200", "9.28.0", frontend, **fields)) == expected


# Where attnsel says something else than TransformerEngine v2.18: gpu, cuDNN, question, TransformerEngine's
# answer, ours, the rule where the difference is argued, and words of that argument.
DIFFERENCES = [
    (
        "B200", "9.7.0", {**TENSORS, "head_dim_qk": 64}, "accepted", "refused",
        "CUDNN309", "TransformerEngine's table says 9.7, true for frontends of that time",
    ),
    (
        "B200", "9.20.0", {**TENSORS, "head_dim_qk": 192, "head_dim_v": 128}, "refused", "accepted",
        "CUDNN325", "the frontend, which names 9.19 and just this pair, is followed",
    ),
    (
        "B200", "9.21.0", {**TENSORS, "head_dim_qk": 160, "head_dim_v": 128}, "accepted", "refused",
        "CUDNN325", "TransformerEngine v2.18 waits for 9.21 and then takes every pair up to 192/128",
    ),
    (
        "RTX 5090", "9.20.0", {**TENSORS, **INFERENCE}, "refused", "accepted",
        "CUDNN311", "refuses sm120 at every version; the library is followed",
    ),
    (
        "H100", "9.1.0", TENSORS, "refused", "unknown",
        "CUDNN306", "the frontend takes FP8, TransformerEngine does not",
    ),
    (
        "H100", "9.5.0", {**TENSORS, "attn_mask_type": "padding"}, "refused", "unknown",
        "CUDNN331", "the frontend announced them for 9.5.0",
    ),
    (
        "B200", "9.20.0", {**TENSORS, **BOTTOM_RIGHT}, "refused", "accepted",
        "CUDNN333", "libcudnn asked without a GPU takes it from 9.8 on",
    ),
    (
        "B200", "9.13.0", {**CURRENT, **INFERENCE}, "refused", "accepted",
        "CUDNN314", "waits for 9.14 and gives no reason; the library is followed",
    ),
    (
        "H100", "9.20.0", {**TENSORS, **WINDOW}, "refused", "accepted",
        "CUDNN338", "libcudnn 9.8 to 9.28 asked without a GPU take it",
    ),
    (
        "H100", "9.20.0", {**TENSORS, "softmax_type": "learnable"}, "refused", "accepted",
        "CUDNN353", "waits for 9.21 and Blackwell; the library is followed",
    ),
    (
        "H100", "9.20.0", {**TENSORS, "return_max_logit": True}, "refused", "accepted",
        "CUDNN352", "accepts 9.13 to 9.28",
    ),
    (
        "H100", "9.7.0", {**TENSORS, **PACKED, **INFERENCE}, "refused", "unknown",
        "CUDNN363", "TransformerEngine gives the FP8 kernels no packed layout at any version",
    ),
    (
        "H100", "9.4.0", {**TENSORS, "attention_dropout": 0.1}, "accepted", "refused",
        "CUDNN356", "TransformerEngine has no clause",
    ),
    (
        "H100", "9.18.1", {**TENSORS, "deterministic": True}, "refused", "unknown",
        "CUDNN357", "the library plans it, but the flag changes nothing in the graph",
    ),
    (
        "H100", "9.7.0", {**TENSORS, **INFERENCE, "kv_cache": "contiguous"}, "refused", "unknown",
        "CUDNN364", "TransformerEngine never gives one to cuDNN",
    ),
    (
        "H100", "9.7.0", {**TENSORS, "dtype": "fp8_e5m2"}, "refused", "unknown",
        "CUDNN303", "TransformerEngine hands over E4M3 only",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "version", "fields", "theirs", "ours", "code", "why"), DIFFERENCES)
def test_difference_from_transformer_engine(
    gpu: str, version: str, fields: dict[str, Any], theirs: str, ours: str, code: str, why: str
) -> None:
    assert theirs != ours
    assert verdict(reasons(gpu, version, **fields)) == ours
    rule = REGISTRY.rules[code]
    assert why in " ".join(f"{rule.title} {rule.text}".split())

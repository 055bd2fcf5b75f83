"""Edges within a rule's body, a row each: GPU, versions, question, and the codes that fire there.

``fires_on`` and ``passes`` of a rule stand at its declaration (test_every_rule.py); a row here is for an edge
that neither shows. What is next to every bound and every release on both sides stands in tests/net.
"""

from __future__ import annotations

from typing import Any

from attnsel.environment import Environment
from attnsel.params import AttentionParams, Tensors, TensorSpec
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.cudnn import fp8
from attnsel.rules.cudnn.vocabulary import PAGED as PAGED_FP8
from tables import each

load_all()
INFERENCE = {"is_training": False}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
NO_MASK = {"attn_mask_type": "no_mask"}
BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right"}
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
        ("9.1.0", {"max_seqlen_q": 196608, "batch_size": 1, "qkv_layout": "thd_th2d"}, False),
        ("9.6.0", {"max_seqlen_q": 131072, "batch_size": 1}, None),
        ("9.1.0", {"max_seqlen_q": 65536, "batch_size": 2, "tensors": INTERLEAVED}, None),
    ],
)
def test_ragged_offsets_of_32_bits(cudnn: str, fields: dict[str, Any], unknown: bool | None) -> None:
    env, p = Environment.describe("H100", cudnn=cudnn), AttentionParams(**{**LONG, **fields})
    rules = [rule for rule in REGISTRY.rules.values() if rule.code.startswith("CUDNN") and rule.applies(env)]
    found = [f for rule in rules if rule.concerns(p) and (f := rule.find(p, env))]
    assert [type(f).__name__ == "Unknown" for f in found] == ([] if unknown is None else [unknown])


# ---- cuDNN from 9.8 on ------------------------------------------------------------------------------------


# ---- FP8 in cuDNN -----------------------------------------------------------------------------------------

DECODE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 4096}
LEARNT_AND_GROUPED = {"softmax_type": "learnable", "num_gqa_groups": 4}
LEARNT_AND_DROPOUT = {"softmax_type": "learnable", "attention_dropout": 0.1}
DELAYED, CURRENT, MXFP8 = fp8.DELAYED, fp8.CURRENT, fp8.MXFP8
TENSORS = {"dtype": "fp8_e4m3", **DELAYED}
FP8: list[Any] = [
    # formats
    ("H100", "9.20.0", {"dtype": "fp8_e4m3", "fp8_meta": {"recipe": {"kind": "delayed"}}}, {"CUDNN301"}),
    ("H100", "9.8.0", {**TENSORS, "dtype": "fp8_e5m2"}, set()),
    # devices and versions
    ("H100", "9.1.0", DELAYED, {"CUDNN306"}),
    # recipes
    ("B200", "9.23.0", MXFP8, {"CUDNN316"}),
    ("B200", "9.23.1", MXFP8, {"CUDNN316"}),
    # head dimensions and lengths
    ("H100", "9.7.0", {**DELAYED, **INFERENCE, "head_dim_qk": 72}, {"CUDNN320", "CUDNN321"}),
    ("B200", "9.18.1", {**DELAYED, **INFERENCE, "head_dim_qk": 192, "head_dim_v": 128}, {"CUDNN325"}),
    ("B200", "9.21.0", {**DELAYED, "head_dim_qk": 192, "head_dim_v": 128}, set()),
    ("H100", "9.7.0", {**DELAYED, "max_seqlen_q": 1000}, set()),
    # masks and windows
    ("B200", "9.21.0", {**DELAYED, **BOTTOM_RIGHT, "max_seqlen_kv": 1024}, {"CUDNN335"}),
    ("H100", "9.28.0", {**DELAYED, **NO_MASK, "window_size": (128, 0)}, {"CUDNN332"}),
    ("H100", "9.8.0", {**DELAYED, **WINDOW}, set()),
    ("B200", "9.7.0", {**DELAYED, **INFERENCE, **WINDOW}, {"CUDNN339"}),
    ("B200", "9.21.0", {**DELAYED, **INFERENCE, **WINDOW, "max_seqlen_kv": 1024}, set()),
    ("H100", "9.18.1", {**DELAYED, **WINDOW, "softmax_type": "learnable"}, {"CUDNN374"}),
    # one query
    ("H100", "9.28.0", {**DELAYED, **DECODE, "core_attention_bias_type": "alibi"}, set()),
    ("RTX 5090", "9.28.0", {**DELAYED, **DECODE}, {"CUDNN370"}),
    ("B200", "9.28.0", {**MXFP8, **DECODE}, set()),
    # scores and softmax
    ("B200", "9.10.2", {**DELAYED, **INFERENCE, "return_max_logit": True}, {"CUDNN352"}),
    ("H100", "9.13.0", {**DELAYED, "softmax_type": "learnable"}, set()),
    ("B200", "9.28.0", {**DELAYED, **LEARNT_AND_GROUPED, "attn_mask_type": "padding"}, set()),
    ("H100", "9.28.0", {**DELAYED, **LEARNT_AND_DROPOUT, "attn_mask_type": "padding"}, {"CUDNN375"}),
    ("H100", "9.28.0", {**DELAYED, **LEARNT_AND_DROPOUT}, set()),
    # dropout and determinism
    ("B200", "9.21.0", {**DELAYED, "attention_dropout": 0.1}, {"CUDNN355"}),
    ("H100", "9.19.0", {**DELAYED, "deterministic": True}, set()),
    ("H100", "9.18.1", {**DELAYED, **INFERENCE, "deterministic": True}, set()),
    # layouts and caches
    ("H100", "9.7.0", {**TENSORS, **INFERENCE, **PACKED}, {"CUDNN363"}),
    ("RTX 5090", "9.28.0", {**TENSORS, **INFERENCE, **PACKED}, set()),
    ("B200", "9.8.0", {**DELAYED, **PAGED_FP8}, {"CUDNN380"}),
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
        ("1.27.0", {**MXFP8, **PACKED}, {"CUDNN362", "CUDNN367"}),
    ],
)
def test_fp8_with_a_frontend(frontend: str, fields: dict[str, Any], expected: set[str]) -> None:
    for version, codes in ((frontend, expected), ("1.28.0", set())):
        env = Environment.describe("B200", cudnn="9.28.0", cudnn_frontend=version)
        assert fired("cudnn.fp8", env, **fields) == codes


# ---- known bugs -------------------------------------------------------------------------------------------

BOTH_SIDES = {**NO_MASK, "window_size": (512, 512)}
SINK = {**PACKED, "softmax_type": "learnable", "head_dim_qk": 192}
LONG_CACHE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 2048, "num_heads": 28}
FEW_HEADS = {**LONG_CACHE, "num_gqa_groups": 4}
DECODE_THD = {**INFERENCE, **PACKED, "max_seqlen_q": 1, "max_seqlen_kv": 300, "num_gqa_groups": 4}
BUGS: list[Any] = [
    # pytorch#193893: B200, few key/value heads, decoding
    ("BUG005", "B200", "9.19.0", {**FEW_HEADS, "max_seqlen_q": 64}, False),
    # pytorch#196678: H100, mask, keys % 128 == 64
    ("BUG006", "H100", "9.20.0", {"max_seqlen_q": 704}, False),
    # cudnn-frontend#1083
    ("BUG010", "A100", "9.26.0", {**DECODE_THD, "return_lse": True}, True),
    # TransformerEngine#2186, #3249
    ("BUG011", "H100", "9.18.0", {**PACKED, "pad_between_seqs": True}, False),
    ("BUG012", "H100", "9.21.1", {**SINK, "softmax_type": "off-by-one"}, False),
    ("BUG012", "H100", "9.26.0", SINK, False),
    # withdrawn and graph-captured releases
    ("BUG001", "H100", "9.10.1", {}, True),
    ("BUG002", "H100", "9.14.0", {**BOTH_SIDES, "max_seqlen_q": 1024}, False),
    ("BUG003", "H100", "9.15.1", {"cuda_graph": True, "max_seqlen_q": 1000}, False),
    ("BUG003", "H100", "9.15.0", {"max_seqlen_q": 1000}, False),
]


@each("code, gpu, cudnn, fields, fires", BUGS)
def test_a_known_bug(code: str, gpu: str, cudnn: str, fields: dict[str, Any], fires: bool) -> None:
    env = Environment.describe(gpu, torch="2.13.0", cudnn=cudnn)
    assert (code in fired("bugs", env, **fields)) is fires


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
    env = Environment.describe("A100", torch=torch)
    assert ("BUG031" in fired("bugs", env, **INFERENCE, **fields, **shared_kv(0))) is fires
    assert "BUG031" not in fired("bugs", env, **INFERENCE, **fields, **shared_kv(512 * 64))

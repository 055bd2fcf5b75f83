"""What attnsel says of cuDNN below 9.8 for FP16/BF16, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY
from attnsel.rules.cudnn import (
    before_9_8_backward,
    before_9_8_forward,
    before_9_8_layouts,
    before_9_8_masks,
    before_9_8_scores,
)
from attnsel.verdicts.requirements import Multiple
from attnsel.verdicts.verdict import Reason, Violation

MODULES = (
    before_9_8_backward,
    before_9_8_forward,
    before_9_8_layouts,
    before_9_8_masks,
    before_9_8_scores,
)
RULES = [rule for rule in REGISTRY.rules.values() if rule.module in {module.__name__ for module in MODULES}]

INFERENCE = {"is_training": False}
MLA = {"head_dim_qk": 192, "head_dim_v": 128}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
GROUPED = {"num_heads": 32, "num_gqa_groups": 8}
BIAS = {"core_attention_bias_type": "post_scale_bias"}
BIAS_GRADIENT = {**BIAS, "core_attention_bias_requires_grad": True}
ALIBI = {"core_attention_bias_type": "alibi"}
BOTTOM_RIGHT = {"attn_mask_type": "causal_bottom_right"}
CROSS = {"max_seqlen_q": 1024, "max_seqlen_kv": 4096}
PAGED = {
    "qkv_layout": "paged_kv_bshd_bshd_bshd",
    "kv_cache": "paged",
    "page_size": 64,
    "is_training": False,
    "attn_mask_type": "padding",
}


def reasons(gpu: str, cudnn: str, **fields: Any) -> list[Reason]:
    env = Environment.describe(gpu=gpu, cudnn=cudnn)
    params = AttentionParams(**fields)
    found = ((rule, rule.find(params, env)) for rule in RULES if rule.applies(env) and rule.concerns(params))
    return [Reason(rule, finding) for rule, finding in found if finding is not None]


def verdict(found: list[Reason]) -> str:
    if any(not reason.unknown for reason in found):
        return "refused"
    return "unknown" if found else "accepted"


def codes(found: list[Reason]) -> set[str]:
    return {reason.code for reason in found}


# The cases of the issue tracker that this project answers.


def test_mla_training_on_hopper_is_refused_by_one_rule_that_names_9_5() -> None:
    found = reasons("H100", "9.1.0", **MLA)
    assert codes(found) == {"CUDNN204"}
    assert found[0].field == "head_dim_qk"
    assert "9.5.0" in found[0].message
    assert Version(9, 5, 0) in set(found[0].rule.when[0].edges())  # type: ignore[attr-defined]


def test_mla_inference_on_hopper_is_accepted_from_9_1() -> None:
    assert verdict(reasons("H100", "9.1.0", **MLA, **INFERENCE)) == "accepted"
    assert codes(reasons("H100", "9.0.0", **MLA, **INFERENCE)) == {"CUDNN116"}


def test_length_16534_on_ampere_is_refused_on_both_sides_and_for_nothing_else() -> None:
    shape = {"batch_size": 48, "max_seqlen_q": 16534, "num_heads": 18, "head_dim_qk": 128}
    found = reasons("A100", "8.9.7", **shape)
    assert {(reason.field, reason.finding.required) for reason in found} == {
        ("max_seqlen_q", Multiple(64)),
        ("max_seqlen_kv", Multiple(64)),
    }
    assert [next(reason.finding.required.repairs(16534)) for reason in found] == [16576, 16576]
    assert verdict(reasons("A100", "9.0.0", **shape)) == "accepted"


@pytest.mark.parametrize("version", ["8.9.3", "8.9.7", "9.0.0", "9.1.0", "9.2.0", "9.3.0", "9.5.1", "9.7.1"])
@pytest.mark.parametrize("gpu", ["A100", "L4", "H100"])
def test_plain_causal_training_is_accepted_everywhere(gpu: str, version: str) -> None:
    assert reasons(gpu, version) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
@pytest.mark.parametrize("gpu", ["T4", "A100", "L4", "H100", "B200", "RTX 5090"])
def test_every_rule_ends_at_9_8(rule: Any, gpu: str) -> None:
    assert not rule.applies(Environment.describe(gpu=gpu, cudnn="9.8.0"))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_no_rule_speaks_about_fp8_attention(rule: Any) -> None:
    assert not rule.concerns(AttentionParams(dtype="fp8_e4m3"))


# Feature by feature: gpu, cuDNN, question, codes.
TABLE = [
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


@pytest.mark.parametrize(("gpu", "version", "fields", "expected"), TABLE)
def test_table(gpu: str, version: str, fields: dict[str, Any], expected: set[str]) -> None:
    assert codes(reasons(gpu, version, **fields)) == expected


# Ragged offsets.

LONG = {**PACKED, "qkv_layout": "t3hd", "num_heads": 64}


@pytest.mark.parametrize(
    ("tokens", "batch", "version", "expected"),
    [
        (131072, 1, "9.1.0", "refused"),  # one sequence alone: 3 * 64 * 128 * 131072 elements
        (65536, 1, "9.1.0", "accepted"),
        (65536, 2, "9.1.0", "unknown"),  # a full batch would be too much
        (131072, 1, "9.6.0", "accepted"),
    ],
)
def test_ragged_offsets(tokens: int, batch: int, version: str, expected: str) -> None:
    assert verdict(reasons("H100", version, **LONG, max_seqlen_q=tokens, batch_size=batch)) == expected


def test_ragged_offsets_are_exact_where_tensors_are_described() -> None:
    shape = {"shape": (65536, 64, 128), "stride": (24576, 384, 1)}
    tensors = {"q": shape, "k": shape, "v": shape}
    found = reasons("H100", "9.1.0", **LONG, max_seqlen_q=65536, batch_size=2, tensors=tensors)
    assert found == []


# Where attnsel says something else than TransformerEngine v2.18: gpu, cuDNN, question, TransformerEngine's
# answer, ours, the rule where the difference is argued, and words of that argument.
DIFFERENCES = [
    (
        "H100", "9.3.0", {"attn_mask_type": "padding"}, "refused", "unknown",
        "CUDNN440", "changed by PR #2477 (c6a92a4dc, first in v2.12), against v2.3 to v2.11",
    ),
    ("H100", "9.5.0", PACKED, "refused", "unknown", "CUDNN440", "tests these features"),
    ("H100", "9.5.0", {"attention_dropout": 0.1}, "refused", "unknown", "CUDNN440", "a side effect"),
    ("H100", "9.5.0", BIAS, "refused", "unknown", "CUDNN440", "unknown"),
    ("H100", "9.5.0", {"max_seqlen_kv": 1024}, "refused", "unknown", "CUDNN440", "more queries than keys"),
    (
        "H100", "8.9.2", {}, "accepted", "unknown",
        "CUDNN103", "requires cudnn version 8.9.3 and above",
    ),
    (
        "H100", "8.9.5", {"head_dim_qk": 96}, "accepted", "refused",
        "CUDNN113", "TransformerEngine asks for a multiple of 8 at every version",
    ),
    (
        "H100", "8.9.5", {"head_dim_v": 64}, "accepted", "refused",
        "CUDNN114", "TransformerEngine has no such clause",
    ),
    (
        "H100", "9.7.0", {**BIAS, "attn_mask_type": "padding"}, "refused", "unknown",
        "CUDNN122", "TransformerEngine refuses the pair at every version",
    ),
    (
        "A100", "9.7.0", ALIBI, "refused", "unknown",
        "CUDNN123", "TransformerEngine gives ALiBi to sm90 and newer only",
    ),
    (
        "H100", "9.7.0", {**ALIBI, "attn_mask_type": "padding_causal"}, "refused", "unknown",
        "CUDNN124", "With padding_causal the frontend builds it",
    ),
    (
        "H100", "9.6.0", {**BOTTOM_RIGHT, "max_seqlen_q": 1000}, "refused", "accepted",
        "CUDNN405", "TransformerEngine v2.18 keeps the clause until 9.7.0",
    ),
    (
        "H100", "9.7.0", {**BOTTOM_RIGHT, **ALIBI}, "accepted", "refused",
        "CUDNN408", "from 9.7 on it lets the pair pass; the frontend is followed",
    ),
    (
        "H100", "9.7.0", {"max_seqlen_q": 1, "max_seqlen_kv": 64, **INFERENCE}, "accepted", "refused",
        "CUDNN410", "TransformerEngine do not say it",
    ),
    (
        "H100", "9.3.0", {**BOTTOM_RIGHT, "window_size": (128, 0)}, "accepted", "refused",
        "CUDNN413", "saying causal is the way out",
    ),
    (
        "H100", "9.6.0", {"attn_mask_type": "no_mask", "window_size": (128, -1)}, "accepted", "refused",
        "CUDNN415", "TransformerEngine v2.18 allows the open side from 9.6",
    ),
    (
        "H100", "9.6.0", {"attn_mask_type": "padding", "window_size": (128, 128)}, "accepted", "refused",
        "CUDNN419", "TransformerEngine has no such clause; the frontend refuses the graph",
    ),
    (
        "H100", "9.1.1", {**PACKED, **GROUPED, **INFERENCE}, "refused", "unknown",
        "CUDNN432", "the frontend refuses the backward pass only",
    ),
    (
        "H100", "9.1.0", PAGED, "accepted", "refused",
        "CUDNN435", "let paged layouts of one format pass at 9.1",
    ),
    (
        "H100", "9.6.0", {**PAGED, "head_dim_qk": 256}, "accepted", "refused",
        "CUDNN437", "TransformerEngine would allow 256 on Hopper",
    ),
    ("L4", "9.6.0", PAGED, "refused", "unknown", "CUDNN438", "The library accepts it there from 9.8"),
    (
        "A100", "9.1.0", {"deterministic": True}, "refused", "unknown",
        "CUDNN205", "TransformerEngine never trusts it before Hopper",
    ),
    (
        "H100", "9.1.0", {**BIAS_GRADIENT, "max_seqlen_q": 1000}, "accepted", "refused",
        "CUDNN208", "TransformerEngine has no such clause",
    ),
    (
        "H100", "9.7.0", {**BOTTOM_RIGHT, "attention_dropout": 0.1}, "accepted", "refused",
        "CUDNN409", "TransformerEngine until 9.6",
    ),
    (
        "H100", "9.7.0", {"max_seqlen_q": 1, "attn_mask_type": "no_mask"}, "accepted", "refused",
        "CUDNN213", "TransformerEngine does not ask",
    ),
    (
        "A100", "9.7.0", {**INFERENCE, "qkv_layout": "thd_bshd_bshd", "attn_mask_type": "padding"},
        "accepted", "refused",
        "CUDNN431", "TransformerEngine lets packed queries with a padded cache pass",
    ),
    ("B300", "9.7.0", {}, "accepted", "unknown", "CUDNN105", "TransformerEngine accepts sm103 like sm100"),
    ("RTX 5090", "9.7.0", {}, "refused", "unknown", "CUDNN105", "refuses sm120 until 9.18.1"),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "version", "fields", "theirs", "ours", "code", "why"), DIFFERENCES)
def test_difference_from_transformer_engine(
    gpu: str, version: str, fields: dict[str, Any], theirs: str, ours: str, code: str, why: str
) -> None:
    assert theirs != ours
    assert verdict(reasons(gpu, version, **fields)) == ours
    assert why in " ".join(REGISTRY.rules[code].text.split())


def test_a_square_bottom_right_window_is_offered_the_same_thing_at_the_top_left() -> None:
    window = {"window_size": (128, 128), "attn_mask_type": "padding"}
    (reason,) = reasons("H100", "9.6.0", **window)
    assert isinstance(reason.finding, Violation)
    assert (reason.field, *reason.finding.required.repairs(True)) == ("bottom_right_diagonal", False)
    assert reasons("H100", "9.6.0", **window, bottom_right_diagonal=False) == []

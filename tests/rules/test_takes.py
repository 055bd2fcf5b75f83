"""What attnsel's own records list under ``takes`` is what their rules leave, word by word.

A word is about the kernel itself. A mask that ``fold_mask`` writes counts, because the kernel takes it; what
attnsel carries out around any kernel (padding, copies, repeated heads) does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from attnsel import AttentionParams, Environment, Policy, Tensors, TensorSpec
from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Device
from attnsel.rules.takes import DEVICES, DTYPES, FEATURES, OFFSETS, WORDS, not_taken
from attnsel.selection.inquiry import Inquiry
from attnsel.verdicts.reasons import NO_EVIDENCE
from attnsel.verdicts.record import CandidateRecord
from tables import each

RECORDS = [record for record in CANDIDATES.values() if record.limits == "rules" and not record.plugin]

CPU = Environment.describe("cpu")
MACHINES = [
    *(
        Environment.describe(gpu, torch="2.13.0", cudnn="9.28.0")
        for gpu in ("T4", "A100", "L4", "H100", "B200")
    ),
    CPU,
    *(CPU.replace(device=Device(type=kind, name=kind)) for kind in ("rocm", "mps", "xpu")),
]

SMALL: dict[str, Any] = {"max_seqlen_q": 128, "num_heads": 4, "head_dim_qk": 64, "is_training": False}
SMALL |= {"attn_mask_type": "no_mask"}
TWICE_AS_FAR = TensorSpec(shape=(2, 128, 4, 64), stride=(65536, 512, 128, 1), dtype="bf16")
PADDING = {"attn_mask_type": "padding"}
PACKED = {"qkv_layout": "thd", **PADDING}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 256, **PADDING}
BIAS = {"core_attention_bias_type": "post_scale_bias"}
FP8 = {"dtype": "fp8_e4m3", "fp8": True, "fp8_meta": {"recipe": {"kind": "delayed", "fp8_dpa": True}}}

# The smallest question that asks for it, as what differs from SMALL; more than one where several features
# share a word.
ASKS: dict[str, tuple[dict[str, Any], ...]] = {
    "thd": (PACKED,),
    "paged": (PAGED,),
    "training": ({"is_training": True},),
    "deterministic": ({"deterministic": True},),
    "gqa": ({"num_gqa_groups": 2},),
    "head_dim_v": ({"head_dim_v": 32},),
    "causal": ({"attn_mask_type": "causal"},),
    "padding": (PADDING,),
    "mask": ({"attn_mask_type": "arbitrary"},),
    "window": ({"window_size": (16, 16)},),
    "top_left": (
        {"attn_mask_type": "causal", "max_seqlen_kv": 256},
        {"attn_mask_type": "causal", "max_seqlen_kv": 96},
    ),
    "bottom_right": ({"attn_mask_type": "causal_bottom_right", "max_seqlen_kv": 256},),
    "bias": (BIAS,),
    "bias_grad": ({**BIAS, "core_attention_bias_requires_grad": True, "is_training": True},),
    "alibi": ({"core_attention_bias_type": "alibi", "attn_mask_type": "causal"},),
    "softcap": ({"softcap": 30.0},),
    "sinks": ({"softmax_type": "off-by-one"},),
    "dropout": ({"attention_dropout": 0.125, "is_training": True},),
    "lse": ({"return_lse": True},),
    "max_logit": ({"return_max_logit": True},),
    "strides": tuple({"tensors": Tensors(**{name: TWICE_AS_FAR})} for name in "qkv"),
    "gaps": ({**PACKED, "pad_between_seqs": True},),
    "cuda_graph": ({"cuda_graph": True},),
    "empty": ({"max_seqlen_q": 0, "max_seqlen_kv": 128}, {"max_seqlen_kv": 0}),
    "fp8": (FP8,),
    # No call asks for these, the steps of one over ranks do.
    "offsets": ({"cp_size": 2, "attn_mask_type": "causal", "window_size": (16, 0)},),
    "head_offset": ({"cp_size": 2, "cp_comm_type": "a2a", "attention_dropout": 0.125, "is_training": True},),
}


def words_of(p: AttentionParams) -> set[str]:
    """The features that a question asks for."""
    return {feature.word for feature in FEATURES if feature.asked(p)}


def questions_for(word: str) -> Iterator[tuple[AttentionParams, Environment]]:
    """What asks for a word, in every element type and on every machine that goes with it."""
    dtypes = (word,) if word in DTYPES else DTYPES
    machines = [env for env in MACHINES if word not in DEVICES or env.device.type == word]
    for asks, dtype, env in product(ASKS.get(word, ({},)), dtypes, machines):
        yield AttentionParams(**{**SMALL, "dtype": dtype, **asks}), env


def takes_it(record: CandidateRecord, p: AttentionParams, env: Environment) -> bool:
    """Whether its kernel is known to take this very call."""
    policy = Policy(backend=record.name)  # asked for by name, triton is interpreted on a CPU
    seen = Inquiry(p, env, policy, NO_EVIDENCE).judge(record.name)
    return seen.verdict == "eligible" and all(change.name == "fold_mask" for change in seen.adaptations)


def test_every_word_has_its_question() -> None:
    assert {*ASKS, *DTYPES, *DEVICES} == set(WORDS)
    assert words_of(AttentionParams(**SMALL)) == set()
    for word in ASKS.keys() - set(OFFSETS):
        asked = [AttentionParams(**{**SMALL, **asks}) for asks in ASKS[word]]
        assert all(word in words_of(p) for p in asked)
        features = [feature for feature in FEATURES if feature.word == word]
        assert all(any(feature.asked(p) for p in asked) for feature in features), word

    for word in ("dropout", "bias_grad"):  # which rules, and the runtime, read in training alone
        (asks,) = ASKS[word]
        assert word not in words_of(AttentionParams(**{**SMALL, **asks, "is_training": False}))


@each("word", WORDS)
@each("record", RECORDS)
def test_the_rules_leave_what_is_listed_and_nothing_else(record: CandidateRecord, word: str) -> None:
    taken = [f"{p.dtype} on {env.target}" for p, env in questions_for(word) if takes_it(record, p, env)]
    if word in record.takes:
        assert taken, "refused everywhere"
    else:
        assert taken == []


@each("record", RECORDS)
def test_calls_of_many_features_are_left_where_all_are_listed(record: CandidateRecord) -> None:
    """One word refuses whatever else is asked: rules may not look at a feature alone."""
    from questions import (
        questions,
    )  # here: the tests of one rule need no more than this folder and tests/support

    left = 0
    for p, env, _ in questions(seed=11, count=300):
        # Of AMD's GPUs some are taken by their name (SDPA801); a contiguous cache has no word.
        if env.device.type != "rocm" and p.kv_cache != "contiguous" and takes_it(record, p, env):
            left += 1
            unlisted = [feature.word for feature in not_taken(record.takes) if feature.asked(p)]
            assert unlisted == [], p
            assert env.device.type in record.takes
            assert p.fp8_attention or p.dtype in record.takes
    assert left > 2

"""Proof by features: a call is proven where each one that it asks for is; elsewhere it counts as new."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from added_rule import forget
from attnsel import AttentionParams, Environment, select
from attnsel.backends.registry import CANDIDATES
from attnsel.rules.takes import unproven, unproven_parts
from attnsel.verdicts.record import CandidateRecord, Proven
from tables import each

FEATURES = frozenset({"bf16", "training", "causal", "gqa", "top_left"})
PART = Proven("sm90", FEATURES, 128)


def record(*proven: str | Proven, **changed: Any) -> CandidateRecord:
    return dataclasses.replace(CANDIDATES["triton"], proven=proven, **changed)


@pytest.fixture
def triton_is() -> Iterator[Callable[..., None]]:
    """Triton's record with other proofs, for as long as a test takes."""
    was = CANDIDATES["triton"]

    def put(*proven: str | Proven) -> None:
        CANDIDATES["triton"] = record(*proven)
        forget()

    yield put
    CANDIDATES["triton"] = was
    forget()


def test_a_whole_target_is_proven_with_all_features_and_needs_no_look_at_the_question() -> None:
    """Nor does one where nothing is proven: it is asked for every candidate at every decision."""
    nobody: Any = None
    assert not unproven(record("cpu", "sm90"), nobody, "sm90")
    assert unproven(record("cpu"), nobody, "sm90")
    assert unproven(record(PART), nobody, "sm86"), "what is proven on one architecture is on no other"
    assert unproven_parts(record(PART), nobody, "sm86") == []
    assert not unproven(record(trusted=True), nobody, "sm90")


QUESTIONS = (
    {},
    {"dtype": "fp16"},
    {"core_attention_bias_type": "alibi"},
    {"core_attention_bias_type": "post_scale_bias"},
    {"window_size": (9, 0)},
    {"is_training": False, "max_seqlen_q": 1, "num_gqa_groups": 4},
    {"head_dim_qk": 256, "head_dim_v": 256},
    {"qkv_layout": "thd_thd_thd", "attn_mask_type": "padding_causal"},
)


@each("gpu", ["H100", "A100", "T4"])
@each("proven", [("cpu",), ("cpu", "sm90"), ("cpu", PART)])
def test_the_choice_is_the_first_of_the_ranks(
    triton_is: Callable[..., None], gpu: str, proven: tuple[Any, ...]
) -> None:
    """The choice is made from bounds: a target that is proven in part must not be bounded too low."""
    triton_is(*proven)
    for cudnn in (None, "9.13.0"):
        env = Environment.describe(gpu, cudnn=cudnn)
        for asked in QUESTIONS:
            selection = select(AttentionParams(**asked), env)
            standing = [c.name for c in selection.candidates if c.verdict != "refused"]
            assert selection.backend == (standing[0] if standing else None), asked


def test_a_call_with_an_unproven_feature_ranks_as_on_an_unproven_target(
    triton_is: Callable[..., None],
) -> None:
    env = Environment.describe("B200", cudnn=None, cudnn_frontend=None)  # not executed off-GPU there

    def place(**asked: Any) -> int:
        return [c.name for c in select(AttentionParams(**asked), env).candidates].index("triton")

    triton_is("cpu")
    before = place(core_attention_bias_type="post_scale_bias"), place()
    triton_is("cpu", PART._replace(target="sm100"))
    assert place(core_attention_bias_type="post_scale_bias") == before[0]
    assert place() < before[1]

"""The wheel of torch must have code for the GPU; what padding costs; where the library is followed."""

from __future__ import annotations

import json
from pathlib import Path

from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY
from attnsel.selection.rule_index import fields_of
from tables import each

RULE = REGISTRY.rules["INSTALL008"]
FP16 = AttentionParams(dtype="fp16")


@each(
    "gpu, given, needs",
    [
        ("V100", {"torch": "2.14.0", "cuda": "13.0"}, ["2.14.0+cu126", "2.10.0+cu128"]),
        ("V100", {"torch": "2.15.0"}, ["2.14.1+cu126", "2.10.0+cu128"]),
        ("V100", {"torch": "2.11.0", "cuda": "12.8"}, ["2.11.0+cu126", "2.10.0+cu128"]),
        ("V100", {"torch": "2.7.1", "cuda": "12.8"}, ["2.7.1+cu126"]),
        ("RTX 5090", {"torch": "2.6.0"}, ["2.7.1+cu128", "2.8.0+cu128"]),
        ("B200", {"cuda": "12.4"}, ["2.10.0+cu128"]),
    ],
)
def test_nothing_runs_where_the_wheel_has_no_code_for_the_gpu(gpu, given, needs):
    env = Environment.describe(gpu, **given)
    selection = select(FP16, env, policy=Policy(adapt="never"))
    assert selection.backend is None
    refused = {c.name for c in selection.candidates if any(r.code == RULE.code for r in c.reasons)}
    assert refused == set(RULE.candidates)
    finding = RULE.find(FP16, env)
    assert [build.name for build in finding.required.builds] == needs
    for change in finding.required.repairs(finding.observed):
        better = env.derive(assumed=tuple(n for n in env.assumed if n not in change), **change)
        assert RULE.find(FP16, better) is None


def test_the_way_out_is_a_wheel_that_has_it_and_it_is_asked_once_per_environment():
    """Trials, V100: with CUDA 13 nothing runs, and the wheel for CUDA 12.6 of the same torch does."""
    selection = select(FP16, Environment.describe("V100", torch="2.14.0", cuda="13.0"))
    assert selection.backend is None
    changes = [dict(unlock.changes) for unlock in selection.unlocks if unlock.candidate == "sdpa.efficient"]
    assert any(str(change.get("cuda")) == "12.6.0" and "gpu" not in change for change in changes)
    assert fields_of(RULE) == frozenset(), "a new question does not ask it again"


def test_flash_on_cuda_lists_the_padding_of_head_dimensions_with_its_bytes():
    column = 2 * 4096 * 16 * 2  # bytes of a column: b, s, h and two bytes
    for dims, v_out in (((100, 100), 104 + 4), ((100, 64), 104 + 40), ((96, 100), 104 + 4)):
        sizes = dict(zip(("head_dim_qk", "head_dim_v"), dims, strict=True))
        p = AttentionParams(batch_size=2, max_seqlen_q=4096, num_heads=16, **sizes)
        flash = select(p, Environment.describe("A100", torch="2.13.0"))["sdpa.flash"]
        assert flash.verdict == "eligible"
        assert [(a.name, a.changes, a.bytes) for a in flash.adaptations] == [
            ("pad_head_dim_qk", (("head_dim_qk", 104),), 2 * 104 * column),  # the copies of q and k
            ("pad_head_dim_v", (("head_dim_v", 104),), v_out * column),  # v's, and what the output gains
        ]


@each(
    "gpu, cudnn, fields, why",
    json.loads(Path(__file__).with_name("cudnn_against_te.json").read_text("utf-8")),
)
def test_the_library_is_followed_where_transformer_engines_table_is_stricter(gpu, cudnn, fields, why):
    """The question itself: TransformerEngine pads and copies nothing."""
    env = Environment.describe(gpu, cudnn=cudnn)
    candidate = select(AttentionParams(**fields), env, policy=Policy(adapt="never"))["cudnn"]
    assert candidate.eligible, (why, [reason.code for reason in candidate.reasons])

"""INSTALL: what every candidate needs. The wheel of torch must have code for the GPU."""

from __future__ import annotations

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

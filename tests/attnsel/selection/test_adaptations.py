"""Why a changed question need not be asked anew. What is planned: recorded_calls/selection.txt."""

from __future__ import annotations

from attnsel import AttentionParams, select
from attnsel.base.model import lazy
from attnsel.params.attention import _SIZES
from attnsel.rules import REGISTRY
from attnsel.selection.adaptations import stages
from attnsel.selection.evaluate import NONE_WAIVED, findings, reevaluate
from attnsel.selection.rule_index import ALL, fields_of, fields_read
from questions import questions


def test_a_changed_question_is_as_good_as_one_that_was_made_so() -> None:
    """And rules that are not asked again about it would answer the same."""
    worked_out = [name for name, value in vars(AttentionParams).items() if isinstance(value, lazy)]
    compared = 0
    for p, env, policy in questions(41, 400):
        if policy.adapt != "auto" or policy.deterministic:
            continue
        for candidate in select(p, env):
            for _, _, changed in stages(p, candidate.adaptations):
                again = reevaluate(changed, p, findings(p, env), env, NONE_WAIVED, (candidate.name,))
                asked_anew = findings(changed, env)[candidate.name]
                told = sorted(reason.message for reason in again[candidate.name])
                assert told == sorted(reason.message for reason in asked_anew)
                fields = {name: getattr(changed, name) for name in AttentionParams.model_fields}
                fresh = AttentionParams(**fields)
                assert fresh == changed
                for name in worked_out:
                    assert getattr(fresh, name) == getattr(changed, name)
                compared += 1
    assert compared > 100


def test_what_resizing_keeps_depends_on_no_size() -> None:
    kept = AttentionParams()
    resized = kept.resized(head_dim_v=64)
    assert "flops" not in vars(resized)
    for name, value in vars(AttentionParams).items():
        if isinstance(value, lazy):
            reads = fields_read(value.compute)
            getattr(kept, name)
            assert (name in vars(kept.resized(head_dim_v=64))) == (not reads & _SIZES), name


def test_what_a_rule_reads_is_found_in_its_code() -> None:
    assert fields_of(REGISTRY.rules["SDPA104"]) == {"head_dim_qk", "head_dim_v"}  # what it requires
    assert fields_of(REGISTRY.rules["SDPA326"]) >= {"is_training", "tensors"}  # by way of a helper
    assert fields_of(REGISTRY.rules["SDPA203"]) == {"head_dim_qk", "head_dim_v", "dtype"}
    followed = [rule for rule in REGISTRY.rules.values() if fields_of(rule) != ALL]
    assert len(followed) > len(REGISTRY.rules) / 2

"""The decision: pure, memoised, with every reason; and the cases the project began with."""

from __future__ import annotations

import json
import pickle

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, NoBackendError, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import to_json
from attnsel.params.options import DelayedScaling
from attnsel.verdicts.reasons import Evidence, Refusal
from questions import questions
from tables import each

H100_9_1 = Environment.describe("H100", cudnn="9.1.0")
MLA = AttentionParams(head_dim_qk=192, head_dim_v=128, dtype="bf16", is_training=True)


def test_equal_questions_get_the_same_object():
    again = AttentionParams(head_dim_qk=192, head_dim_v=128)
    assert select(again, Environment.describe("H100", cudnn="9.1.0")) is select(MLA, H100_9_1)
    first = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(fp8_dpa=True), "scale": 1})
    second = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(fp8_dpa=True), "step": 7})
    assert select(first, H100_9_1) is select(second, H100_9_1), "the recipe is all that is asked about"


def test_all_reasons_are_given_not_the_first():
    p = AttentionParams(softcap=30.0, softmax_type="learnable", head_dim_qk=192, head_dim_v=128)
    fields = {reason.field for reason in select(p, H100_9_1)["sdpa.flash"].reasons}
    assert {"softcap", "softmax_type", "head_dim_v"} <= fields


def test_a_selection_is_json_from_end_to_end():
    told = json.loads(select(MLA, H100_9_1).to_json())
    assert told["backend"] == select(MLA, H100_9_1).backend
    cudnn = next(c for c in told["candidates"] if c["name"] == "cudnn")
    assert cudnn["reasons"][0]["code"] == "CUDNN204"
    assert AttentionParams(**told["params"]) == MLA
    assert told["unlocks"]
    with pytest.raises(KeyError, match=r"sdpa\.flash"):
        select(MLA, H100_9_1)["flash"]


def test_on_a_detected_machine_only_what_can_run_is_chosen():
    env = Environment.describe("H100", cudnn="9.10.2").replace(detected=True)
    selection = select(AttentionParams(), env)
    assert selection.backend is not None
    assert selection[selection.backend].executable


# ---- policy and evidence ----------------------------------------------------------------------------


def test_a_forced_backend_is_never_swapped_and_its_error_keeps_the_report_through_a_pickle():
    selection = select(MLA, H100_9_1, policy=Policy(backend="cudnn"))
    assert selection.backend is None
    with pytest.raises(NoBackendError, match=r"(?s)'cudnn' was asked for.*CUDNN204") as caught:
        selection.require()
    assert caught.value.selection is selection
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_denied_candidate_says_who_denied_it():
    selection = select(AttentionParams(), H100_9_1, policy=Policy(deny=("cudnn",)))
    assert [reason.code for reason in selection["cudnn"].reasons] == ["POLICY003"]
    back = [u for u in selection.unlocks if u.candidate == "cudnn"]
    assert back[0].paste == "ATTNSEL_DISABLE="


def test_a_refusal_at_run_time_makes_a_new_answer_and_leaves_the_old_one():
    before = select(AttentionParams(), H100_9_1)
    evidence = Evidence().plus(Refusal(before.backend, before.params, "engine 3 refused"))
    after = select(AttentionParams(), H100_9_1, evidence=evidence)
    assert after.backend != before.backend
    assert "engine 3 refused" in after.report()
    assert select(AttentionParams(), H100_9_1) is before
    other = select(AttentionParams(max_seqlen_q=128), H100_9_1, evidence=evidence)
    assert other.backend == before.backend


# ---- anything at all --------------------------------------------------------------------------------


def test_any_question_gets_a_whole_answer():
    for p, env, policy in questions(seed=51, count=80):
        selection = select(p, env, policy=policy)
        assert sorted(candidate.name for candidate in selection) == sorted(CANDIDATES)
        for candidate in selection:
            assert (candidate.verdict == "eligible") == (not candidate.reasons)
            for reason in candidate.reasons:
                parts = ("code", "field", "required", "evidence", "source", "message")
                assert all(to_json(reason)[part] for part in parts)
        report = selection.report()
        wide = [line for line in report.splitlines() if len(line) > 80]
        assert [x for x in wide if "pad(" not in x and "https://" not in x and not x.startswith("! ")] == []


def test_a_missing_library_is_offered_in_a_version_attnsel_runs_on():
    bare = Environment.describe("cpu", torch=None)
    offers = [u for u in select(AttentionParams(), bare).unlocks if u.candidate == "sdpa.flash"]
    assert [str(value) for u in offers for _, value in u.changes] == ["2.6.0"]


# ---- arguments that belong elsewhere ----------------------------------------------------------------


@each(
    "given, error, text",
    [
        ({"params": {}}, InvalidInput, "params"),
        ({"environment": "H100"}, InvalidInput, r'environment.*such as Environment\.describe\("H100"\)'),
        ({"policy": {"adapt": "never"}}, InvalidInput, "policy"),
        ({"evidence": ()}, InvalidInput, "evidence"),
        ({"deny": "cudnn"}, TypeError, r"unexpected argument 'deny': it is an argument of policy=Policy"),
        ({"gpu": "H100"}, TypeError, r"it is an argument of Environment\.describe\(\.\.\.\)$"),
        ({"deterministic": True}, TypeError, r"it is an argument of AttentionParams\(\.\.\.\)$"),
    ],
)
def test_arguments_of_another_kind_are_named(given, error, text):
    with pytest.raises(error, match=text):
        select(**{"params": AttentionParams(), "environment": H100_9_1, **given})

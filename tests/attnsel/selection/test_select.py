"""The decision: pure, memoised, with every reason; and the cases the project began with."""

from __future__ import annotations

import json
import pickle

import pytest

from attnsel import AttentionParams, Environment, InvalidInput, NoBackendError, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.params.recipes import DelayedScaling
from attnsel.verdicts.evidence import Evidence, Refusal
from questions import questions
from tables import each

H100_9_1 = Environment.describe("H100", cudnn="9.1.0")
MLA = AttentionParams(head_dim_qk=192, head_dim_v=128, dtype="bf16", is_training=True)
A100_8_9 = Environment.describe("A100", cudnn="8.9.7")


def codes(selection, name):
    return [reason.code for reason in selection[name].reasons]


# ---- H100, cuDNN 9.1.0, head_dim 192/128 ------------------------------------------------------------


def test_padding_v_does_not_unlock_cudnn_and_the_report_does_not_claim_it():
    selection = select(MLA, H100_9_1)
    padded = select(MLA.replace(head_dim_v=192), H100_9_1)
    assert not padded["cudnn"].eligible
    assert not any(u.candidate == "cudnn" and dict(u.changes).get("head_dim_v") for u in selection.unlocks)


# ---- FP8 --------------------------------------------------------------------------------------------


def test_fp8_questions_that_differ_outside_the_recipe_get_the_same_object():
    env = Environment.describe("H100", cudnn="9.15.1")
    first = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(fp8_dpa=True), "scale": 1})
    second = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(fp8_dpa=True), "step": 7})
    assert select(first, env) is select(second, env)


# ---- the shape of an answer -------------------------------------------------------------------------


def test_equal_questions_get_the_same_object():
    again = AttentionParams(head_dim_qk=192, head_dim_v=128)
    assert select(again, Environment.describe("H100", cudnn="9.1.0")) is select(MLA, H100_9_1)


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


def test_an_unknown_candidate_is_a_key_error_that_lists_them():
    with pytest.raises(KeyError, match=r"sdpa\.flash"):
        select(MLA, H100_9_1)["flash"]


def test_on_a_detected_machine_only_what_can_run_is_chosen():
    env = Environment.describe("H100", cudnn="9.10.2").replace(detected=True)
    selection = select(AttentionParams(), env)
    assert selection.backend is not None
    assert selection[selection.backend].executable


# ---- policy and evidence ----------------------------------------------------------------------------


def test_a_forced_backend_is_never_swapped():
    selection = select(MLA, H100_9_1, policy=Policy(backend="cudnn"))
    assert selection.backend is None
    with pytest.raises(NoBackendError) as caught:
        selection.require()
    assert "'cudnn' was asked for" in str(caught.value)
    assert "CUDNN204" in str(caught.value)
    assert caught.value.selection is selection


def test_an_error_carries_its_report_through_pickle():
    with pytest.raises(NoBackendError) as caught:
        select(MLA, H100_9_1, policy=Policy(backend="cudnn")).require()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)


def test_a_denied_candidate_says_who_denied_it():
    selection = select(AttentionParams(), H100_9_1, policy=Policy(deny=("cudnn",)))
    assert codes(selection, "cudnn") == ["POLICY003"]
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


# ---- the report -------------------------------------------------------------------------------------


def test_a_report_marks_what_was_assumed_and_names_every_code():
    selection = select(MLA, H100_9_1)
    report = selection.report()
    assert "torch 2.6.0*" in report
    assert "cuDNN 9.1.0 " in report
    of_this_gpu = ("arch", "device", "platform")
    for candidate in selection:
        library = CANDIDATES[candidate.name].library
        absent = any(reason.field == library and reason.observed is None for reason in candidate.reasons)
        for reason in candidate.reasons:
            # Of what is not installed: that, and what installing would not change.
            if not absent or reason.field in (library, *of_this_gpu):
                assert reason.code in report


# ---- anything at all --------------------------------------------------------------------------------


def test_any_question_gets_a_whole_answer():
    for p, env, policy in questions(seed=51, count=150):
        selection = select(p, env, policy=policy)
        assert sorted(candidate.name for candidate in selection) == sorted(CANDIDATES)
        for candidate in selection:
            assert (candidate.verdict == "eligible") == (not candidate.reasons)
            for reason in candidate.reasons:
                told = reason.as_dict()
                parts = ("code", "field", "required", "evidence", "source", "message")
                assert all(told[part] for part in parts)
        report = selection.report()
        wide = [line for line in report.splitlines() if len(line) > 80]
        assert [x for x in wide if "pad(" not in x and "https://" not in x and not x.startswith("! ")] == []


def test_a_missing_library_is_offered_in_a_version_attnsel_runs_on():
    bare = Environment.describe("cpu", torch=None)
    offers = [u for u in select(AttentionParams(), bare).unlocks if u.candidate == "sdpa.flash"]
    assert [str(value) for u in offers for _, value in u.changes] == ["2.6.0"]
    assert "torch is not installed" in select(AttentionParams(), bare).report(200)


@each(
    "given, field",
    [
        ({"params": {}}, "params"),
        ({"environment": "H100"}, "environment"),
        ({"policy": {"adapt": "never"}}, "policy"),
        ({"evidence": ()}, "evidence"),
    ],
)
def test_arguments_of_another_kind_are_named(given, field):
    with pytest.raises(InvalidInput) as caught:
        select(**{"params": AttentionParams(), "environment": Environment.describe("H100"), **given})
    assert caught.value.field == field


# ---- arguments that belong elsewhere ----------------------------------------------------------------


@each(
    "name, place",
    [
        ("backend", "policy=Policy(...)"),
        ("deny", "policy=Policy(...)"),
        ("gpu", "Environment.describe(...)"),
        ("cudnn", "Environment.describe(...)"),
        ("deterministic", "AttentionParams(...)"),
        ("head_dim_qk", "AttentionParams(...)"),
    ],
)
def test_an_argument_of_another_model_is_sent_there(name, place):
    with pytest.raises(TypeError) as caught:
        select(AttentionParams(), A100_8_9, **{name: "anything"})
    assert str(caught.value) == f"select got an unexpected argument {name!r}: it is an argument of {place}"


def test_a_gpu_s_name_is_no_environment_and_the_error_says_how_to_make_one():
    with pytest.raises(InvalidInput, match=r'such as Environment\.describe\("H100"\)'):
        select(AttentionParams(), "H100")

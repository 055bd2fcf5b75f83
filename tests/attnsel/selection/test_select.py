"""The decision: pure, memoised, with every reason; and the cases the project began with."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel import AttentionParams, Environment, InvalidInput, NoBackendError, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.params.recipes import DelayedScaling
from attnsel.report import one_line
from attnsel.verdicts.evidence import Evidence, Refusal

H100_9_1 = Environment.describe("H100", cudnn="9.1.0")
MLA = AttentionParams(head_dim_qk=192, head_dim_v=128, dtype="bf16", is_training=True)
A100_8_9 = Environment.describe("A100", cudnn="8.9.7")
LONG = AttentionParams(batch_size=48, max_seqlen_q=16534, num_heads=18, head_dim_qk=128, dtype="bf16")


def codes(selection, name):
    return [reason.code for reason in selection[name].reasons]


# ---- H100, cuDNN 9.1.0, head_dim 192/128 ------------------------------------------------------------


def test_mla_training_on_cudnn_9_1_is_refused_for_its_backward_and_9_5_is_named():
    selection = select(MLA, H100_9_1)
    reason = next(r for r in selection["cudnn"].reasons if r.code == "CUDNN204")
    assert reason.field == "head_dim_qk"
    assert reason.observed == 192
    assert not selection["cudnn"].eligible
    assert "9.5.0" in selection.report()
    upgrades = [u for u in selection.unlocks if u.candidate == "cudnn" and u.effect == "install"]
    assert [str(version) for u in upgrades for _, version in u.changes] == ["9.5.0"]
    assert upgrades[0].rank == 1
    assert "pip install" in upgrades[0].paste


def test_mla_inference_on_cudnn_9_1_is_allowed():
    assert select(MLA.replace(is_training=False), H100_9_1)["cudnn"].eligible


def test_padding_v_does_not_unlock_cudnn_and_the_report_does_not_claim_it():
    selection = select(MLA, H100_9_1)
    padded = select(MLA.replace(head_dim_v=192), H100_9_1)
    assert not padded["cudnn"].eligible
    assert not any(u.candidate == "cudnn" and dict(u.changes).get("head_dim_v") for u in selection.unlocks)


# ---- A100, cuDNN 8.9.7, sequence 16534 --------------------------------------------------------------


def test_a_sequence_of_16534_is_refused_by_cudnn_8_9_for_its_remainder_alone():
    assert 16534 % 64 == 22
    reasons = select(LONG, A100_8_9, policy=Policy(adapt="never"))["cudnn"].reasons
    assert {reason.field for reason in reasons} == {"max_seqlen_q", "max_seqlen_kv"}
    assert {reason.required for reason in reasons} == {"a multiple of 64"}
    assert {reason.observed for reason in reasons} == {16534}


def test_ways_out_of_16534_are_cudnn_9_and_16576():
    never = Policy(adapt="never")
    unlocks = [u for u in select(LONG, A100_8_9, policy=never).unlocks if u.candidate == "cudnn"]
    changes = [{name: str(value) for name, value in u.changes} for u in unlocks]
    assert {"max_seqlen_q": "16576", "max_seqlen_kv": "16576"} in changes
    assert {"cudnn": "9.0.0"} in changes


@pytest.mark.parametrize("cudnn", ["9.0.0", "9.1.0"])
def test_on_ampere_a_flash_kernel_ranks_above_cudnn_even_where_cudnn_runs(cudnn):
    selection = select(LONG, Environment.describe("A100", cudnn=cudnn, torch="2.6.0"))
    order = [candidate.name for candidate in selection.ranked]
    assert selection["cudnn"].eligible
    assert order.index("sdpa.flash") < order.index("cudnn")
    assert select(LONG, Environment.describe("H100", cudnn=cudnn, torch="2.6.0")).backend == "cudnn"


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


def test_every_candidate_is_judged_and_every_refusal_is_explained():
    selection = select(MLA, H100_9_1)
    assert sorted(c.name for c in selection) == sorted(CANDIDATES)
    for candidate in selection:
        if candidate.verdict == "refused":
            assert candidate.reasons
        else:
            assert all(reason.unknown for reason in candidate.reasons)


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


def test_allowed_candidates_run_in_the_order_given():
    policy = Policy(allow=("tiled", "sdpa.math"))
    assert [c.name for c in select(MLA, H100_9_1, policy=policy).ranked] == ["tiled", "sdpa.math"]


def test_a_denied_candidate_says_who_denied_it():
    selection = select(AttentionParams(), H100_9_1, policy=Policy(deny=("cudnn",)))
    assert codes(selection, "cudnn") == ["POLICY003"]
    back = [u for u in selection.unlocks if u.candidate == "cudnn"]
    assert back[0].paste == "ATTNSEL_DISABLE="


def test_wishing_for_determinism_changes_the_question():
    selection = select(AttentionParams(), H100_9_1, policy=Policy(deterministic=True))
    assert selection.params.deterministic
    assert not selection["sdpa.efficient"].eligible


def test_without_adaptations_a_window_is_a_reason():
    p = AttentionParams(window_size=(128, 0))
    plain = select(p, H100_9_1, policy=Policy(adapt="never"))
    assert not plain["sdpa.efficient"].eligible
    folded = select(p, H100_9_1)["sdpa.efficient"]
    assert [a.name for a in folded.adaptations] == ["fold_mask"]
    assert folded.adaptations[0].bytes == 4096 * 4096 * 2


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


@pytest.mark.parametrize("env", [H100_9_1, A100_8_9, Environment.describe("T4"), Environment.describe("cpu")])
@pytest.mark.parametrize("p", [MLA, LONG, AttentionParams(softcap=30.0, window_size=(128, 0))])
def test_a_report_fits_80_columns(p, env):
    report = select(p, env).report()
    plain = [line for line in report.splitlines() if "pad(" not in line and "https://" not in line]
    long = [line for line in plain if len(line) > 80]
    assert not long


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


def test_one_line_says_chosen_next_blocked_and_the_way_out():
    line = one_line(select(MLA, H100_9_1))
    assert "\n" not in line
    assert "refused: cudnn (CUDNN204" in line
    assert "to get" in line


# ---- anything at all --------------------------------------------------------------------------------

_fields = {
    "dtype": st.sampled_from(["bf16", "fp16", "fp32", "fp64", "fp8_e4m3"]),
    "qkv_layout": st.sampled_from(["bshd", "sbhd", "bhsd", "thd", "bs3hd", "t3hd", "thd_bshd_bshd"]),
    "batch_size": st.sampled_from([1, 2, 48, 70_000]),
    "num_heads": st.sampled_from([1, 8, 16, 18]),
    "num_gqa_groups": st.sampled_from([1, 2, 8]),
    "max_seqlen_q": st.sampled_from([0, 1, 7, 64, 1000, 4096, 16534, 131072]),
    "max_seqlen_kv": st.sampled_from([0, 1, 64, 1023, 4096, 131072]),
    "head_dim_qk": st.sampled_from([1, 8, 59, 64, 128, 192, 256, 512, 576]),
    "head_dim_v": st.sampled_from([8, 64, 128, 256, 512]),
    "attn_mask_type": st.sampled_from(
        ["no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
         "padding_causal_bottom_right", "arbitrary"]
    ),
    "window_size": st.sampled_from([(-1, -1), (128, 0), (0, 0), (64, 64), (-1, 3)]),
    "core_attention_bias_type": st.sampled_from(["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"]),
    "softmax_type": st.sampled_from(["vanilla", "off-by-one", "learnable"]),
    "softcap": st.sampled_from([0.0, 30.0]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "is_training": st.booleans(),
    "deterministic": st.booleans(),
    "return_lse": st.booleans(),
    "return_max_logit": st.booleans(),
    "cp_size": st.sampled_from([1, 2, 8]),
    "cp_comm_type": st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]),
    "cuda_graph": st.booleans(),
    "fp8": st.booleans(),
    "fp8_meta": st.sampled_from([None, {"recipe": {"kind": "delayed", "fp8_dpa": True}},
                                 {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}]),
}  # fmt: skip
_machines = st.builds(
    lambda gpu, cudnn, torch: Environment.describe(gpu, cudnn=cudnn, torch=torch),
    st.sampled_from(
        ["V100", "T4", "A100", "RTX 4090", "H100", "B200", "B300", "RTX 5090", "GB10", "sm110", "cpu"]
    ),
    st.sampled_from(
        ["8.8.0", "8.9.7", "9.0.0", "9.1.0", "9.3.0", "9.7.1", "9.10.0", "9.14.0", "9.26.0", None]
    ),
    st.sampled_from(["2.2.2", "2.6.0", "2.9.1", "2.13.0", "2.14.1", None]),
)
_policies = st.sampled_from(
    [
        Policy(),
        Policy(adapt="never"),
        Policy(backend="cudnn"),
        Policy(allow=("tiled",)),
        Policy(deny=("tiled",)),
        Policy(deterministic=True),
        Policy(allow_known_bugs=("all",)),
    ]
)


@settings(max_examples=300, deadline=None)
@given(st.fixed_dictionaries({}, optional=_fields), _machines, _policies)
def test_any_question_gets_a_whole_answer_or_the_documented_error(fields, env, policy):
    try:
        p = AttentionParams(**fields)
    except InvalidInput:
        return
    selection = select(p, env, policy=policy)
    names = [candidate.name for candidate in selection]
    assert sorted(names) == sorted(CANDIDATES)
    for candidate in selection:
        assert (candidate.verdict == "eligible") == (not candidate.reasons)
        for reason in candidate.reasons:
            told = reason.as_dict()
            assert all(told[part] for part in ("code", "field", "required", "evidence", "source", "message"))
    assert selection.report()


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({}, optional=_fields), _machines)
def test_every_way_out_that_is_shown_works(fields, env):
    try:
        p = AttentionParams(**fields)
    except InvalidInput:
        return
    for unlock in select(p, env).unlocks:
        p2, env2, policy = unlock.apply(p, env, Policy())
        assert select(p2, env2, policy=policy)[unlock.candidate].eligible


def test_a_missing_library_is_offered_in_a_version_attnsel_runs_on():
    bare = Environment.describe("cpu", torch=None)
    offers = [u for u in select(AttentionParams(), bare).unlocks if u.candidate == "sdpa.flash"]
    assert [str(value) for u in offers for _, value in u.changes] == ["2.6.0"]
    assert "torch is not installed" in select(AttentionParams(), bare).report(200)


@pytest.mark.parametrize(
    ("given", "field"),
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


@pytest.mark.parametrize(
    ("name", "place"),
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

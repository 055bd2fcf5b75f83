"""Which adaptations are planned, what they weigh, and what is said about them."""

from __future__ import annotations

import inspect
import json
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel import AttentionParams, Environment, InvalidInput, Policy, Tensors, TensorSpec, select
from attnsel.backends.registry import CANDIDATES
from attnsel.base.model import lazy
from attnsel.cli import main
from attnsel.params.attention import _SIZES
from attnsel.rules import REGISTRY, limit
from attnsel.selection import rank
from attnsel.selection.adaptations.search import ADAPTERS, overhead, stages
from attnsel.selection.evaluate import NONE_WAIVED, findings, reevaluate
from attnsel.selection.rule_dependencies import ALL, fields_of, fields_read
from attnsel.verdicts.requirements import Multiple, OneOf
from attnsel.verdicts.verdict import Adaptation, RankKey

H100, A100, T4 = (Environment.describe(gpu, torch="2.13.0") for gpu in ("H100", "A100", "T4"))
FP32 = {"dtype": "fp32", "is_training": False}


def listed(p: AttentionParams, env: Environment, name: str) -> list[str]:
    candidate = select(p, env)[name]
    assert candidate.eligible, candidate.reasons
    return [a.text for a in candidate.adaptations]


PLANNED: list[Any] = [
    ("sdpa.flash", {"head_dim_qk": 192, "head_dim_v": 128}, H100, ["pads head_dim_v 128 → 192"]),
    ("sdpa.flash", {"head_dim_qk": 64, "head_dim_v": 128}, H100, ["pads head_dim_qk 64 → 128"]),
    ("sdpa.efficient", {"head_dim_qk": 60}, H100,
     ["pads head_dim_qk 60 → 64", "pads head_dim_v 60 → 64"]),
    ("sdpa.efficient", {"head_dim_qk": 59, **FP32}, T4,
     ["pads head_dim_qk 59 → 60", "pads head_dim_v 59 → 60"]),
    ("sdpa.cudnn", {"head_dim_qk": 60, "head_dim_v": 64}, H100, ["pads head_dim_qk 60 → 64"]),
    ("sdpa.flash", {"head_dim_qk": 200}, Environment.describe("RTX 4090"),
     ["pads head_dim_qk 200 → 256", "pads head_dim_v 200 → 256"]),
    ("cudnn", {"max_seqlen_q": 16534}, Environment.describe("A100", cudnn="8.9.7"),
     ["pads the sequence 16534 → 16576"]),
    ("sdpa.cudnn", {"max_seqlen_q": 261}, Environment.describe("H100", cudnn="9.10.2"),
     ["pads the sequence 261 → 384"]),
    ("sdpa.cudnn", {"max_seqlen_q": 261, "max_seqlen_kv": 512, "attn_mask_type": "no_mask"},
     Environment.describe("H100", cudnn="9.10.2"), ["pads max_seqlen_q 261 → 384"]),
    ("cudnn", {"max_seqlen_q": 1, "max_seqlen_kv": 8192, "num_gqa_groups": 4, "is_training": False},
     Environment.describe("B200", torch="2.11.0"), ["repeats 4 kv heads to 8"]),
    ("cudnn", {"max_seqlen_q": 1, "num_heads": 12, "num_gqa_groups": 3, "is_training": False},
     Environment.describe("B200", torch="2.11.0"), ["repeats 3 kv heads to 12"]),
    ("sdpa.efficient", {"qkv_layout": "thd", "attn_mask_type": "padding", "num_gqa_groups": 4}, H100,
     ["unpacks 2 sequences into a padded batch", "repeats 4 kv heads to 16",
      "folds padding into a mask and zeroes padded rows"]),
    ("sdpa.flash", {"attn_mask_type": "arbitrary", "tensors": Tensors(mask_hides_nothing=True)}, H100,
     ["drops the mask, which hides nothing"]),
    ("sdpa.flash", {"attn_mask_type": "padding_causal", "tensors": Tensors(mask_hides_nothing=True)}, H100,
     ["drops the mask, which hides nothing"]),
    ("triton", {"attn_mask_type": "arbitrary", "tensors": Tensors(mask_hides_nothing=True)}, H100,
     ["drops the mask, which hides nothing"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "env", "texts"), PLANNED)
def test_a_refusal_is_met_by_the_smallest_exact_change(name: str, fields: Any, env: Any, texts: Any) -> None:
    assert listed(AttentionParams(**fields), env, name) == texts


@pytest.mark.parametrize(("name", "fields", "env", "texts"), PLANNED)
def test_never_means_reasons(name: str, fields: Any, env: Any, texts: Any) -> None:
    candidate = select(AttentionParams(**fields), env, policy=Policy(adapt="never"))[name]
    assert candidate.adaptations == ()
    assert candidate.reasons or name == "triton"  # which takes any mask


@pytest.mark.parametrize(("name", "fields", "env", "texts"), PLANNED)
def test_the_changed_question_is_one_the_rules_accept(name: str, fields: Any, env: Any, texts: Any) -> None:
    p = AttentionParams(**fields)
    *_, (_, _, changed) = stages(p, select(p, env)[name].adaptations)
    assert not findings(changed, env)[name]


REFUSED: list[Any] = [
    ("sdpa.flash", {"head_dim_qk": 320}, H100, "SDPA105"),
    ("sdpa.flash", {"attn_mask_type": "arbitrary"}, H100, "SDPA101"),
    ("sdpa.math", {"qkv_layout": "thd", "attn_mask_type": "padding", "tensors": Tensors(ragged=True)}, H100,
     "SDPA007"),
    ("sdpa.math", {"qkv_layout": "thd_bshd_bshd", "attn_mask_type": "padding", "is_training": False}, H100,
     "SDPA007"),
    ("cudnn", {"max_seqlen_q": 1000, "attn_mask_type": "arbitrary"}, A100, None),
    ("sdpa.efficient", {"head_dim_qk": 60, "is_training": False, "kv_cache": "paged", "page_size": 64,
                        "qkv_layout": "paged_kv_bshd_bshd_bshd"}, H100, "SDPA203"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "env", "code"), REFUSED)
def test_what_no_exact_change_provides_is_a_reason(name: str, fields: Any, env: Any, code: str) -> None:
    candidate = select(AttentionParams(**fields), env)[name]
    assert candidate.verdict == "refused"
    assert candidate.adaptations == ()
    assert code is None or code in [reason.code for reason in candidate.reasons]


def test_a_sum_of_costs_counts_operations_as_the_kernel_will_do_them() -> None:
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    (padded,) = select(p, H100)["sdpa.flash"].adaptations
    assert p.flops + padded.flops == p.replace(head_dim_v=192).flops
    pairs = 2 * 16 * 4096 * 4097 // 2  # under the causal mask
    assert p.flops == 2 * pairs * (4 * 192 + 3 * 128)
    assert p.replace(is_training=False).flops == 2 * pairs * (192 + 128)


# ---- ranking ----------------------------------------------------------------------------------------


def order(*standing: RankKey, arch: int = 80) -> list[str]:
    return [standing[i].name for i, _ in rank.order(standing, arch, Policy())]


def test_a_copy_is_not_chosen_where_a_kernel_as_good_needs_none() -> None:
    copying = RankKey("sdpa.flash", "eligible", 1, False, False)
    assert order(copying, RankKey("triton", "eligible", 0, False, False)) == ["triton", "sdpa.flash"]
    assert order(copying, RankKey("cudnn", "eligible", 0, False, False)) == ["sdpa.flash", "cudnn"]


def test_a_change_that_costs_half_the_attention_loses_to_the_next_family() -> None:
    dear = RankKey("sdpa.flash", "eligible", 9, False, False)
    assert order(dear, RankKey("sdpa.efficient", "eligible", 0, False, False)) == [
        "sdpa.efficient",
        "sdpa.flash",
    ]
    assert order(RankKey("tiled", "eligible", 0, False, False), dear) == ["sdpa.flash", "tiled"]


def test_a_kernel_executed_off_gpu_loses_to_a_proven_one_unless_that_costs_half_the_attention() -> None:
    """And one that was compiled only loses even then."""
    executed = RankKey("triton", "eligible", 0, True, False, executed=True)
    compiled = executed._replace(executed=False)
    for cost, first in ((0, "sdpa.efficient"), (8, "sdpa.efficient"), (9, "triton")):
        proven = RankKey("sdpa.efficient", "eligible", cost, False, False)
        assert order(executed, proven, arch=75)[0] == first
        assert order(compiled, proven, arch=75) == ["sdpa.efficient", "triton"]
    standing = (executed, RankKey("sdpa.efficient", "eligible", 0, False, False))
    assert [code for _, code in rank.order(standing, 75, Policy())] == [None, "PREF010"]
    standing = (compiled, RankKey("sdpa.efficient", "eligible", 0, False, False))
    assert [code for _, code in rank.order(standing, 75, Policy())] == [None, "PREF004"]
    standing = (executed, RankKey("sdpa.efficient", "eligible", 9, False, False))
    assert [code for _, code in rank.order(standing, 75, Policy())] == [None, "PREF008"]
    assert order(RankKey("tiled", "eligible", 0, False, False), executed) == ["triton", "tiled"]


def test_decoding_with_grouped_heads_on_a_t4_copies_no_cache() -> None:
    call = AttentionParams(
        dtype="fp16",
        max_seqlen_q=1,
        num_gqa_groups=4,
        attn_mask_type="causal_bottom_right",
        is_training=False,
    )
    assert select(call, Environment.describe("T4")).backend == "triton"
    every_head = call.replace(num_gqa_groups=16)
    assert select(every_head, Environment.describe("T4")).backend == "sdpa.efficient"


def test_the_overhead_of_a_copy_shrinks_with_the_sequence() -> None:
    strided = TensorSpec(shape=(2, 4096, 16, 128), stride=(16777216, 4096, 256, 2))

    def copying(s: int) -> int:
        p = AttentionParams(max_seqlen_q=s, tensors=Tensors(q=strided))
        return overhead(select(p, H100)["sdpa.flash"].adaptations, p)

    assert copying(128) > copying(1024) > copying(16384) == 1
    assert overhead((Adaptation("drop_mask", "", 0),), AttentionParams()) == 0
    assert overhead((Adaptation("contiguous", "", 1 << 60),), AttentionParams(max_seqlen_q=0)) > 0


# ---- asked for, and shown ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["explain --json", "matrix --json --rows head_dim_qk=192 --cols torch=2.13.0"]
)
@pytest.mark.parametrize("adapt", ["auto", "never"])
def test_the_commands_take_adapt(command: str, adapt: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*command.split(), "--gpu", "H100", "--head-dim-qk", "192", "--head-dim-v", "128", "--adapt", adapt])
    told = capsys.readouterr().out
    assert json.loads(told)
    assert ("pad_head_dim_v" in told) == (adapt == "auto" and command.startswith("explain"))


def test_a_selection_shows_each_change_and_its_cost() -> None:
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    selection = select(p, H100, policy=Policy(backend="sdpa.flash"))
    words = " ".join(selection.report().split())
    assert "pads head_dim_v 128 → 192, 64.0 MiB, +17 % work · avoids SDPA104" in words
    (shown,) = selection.as_dict()["candidates"][0]["adaptations"]
    assert shown["changes"] == {"head_dim_v": 192}
    assert shown["flops"] > 0
    json.loads(selection.to_json())


def test_a_mask_that_hides_nothing_needs_no_memory_to_drop() -> None:
    p = AttentionParams(attn_mask_type="arbitrary", tensors=Tensors(mask_hides_nothing=True))
    selection = select(p, H100)
    assert all(a.bytes == a.flops == 0 for a in selection[selection.backend].adaptations)


# ---- how it stays cheap -----------------------------------------------------------------------------

_FIELDS: dict[str, Any] = {
    "dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
    "qkv_layout": st.sampled_from(["bshd", "sbhd", "bhsd", "thd", "bs3hd", "t3hd"]),
    "batch_size": st.sampled_from([1, 2, 70_000]),
    "num_gqa_groups": st.sampled_from([1, 4, 16]),
    "max_seqlen_q": st.sampled_from([1, 7, 64, 261, 1000, 4096]),
    "max_seqlen_kv": st.sampled_from([1, 64, 704, 1023, 4096]),
    "head_dim_qk": st.sampled_from([1, 59, 60, 64, 128, 192, 200, 256, 512]),
    "head_dim_v": st.sampled_from([8, 60, 64, 128, 256, 512]),
    "attn_mask_type": st.sampled_from(["no_mask", "padding", "causal", "padding_causal", "arbitrary",
                                       "causal_bottom_right", "padding_causal_bottom_right"]),
    "window_size": st.sampled_from([(-1, -1), (128, 0), (64, 64)]),
    "core_attention_bias_type": st.sampled_from(["no_bias", "post_scale_bias", "alibi"]),
    "softmax_type": st.sampled_from(["vanilla", "learnable"]),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "is_training": st.booleans(),
    "deterministic": st.booleans(),
    "return_max_logit": st.booleans(),
    "cuda_graph": st.booleans(),
    "cp_size": st.sampled_from([1, 2]),
    "tensors": st.sampled_from([
        Tensors(), Tensors(mask_hides_nothing=True), Tensors(ragged=True),
        Tensors(k=TensorSpec(shape=(2, 64, 16, 64), stride=(131072, 2048, 128, 2)),
                mask=TensorSpec(shape=(1, 1, 64, 64), stride=(1, 1, 1, 1), dtype="bool")),
    ]),
}  # fmt: skip
_MACHINES = [
    Environment.describe(gpu, cudnn=cudnn)
    for gpu in ("T4", "A100", "RTX 4090", "H100", "B200")
    for cudnn in ("8.9.7", "9.1.0", "9.10.2", "9.20.0")
]


def drawn(fields: dict[str, Any]) -> AttentionParams | None:
    try:
        return AttentionParams(**fields)
    except InvalidInput:
        return None


@settings(max_examples=400, deadline=None)
@given(st.fixed_dictionaries({}, optional=_FIELDS), st.sampled_from(_MACHINES))
def test_rules_that_are_not_asked_again_would_answer_the_same(fields: Any, env: Any) -> None:
    p = drawn(fields)
    if p is None:
        return
    found = findings(p, env)
    for candidate in select(p, env):
        for _, _, changed in stages(p, candidate.adaptations):
            among = (candidate.name,)
            again = reevaluate(changed, p, found, env, NONE_WAIVED, among)[candidate.name]
            fresh = findings(changed, env)[candidate.name]
            assert sorted(r.message for r in again) == sorted(r.message for r in fresh)


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({}, optional=_FIELDS), st.sampled_from(_MACHINES))
def test_a_changed_question_is_as_good_as_one_that_was_made_so(fields: Any, env: Any) -> None:
    p = drawn(fields)
    if p is None:
        return
    worked_out = [name for name, value in vars(AttentionParams).items() if isinstance(value, lazy)]
    assert worked_out
    for name in worked_out:
        getattr(p, name)
    for candidate in select(p, env):
        for _, _, changed in stages(p, candidate.adaptations):
            fresh = AttentionParams(**{name: getattr(changed, name) for name in AttentionParams.model_fields})
            assert fresh == changed
            assert [getattr(fresh, name) for name in worked_out] == [
                getattr(changed, name) for name in worked_out
            ]


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


def test_a_field_that_is_named_by_a_text_counts_as_read() -> None:
    def one(p, env):
        return limit(p, "softcap", OneOf(0.0))

    def several(p, env):
        for field in ("head_dim_qk", "head_dim_v"):
            found = limit(p, field, Multiple(8))
            if found:
                return found
        return None

    assert fields_read(one) == {"softcap"}
    assert fields_read(several) == {"head_dim_qk", "head_dim_v"}


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adaptation_is_explained_and_some_candidate_or_plug_in_may_list_it(name: str) -> None:
    assert "Exact" in inspect.getdoc(ADAPTERS[name].apply)
    users = [info.name for info in CANDIDATES.values() if name in info.adaptations]
    assert users


# ---- what is said -----------------------------------------------------------------------------------


def test_a_copy_on_every_call_is_told_once_with_the_line_that_spares_it() -> None:
    torch = pytest.importorskip("torch")
    from attnsel import DotProductAttention, attention, debug

    debug._announced.clear()
    core = DotProductAttention(2, 8, qkv_format="bshd", name="encoder.3", backend="sdpa.flash")
    q, k, v = (torch.randn(2, 9, 2, 16)[..., ::2] for _ in range(3))
    with pytest.warns(debug.CopyWarning, match="encoder.3: sdpa.flash copies k into") as told:
        core(q.contiguous(), k, v.contiguous())
    assert "k = k.contiguous() once" in str(told[0].message)
    assert "1.1 KiB" in str(told[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        core(q.contiguous(), k, v.contiguous())
        core(q.contiguous()[:, :4], k[:, :4], v.contiguous()[:, :4])  # another size of the same
    wide = torch.randn(2, 9, 2, 16)
    with pytest.warns(debug.CopyWarning, match="make the projection of v 16 wide"):
        attention(wide, wide, v.contiguous(), backend="sdpa.flash")
    debug._announced.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", debug.CopyWarning)
        attention(q, k, v, backend="sdpa.flash")
        core(q, q, q, window_size=(2, 0))
        with pytest.raises(Exception, match="contiguous"):
            attention(q, k, v, backend="sdpa.flash", adapt="never")

"""Which adaptations are planned, what they weigh, and what is said about them."""

from __future__ import annotations

from typing import Any

from attnsel import AttentionParams, Environment, Policy, Tensors, TensorSpec, select
from attnsel.base.model import lazy
from attnsel.params.attention import _SIZES
from attnsel.rules import REGISTRY
from attnsel.selection import rank
from attnsel.selection.adaptations.search import overhead, stages
from attnsel.selection.evaluate import NONE_WAIVED, findings, reevaluate
from attnsel.selection.rule_dependencies import ALL, fields_of, fields_read
from attnsel.verdicts.verdict import Adaptation, RankKey
from questions import questions
from tables import each

H100, T4 = (Environment.describe(gpu, torch="2.13.0") for gpu in ("H100", "T4"))
FP32 = {"dtype": "fp32", "is_training": False}


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


@each("name, fields, env, texts", PLANNED)
def test_a_refusal_is_met_by_the_smallest_exact_change(name: str, fields: Any, env: Any, texts: Any) -> None:
    """The rules accept the changed question; where nothing may be changed there are reasons."""
    p = AttentionParams(**fields)
    planned = select(p, env)[name]
    assert planned.eligible, planned.reasons
    assert [a.text for a in planned.adaptations] == texts
    *_, (_, _, changed) = stages(p, planned.adaptations)
    assert not findings(changed, env)[name]
    never = select(p, env, policy=Policy(adapt="never"))[name]
    assert never.adaptations == ()
    assert never.reasons or name == "triton"  # which takes any mask


PAGED = {"kv_cache": "paged", "page_size": 64, "qkv_layout": "paged_kv_bshd_bshd_bshd", "is_training": False}
RAGGED = {"qkv_layout": "thd", "attn_mask_type": "padding", "tensors": Tensors(ragged=True)}


@each(
    "name, fields, code",
    [
        ("sdpa.flash", {"head_dim_qk": 320}, "SDPA105"),
        ("sdpa.flash", {"attn_mask_type": "arbitrary"}, "SDPA101"),
        ("sdpa.math", RAGGED, "SDPA007"),
        ("sdpa.efficient", {"head_dim_qk": 60, **PAGED}, "SDPA203"),
    ],
)
def test_what_no_exact_change_provides_is_a_reason(name: str, fields: Any, code: str) -> None:
    candidate = select(AttentionParams(**fields), H100)[name]
    assert (candidate.verdict, candidate.adaptations) == ("refused", ())
    assert code in [reason.code for reason in candidate.reasons]


def test_a_sum_of_costs_counts_operations_as_the_kernel_will_do_them() -> None:
    p = AttentionParams(head_dim_qk=192, head_dim_v=128)
    (padded,) = select(p, H100)["sdpa.flash"].adaptations
    assert p.flops + padded.flops == p.replace(head_dim_v=192).flops
    pairs = 2 * 16 * 4096 * 4097 // 2  # under the causal mask
    assert p.flops == 2 * pairs * (4 * 192 + 3 * 128)
    assert p.replace(is_training=False).flops == 2 * pairs * (192 + 128)


# ---- ranking ----------------------------------------------------------------------------------------


FLASH = RankKey("sdpa.flash", "eligible", 0, False, False)
EFFICIENT, CUDNN = FLASH._replace(name="sdpa.efficient"), FLASH._replace(name="cudnn")
TRITON, TILED = FLASH._replace(name="triton"), FLASH._replace(name="tiled")
COPYING, DEAR = FLASH._replace(overhead=1), FLASH._replace(overhead=9)
COMPILED = TRITON._replace(unproven=True)
EXECUTED = COMPILED._replace(executed=True)


@each(
    "standing, arch, expected, code",
    [
        # A copy is not chosen where a kernel as good needs none,
        ((COPYING, TRITON), 80, ["triton", "sdpa.flash"], "PREF007"),
        ((COPYING, CUDNN), 80, ["sdpa.flash", "cudnn"], None),
        # a change that costs half the attention loses to the next family,
        ((DEAR, EFFICIENT), 80, ["sdpa.efficient", "sdpa.flash"], None),
        ((TILED, DEAR), 80, ["sdpa.flash", "tiled"], None),
        # a kernel executed off-GPU to a proven one, unless that costs half the attention,
        ((EXECUTED, EFFICIENT), 75, ["sdpa.efficient", "triton"], "PREF010"),
        ((EXECUTED, EFFICIENT._replace(overhead=8)), 75, ["sdpa.efficient", "triton"], "PREF010"),
        ((EXECUTED, EFFICIENT._replace(overhead=9)), 75, ["triton", "sdpa.efficient"], "PREF008"),
        # and one that was compiled only even then.
        ((COMPILED, EFFICIENT), 75, ["sdpa.efficient", "triton"], "PREF004"),
        ((COMPILED, EFFICIENT._replace(overhead=9)), 75, ["sdpa.efficient", "triton"], "PREF004"),
        ((TILED, EXECUTED), 80, ["triton", "tiled"], None),
    ],
)
def test_the_order(standing: tuple[RankKey, ...], arch: int, expected: list[str], code: str | None) -> None:
    (first, none), (second, placed_by) = rank.order(standing, arch, Policy())
    assert [standing[first].name, standing[second].name] == expected
    assert none is None
    assert code in (None, placed_by)


def test_the_overhead_of_a_copy_shrinks_with_the_sequence() -> None:
    strided = TensorSpec(shape=(2, 4096, 16, 128), stride=(16777216, 4096, 256, 2))

    def copying(s: int) -> int:
        p = AttentionParams(max_seqlen_q=s, tensors=Tensors(q=strided))
        return overhead(select(p, H100)["sdpa.flash"].adaptations, p)

    assert copying(128) > copying(1024) > copying(16384) == 1
    assert overhead((Adaptation("drop_mask", "", 0),), AttentionParams()) == 0
    assert overhead((Adaptation("contiguous", "", 1 << 60),), AttentionParams(max_seqlen_q=0)) > 0


# ---- how it stays cheap -----------------------------------------------------------------------------


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

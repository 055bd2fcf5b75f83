"""Equal questions have one answer: the same object, whatever they were built from and however often.

Later changes may move what is behind this, and may add rows. They may not weaken it: a field that equality
ignores gives one question the answer of another, and an equality that reads scales or histories plans anew at
every step of a training run. Needs no torch.
"""

from __future__ import annotations

import copy
import enum
import gc
import pickle
import typing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnsel
from attnsel import AttentionParams, Environment, Evidence, InvalidInput, Policy, Tensors, TensorSpec, select
from tables import each

H100 = {"torch": "2.11", "cudnn": "9.20"}


def environment(**changes: Any) -> Environment:
    return Environment.describe("H100", **{**H100, **changes})


# ---- equal arguments, one object --------------------------------------------------------------------


def rich() -> AttentionParams:
    """A question that states much, built anew."""
    return AttentionParams(
        dtype="bf16", qkv_layout="bshd", batch_size=2, num_heads=8, num_gqa_groups=2, max_seqlen_q=512,
        head_dim_qk=64, attn_mask_type="padding_causal", window_size=(128, 0), softcap=30.0, fp8=True,
        fp8_meta={"recipe": {"kind": "delayed", "margin": 1}, "scale": object()},
        tensors={"q": {"shape": [2, 512, 8, 64], "stride": [262144, 512, 64, 1]}},
    )  # fmt: skip


COPIES: dict[str, Callable[[AttentionParams], AttentionParams]] = {
    "built apart": lambda p: rich(),
    "replace": lambda p: p.replace(),
    "there and back": lambda p: p.replace(softcap=0.0).replace(softcap=30.0),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "deepcopy": copy.deepcopy,
    "dump": lambda p: AttentionParams(**p.model_dump()),
}


@each("how", COPIES)
def test_a_copy_is_the_same_question_and_has_one_answer(how: str) -> None:
    p = rich()
    again = COPIES[how](p)
    assert again == p
    assert hash(again) == hash(p)
    first, second = (
        select(one, environment(), policy=Policy(deny=["cudnn"]), evidence=Evidence()) for one in (p, again)
    )
    assert first is second


def test_spellings_of_one_question_have_one_answer() -> None:
    one = AttentionParams(dtype="torch.bfloat16", attn_mask_type="padding,causal", qkv_layout="bshd")
    two = AttentionParams(**{"qkv_dtype": "bf16", "attn_mask_type": "causal_padding", "window_size": (-1, 0)})
    assert one == two
    assert select(one, environment()) is select(two, environment())


# ---- each field counts ------------------------------------------------------------------------------

SPEC = {"shape": (2, 4096, 16, 128), "stride": (16777216, 2048, 128, 1)}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged"}
PAGED |= {"attn_mask_type": "padding", "is_training": False}
BIASED = {"core_attention_bias_type": "post_scale_bias"}

# By field: what else must be stated, and two legal values.
PARAMS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "dtype": ({}, "bf16", "fp16"),
    "qkv_layout": ({}, "bshd", "sbhd"),
    "batch_size": ({}, 2, 3),
    "num_heads": ({"num_gqa_groups": 8}, 16, 8),
    "num_gqa_groups": ({}, 8, 4),
    "max_seqlen_q": ({"max_seqlen_kv": 4096}, 4096, 2048),
    "max_seqlen_kv": ({}, 4096, 2048),
    "head_dim_qk": ({"head_dim_v": 128}, 128, 64),
    "head_dim_v": ({}, 128, 64),
    "attn_mask_type": ({"window_size": (5, 0)}, "causal", "padding_causal"),
    "window_size": ({}, (64, 0), (32, 0)),
    "bottom_right_diagonal": ({"attn_mask_type": "no_mask"}, True, False),
    "core_attention_bias_type": ({}, "post_scale_bias", "pre_scale_bias"),
    "core_attention_bias_shape": (BIASED, "1hss", "bhss"),
    "core_attention_bias_requires_grad": (BIASED, False, True),
    "alibi_slopes_shape": ({"core_attention_bias_type": "alibi"}, (16,), (2, 16)),
    "softmax_type": ({}, "vanilla", "off-by-one"),
    "softcap": ({}, 0.0, 30.0),
    "attention_dropout": ({}, 0.0, 0.1),
    "is_training": ({}, True, False),
    "deterministic": ({}, False, True),
    "return_lse": ({}, False, True),
    "return_max_logit": ({}, False, True),
    "kv_cache": ({"is_training": False}, "none", "contiguous"),
    "page_size": (PAGED, 16, 64),
    "pad_between_seqs": ({"qkv_layout": "thd", "attn_mask_type": "padding"}, False, True),
    "cp_size": ({}, 2, 4),
    "cp_comm_type": ({"cp_size": 2}, "p2p", "all_gather"),
    "cuda_graph": ({}, False, True),
    "fp8": ({}, False, True),
    "fp8_meta": ({"fp8": True}, {"recipe": "delayed"}, {"recipe": "current"}),
    "tensors": ({}, {}, {"q": SPEC}),
}
TENSORS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "q": ({}, None, SPEC),
    "k": ({}, None, SPEC),
    "v": ({}, None, SPEC),
    "mask": ({}, None, {"shape": (1, 1, 8, 8), "stride": (64, 64, 8, 1), "dtype": "bool"}),
    "mask_hides_nothing": ({}, False, True),
    "ragged": ({}, False, True),
    "lengths_apart": ({}, False, True),
    "rank": ({}, 4, 3),
}
TENSOR: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "shape": (SPEC, (2, 4096, 16, 128), (2, 4096, 8, 128)),
    "stride": (SPEC, (16777216, 2048, 128, 1), (16777216, 4096, 128, 1)),
    "dtype": (SPEC, "bf16", "fp16"),
    "alignment": (SPEC, 16, 4),
    "requires_grad": (SPEC, False, True),
}
POLICY: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "backend": ({}, None, "tiled"),
    "allow": ({}, ("cudnn", "tiled"), ("tiled", "cudnn")),
    "deny": ({}, (), ("cudnn",)),
    "adapt": ({}, "auto", "never"),
    "allow_known_bugs": ({}, (), ("all",)),
    "deterministic": ({}, False, True),
    "preview": ({}, False, True),
    "memory_limit": ({}, None, 1 << 30),
    "figures": ({}, None, str(Path(__file__).parents[1] / "attnsel/cli/measured.csv")),
}
DESCRIBED: dict[str, Any] = {"device": environment().device}
ENVIRONMENT: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "device": ({}, environment().device, Environment.describe("A100").device),
    "torch": (DESCRIBED, "2.11", "2.10"),
    "triton": (DESCRIBED, "3.5", "3.4"),
    "cudnn": (DESCRIBED, "9.20", "9.10"),
    "cudnn_frontend": (DESCRIBED, "1.15", "1.14"),
    "cuda": (DESCRIBED, "12.8", "12.6"),
    "python": (DESCRIBED, "3.12", "3.11"),
    "flash_attn": (DESCRIBED, None, "2.8.3"),
    "flash_attn_3": (DESCRIBED, None, "3.0"),
    "flash_attn_4": (DESCRIBED, None, "4.0"),
    "transformer_engine": (DESCRIBED, None, "2.8"),
    "platform": (DESCRIBED, "linux", "windows"),
    "torch_flash": (DESCRIBED, "FA2", "FA3"),
    "missing": (DESCRIBED, (), ("libcudnn",)),
    "assumed": (DESCRIBED, (), ("torch",)),
    "detected": (DESCRIBED, False, True),
    "resolved": (DESCRIBED, False, True),
}
DEVICE: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "type": ({}, "cuda", "rocm"),
    "name": ({}, "one", "other"),
    "arch": ({}, 90, 100),
    "memory": ({}, 80 << 30, 141 << 30),
    "sm_count": ({}, 132, 114),
    "shared_memory": ({}, 232448, 166912),
}
TABLES: dict[Any, dict[str, tuple[dict[str, Any], Any, Any]]] = {
    AttentionParams: PARAMS, Tensors: TENSORS, TensorSpec: TENSOR, Policy: POLICY, Environment: ENVIRONMENT,
    attnsel.Device: DEVICE,
}  # fmt: skip
ROWS = [(kind, name) for kind, table in TABLES.items() for name in table]


def test_each_field_has_its_row() -> None:
    assert {kind: list(table) for kind, table in TABLES.items()} == {k: list(k.model_fields) for k in TABLES}


def pair(kind: Any, name: str) -> list[Any]:
    others, *values = TABLES[kind][name]
    return [kind(**{**others, name: value}) for value in values]


@each("kind, name", ROWS)
def test_what_differs_in_one_field_differs(kind: Any, name: str) -> None:
    (a, b), (again, _) = pair(kind, name), pair(kind, name)
    assert a != b
    assert hash(a) != hash(b)
    assert a == again
    assert hash(a) == hash(again)
    changed = {n for n in kind.model_fields if getattr(a, n) != getattr(b, n)}
    assert changed == {name}, "a row is about one field"


# "resolved" says how an environment was made up, not what it is.
ASKED = {AttentionParams: "params", Policy: "policy", Environment: "environment"}


@each("kind, name", [(kind, name) for kind, name in ROWS if kind in ASKED and name != "resolved"])
def test_another_question_has_another_answer(kind: Any, name: str) -> None:
    plain = {AttentionParams: AttentionParams(), Environment: environment(), Policy: Policy()}
    a, b = pair(kind, name)
    first, second, again = (
        select(asked[AttentionParams], asked[Environment], policy=asked[Policy])
        for asked in ({**plain, kind: one} for one in (a, b, *pair(kind, name)[:1]))
    )
    assert first is not second
    assert again is first
    for one, answer in ((a, first), (b, second)):
        answered = getattr(answer, ASKED[kind])
        # What is assumed of a machine may be filled in.
        assert answered == one if kind is not Environment else getattr(answered, name) == getattr(one, name)


def test_other_evidence_has_another_answer() -> None:
    first, second = (
        select(AttentionParams(), environment(), evidence=evidence)
        for evidence in (Evidence(), Evidence(many_lengths=True))
    )
    assert first is not second
    assert (first.evidence.many_lengths, second.evidence.many_lengths) == (False, True)


# ---- an fp8_meta is its recipe ----------------------------------------------------------------------

KINDS = ("delayed", "current", "mxfp8", "block")


def fp8(meta: Any) -> AttentionParams:
    return AttentionParams(fp8=True, fp8_meta=meta)


def recipe_of(kind: str, **fields: Any) -> Any:
    return fp8({"recipe": {"kind": kind, **fields}}).recipe


class Incomparable:
    """As a tensor is: neither equal nor unequal as a whole, and of no use as a key."""

    __hash__ = None

    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        raise AssertionError("equality read what is no recipe")


def two_values(annotation: Any) -> tuple[Any, Any] | None:
    """Two legal values of a recipe's field, from its annotation; None for a kind that is not known here."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)[:2]
    return {bool: (False, True), int: (1, 2), float: (1.0, 2.0)}.get(annotation)


RECIPE_ROWS = [
    (kind, name, field.annotation)
    for kind in KINDS
    for name, field in type(recipe_of(kind)).model_fields.items()
    if name != "kind"
]


def test_a_meta_without_a_recipe_is_none() -> None:
    metas = (None, {}, {"scale": Incomparable(1.0)}, {"scale": 1}, {"recipe": None})
    assert {fp8(meta) for meta in metas} == {AttentionParams(fp8=True)}
    assert fp8(None) != fp8({"recipe": "delayed"})


@each("kind", KINDS)
def test_equal_recipes_are_one_whatever_stands_beside_them(kind: str) -> None:
    one = fp8({"recipe": {"kind": kind}, "scale": Incomparable(1.0), "amax_history": [1.0], "step": 1})
    two = fp8({"recipe": recipe_of(kind), "scale": Incomparable(2.0), "amax_history": [3.0] * 1024})
    three = fp8(kind)
    assert one.recipe == two.recipe == three.recipe
    assert one.recipe is not two.recipe
    assert one == two == three
    assert hash(one) == hash(two) == hash(three)
    assert select(one, environment()) is select(two, environment()) is select(three, environment())


def test_recipes_of_different_kinds_are_different() -> None:
    assert len({fp8(kind) for kind in KINDS}) == len(KINDS)
    assert len({id(select(fp8(kind), environment())) for kind in KINDS}) == len(KINDS)


@each("kind, name, annotation", RECIPE_ROWS)
def test_each_field_of_a_recipe_counts(kind: str, name: str, annotation: Any) -> None:
    """As ours, and read from TransformerEngine's object: it has our names; fp8_format is an enum's member."""
    values = two_values(annotation)
    assert values is not None, f"two_values does not know what a {annotation} may hold"
    one, two, again = (recipe_of(kind, **{name: value}) for value in (*values, values[0]))
    assert one != two
    assert hash(one) != hash(two)
    assert one == again
    assert fp8({"recipe": one}) != fp8({"recipe": two})
    assert select(fp8({"recipe": one}), environment()) is not select(fp8({"recipe": two}), environment())
    formats = enum.Enum("Format", ["E4M3", "HYBRID"])
    for value, ours in zip(values, (one, two), strict=True):
        theirs = type(type(ours).__name__, (), {"unknown_to_us": object()})()
        setattr(theirs, name, formats[value] if name == "fp8_format" else value)
        assert fp8({"recipe": theirs}).recipe == ours
        assert fp8({"recipe": theirs, "scale": Incomparable(1.0)}) == fp8({"recipe": ours})


@each("recipe", [object(), "delaied", {"kind": "other"}, 3])
def test_an_unknown_recipe_is_an_error(recipe: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        fp8({"recipe": recipe})
    assert caught.value.field == "fp8_meta"


def test_a_meta_that_changes_later_changes_no_question() -> None:
    theirs = type("DelayedScaling", (), {"margin": 1})()
    meta = {"recipe": theirs, "scale": 1.0}
    p, same = fp8(meta), fp8({"recipe": {"kind": "delayed", "margin": 1}})
    before = hash(p)
    theirs.margin, meta["scale"] = 2, 5.0
    assert p == same
    meta["recipe"] = {"kind": "current"}
    assert p == same
    assert hash(p) == before == hash(same)
    assert fp8(meta) != p


def test_nothing_of_a_meta_is_kept_alive() -> None:
    class Scale:
        pass

    scale, theirs = Scale(), type("DelayedScaling", (), {"margin": 1})()
    gone = weakref.ref(scale), weakref.ref(theirs)
    p = fp8({"recipe": theirs, "scaling_fwd": scale, "history": [scale]})
    selection = select(p, environment())
    del scale, theirs
    gc.collect()
    assert [dead() for dead in gone] == [None, None]
    assert selection.params is not None


STEPS = 1000


def training(step: int) -> AttentionParams:
    """What a training loop asks at one step: everything anew, the recipe too."""
    meta = {"recipe": {"kind": "delayed", "fp8_dpa": True}, "scaling_fwd": Incomparable(1.0 / (step + 1))}
    meta |= {"amax_history": [float(step)] * 16, "step": step}
    return AttentionParams(dtype="bf16", num_heads=8, head_dim_qk=128, fp8=True, fp8_meta=meta)


def alive() -> int:
    gc.collect()
    return sum(type(thing) is AttentionParams for thing in gc.get_objects())


def test_a_thousand_steps_with_changing_scales_are_one_selection() -> None:
    first = select(training(0), environment())
    before = alive()
    others = [step for step in range(1, STEPS) if select(training(step), environment()) is not first]
    assert not others, f"{len(others)} steps were planned anew, the first at step {others[0]}"
    assert alive() - before <= 1, "questions of single steps are remembered"

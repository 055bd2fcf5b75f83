"""The question: its checks, its normalisations, its equality."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel import AttentionParams, InvalidInput
from attnsel.params.options import DelayedScaling, Float8CurrentScaling


class Unwritable:
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def test_a_value_that_cannot_be_written_is_named():
    with pytest.raises(InvalidInput) as caught:
        AttentionParams(dtype=Unwritable())
    assert caught.value.field == "dtype"


def test_several_problems_are_counted_not_dropped():
    with pytest.raises(InvalidInput, match=r"also wrong: .*head_dim_qk"):
        AttentionParams(num_heads=-1, head_dim_qk=0)


def test_fp8_meta_is_compared_by_its_recipe_only():
    recipe = {"kind": "delayed", "fp8_dpa": True}
    one = AttentionParams(fp8=True, fp8_meta={"recipe": recipe, "scale": [1.0], "step": 1})
    two = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(fp8_dpa=True), "scale": [2.0]})
    other = AttentionParams(fp8=True, fp8_meta={"recipe": Float8CurrentScaling(fp8_dpa=True)})
    assert one == two
    assert hash(one) == hash(two)
    assert one != other
    assert (
        AttentionParams(fp8_meta=None) == AttentionParams(fp8_meta={}) == AttentionParams(fp8_meta={"a": 1})
    )


def test_nothing_in_an_fp8_meta_is_kept_alive():
    class Scale:
        pass

    scale = Scale()
    gone = weakref.ref(scale)
    p = AttentionParams(fp8=True, fp8_meta={"recipe": DelayedScaling(), "scaling_fwd": scale})
    del scale
    gc.collect()
    assert gone() is None
    assert p.recipe == DelayedScaling()


def test_what_was_never_stated_follows_a_change_and_what_was_is_kept():
    assert AttentionParams(max_seqlen_q=1024).replace(max_seqlen_q=2048).max_seqlen_kv == 2048
    assert AttentionParams(num_heads=16).replace(num_heads=32).num_gqa_groups == 32
    assert AttentionParams().replace(attn_mask_type="no_mask").window_size == (-1, -1)
    assert AttentionParams(num_heads=16, num_gqa_groups=16).replace(num_heads=32).num_gqa_groups == 16
    assert AttentionParams(head_dim_qk=192, head_dim_v=128).replace(head_dim_qk=256).head_dim_v == 128
    p = AttentionParams()
    with pytest.raises(InvalidInput, match="num_gqa_groups"):
        p.replace(num_gqa_groups=5)
    with pytest.raises(ValueError, match="frozen"):
        p.head_dim_qk = 64


_values = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70_000), st.floats(), st.text(max_size=8),
    st.sampled_from(["bf16", "fp8_e4m3", "thd", "sbhd", "padding_causal", "alibi", "learnable", "paged"]),
    st.tuples(st.integers(-3, 9), st.integers(-3, 9)),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)  # fmt: skip


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(sorted(AttentionParams.model_fields)), _values, max_size=5))
def test_random_input_gives_parameters_or_the_documented_error(fields):
    try:
        p = AttentionParams(**fields)
    except InvalidInput as error:
        if not (error.field and error.allowed):
            pytest.fail(f"an error that names no field or nothing allowed: {error}")
        return
    assert AttentionParams.model_validate_json(p.model_dump_json()) == p

"""The question: its checks, its normalisations, its equality."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnsel import AttentionParams, InvalidInput, TensorSpec
from attnsel.params import recipes
from attnsel.params.layout import LAYOUTS
from attnsel.params.recipes import DelayedScaling, Float8CurrentScaling, read_recipe
from tables import each


class Unwritable:
    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


SLOPES = {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (3,)}


@each("fields, field, allowed", [
    ({"num_heads": 16, "num_gqa_groups": 3}, "num_gqa_groups", "divide num_heads = 16"),
    ({"num_heads": -1}, "num_heads", "greater than 0"),
    ({"batch_size": 0}, "batch_size", "greater than 0"),
    ({"max_seqlen_q": -5}, "max_seqlen_q", "greater than or equal to 0"),
    ({"head_dim_qk": 0}, "head_dim_qk", "greater than 0"),
    ({"qkv_layout": "hdbs"}, "qkv_layout", "bshd_bshd_bshd"),
    ({"attn_mask_type": "causl"}, "attn_mask_type", "'causal'"),
    ({"dtype": "int8"}, "dtype", "'bf16'"),
    ({"window_size": (-2, 0)}, "window_size", "at least 0"),
    ({"attn_mask_type": "no_mask", "window_size": (-1, 0)}, "window_size", "causal"),
    ({"softcap": float("nan")}, "softcap", "finite"),
    ({"softcap": 1e39}, "softcap", "at most 1e+30"),  # inf in float32: 0 * inf
    ({"attention_dropout": 1.0}, "attention_dropout", "less than 1"),
    ({"bottom_right_diagonal": True}, "bottom_right_diagonal", "must be False"),
    ({"core_attention_bias_shape": "1hss"}, "core_attention_bias_shape", "post_scale_bias"),
    (SLOPES, "alibi_slopes_shape", "(16,)"),
    ({"qkv_layout": "thd"}, "attn_mask_type", "padding"),
    ({"pad_between_seqs": True}, "pad_between_seqs", "thd"),
    ({"kv_cache": "paged", "is_training": False}, "kv_cache", "paged_kv"),
    ({"page_size": 16}, "page_size", "kv_cache"),
    ({"kv_cache": "contiguous"}, "is_training", "False"),
    ({"context_parallel": True}, "context_parallel", "cp_size"),
    ({"fp8_meta": {"recipe": object()}}, "fp8_meta", "DelayedScaling"),
    ({"head_dim": 64}, "head_dim", "no such field"),
    # What cannot be read at all
    ({"context_parallel": "no"}, "context_parallel", ""),
    ({"context_parallel": True, "cp_size": Unwritable()}, "context_parallel", ""),
    ({"tensors": {1: 2}}, "tensors", ""),
    ({"tensors": {"q": {1: 2}}}, "tensors.q", ""),
    ({"fp8_meta": {"recipe": {"kind": []}}}, "fp8_meta", ""),
])  # fmt: skip
def test_bad_input_names_the_field_the_value_and_what_is_allowed(fields, field, allowed):
    with pytest.raises(InvalidInput) as caught:
        AttentionParams(**fields)
    assert caught.value.field == field
    assert allowed in str(caught.value)
    if field in fields and allowed:
        assert repr(caught.value.value) == repr(fields[field])  # NaN differs from itself


def test_a_value_that_cannot_be_written_is_named():
    with pytest.raises(InvalidInput) as caught:
        AttentionParams(dtype=Unwritable())
    assert caught.value.field == "dtype"


def test_recipes_name_what_is_wrong_like_everything_else():
    with pytest.raises(InvalidInput, match="amax_history_len = 0: must be greater than 0"):
        recipes.DelayedScaling(amax_history_len=0)
    assert recipes.DelayedScaling() == recipes.DelayedScaling(margin=0) != recipes.DelayedScaling(margin=1)


def test_several_problems_are_counted_not_dropped():
    with pytest.raises(InvalidInput, match=r"also wrong: .*head_dim_qk"):
        AttentionParams(num_heads=-1, head_dim_qk=0)


@each("given, stored", [
    ({"attn_mask_type": "padding,causal"}, {"attn_mask_type": "padding_causal"}),
    ({"attn_mask_type": "causal_padding"}, {"attn_mask_type": "padding_causal"}),
    ({"dtype": "torch.bfloat16"}, {"dtype": "bf16"}),
    ({"qkv_dtype": "half"}, {"dtype": "fp16"}),
    ({"qkv_layout": "sbhd"}, {"qkv_layout": "sbhd_sbhd_sbhd"}),
    ({"window_size": None}, {"window_size": (-1, 0)}),
    ({"window_size": (128, 128)}, {"window_size": (128, 0)}),
    ({"attn_mask_type": "no_mask"}, {"window_size": (-1, -1), "bottom_right_diagonal": True}),
    ({"attn_mask_type": "causal_bottom_right"}, {"bottom_right_diagonal": True}),
    ({"num_heads": 8}, {"num_gqa_groups": 8}),
    ({"max_seqlen_q": 7}, {"max_seqlen_kv": 7}),
    ({"head_dim_qk": 96}, {"head_dim_v": 96}),
    ({"core_attention_bias_type": "post_scale_bias"}, {"core_attention_bias_shape": "1hss"}),
])  # fmt: skip
def test_equal_questions_are_brought_to_one_form(given, stored):
    p = AttentionParams(**given)
    assert {name: getattr(p, name) for name in stored} == stored


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


def test_a_recipe_of_transformer_engine_is_read_by_its_name_and_fields():
    class Format:
        name = "HYBRID"

    theirs = type("DelayedScaling", (), {"margin": 3, "fp8_format": Format(), "fp8_dpa": True, "other": 1})()
    assert read_recipe(theirs) == DelayedScaling(margin=3, fp8_dpa=True)


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


def test_every_layout_name_says_what_it_is():
    for layout in LAYOUTS:
        paged = layout.startswith("paged")
        cache = {"kv_cache": "paged", "page_size": 16, "is_training": False} if paged else {}
        p = AttentionParams(qkv_layout=layout, attn_mask_type="padding_causal", **cache)
        assert p.qkv_format in layout or p.layout.group in ("3hd", "h3d")


def test_a_tensor_spec_needs_a_stride_per_dimension():
    with pytest.raises(InvalidInput, match="must be equal"):
        TensorSpec(shape=(2, 3), stride=(3,))
    assert TensorSpec(shape=(2, 1, 3), stride=(3, 99, 1)).contiguous
    assert not TensorSpec(shape=(2, 3), stride=(6, 2)).contiguous


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

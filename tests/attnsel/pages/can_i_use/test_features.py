"""Features cover what a question can ask, and are found by what people call them."""

from __future__ import annotations

import re

import pytest

from attnsel import AttentionParams, InvalidInput
from attnsel.pages.can_i_use import all_features, find
from attnsel.params.options import KINDS
from attnsel.rules.takes import FEATURES as CAPABILITIES
from tables import cells_of, each

FEATURES = all_features()
ASKED = {field for feature in FEATURES.values() for field in feature.changes} | {"is_training"}
QUESTIONS = [feature.params(mode) for feature in FEATURES.values() for mode in feature.modes]


def test_every_field_of_a_question_is_asked():
    no_feature = {
        "bottom_right_diagonal",  # decided by the causal mask types, which are asked
        "tensors",  # where tensors lie is a property of one program's tensors; layouts are asked by name
    }
    assert set(AttentionParams.model_fields) - ASKED == no_feature


# What no feature asks for, because no user would call it one.
UNASKED = {"strides", "empty"}


@each("word", sorted({capability.word for capability in CAPABILITIES}))
def test_everything_a_record_can_list_is_asked_by_some_feature(word):
    tests = [capability.asked for capability in CAPABILITIES if capability.word == word]
    assert any(asked(p) for asked in tests for p in QUESTIONS) == (word not in UNASKED)


def test_every_recipe_and_every_kind_of_mask_is_asked():
    assert {p.recipe.kind for p in QUESTIONS if p.fp8_attention} == set(KINDS)
    masks = re.findall(r"'([\w-]+)'", str(AttentionParams.model_fields["attn_mask_type"].annotation))
    assert set(masks) <= {p.attn_mask_type for p in QUESTIONS}


def test_a_name_is_an_address_and_no_word_means_two_features():
    words = [word for feature in FEATURES.values() for word in feature.words]
    assert not [name for name in FEATURES if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)]
    twice = {word for word in words if words.count(word) > 1}
    assert twice == {"context-parallelism", "context-parallel"}  # of all exchanges
    assert not set(FEATURES) & {"index", "matrix"}
    assert not [name for name in FEATURES if re.fullmatch(r"sm\d+", name)]  # pages of architectures


@each("word, names", cells_of(__file__, "words.txt"))
def test_a_feature_is_found_by_what_people_call_it(word, names):
    assert [feature.name for feature in find([word])] == names.split()
    assert [feature.name for feature in find(["sinks", "alibi", "sink"])] == ["sinks", "alibi"]


def test_an_unknown_word_names_near_ones():
    with pytest.raises(InvalidInput, match="did you mean softcap"):
        find(["sofcap"])
    with pytest.raises(InvalidInput, match="attnsel can-i-use lists them"):
        find(["zzzzzz"])

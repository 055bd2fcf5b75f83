"""An argument that there is not gets one clear error, with the one that was meant."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnsel import (
    AttentionParams,
    DotProductAttention,
    Environment,
    InvalidInput,
    Policy,
    attention,
    configure,
    select,
)
from attnsel.backends.registry import CANDIDATES
from attnsel.base.suggestions import other_names, said
from attnsel.settings import Settings

Q = torch.zeros(1, 4, 2, 8)
CORE = DotProductAttention(2, 8, qkv_format="bshd")

INVERTED = "did you mean attn_mask? True = takes part, as in F.sdpa; attention_mask is the opposite"
CAUSAL = 'did you mean attn_mask_type="causal"?'
WINDOW = "did you mean window_size=(left, right)?"
LEFT_OUT = "leave it out: the heads of k and v say it"
OF_MODULE = "did you mean attention_dropout? It is an argument of DotProductAttention(...)"
GROUPS = "did you mean num_gqa_groups? The number of key/value heads"


def built(**wrong: Any) -> Any:
    return DotProductAttention(2, 8, **wrong)


def run(**wrong: Any) -> Any:
    return CORE(Q, Q, Q, **wrong)


def explained(**wrong: Any) -> Any:
    return CORE.explain(Q, Q, Q, **wrong)


def called(**wrong: Any) -> Any:
    return attention(Q, Q, Q, **wrong)


def selected(**wrong: Any) -> Any:
    return select(AttentionParams(), **wrong)


def described(**wrong: Any) -> Any:
    return Environment.describe("H100", **wrong)


MEANINGS: list[tuple[Callable[..., Any], str, str]] = [
    *((call, "is_causal", CAUSAL) for call in (built, run, explained, called, selected, AttentionParams)),
    *((call, "mask", INVERTED) for call in (run, explained, called)),
    (AttentionParams, "attn_mask", 'did you mean attn_mask_type="arbitrary"?'),
    *((call, "dropout_p", "did you mean attention_dropout?") for call in (built, called, AttentionParams)),
    *((call, "dropout_p", OF_MODULE) for call in (run, explained)),
    *((call, "scale", "did you mean softmax_scale?") for call in (built, run, explained, called)),
    (AttentionParams, "scale", "the scale of the scores decides nothing, so there is no field for it"),
    *((call, "enable_gqa", GROUPS) for call in (built, AttentionParams)),
    *((call, "enable_gqa", LEFT_OUT) for call in (run, explained, called)),
    *((call, "window", WINDOW) for call in (built, run, called, AttentionParams)),
    (run, "softcap", "it is an argument of DotProductAttention(...)"),
    (built, "head_dim", "did you mean kv_channels?"),
    (AttentionParams, "kv_heads", "did you mean num_gqa_groups?"),
    (called, "sofmax_scale", "did you mean softmax_scale?"),
    (selected, "env", "did you mean environment?"),
    (selected, "num_heads", "it is an argument of AttentionParams(...)"),
    (Policy, "disable", "did you mean deny?"),
    (described, "cuda_version", "did you mean cuda? Allowed: torch, triton"),
    (Environment.describe, "device", "did you mean gpu? Allowed: torch, triton"),
    (configure, "determinstic", "did you mean deterministic? Allowed: adapt"),
]


def test_what_was_meant_is_said() -> None:
    for call, name, meant in MEANINGS:
        wanted = TypeError if call in (built, run, explained, called, selected) else InvalidInput
        with pytest.raises(wanted) as caught:
            call(**{name: 1})
        text = str(caught.value)
        assert name in text
        assert f": {meant}" in text


def test_what_resembles_nothing_gets_no_guess() -> None:
    for call in (built, run, explained, called, selected, AttentionParams, Policy, described):
        with pytest.raises((TypeError, InvalidInput), match="colour") as caught:
            call(**{"colour": 1})
        assert "mean" not in str(caught.value)


def test_every_meaning_is_of_something_that_exists() -> None:
    functions = (DotProductAttention.__init__, DotProductAttention.forward, attention, select)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= {"gpu", "--gpu", *AttentionParams.model_fields, *Environment.model_fields}
    names |= {*Policy.model_fields, *Settings.model_fields}
    assert set(other_names("field")) | set(other_names("argument")) <= names
    assert {row.argument.rstrip("=") for row in said()} <= names
    assert set(other_names("candidate")) <= set(CANDIDATES)
    # A name is never explained by another that is right as well.
    for name, words in other_names("candidate").items():
        assert not set(words.split()) & set(CANDIDATES), name

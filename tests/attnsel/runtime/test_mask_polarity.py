"""A bool mask that looks inverted is told once, under ATTNSEL_DEBUG; so are hints about the call."""

from __future__ import annotations

import warnings

import pytest
import torch

import attnsel
from attnsel.debug import HintWarning

VISIBLE = torch.ones(8, 8, dtype=torch.bool).tril()  # as F.sdpa wants a causal mask


def told(mask, debug=1, calls=1):
    """The hints that calls with this mask are given."""
    q = torch.randn(1, 8, 2, 16)
    with attnsel.override(debug=debug, debug_file="/dev/null"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(calls):
            attnsel.attention(q, q, q, attention_mask=mask, attn_mask_type="arbitrary")
    return [str(w.message) for w in seen if issubclass(w.category, HintWarning)]


@pytest.fixture(autouse=True)
def _nothing_said_before(monkeypatch):
    from attnsel import debug

    attnsel.clear_cache()
    monkeypatch.setattr(debug, "_announced", set())


def test_it_is_said_once_with_the_way_out():
    (message,) = told(VISIBLE, calls=3)
    assert "True means masked out here" in message
    assert "attention_mask=~mask" in message
    assert message.endswith("[HINT009]")


def test_without_debug_nothing_is_read_or_said():
    assert told(VISIBLE, debug=0) == []

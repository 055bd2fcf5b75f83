"""Calls that were probably meant otherwise are told as docs/reference/mistakes.md promises, and no others."""

from __future__ import annotations

import warnings

import pytest
import torch

from attnsel import DotProductAttention, InvalidInput, attention, configure, debug, override
from attnsel.errors import SuspiciousCall
from attnsel.f_sdpa.function import scaled_dot_product_attention
from legitimate_calls import drawn, words
from mistaken_calls import cases, expected, outcome

LOWER = torch.ones(16, 16, dtype=torch.bool).tril()
Q = torch.randn(2, 16, 4, 8)
INVERTED = {"attn_mask_type": "arbitrary", "attention_mask": LOWER}


def test_a_mistake_is_told_where_the_page_promises_it():
    found = [(case.mistake, case.door, case.layout, outcome(case.made), expected(case)) for case in cases()]
    assert [one for one in found if one[-1] != one[-2]] == []


def test_no_word_about_calls_as_programs_make_them():
    assert [(str(made), said) for made in drawn(250, 1) if (said := words(made))] == []


def test_it_is_said_once_for_a_kind_of_call_unless_it_is_silenced(monkeypatch):
    monkeypatch.setattr(debug, "_announced", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for s in (1, 2, 3):
            attention(Q[:, :1], Q[:, : 5 + s], Q[:, : 5 + s], attn_mask_type="causal")
        with override(silence=("HINT009",), strict=True):
            attention(Q, Q, Q, **INVERTED)
    assert [one.category for one in caught] == [debug.HintWarning]
    assert "causal_bottom_right" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_strict_process_raises_at_every_call():
    with override(strict=True):
        for _ in range(2):
            with pytest.raises(SuspiciousCall, match=r"attn_mask=mask.*\[HINT009\]") as error:
                attention(Q, Q, Q, **INVERTED)
            assert error.value.code == "HINT009"
    with pytest.raises(InvalidInput, match=r"silence.*no hint; allowed: all, or codes such as HINT009"):
        configure(silence="HINT9")


@pytest.mark.parametrize("mask", [LOWER, torch.randn(2, 1, 16, 16), LOWER[:, :1].expand(16, 16)])
def test_attn_mask_means_what_it_means_in_pytorch(mask):
    meant = scaled_dot_product_attention(*(Q.transpose(1, 2) for _ in "qkv"), attn_mask=mask).transpose(1, 2)
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask")
    torch.testing.assert_close(attention(Q, Q, Q, attn_mask=mask), meant)
    torch.testing.assert_close(core(Q, Q, Q, attn_mask=mask).view_as(meant), meant)
    assert core.explain(Q, Q, Q, attn_mask=mask) == core.last_selection


def test_attn_mask_beside_a_padding_type_and_beside_what_contradicts_it():
    real = torch.tensor([16, 9])[:, None, None, None] > torch.arange(16)
    padded = attention(Q, Q, Q, attn_mask_type="padding", attn_mask=real)
    assert torch.equal(padded, attention(Q, Q, Q, attn_mask_type="padding", attention_mask=~real))
    for others, named in (
        ({"attention_mask": LOWER}, "attn_mask = 'a tensor': must be left out"),
        ({"attn_mask_type": "causal"}, "attn_mask_type = 'causal': must be no_mask"),
        ({"attn_mask": LOWER.int()}, "attn_mask.dtype = 'torch.int32': must be torch.bool"),
    ):
        with pytest.raises(InvalidInput, match=named):
            attention(Q, Q, Q, **{"attn_mask": LOWER, **others})

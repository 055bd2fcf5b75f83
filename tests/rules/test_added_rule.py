"""The rule that other tests add and take away: there it refuses, and afterwards nothing of it is left."""

from __future__ import annotations

import sys

import pytest

from added_rule import as_it_was
from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, find_rule
from attnsel.rules.examples import question


def reasons(p, env):
    return [reason.code for reason in select(p, env)["cudnn"].reasons]


WINDOW = AttentionParams(window_size=(128, 0)), Environment.describe("H100", cudnn="9.10.2")


def test_it_refuses_where_it_says_and_passes_where_it_says(added_rule):
    assert reasons(*WINDOW) == []
    page = added_rule()
    assert page is find_rule("CUDNN999")
    assert reasons(*WINDOW) == ["CUDNN999"]
    assert "CUDNN999" in reasons(*question(page, page.fires_on))
    assert "CUDNN999" not in reasons(*question(page, page.passes))


def test_nothing_is_left_of_it(tmp_path):
    before, order = dict(REGISTRY.pages), list(REGISTRY.pages)
    with as_it_was():
        REGISTRY.pages.pop("BUG006")
        REGISTRY.pages["CUDNN999"] = before["CUDNN001"]
    assert (REGISTRY.pages, list(REGISTRY.pages)) == (before, order)


def test_the_test_before_left_nothing():
    assert reasons(*WINDOW) == []
    assert not [name for name in sys.modules if name.startswith("rules_of_a_test")]
    with pytest.raises(KeyError, match="no rule"):
        find_rule("CUDNN999")

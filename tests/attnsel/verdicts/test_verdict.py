"""What a reason says: who is meant, what was seen, what is needed."""

from __future__ import annotations

import pytest

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.environment import COMPONENTS
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.examples import question

load_all()


def reason(code, candidate, p, env):
    (found,) = [each for each in select(p, env)[candidate].reasons if each.code == code]
    return found


def test_a_recipe_that_is_missing_was_not_given():
    p = AttentionParams(dtype="fp8_e4m3")
    found = reason("CUDNN301", "cudnn", p, Environment.describe("H100"))
    assert found.observed is None
    assert " — fp8_meta is not given, needs a recipe of kind" in found.message


def test_a_library_that_is_missing_is_not_installed():
    found = reason("INSTALL003", "cudnn", AttentionParams(), Environment.describe("H100", cudnn=None))
    assert " — cudnn is not installed, needs at least" in found.message


@pytest.mark.parametrize("rule", REGISTRY.rules.values(), ids=lambda rule: rule.code)
def test_only_what_can_be_installed_is_said_not_to_be(rule):
    p, env = question(rule, rule.fires_on)
    for candidate in select(p, env, policy=Policy(adapt="never")):
        for each in candidate.reasons:
            missing = f"{each.field} is not installed" in each.message
            assert missing == (each.observed is None and each.field in COMPONENTS), each.message

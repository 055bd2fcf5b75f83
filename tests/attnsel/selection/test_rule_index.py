"""The index of the rules gives what asking each of them gives, and what a rule does not read moves none."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from added_rule import as_it_was
from attnsel import Environment, InvalidInput
from attnsel.backends.registry import CANDIDATES
from attnsel.environment.versions import Version
from attnsel.rules import REGISTRY, Registry, rule
from attnsel.selection.evaluate import NONE_WAIVED, fold
from attnsel.selection.rule_index import all_read_by, rule_index
from attnsel.selection.unlock.change import Scenario, changed, touched
from attnsel.selection.unlock.proposals import _says, _unasked
from questions import questions

MOVES: tuple[dict[str, Any], ...] = (
    {"qkv_layout": "bshd_bshd_bshd", "attn_mask_type": "no_mask"},
    {"attn_mask_type": "padding"},
    {"core_attention_bias_type": "post_scale_bias"},
    {"num_gqa_groups": 1},
    {"head_dim_qk": 256},
    {"dtype": "fp32"},
    {"torch": Version(2, 3)},
    {"cuda": Version(11, 8)},
    {"cuda": Version(13, 0)},
    {"cudnn": Version(9, 30)},
)


def test_folding_keeps_the_rules_whose_gates_are_open() -> None:
    waived = {page.code for page in REGISTRY.pages.values() if page.status == "preview"}
    for _, env, _ in questions(5, 60):
        for among, *kind in product([(), ("cudnn",), ("sdpa.flash", "triton")], *[(False, True)] * 3):
            names = among or tuple(CANDIDATES)
            kept = [
                rule
                for rule in REGISTRY.rules.values()
                if rule.applies(env) and rule.is_about(*kind) and not {*names}.isdisjoint(rule.candidates)
            ]
            assert fold(env, *kind, NONE_WAIVED, among).rules == tuple(
                rule for rule in kept if rule.code not in waived
            )


def test_a_rule_says_the_same_after_a_change_that_touches_nothing_it_reads() -> None:
    """So that the search for ways out need not ask it."""
    compared = 0
    for p, env, policy in questions(6, 60):
        question = Scenario(p, env, policy)
        moves = [*_unasked(question, question, (), hardware=True), *MOVES]
        for move in moves:
            try:
                after = changed(question, move)
            except InvalidInput:
                continue
            other = {name for name in type(p).model_fields if getattr(after.p, name) != getattr(p, name)}
            other |= {
                name for name in type(env).model_fields if getattr(after.env, name) != getattr(env, name)
            }
            assert other <= touched(tuple(move)), move
            for one in REGISTRY.rules.values():
                if all_read_by(one).isdisjoint(touched(tuple(move))):
                    assert _says(one, after) == _says(one, question), (one.code, move)
                    compared += 1
    assert compared > 50_000


def test_a_rule_that_came_later_is_in_the_index() -> None:
    env = Environment.describe("H100")
    with as_it_was():
        before = len(fold(env, False, False, True).rules)

        @rule("BUG900", "tiled", evidence="measured")
        def late(p, env):
            """It came after the others were folded

            Source: this file.
            """

        assert rule_index().rules[-1].code == "BUG900"
        assert len(fold(env.derive(detected=True), False, False, True).rules) == before + 1


def test_a_rule_of_a_plugin_without_a_source_fails_at_once() -> None:
    def unfounded(p, env):
        """It rests on nothing"""

    with pytest.raises(ValueError, match="OWN001: the docstring needs a line 'Source: …'"):
        rule("OWN001", "own", registry=Registry("own"))(unfounded)

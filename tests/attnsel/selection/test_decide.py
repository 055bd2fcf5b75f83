"""The choice is made before the explanation, and is the one the explanation would have made."""

from __future__ import annotations

import pytest

from attnsel import AttentionParams, Environment, Policy
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import select
from attnsel.plugins import load_plugins
from attnsel.rules import REGISTRY
from attnsel.selection.inquiry import Inquiry
from attnsel.selection.rank import asked, at_best, key_of, rank_key
from attnsel.verdicts.evidence import NO_EVIDENCE, Evidence, Refusal
from questions import questions

load_plugins()
SEEDS = [(0, 300), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 8))]


def evaluated_whole(p, env, policy, evidence):
    """Every candidate judged and ranked before one is chosen."""
    ranked = Inquiry(p, env, policy, evidence).ranked()
    runs = [c for c in ranked if c.verdict != "refused" and (c.executable or not env.detected)]
    return (runs[0].name if runs else None), ranked


@pytest.mark.parametrize(("seed", "count"), SEEDS)
def test_what_is_decided_first_is_what_a_whole_evaluation_gives(seed, count):
    for p, env, policy in questions(seed, count):
        name, ranked = evaluated_whole(p, env, policy, NO_EVIDENCE)
        inquiry = Inquiry(p, env, policy, NO_EVIDENCE)
        chosen = inquiry.decide()
        assert (chosen.name if chosen else None) == name, (p, env, policy)
        if chosen is not None:
            assert chosen == next(c for c in ranked if c.name == name)._replace(placed_by=None)
        assert inquiry.ranked() == ranked, (p, env, policy)


@pytest.mark.parametrize(("seed", "count"), SEEDS[:2])
def test_and_with_what_was_learnt(seed, count):
    for p, env, policy in questions(100 + seed, count // 2):
        first, _ = evaluated_whole(p, env, policy, NO_EVIDENCE)
        if first is None:
            continue
        asked = Inquiry(p, env, policy, NO_EVIDENCE).p
        learned = Evidence((Refusal(first, asked, "no engine"),))
        chosen = Inquiry(p, env, policy, learned).decide()
        name, _ = evaluated_whole(p, env, policy, learned)
        assert (chosen.name if chosen else None) == name != first


def test_nothing_that_cannot_change_the_choice_is_judged():
    inquiry = Inquiry(AttentionParams(), Environment.describe("H100"), Policy(), NO_EVIDENCE)
    assert inquiry.decide().name == "cudnn"
    assert set(inquiry._judged) == {"cudnn"}
    assert len(inquiry.ranked()) == len(CANDIDATES)


def test_a_selection_is_explained_when_it_is_looked_at():
    selection = select(AttentionParams(max_seqlen_q=4095), Environment.describe("H100"))
    assert selection.backend == selection.chosen.name
    assert selection._candidates is None
    assert selection[selection.backend].name == selection.backend
    assert selection._candidates is not None


@pytest.mark.parametrize(("seed", "count"), SEEDS[:2])
def test_no_candidate_ranks_better_than_it_could_at_best(seed, count):
    """What lets the search stop: adapting and doubt never improve a place."""
    for p, env, policy in questions(200 + seed, count // 2):
        of = asked(p)
        bounds = {name: key for key, name in at_best(env, policy, of)}
        for candidate in Inquiry(p, env, policy, NO_EVIDENCE).ranked():
            if candidate.verdict != "refused":
                key = key_of(rank_key(candidate, p, of), env.arch, policy)
                assert key >= bounds[candidate.name]
    assert REGISTRY.preferences

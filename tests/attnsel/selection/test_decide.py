"""The choice is made before the explanation, and is the one the explanation would have made."""

from __future__ import annotations

import pytest

from attnsel import AttentionParams, Environment, Policy
from attnsel.backends.registry import CANDIDATES
from attnsel.decision import select
from attnsel.plugins import load_plugins
from attnsel.rules import REGISTRY
from attnsel.selection.inquiry import Inquiry, at_best, key_of, preference_input, rank_key
from attnsel.verdicts.reasons import NO_EVIDENCE, Evidence, Refusal
from questions import questions

load_plugins()


def evaluated_whole(p, env, policy, evidence):
    """Every candidate judged and ranked before one is chosen."""
    ranked = Inquiry(p, env, policy, evidence).ranked()
    runs = [c for c in ranked if c.verdict != "refused" and (c.executable or not env.detected)]
    return (runs[0].name if runs else None), ranked


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 300), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 8))]
)
def test_what_is_decided_first_is_what_a_whole_evaluation_gives(seed, count):
    """Also with what was learnt; nothing ranks better than it could at best, which lets the search stop."""
    assert REGISTRY.preferences
    for p, env, policy in questions(seed, count):
        name, ranked = evaluated_whole(p, env, policy, NO_EVIDENCE)
        inquiry = Inquiry(p, env, policy, NO_EVIDENCE)
        chosen = inquiry.decide()
        assert (chosen.name if chosen else None) == name, (p, env, policy)
        assert inquiry.ranked() == ranked, (p, env, policy)
        of = preference_input(p)
        bounds = {name: key for key, name in at_best(env.device, policy, of)}
        for candidate in ranked:
            if candidate.verdict != "refused":
                key = key_of(rank_key(candidate, p, of), env.arch, policy)
                assert key >= bounds[candidate.name]
        if chosen is not None:
            assert chosen == next(c for c in ranked if c.name == name)._replace(placed_by=None)
            learned = Evidence((Refusal(name, inquiry.p, "no engine"),))
            instead = Inquiry(p, env, policy, learned).decide()
            expected, _ = evaluated_whole(p, env, policy, learned)
            assert (instead.name if instead else None) == expected != name


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

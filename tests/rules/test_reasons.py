"""No reason reads as if it were met: its value does not satisfy what it names, nor is it what repairs it.

Asked: every rule's example, questions drawn at random, and what TransformerEngine's and PyTorch's choosers
say to such.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from attnsel import InvalidInput
from attnsel.decision import select
from attnsel.environment.versions import Version
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.codes import question
from attnsel.verdicts.reasons import Reason
from questions import questions, random_question
from tables import each
from te_questions import questions as questions_of_te

load_all()
RULES = list(REGISTRY.rules.values())
BOUND = re.compile(
    r"\b(?:is|to) (\S+?),? (?:needs )?(at least|at most|above|below) (\S+)(?: and (below) (\S+))?"
)
INSTEAD = re.compile(r"needs \w+ (\S+), not (\S+)")
ONE_OF = re.compile(r"\b(?:is|dropout) (\S+), (?:needs|only) ([^:;()]+)")


def number(text: str) -> Version | None:
    text = text.removeprefix("sm").rstrip(".,:;)")
    try:
        return Version(int(text)) if text.isdigit() else Version.parse(text)
    except ValueError:
        return None


def holds(value: Version | None, words: str, bound: Version | None) -> bool:
    if value is None or bound is None:
        return False
    return {"least": value >= bound, "most": value <= bound, "above": value > bound, "below": value < bound}[
        words.split()[-1]
    ]


def read_as_met(text: str) -> Iterator[str]:
    """The parts of a sentence whose value satisfies what is asked of it."""
    for value, words, bound, also, other in BOUND.findall(text):
        excepted = "neither" in text and value in text.partition("neither")[2]
        both = not also or holds(number(value), also, number(other))
        if holds(number(value), words, number(bound)) and both and not excepted:
            yield f"{value} {words} {bound}"
    yield from (had for bound, had in INSTEAD.findall(text) if holds(number(had), "at least", number(bound)))
    for value, allowed in ONE_OF.findall(text):
        if value in re.split(r", or |, | or | and ", allowed.strip()):
            yield f"{value} among {allowed}"


def misleading(rule, p, env) -> str | None:
    """What of a rule's reason is not so, if it has one."""
    finding = rule.find(p, env) if rule.applies(env) and rule.concerns(p) else None
    if finding is None:
        return None
    reason, (field, observed, required, _) = Reason(rule, finding), finding
    if str(observed) == str(required) or list(read_as_met(reason.message)):
        return f"{rule.code}: {reason.message}"
    if not hasattr(p, field):
        return None
    for value in required.repairs(observed):
        try:
            after = rule.find(p.replace(**{field: value}), env)
        except InvalidInput:
            return None  # another field has to change with it
        if after is None or (after.field, after.observed) != (field, value):
            return None
        return f"{rule.code}: {field} {value} does not repair {reason.message}"
    return None


def test_no_rule_refuses_what_meets_its_own_bound():
    asked = [question(rule, rule.fires_on) for rule in RULES]
    asked += [(p, env) for p, env, _ in questions(20261126, 400)]
    assert not {told for p, env in asked for rule in RULES if (told := misleading(rule, p, env))}


@each("te", ["1.11", "2.8", "2.10", "2.15", "2.18"])
def test_nor_does_a_filter_of_transformer_engine(te):
    said = (select(p, env, dispatcher="te", switches=on) for p, env, on in questions_of_te(7, 150, te))
    texts = {refused.text for s in said for offer in s.dispatched.offers for refused in offer.refusals}
    assert not [text for text in texts if list(read_as_met(text))]


@pytest.mark.parametrize("dispatcher", ["torch", "transformers"])
def test_nor_does_one_of_pytorch_or_transformers(dispatcher):
    draw, texts = random.Random(11), set()
    for drawn in filter(None, (random_question(draw) for _ in range(400))):
        p, env, *_ = drawn.parts
        try:
            offers = select(p, env, dispatcher=dispatcher).dispatched.offers
        except InvalidInput:
            continue
        texts |= {refused.text for offer in offers for refused in offer.refusals}
    assert texts
    assert not [text for text in texts if list(read_as_met(text))]

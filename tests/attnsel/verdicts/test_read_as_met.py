"""No reason reads as if it were met: neither a rule's nor one of another library's chooser."""

from __future__ import annotations

import random

from attnsel import InvalidInput
from attnsel.decision import select
from attnsel.rules.codes import question
from questions import questions, random_question
from read_as_met import RULES, all_misleading, read_as_met
from tables import each
from te_questions import questions as questions_of_te


def test_no_rule_refuses_what_meets_its_own_bound():
    asked = [question(rule, rule.fires_on) for rule in RULES]
    asked += [(p, env) for p, env, _ in questions(20261126, 400)]
    assert not set().union(*(all_misleading(p, env) for p, env in asked))


def other_choosers():
    yield from (
        ("te", *asked)
        for te in ("1.11", "2.8", "2.10", "2.15", "2.18")
        for asked in questions_of_te(7, 150, te)
    )
    draw = random.Random(11)
    for drawn in filter(None, (random_question(draw) for _ in range(400))):
        yield from ((chooser, *drawn.parts[:2], {}) for chooser in ("torch", "transformers"))


@each(
    "sentence",
    ["cuDNN is 9.18.1, at least 9.18.0", "max_logit needs cuDNN 9.21.0, not 9.22.0", "fp8 is 1, needs 1"],
)
def test_a_sentence_that_reads_as_met_is_seen(sentence):
    assert list(read_as_met(sentence))


def test_nor_does_another_librarys_chooser():
    texts = set()
    for chooser, p, env, switches in other_choosers():
        try:
            offers = select(p, env, dispatcher=chooser, switches=switches).dispatched.offers
        except InvalidInput:
            continue
        texts |= {refused.text for offer in offers for refused in offer.refusals}
    assert not [text for text in texts if list(read_as_met(text))]

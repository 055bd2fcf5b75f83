"""Edges within a rule's body: what rules find, question by question, is what ``edges.txt`` says.

A question: a candidate, or how a module's name in rules/ begins, GPU and versions | fields of the call. What
``fires_on`` and ``passes`` of a rule show stands at its declaration (test_every_rule.py); what is next to
every bound and every release on both sides, in tests/net. A new edge is a line of the text that begins with
``>``; its answer is accepted as tests/support/records.py says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, load_all
from attnsel.verdicts.reasons import Reason
from records import Record, literals, words_of

load_all()


def answered(question: str) -> Iterator[str]:
    ((subject, gpu), versions), (_, fields) = (words_of(part) for part in question.split(" | "))
    env, p = Environment.describe(gpu, **versions), AttentionParams(**literals(fields))
    found = []
    for rule in REGISTRY.rules.values():
        of_module = rule.module.startswith(f"attnsel.rules.{subject}")
        concerned = subject in rule.candidates if subject in CANDIDATES else of_module
        if concerned and rule.applies(env) and rule.concerns(p):
            finding = rule.find(p, env)
            if finding is not None:
                reason = Reason(rule, finding)
                found.append(f"{rule.code} {'unknown' if reason.unknown else 'no'}: {reason.message}")
    yield from found or ["nothing"]


def test_every_question_is_answered_as_it_is_written_down(record: Record) -> None:
    record.answers(Path(__file__).with_name("edges.txt"), answered)

"""What of a reason reads as if it were met: its value satisfies what it names, or repairs nothing.

Sentences are read as people read them: "cuDNN is 9.18.1, at least 9.18.0" says nothing that is wanted. A
nightly run draws many questions: ``python tests/proof/read_as_met.py 20000``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.environment.versions import Version
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.api import Rule
from attnsel.verdicts.reasons import Reason

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


def misleading(rule: Rule, p: AttentionParams, env: Environment) -> str | None:
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


def all_misleading(p: AttentionParams, env: Environment) -> set[str]:
    """Of every rule."""
    return {told for rule in RULES if (told := misleading(rule, p, env))}


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("net", "support")]
    from questions import questions

    found: set[str] = set()
    for p, env, _ in questions(20261126, int(sys.argv[1])):
        found |= all_misleading(p, env)
    print("\n".join([*sorted(found), f"{len(found)} misleading"]))
    sys.exit(bool(found))

"""A kernel that refuses what the rules allowed: its own words, and the rules that may explain them.

Or one that ran and was wrong: the figures.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY
from attnsel.rules.cudnn.words import rules_that_say
from attnsel.runtime.selfcheck import Disagreement
from attnsel.select import Refusal, Selection, select
from attnsel.versions import Version

_SPEAK_AS_CUDNN = frozenset({"cudnn", "sdpa.cudnn"})
_MOST = 3
_NEAR = 4  # minor versions: what refuses a call further off is another story


def refusal_of(selection: Selection, error: Exception) -> Refusal:
    """The evidence that the chosen candidate's ``error`` is."""
    name = selection.backend
    assert name is not None
    message = str(error) or type(error).__name__
    if isinstance(error, Disagreement):
        return Refusal(name, selection.params, message, code="RUNTIME002")
    likely: tuple[str, ...] = ()
    if name in _SPEAK_AS_CUDNN:
        likely = likely_rules(name, message, selection.params, selection.environment)
    return Refusal(name, selection.params, message, likely)


def likely_rules(name: str, message: str, p: AttentionParams, env: Environment) -> tuple[str, ...]:
    """Codes of rules for this candidate, the likeliest first; at most three.

    Rules that stand for a sentence of the message; "No execution plans support the graph" says nothing, so
    then the rules that refuse the same call on the nearest older and newer cuDNN, if one near by does.
    """
    found = rules_that_say(message) or tuple(_on_neighbours(name, p, env))
    return tuple(dict.fromkeys(found))[:_MOST]


def _on_neighbours(name: str, p: AttentionParams, env: Environment) -> Iterator[str]:
    current = env.cudnn
    if current is None:
        return
    edges: set[Version] = set()
    for rule in REGISTRY.rules.values():
        if name in rule.candidates:
            for versions in rule.when:
                if versions.component == "cudnn":
                    edges.update(versions.edges())
    newer = sorted(edge for edge in edges if edge > current)
    older = sorted((edge for edge in edges if edge < current), reverse=True)
    for side in (older, newer):
        for edge in side:
            if edge.major != current.major or abs(edge.minor - current.minor) > _NEAR:
                break
            candidate = select(p, env.replace(cudnn=edge))[name]
            codes = [reason.code for reason in candidate.reasons if not reason.unknown]
            if codes:
                yield from codes
                break

"""Rules against one question: which candidates stand, and every reason against the others.

Two stages. ``fold`` keeps the rules whose gates are open, once per environment; ``findings`` runs what
is left, once per question.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attnsel.candidates import CANDIDATES
from attnsel.errors import InvalidInput
from attnsel.memory import memory_parts
from attnsel.params import AttentionParams
from attnsel.reads import ALL, fields_read
from attnsel.rules import REGISTRY, Page, Rule, load_families
from attnsel.rules.api import INTERPRETED
from attnsel.verdict import Reason

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.policy import Policy
    from attnsel.verdict import Adaptation

load_families()


Pair = tuple[Callable[..., Any], Rule]


@lru_cache(maxsize=512)
def fold(
    env: Environment,
    fp8: bool,
    ignored: tuple[str, ...] = (),
    among: tuple[str, ...] = (),
    changed: frozenset[str] = frozenset(),
) -> tuple[Pair, ...]:
    """The rules whose gates are open in ``env`` for FP8 attention or other, less what a policy overrides.

    ``among``: only those that speak about one of these candidates; of them, those that read a field which
    ``changed``.
    """
    if changed:
        pairs = fold(env, fp8, ignored, among)
        return tuple([pair for pair in pairs if not changed.isdisjoint(_fields_read(pair[1]))])
    for code in ignored:
        if code != "all" and code not in REGISTRY.pages:
            bugs = ", ".join(code for code in REGISTRY.pages if code.startswith("BUG"))
            raise InvalidInput("allow_known_bugs", code, f"must be 'all' or among {bugs}")
    waved = {code for code in ignored if code.startswith("BUG") or code == INTERPRETED}
    if "all" in ignored:
        waved.update(code for code in REGISTRY.pages if code.startswith("BUG"))
    return tuple(
        [
            (rule.body, rule)
            for rule in _rules(among)
            if rule.fp8 in (None, fp8) and rule.code not in waved and rule.applies(env)
        ]
    )


@lru_cache(maxsize=64)
def _rules(among: tuple[str, ...]) -> tuple[Rule, ...]:
    """All of them, or those that speak about one of these candidates."""
    rules = REGISTRY.rules.values()
    if not among:
        return tuple(rules)
    named = frozenset(among)
    return tuple([rule for rule in rules if not named.isdisjoint(rule.candidates)])


_FIELDS = tuple(AttentionParams.model_fields)


@lru_cache(maxsize=1024)
def _fields_read(rule: Page) -> frozenset[str]:
    return fields_read(rule.body) if isinstance(rule, Rule) else ALL


def findings(
    p: AttentionParams,
    env: Environment,
    ignored: tuple[str, ...] = (),
    among: tuple[str, ...] = (),
) -> dict[str, list[Reason]]:
    """Every reason against every candidate, as the question stands; or against some of them."""
    found: dict[str, list[Reason]] = {name: [] for name in CANDIDATES}
    for body, rule in fold(env, p.fp8_attention, ignored, among):
        finding = body(p, env)
        if finding is not None:
            reason = Reason(rule, finding)
            for name in rule.candidates:
                found[name].append(reason)
    return found


def findings_again(
    p: AttentionParams,
    before: AttentionParams,
    found: dict[str, list[Reason]],
    env: Environment,
    ignored: tuple[str, ...],
    among: tuple[str, ...],
) -> dict[str, list[Reason]]:
    """``findings`` about some candidates for a question that another, with its findings, was changed into."""
    changed = frozenset(
        [name for name, a, b in zip(_FIELDS, p._key, before._key, strict=True) if a is not b and a != b]
    )
    pairs = fold(env, p.fp8_attention, ignored, among, changed)
    again: dict[str, list[Reason]] = {}
    for name in among:
        reasons = found[name]
        again[name] = [r for r in reasons if changed.isdisjoint(_fields_read(r.rule))] if reasons else []
    for body, rule in pairs:
        finding = body(p, env)
        if finding is not None:
            reason = Reason(rule, finding)
            for name in rule.candidates:
                if name in again:
                    again[name].append(reason)
    return again


def over_memory(
    name: str, p: AttentionParams, env: Environment, policy: Policy, adaptations: tuple[Adaptation, ...]
) -> list[Reason]:
    """The reason against a candidate whose call takes more memory than the policy allows."""
    page = REGISTRY.wishes["POLICY004"]
    finding = page.body(name, policy, memory_parts(name, p, env, adaptations))
    return [] if finding is None else [Reason(page, finding)]


@lru_cache(maxsize=256)
def wishes(policy: Policy) -> dict[str, tuple[Reason, ...]]:
    """Per candidate, the reasons that rest on the policy alone."""
    return {
        name: tuple(
            Reason(page, finding)
            for page in REGISTRY.wishes.values()
            if (finding := page.body(name, policy)) is not None
        )
        for name in CANDIDATES
    }

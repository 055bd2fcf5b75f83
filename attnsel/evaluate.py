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
from attnsel.rules import REGISTRY, Rule, load_families
from attnsel.rules.api import INTERPRETED
from attnsel.verdict import Reason

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.policy import Policy

load_families()


Pair = tuple[Callable[..., Any], Rule]


@lru_cache(maxsize=512)
def fold(
    env: Environment, fp8: bool, ignored: tuple[str, ...] = (), adaptable: bool = False
) -> tuple[Pair, ...]:
    """The rules whose gates are open in ``env`` for FP8 attention or other, less what a policy overrides.

    ``adaptable``: only those that speak about a candidate with adaptations.
    """
    if adaptable:
        codes = _adaptable_codes()
        return tuple([pair for pair in fold(env, fp8, ignored, False) if pair[1].code in codes])
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
            for rule in _all_rules()
            if rule.fp8 in (None, fp8) and rule.code not in waved and rule.applies(env)
        ]
    )


@lru_cache(maxsize=1)
def _all_rules() -> tuple[Rule, ...]:
    return tuple(REGISTRY.rules.values())


@lru_cache(maxsize=1)
def _adaptable_codes() -> frozenset[str]:
    return frozenset(
        rule.code for rule in _all_rules() if any(CANDIDATES[name].adaptations for name in rule.candidates)
    )


def findings(
    p: AttentionParams, env: Environment, ignored: tuple[str, ...] = (), adaptable: bool = False
) -> dict[str, list[Reason]]:
    """Every reason against every candidate, as the question stands; or against those that adapt."""
    found: dict[str, list[Reason]] = {name: [] for name in CANDIDATES}
    for body, rule in fold(env, p.fp8_attention, ignored, adaptable):
        finding = body(p, env)
        if finding is not None:
            reason = Reason(rule, finding)
            for name in rule.candidates:
                found[name].append(reason)
    return found


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

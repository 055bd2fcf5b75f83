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
from attnsel.rules import REGISTRY, Rule, load_all
from attnsel.rules.api import INTERPRETED
from attnsel.verdict import Reason

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.policy import Policy
    from attnsel.verdict import Adaptation

load_all()


Pair = tuple[Callable[..., Any], Rule]


@lru_cache(maxsize=512)
def fold(
    env: Environment,
    fp8: bool,
    ignored: tuple[str, ...] = (),
    adaptable: bool = False,
    about: str | None = None,
) -> tuple[Pair, ...]:
    """The rules whose gates are open in ``env`` for FP8 attention or other, less what a policy overrides.

    ``adaptable``: only those that speak about a candidate with adaptations; ``about``: about this candidate.
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
            for rule in _rules(about)
            if rule.fp8 in (None, fp8) and rule.code not in waved and rule.applies(env)
        ]
    )


@lru_cache(maxsize=32)
def _rules(about: str | None = None) -> tuple[Rule, ...]:
    rules = REGISTRY.rules.values()
    return tuple(rules) if about is None else tuple(rule for rule in rules if about in rule.candidates)


@lru_cache(maxsize=1)
def _adaptable_codes() -> frozenset[str]:
    return frozenset(
        rule.code for rule in _rules() if any(CANDIDATES[name].adaptations for name in rule.candidates)
    )


def findings(
    p: AttentionParams,
    env: Environment,
    ignored: tuple[str, ...] = (),
    adaptable: bool = False,
    about: str | None = None,
) -> dict[str, list[Reason]]:
    """Every reason against every candidate, as the question stands; or against those that adapt, or one."""
    found: dict[str, list[Reason]] = {name: [] for name in CANDIDATES}
    for body, rule in fold(env, p.fp8_attention, ignored, adaptable, about):
        finding = body(p, env)
        if finding is not None:
            reason = Reason(rule, finding)
            for name in rule.candidates:
                found[name].append(reason)
    return found


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

"""The order of candidates, by preferences, and the preference that decided between two neighbours."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from attnsel.adaptations.search import overhead
from attnsel.candidates import CANDIDATES
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY
from attnsel.selection.verdict import Candidate, RankKey

Key = tuple[int, ...]
"""Values of the preferences, the first that differs decides; last the place in the list of candidates."""

_LARGE = 1 << 30


def has_large_scores(p: AttentionParams) -> bool:
    """Whether one [b, h, s_q, s_kv] tensor is more than a GiB."""
    return p.score_bytes > _LARGE


def rank_key(candidate: Candidate, p: AttentionParams, large_scores: bool) -> RankKey:
    """What preferences may read of a candidate."""
    return RankKey(
        candidate.name,
        candidate.verdict,
        overhead(candidate.adaptations, p) if candidate.adaptations else 0,
        candidate.unproven and CANDIDATES[candidate.name].unproven_last,
        large_scores,
        candidate.executed_off_gpu,
    )


@lru_cache(maxsize=4096)
def key_of(key: RankKey, arch: int | None, policy: Policy) -> Key:
    """The smaller goes first."""
    place = list(CANDIDATES).index(key.name)
    return (*(page.value(key, arch, policy) for page in REGISTRY.preferences.values()), place)


@lru_cache(maxsize=1024)
def at_best(env: Environment, policy: Policy, large_scores: bool) -> tuple[tuple[Key, str], ...]:
    """Every candidate with the key it has if it runs as it is, best first: none can have a better one.

    One that was executed off-GPU for some calls counts as executed for this one.
    """
    return tuple(
        sorted(
            (
                key_of(
                    RankKey(
                        name,
                        "eligible",
                        0,
                        record.unproven_on(env.target) and record.unproven_last,
                        large_scores,
                        record.executed is not None and env.target in record.executed.targets,
                    ),
                    env.arch,
                    policy,
                ),
                name,
            )
            for name, record in CANDIDATES.items()
        )
    )


@lru_cache(maxsize=4096)
def order(keys: tuple[RankKey, ...], arch: int | None, policy: Policy) -> tuple[tuple[int, str | None], ...]:
    """Indices best first, each with the code of the first preference in which it loses to the one above."""
    values = [key_of(key, arch, policy) for key in keys]
    ranked = sorted(range(len(keys)), key=values.__getitem__)
    codes: list[str | None] = [None]
    for above, below in pairwise(ranked):
        pairs = zip(REGISTRY.preferences, values[above], values[below], strict=False)
        codes.append(next((code for code, a, b in pairs if a != b), None))
    return tuple(zip(ranked, codes, strict=False))

"""The order of candidates, by preferences, and the preference that decided between two neighbours."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY
from attnsel.selection.adaptations.search import overhead
from attnsel.verdicts.verdict import Candidate, RankKey

Key = tuple[int, ...]
"""Values of the preferences, the first that differs decides; last the place in the list of candidates."""

_LARGE = 1 << 30
_FEW = 16  # queries: tokens that are decoded, and drafts of some


class Asked(NamedTuple):
    """What preferences may read of a question: see ``RankKey``."""

    large_scores: bool
    growing: bool
    f_sdpa: tuple[str, ...] = ()

    def place(self, name: str) -> int:
        """Where F.sdpa tries a kernel; 0 where that is nothing to go by."""
        return self.f_sdpa.index(name) if name in self.f_sdpa else len(self.f_sdpa)


def asked(p: AttentionParams, many_lengths: bool = False, f_sdpa: tuple[str, ...] = ()) -> Asked:
    """Keys grow where their number is the tensor's own: not where lengths or pages say it, or a mask.

    ``many_lengths``: it is known that each call has another length. ``f_sdpa``: kernels as F.sdpa tries them,
    where it is what runs.
    """
    if p.is_training or p.kv_cache == "paged" or p.qkv_format == "thd":
        return Asked(p.score_bytes > _LARGE, False, f_sdpa)
    own = p.attn_mask_type in ("no_mask", "causal", "causal_bottom_right")
    return Asked(p.score_bytes > _LARGE, many_lengths or (own and p.max_seqlen_q <= _FEW), f_sdpa)


def rank_key(candidate: Candidate, p: AttentionParams, of: Asked) -> RankKey:
    """What preferences may read of a candidate."""
    return RankKey(
        candidate.name,
        candidate.verdict,
        overhead(candidate.adaptations, p) if candidate.adaptations else 0,
        candidate.unproven and CANDIDATES[candidate.name].unproven_last,
        of.large_scores,
        candidate.executed_off_gpu,
        of.growing,
        bool(candidate.adaptations) and _copies_padding(candidate, p),
        of.place(candidate.name),
    )


_PADDING = frozenset({"unpack", "zero_padding", "fold_mask"})


def _copies_padding(candidate: Candidate, p: AttentionParams) -> bool:
    lengths = p.padding or p.qkv_format == "thd"
    return lengths and any(made.name in _PADDING for made in candidate.adaptations)


@lru_cache(maxsize=4096)
def key_of(key: RankKey, arch: int | None, policy: Policy) -> Key:
    """The smaller goes first."""
    place = list(CANDIDATES).index(key.name)
    return (*(page.value(key, arch, policy) for page in REGISTRY.preferences.values()), place)


@lru_cache(maxsize=1024)
def at_best(env: Environment, policy: Policy, of: Asked) -> tuple[tuple[Key, str], ...]:
    """Every candidate with the key it has if it runs as it is, best first: none can have a better one.

    One that is proven, or was executed off-GPU, for some calls there counts as that for this one.
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
                        of.large_scores,
                        record.executed is not None and env.target in record.executed.targets,
                        of.growing,
                        False,
                        of.place(name),
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

"""Whether a candidate is proven for a call: every feature that the call asks for is, where it would run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from attnsel.params import AttentionParams
from attnsel.rules.features import OFFSETS, not_taken
from attnsel.verdicts.record import CandidateRecord, Proven

_not_among = lru_cache(maxsize=256)(not_taken)
_OVER_RANKS = (*OFFSETS, "lse")  # what steps of a sequence over ranks use, of what a kernel takes


def unproven(record: CandidateRecord, p: AttentionParams, target: str) -> bool:
    """Whether nothing shows such a call right there ("sm90", "cpu"). Asked for every candidate at every
    decision: a look-up, unless the target is proven in part."""
    if record.trusted or target in record.proven_targets:
        return False
    known = record.proven_in_part.get(target)
    return known is None or next(_lacking(record, p, known), None) is not None


def unproven_parts(record: CandidateRecord, p: AttentionParams, target: str) -> list[str]:
    """What of a call is unproven on a target that is proven in part, in words."""
    known = record.proven_in_part.get(target)
    if known is None or record.trusted or target in record.proven_targets:
        return []
    return list(dict.fromkeys(_lacking(record, p, known)))


def _lacking(record: CandidateRecord, p: AttentionParams, known: Proven) -> Iterator[str]:
    if p.dtype not in known.features:
        yield p.dtype
    widest = max(p.head_dim_qk, p.head_dim_v)
    if widest > known.head_dim:
        yield f"head_dim {widest}"
    for feature in _not_among(known.features):
        if feature.asked(p):
            yield feature.text
    if p.context_parallel:
        yield from (word for word in _OVER_RANKS if word in record.takes and word not in known.features)

"""Whether a candidate is proven for a call: every feature that the call asks for is, where it would run."""

from __future__ import annotations

from functools import lru_cache

from attnsel.candidates.capabilities import Feature, not_taken
from attnsel.candidates.record import CandidateRecord
from attnsel.params import AttentionParams

_not_among = lru_cache(maxsize=256)(not_taken)


def unproven(record: CandidateRecord, p: AttentionParams, target: str) -> bool:
    """Whether nothing shows such a call right there ("sm90", "cpu"). Asked for every candidate at every
    decision: a look-up, unless the target is proven in part."""
    if record.trusted or target in record.proven_targets:
        return False
    known = record.proven_in_part.get(target)
    if known is None:
        return True
    return (
        p.dtype not in known.features
        or max(p.head_dim_qk, p.head_dim_v) > known.head_dim
        or any(feature.asked(p) for feature in _not_among(known.features))
    )


def unproven_parts(record: CandidateRecord, p: AttentionParams, target: str) -> list[str]:
    """What of a call is unproven on a target that is proven in part, in words."""
    known = record.proven_in_part.get(target)
    if known is None or record.trusted or target in record.proven_targets:
        return []
    asked: tuple[Feature, ...] = _not_among(known.features)
    parts: list[str] = [] if p.dtype in known.features else [p.dtype]
    widest = max(p.head_dim_qk, p.head_dim_v)
    parts += [f"head_dim {widest}"] if widest > known.head_dim else []
    return [*parts, *dict.fromkeys(feature.text for feature in asked if feature.asked(p))]

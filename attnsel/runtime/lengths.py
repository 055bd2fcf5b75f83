"""How many lengths a call came in, where a library prepares something for each of them.

A prompt has whatever length it has. A kernel that plans for each, for tens of milliseconds, is worth it for
lengths that come again and again, and nobody knows yet which those are. So the first lengths of a call get
it; from then on a new one ranks it behind kernels that need no plan (PREF011). The lengths of a training run
come back each epoch: it is left alone.
"""

from __future__ import annotations

from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.runtime.cache import BoundedCache
from attnsel.verdicts.evidence import Evidence

FEW = 8
"""Lengths of one call that are planned for, whatever comes."""

_OTHER = tuple(
    name for name in AttentionParams.model_fields if name not in ("max_seqlen_q", "max_seqlen_kv", "tensors")
)
_planned: BoundedCache[set[tuple[int, int]]] = BoundedCache(limit=256)  # a call without its lengths: those


def with_lengths(evidence: Evidence, p: AttentionParams, env: Environment) -> Evidence:
    """What running has taught, and whether ``p`` is one length more than enough."""
    lengths = _planned.get(_call_of(p, env)) if _planned.items else None
    if lengths is None or len(lengths) < FEW or (p.max_seqlen_q, p.max_seqlen_kv) in lengths:
        return evidence
    return evidence.of_many_lengths()


def record_length(selection: Selection) -> None:
    """Remember that a plan was made for these lengths."""
    p, name = selection.params, selection.backend
    if name is None or not CANDIDATES[name].plan_per_length or p.is_training:
        return
    key = _call_of(p, selection.environment)
    lengths = _planned.get(key) or _planned.add(key, set())
    if len(lengths) < FEW:
        lengths.add((p.max_seqlen_q, p.max_seqlen_kv))


def _call_of(p: AttentionParams, env: Environment) -> Any:
    """All of a question but its lengths, and the device."""
    return (env.device, *(getattr(p, name) for name in _OTHER))

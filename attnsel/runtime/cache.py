"""A bounded dictionary in front of everything slow: read without a lock, written under one."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import _lru_cache_wrapper
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from attnsel.backends.registry import CANDIDATES
from attnsel.base.processes import ForkSafeLock
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.verdicts.reasons import Evidence

V = TypeVar("V")


class CacheInfo(NamedTuple):
    """Counters of one cache. ``hits`` may miss a few that happened at the same instant on two threads."""

    hits: int
    misses: int
    size: int
    limit: int


class BoundedCache(Generic[V]):
    """Keys to values, oldest quarter out when full.

    A look-up is one ``dict.get``: reordering on every hit would cost more than what is cached here is
    worth. Values are made outside the lock, so making one may use other caches; of two threads that make
    the same value, the first to finish wins.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.items: dict[Hashable, V] = {}
        self.hits = 0
        self.misses = 0
        self._lock = ForkSafeLock()
        _every.add(self)

    def get(self, key: Hashable) -> V | None:
        value = self.items.get(key)
        if value is not None:
            self.hits += 1
        return value

    def add(self, key: Hashable, value: V) -> V:
        """The value of ``key``: this one, or the one that another thread put there first."""
        with self._lock:
            self.misses += 1
            present = self.items.get(key)
            if present is not None:
                return present
            if len(self.items) >= self.limit:
                for old in list(self.items)[: max(1, self.limit // 4)]:
                    del self.items[old]
            self.items[key] = value
        return value

    def clear(self) -> None:
        with self._lock:
            self.items = {}
            self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        return CacheInfo(self.hits, self.misses, len(self.items), self.limit)


_every: WeakSet[BoundedCache[Any]] = WeakSet()


def clear_all() -> None:
    """Empty every cache there is, and forget what functions remember of their arguments.

    But not what backends remember: a CUDA graph that was captured may still read a tensor of theirs.
    """
    for cache in list(_every):
        cache.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("attnsel.") and not name.startswith("attnsel.backends"):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()


# ---- How many lengths a call came in, where a library prepares something for each of them --------------
# A prompt has whatever length it has. A kernel that plans for each, for tens of milliseconds, is worth it
# for lengths that come again and again, and nobody knows yet which those are. So the first lengths of a
# call get it; from then on a new one ranks it behind kernels that need no plan (PREF011). The lengths of a
# training run come back each epoch: it is left alone.


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

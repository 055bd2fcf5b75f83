"""A bounded dictionary in front of everything slow: read without a lock, written under one."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import _lru_cache_wrapper
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from attnsel.base.lock import ForkSafeLock

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

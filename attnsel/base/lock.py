"""A lock that a forked child finds open, whichever thread of its parent held it."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakSet

_every: WeakSet[ForkSafeLock] = WeakSet()


class ForkSafeLock:
    """``with lock:``; the same thread may enter again."""

    def __init__(self) -> None:
        self._held = threading.RLock()
        _every.add(self)

    def renew(self) -> None:
        self._held = threading.RLock()

    def __enter__(self) -> None:
        self._held.acquire()

    def __exit__(self, *error: Any) -> None:
        self._held.release()


def _renew_all() -> None:
    for lock in list(_every):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)

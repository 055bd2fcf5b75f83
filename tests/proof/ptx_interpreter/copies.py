"""9.7.9.25.3 cp.async: copies to shared memory land when their group is waited for, not before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx_interpreter.faults import ASYNCHRONOUS, RACE
from ptx_interpreter.global_memory import GlobalAccess
from ptx_interpreter.lanes import both
from ptx_interpreter.numbers import Array, i8, u1, u4, u8
from ptx_interpreter.shadow import WORD
from ptx_interpreter.shared_memory import SharedMemory


@dataclass(slots=True)
class _Copy:
    """One instruction's copies that are under way."""

    lanes: Array
    to: Array  # byte places in shared memory
    data: Array  # bytes [lanes, size]
    group: Array  # of the lane's groups, counted from 0
    line: int


class Copies:
    def __init__(self, shared: SharedMemory, memory: GlobalAccess) -> None:
        self.shared, self.memory, self.lanes = shared, memory, shared.lanes
        self.under_way: list[_Copy] = []
        self.committed = np.zeros(self.lanes.n, i8)  # groups, per lane

    def begin(
        self, to: Array, source: Array, size: int, given: Array | None, mask: Array | None, line: int
    ) -> None:
        """Copy ``size`` bytes, zeros after the first ``given``."""
        shared = self.shared
        at, mask = shared.locate(to, size, mask, line)
        data = self._read(source, size, given, mask, line)
        # It may write at any time from now on: against reads and writes before the next barrier, too.
        lanes = np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask)
        far = np.zeros(self.lanes.n, bool)
        far[lanes] = shared.order.copy(at[lanes], size, lanes, landed=False)
        if far.any():
            told = f"copies to {shared.named(at, far)}, read or written by another warp, which nothing orders"
            self.lanes.report(RACE, line, far, told)
        flying = both(mask, shared.flying.any(at, size))
        self.lanes.report(ASYNCHRONOUS, line, flying, "copies to where another copy is under way")
        if shared.proxy:
            shared.note_proxy_write(at, size, mask, line)
        shared.flying.put(at[lanes], size, 1)
        self.under_way.append(_Copy(lanes, at[lanes], data[lanes], self.committed[lanes], line))
        shared.copies_under_way = True

    def _read(self, source: Array, size: int, given: Array | None, mask: Array | None, line: int) -> Array:
        n = self.lanes.n
        everywhere = np.ones(n, bool) if mask is None else mask
        wanted = np.full(n, size, u4) if given is None else np.minimum(given, u4(size))
        data = np.zeros((n, size), u1)
        whole = everywhere & (wanted == size)
        if whole.any():
            words = np.ascontiguousarray(self.memory.words(source, size, whole, line))
            data[whole] = words.view(u1).reshape(n, size)[whole]
        for k in range(size if (everywhere & (wanted > 0) & (wanted < size)).any() else 0):
            some = everywhere & (wanted < size) & (wanted > k)
            data[some, k] = self.memory.words(source + u8(k), 1, some, line)[some]
        return data

    def commit(self, mask: Array | None) -> None:
        self.committed = self.committed + (1 if mask is None else mask)

    def wait(self, n: int, mask: Array | None, line: int) -> None:
        """All but the ``n`` youngest groups of each waiting lane land; -1: what is not committed as well."""
        if not self.under_way:
            return
        rest = []
        for copy in self.under_way:
            done = copy.group < self.committed[copy.lanes] - n
            if mask is not None:
                done &= mask[copy.lanes]
            if done.any():
                self._land(copy, done)
            if not done.all():
                keep = ~done
                rest.append(
                    _Copy(copy.lanes[keep], copy.to[keep], copy.data[keep], copy.group[keep], copy.line)
                )
        self.under_way = rest
        self.shared.copies_under_way = bool(rest)

    def _land(self, copy: _Copy, done: Array) -> None:
        shared, size = self.shared, copy.data.shape[1]
        lanes, at = copy.lanes[done], copy.to[done]
        shared.data.view(WORD[size])[at // size] = copy.data[done].view(WORD[size]).reshape(-1)
        shared.ready.put(at, size, 1)
        shared.flying.put(at, size, 0)
        if shared.proxy:  # a fence while the copy was under way did not order it
            shared.order.unfenced(at, size)
        far = shared.order.copy(at, size, lanes, landed=True)
        if far.any():
            told = (
                f"a copy to shared {int(at[far][0]) % shared.size:#x} lands, read or written by another warp"
            )
            self.lanes.report(RACE, copy.line, self.lanes.mask_of(lanes[far]), told)

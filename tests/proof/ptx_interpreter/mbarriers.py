"""9.7.13.15 mbarriers: objects in shared memory on which threads, and copies, arrive and threads wait.

A phase ends when as many have arrived as the object was made for, and as many bytes have come as were
expected. What those knew that arrived is known to who has waited (see ``Clocks``). An object is no data: its
eight bytes are not readable here, and writing over one that is in use is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ptx_interpreter.clocks import Clocks
from ptx_interpreter.faults import DEADLOCK, MISUSE, RACE, UNINITIALISED
from ptx_interpreter.lanes import both
from ptx_interpreter.numbers import Array, u8
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.threads import Threads

_SIZE = 8  # bytes
_MOST = (1 << 20) - 1  # arrivals of a phase, and its bytes


@dataclass(slots=True)
class Mbarrier:
    count: int  # arrivals of a phase
    pending: int  # of the current one
    made: tuple[int, int]  # the row and the time that its maker had
    gathered: Array  # what those knew that arrived in this phase or before
    ended: Array  # in phases that have ended
    line: int  # where it was made
    missing: int = 0  # bytes that are expected and have not come
    phase: int = 0  # that have ended
    used: bool = False
    waiting: list[tuple[Array, Array, int]] = field(default_factory=list)  # lanes, their phase, the line


class Mbarriers:
    def __init__(self, shared: SharedMemory, threads: Threads) -> None:
        assert isinstance(shared.order, Clocks)
        self.shared, self.lanes, self.order = shared, shared.lanes, shared.order
        self.threads = threads
        self.at: dict[tuple[int, int], Mbarrier] = {}  # by block and address
        self.agents: dict[int, int] = {}  # by address
        shared.overwritten = self.overwritten

    def init(self, address: Array, count: Array, mask: Array | None, line: int) -> None:
        for block, where, lanes in self._each(address, mask, line):
            wanted = int(count[lanes[0]])
            self._report_if(not 1 <= wanted <= _MOST, line, lanes, f"an mbarrier of {wanted} arrivals")
            old = self.at.get((block, where))
            told = f"makes the mbarrier at shared {where:#x} anew, which is in use"
            self._report_if(old is not None and old.used, line, lanes, told)
            row = int(self.order.row[lanes[0]])
            known = np.zeros_like(self.order.known[row])
            made = (row, int(self.order.known[row, row % self.order.warps]))
            self.at[block, where] = Mbarrier(wanted, wanted, made, known, known, line)
            self._mark(block, where, 1)

    def invalidate(self, address: Array, mask: Array | None, line: int) -> None:
        for block, where, lanes in self._each(address, mask, line):
            if self.find(block, where, lanes, line) is not None:
                del self.at[block, where]
                self._mark(block, where, 0)

    def arrive(
        self, address: Array, count: Array | None, expected: Array | None, mask: Array | None, line: int
    ) -> Array:
        """``count`` arrivals of each thread (None: one), with ``expected`` bytes more to await; the state."""
        state = np.zeros(self.lanes.n, u8)
        counts = np.ones(self.lanes.n, np.int64) if count is None else count.astype(np.int64)
        for block, where, lanes in self._each(address, mask, line):
            barrier = self.find(block, where, lanes, line)
            if barrier is None:
                continue
            # One after the other where they reach over the end of a phase.
            at_once = counts[lanes].sum() <= barrier.pending
            for some in [lanes] if at_once else np.split(lanes, len(lanes)):
                state[some] = barrier.phase
                if expected is not None:
                    self._expect(barrier, where, int(expected[some].astype(np.int64).sum()), some, line)
                self._arrive(barrier, where, int(counts[some].sum()), some, line)
        return state

    def _arrive(self, barrier: Mbarrier, where: int, count: int, lanes: Array, line: int) -> None:
        told = f"{count} arrivals at the mbarrier at shared {where:#x}, which wants {barrier.pending}"
        self._report_if(count > barrier.pending, line, lanes, told)
        barrier.pending -= min(count, barrier.pending)
        known = self.order.release(np.unique(self.order.row[lanes]))
        barrier.gathered = np.maximum(barrier.gathered, known)
        self._end_phase(barrier)

    def expect(self, address: Array, expected: Array, mask: Array | None, line: int) -> None:
        for block, where, lanes in self._each(address, mask, line):
            barrier = self.find(block, where, lanes, line)
            if barrier is not None:
                self._expect(barrier, where, int(expected[lanes].astype(np.int64).sum()), lanes, line)

    def _expect(self, barrier: Mbarrier, where: int, expected: int, lanes: Array, line: int) -> None:
        barrier.missing += expected
        barrier.used = True
        told = f"the mbarrier at shared {where:#x} awaits {barrier.missing} bytes, more than it can count"
        self._report_if(abs(barrier.missing) > _MOST, line, lanes, told)

    def arrived_bytes(self, block: int, where: int, size: int, agent: int, clock: int) -> None:
        """A copy has written ``size`` bytes (complete_tx)."""
        barrier = self.at.get((block, where))
        if barrier is not None:
            barrier.missing -= size
            barrier.used = True
            barrier.gathered = barrier.gathered.copy()
            barrier.gathered[agent] = max(barrier.gathered[agent], clock)
            self._end_phase(barrier)

    def _end_phase(self, barrier: Mbarrier) -> None:
        barrier.used = True
        if barrier.pending or barrier.missing:
            return
        barrier.phase += 1
        barrier.pending, barrier.ended = barrier.count, barrier.gathered
        for lanes, _, _ in barrier.waiting:
            self.threads.wake(lanes)
        barrier.waiting = []

    def ended(self, address: Array, phase: Array, parity: bool, mask: Array | None, line: int) -> Array:
        """try_wait: whether a phase has ended; of lanes for which it has not the try waits until it has.

        ``phase``: a state, or a parity. That of the current phase means the current phase, the other one the
        phase before. Triton gives 1 as -1: the lowest bit counts.
        """
        done = np.ones(self.lanes.n, bool)
        for block, where, lanes in self._each(address, mask, line):
            barrier = self.find(block, where, lanes, line)
            if barrier is None:
                continue
            barrier.used = True
            asked = phase[lanes]
            over = (asked & 1) != (barrier.phase & 1) if parity else asked < barrier.phase
            done[lanes] = over
            if over.any():
                self.order.learn(np.unique(self.order.row[lanes[over]]), barrier.ended)
            if not over.all():
                left = lanes[~over]
                self.threads.stall(left)
                barrier.waiting.append((left, asked[~over], line))
        return done

    # -- objects --------------------------------------------------------------------------------------------
    def agent(self, where: int) -> int:
        """The actor (see ``Clocks``) that copies are which complete on it."""
        return self.order.agent(self.agents.setdefault(where, len(self.agents)))

    def _each(self, address: Array, mask: Array | None, line: int) -> Iterator[tuple[int, int, Array]]:
        """Block, address and lanes of each object that is meant."""
        _, mask = self.shared.locate(address, _SIZE, mask, line)
        lanes = np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask)
        keys = (self.lanes.block[lanes] << 32) | address[lanes].astype(np.int64)
        for key in np.unique(keys):
            yield int(key) >> 32, int(key) & 0xFFFFFFFF, lanes[keys == key]

    def find(self, block: int, where: int, lanes: Array, line: int) -> Mbarrier | None:
        barrier = self.at.get((block, where))
        if barrier is None:
            mask = self.lanes.mask_of(lanes)
            self.lanes.report(UNINITIALISED, line, mask, f"no mbarrier was made at shared {where:#x}")
            return None
        row, clock = barrier.made
        own = row % self.order.warps
        unknown = self.order.known[self.order.row[lanes], own] < clock
        if unknown.any():
            told = f"the mbarrier at shared {where:#x} is made by another warp, which nothing orders before"
            self.lanes.report(RACE, line, self.lanes.mask_of(lanes[unknown]), told)
        return barrier

    def _mark(self, block: int, where: int, value: int) -> None:
        self.shared.objects.put(np.array([block * self.shared.size + where]), _SIZE, value)

    def overwritten(self, at: Array, size: int, lanes: Array, line: int) -> None:
        """Data is written to byte places of objects, by ``lanes``. One not yet used goes in silence."""
        for place, lane in zip(at, lanes, strict=True):
            block, inside = divmod(int(place), self.shared.size)
            for where in [w for b, w in self.at if b == block and w < inside + size and inside < w + _SIZE]:
                told = f"writes over the mbarrier at shared {where:#x}"
                self._report_if(self.at[block, where].used, line, np.array([lane]), told)
                del self.at[block, where]
                self._mark(block, where, 0)

    def _report_if(self, wrong: bool, line: int, lanes: Array, told: str) -> None:
        if wrong:
            self.lanes.report(MISUSE, line, self.lanes.mask_of(lanes), told)

    def report_deadlock(self, stalled: Array) -> None:
        for (_, where), barrier in self.at.items():
            for lanes, phase, line in barrier.waiting:
                mask = both(stalled, self.lanes.mask_of(lanes))
                wants = []
                if barrier.pending:
                    wants.append(f"{barrier.pending} of {barrier.count} arrivals")
                if barrier.missing > 0:
                    wants.append(f"{barrier.missing} bytes")
                elif barrier.missing < 0:
                    wants.append(f"{-barrier.missing} bytes too many to be expected")
                told = (
                    f"waits at the mbarrier at shared {where:#x} (made in line {barrier.line}) "
                    f"with {int(phase[0]) & 1} for the end of phase {barrier.phase}, "
                    f"which wants {' and '.join(wants)}"
                )
                self.lanes.report(DEADLOCK, line, mask, told)

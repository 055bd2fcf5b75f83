"""9.7.13.1 barriers of a block's threads, all or a number of them, and 9.7.19.5 the pool of registers.

Who waits here is not run; ``threads.py`` asks which of them may go on.
"""

from __future__ import annotations

import numpy as np

from ptx_interpreter.clocks import Clocks
from ptx_interpreter.faults import DIVERGENCE, MISUSE
from ptx_interpreter.lanes import WARP, Lanes
from ptx_interpreter.numbers import Array, i8
from ptx_interpreter.parse import Immediate, Instruction, Kernel
from ptx_interpreter.shared_memory import SharedMemory

_NUMBERS = 16  # barriers of a block
_GROUP = 128  # threads of a warpgroup


class Barriers:
    def __init__(self, shared: SharedMemory) -> None:
        self.shared, self.lanes = shared, shared.lanes
        self.at = np.full(self.lanes.n, -1, i8)  # number of the barrier that a lane waits at
        self.wanted = np.zeros(self.lanes.n, i8)  # threads it takes; 0: all that have not returned
        self.arrived = np.zeros((self.lanes.count, _NUMBERS), i8)  # threads that do not wait: bar.arrive
        # What those knew (see ``Clocks``), by block and barrier.
        self.told: dict[tuple[int, int], Array] = {}

    def all_at_once(self, i: Instruction) -> bool:
        """Whether a barrier that every thread reaches by the same instruction is completed by it."""
        count = operands(i)[1]
        if count not in (0, self.lanes.threads) or self.arrived.any():
            return False
        self.shared.order.meet(None, None)
        return True

    def wait(self, mask: Array, i: Instruction) -> None:
        number, count = operands(i)
        self._whole_warps(mask, count, i.line)
        self.at[mask], self.wanted[mask] = number, count

    def arrive(self, number: int, count: int, mask: Array | None, line: int) -> None:
        """bar.arrive: counted, and not waiting."""
        here: Array = np.ones(self.lanes.n, bool) if mask is None else mask
        self._whole_warps(here, count, line)
        warps = here.reshape(self.lanes.count, -1, WARP).any(2)
        self.arrived[:, number] += WARP * warps.sum(1)
        over = np.repeat(self.arrived[:, number] >= count, self.lanes.threads) & here
        self.lanes.report(
            MISUSE, line, over, f"barrier {number} of {count} threads has no room for one waiting"
        )
        assert isinstance(self.shared.order, Clocks)
        for block in np.flatnonzero(warps.any(1)):
            known = self.shared.order.release(block * warps.shape[1] + np.flatnonzero(warps[block]))
            before: Array = self.told.get((int(block), number), known)
            self.told[int(block), number] = np.maximum(known, before)

    def _whole_warps(self, mask: Array, count: int, line: int) -> None:
        part = mask.reshape(-1, WARP)
        split = np.repeat(part.any(1) & ~part.all(1), WARP)
        self.lanes.report(DIVERGENCE, line, mask & split, "a barrier reached by part of a warp")
        if count % WARP:
            self.lanes.report(MISUSE, line, mask, f"a barrier of {count} threads, which are no whole warps")

    def release(self, alive: Array, line_of: Array) -> bool:
        """Let those go whose barrier as many threads have reached as it takes, or all that have not returned.

        ``line_of``: of the barrier that each lane waits at.
        """
        shape = (self.lanes.count, self.lanes.threads)
        alive, released = alive.reshape(shape).sum(1), False
        for number in np.unique(self.at[self.at >= 0]):
            here = (self.at == number).reshape(shape)
            wanted = np.where(here, self.wanted.reshape(shape), 0).max(1)
            waiting = here.sum(1)
            total = waiting + self.arrived[:, number]
            complete = here.any(1) & (total >= np.where(wanted > 0, wanted, alive))
            if complete.any():
                going = (here & complete[:, None]).reshape(-1)
                self._check(going, complete, total, wanted, int(number), line_of)
                self._meet(going, complete, int(number))
                self.at[going] = -1
                released = True
        return released

    def _meet(self, going: Array, complete: Array, number: int) -> None:
        order = self.shared.order
        for block in np.flatnonzero(complete):
            known = self.told.pop((int(block), number), None)
            if known is not None and isinstance(order, Clocks):
                order.learn(np.unique(order.row[going & (self.lanes.block == block)]), known)
        order.meet(complete, going)
        self.arrived[complete, number] = 0

    def _check(
        self, going: Array, complete: Array, total: Array, wanted: Array, number: int, line_of: Array
    ) -> None:
        over = complete & (wanted > 0) & (total > wanted)
        unequal = self.wanted != np.repeat(wanted, self.lanes.threads)
        for bad, told in (
            (going & np.repeat(over, self.lanes.threads), "more threads than it takes"),
            (going & unequal, "threads that want different numbers of them"),
        ):
            if bad.any():
                line = int(line_of[np.argmax(bad)])
                self.lanes.report(MISUSE, line, bad, f"barrier {number} is reached by {told}")


def operands(i: Instruction) -> tuple[int, int]:
    """A barrier's number, and how many threads it takes; 0: all."""
    number, count, *_ = [o.bits if isinstance(o, Immediate) else -1 for o in i.operands] + [0, 0]
    return number, count


class Registers:
    """setmaxnreg: warpgroups give registers to their block's pool, and ask it for more and wait."""

    def __init__(self, lanes: Lanes, kernel: Kernel) -> None:
        self.lanes, self.known = lanes, kernel.registers > 0
        # A block of part of a warpgroup may not use any of this.
        self.size = lanes.threads if lanes.threads % _GROUP else _GROUP
        self.groups = lanes.n // self.size
        self.held = np.full(self.groups, kernel.registers, i8)  # by a thread of each warpgroup
        self.pool = np.zeros(lanes.count, i8)  # in the same measure: for a thread of one warpgroup
        self.wanted = np.zeros(lanes.n, i8)  # 0: the lane does not wait

    def give(self, count: int, mask: Array | None, line: int) -> None:
        here = self._groups(mask, count, line)
        more = here & (self.held < count)
        told = f"gives up registers down to {count} and has fewer"
        self.lanes.report(MISUSE, line, np.repeat(more, self.size), told)
        here &= ~more
        np.add.at(self.pool, self._block()[here], (self.held - count)[here])
        self.held[here] = count

    def ask(self, count: int, mask: Array, line: int) -> None:
        less = self._groups(mask, count, line) & (self.held > count)
        self.lanes.report(
            MISUSE, line, np.repeat(less, self.size), f"asks for {count} registers and has more"
        )
        self.wanted[mask] = count

    def grant(self) -> bool:
        """Let warpgroups go for which the pool has enough."""
        granted = False
        if not self.wanted.any():
            return False
        for group in np.flatnonzero(self.wanted.reshape(self.groups, -1).all(1)):
            lanes = slice(group * self.size, (group + 1) * self.size)
            block, more = self._block()[group], int(self.wanted[lanes][0]) - self.held[group]
            if more <= self.pool[block]:
                self.pool[block] -= max(0, more)
                self.held[group] += max(0, more)
                self.wanted[lanes] = 0
                granted = True
        return granted

    def _block(self) -> Array:
        return np.arange(self.groups) * self.size // self.lanes.threads

    def _groups(self, mask: Array | None, count: int, line: int) -> Array:
        here = np.ones(self.lanes.n, bool) if mask is None else mask
        parts = here.reshape(self.groups, -1)
        split = np.repeat(parts.any(1) & ~parts.all(1), self.size) | (self.size != _GROUP)
        self.lanes.report(DIVERGENCE, line, here & split, "setmaxnreg in part of a warpgroup")
        if not self.known:
            self.lanes.report(MISUSE, line, here, "setmaxnreg in a kernel without .maxnreg")
        if count % 8 or not 24 <= count <= 256:
            self.lanes.report(MISUSE, line, here, f"{count} registers; 24 to 256 in steps of 8 can be had")
        return parts.all(1)

"""Which threads run next: each has its own program counter, and some wait.

Of the lanes that can run, those at the lowest basic block do: lanes that parted meet again where their code
does. While all lanes agree, no mask is needed. A wait on an mbarrier is a loop in PTX; a lane whose try
failed does not try again before the barrier's phase has ended. What copies write lands when nothing else can
run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_interpreter.faults import DEADLOCK
from ptx_interpreter.lanes import WARP
from ptx_interpreter.numbers import Array, i8
from ptx_interpreter.parse import BARRIER, BRANCH, REGISTERS, RETURN, Immediate, Instruction

if TYPE_CHECKING:
    from ptx_interpreter.machine import Machine

ENDED = 1 << 30  # the program counter of a thread that has returned


class Threads:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.lanes = machine, machine.lanes
        self.pc = np.zeros(self.lanes.n, i8)
        self.together: int | None = 0  # the block that all lanes are at
        self.waiting = np.zeros(self.lanes.n, bool)  # at a barrier, or for registers
        self.line = np.zeros(self.lanes.n, i8)  # of the PTX, where it does
        self.failed = np.full(self.lanes.n, -1, i8)  # the block in which a lane's try of an mbarrier failed
        self.now = 0  # the block that runs

    def next(self) -> tuple[int, Array | None]:
        """The block to run and the lanes that run it; ENDED when there is none."""
        if self.together is not None and not (self.failed == self.together).any():
            self.now = self.together
            return self.now, None
        self._part()
        while True:
            able = np.where(self.waiting | (self.failed == self.pc), ENDED, self.pc)
            self.now = int(able.min())
            if self.now < ENDED:
                break
            if not self._release() and not self._land():
                self._report_stuck()
                return ENDED, None
        mask = able == self.now
        if mask.all():
            self.together = self.now
            return self.now, None
        return self.now, mask

    def _land(self) -> bool:
        """Let copies land that somebody may wait for."""
        alive = (self.pc < ENDED).reshape(self.lanes.count, -1).any(1)
        return self.machine.tensors is not None and self.machine.tensors.land(alive)

    def _part(self) -> None:
        if self.together is not None:
            self.pc[:] = self.together
            self.together = None

    def warps(self, mask: Array | None) -> int:
        if mask is None:
            return self.lanes.n // WARP
        return int(mask.reshape(-1, WARP).any(1).sum())

    def leave(
        self, at: int, mask: Array | None, end: Instruction | None, target: int, taken: Array | None
    ) -> bool:
        """Go on behind a block; False when every lane has returned."""
        if end is None:
            self._go(mask, at + 1)
        elif BARRIER.fullmatch(end.op) or REGISTERS.fullmatch(end.op):
            self._wait(at, mask, end)
        elif RETURN.fullmatch(end.op) or BRANCH.fullmatch(end.op):
            self._jump(at, mask, ENDED if RETURN.fullmatch(end.op) else target, taken)
        return self.together != ENDED

    def _go(self, mask: Array | None, to: int) -> None:
        if mask is None:
            self.together = to
        else:
            self.pc[mask] = to

    def _jump(self, at: int, mask: Array | None, target: int, taken: Array | None) -> None:
        """``taken``: the branch's guard per lane, None without one."""
        if taken is None or (mask is None and taken.all()):
            self._go(mask, target)
        elif mask is not None:
            self.pc[mask] = np.where(taken, target, at + 1)[mask]
        elif not taken.any():
            self.together = at + 1
        else:
            self.together = None
            self.pc[:] = np.where(taken, target, at + 1)

    def _wait(self, at: int, mask: Array | None, end: Instruction) -> None:
        machine, barrier = self.machine, bool(BARRIER.fullmatch(end.op))
        if barrier and mask is None and machine.barriers.all_at_once(end):
            self.together = at + 1
            return
        self._part()
        here = np.ones(self.lanes.n, bool) if mask is None else mask
        if barrier:
            machine.barriers.wait(here, end)
        else:
            (count,) = end.operands
            assert isinstance(count, Immediate)
            machine.registers.ask(count.bits, here, end.line)
        self.pc[here], self.waiting[here], self.line[here] = at + 1, True, end.line
        self._release()

    def _release(self) -> bool:
        machine = self.machine
        went = machine.barriers.release(self.pc < ENDED, self.line)
        went |= machine.registers.grant()
        if went:
            self.waiting = (machine.barriers.at >= 0) | (machine.registers.wanted > 0)
        return went

    # -- mbarriers ------------------------------------------------------------------------------------------
    def stall(self, lanes: Array) -> None:
        """Their try in the block that runs failed."""
        self.failed[lanes] = self.now

    def wake(self, lanes: Array) -> None:
        self.failed[lanes] = -1

    def _report_stuck(self) -> None:
        machine = self.machine
        held = machine.barriers.at >= 0
        for line in np.unique(self.line[held]):
            told = "waits at a barrier that not all threads of its block reach"
            if self.machine.barriers.wanted[held & (self.line == line)].any():
                told = "waits at a barrier that fewer threads reach than it takes"
            self.lanes.report(DEADLOCK, int(line), held & (self.line == line), told)
        poor = machine.registers.wanted > 0
        for line in np.unique(self.line[poor]):
            told = "waits for registers that no warpgroup gives up"
            self.lanes.report(DEADLOCK, int(line), poor & (self.line == line), told)
        if machine.mbarriers is not None:
            machine.mbarriers.report_deadlock((self.failed == self.pc) & (self.pc < ENDED))

"""Run a translated kernel: all threads of many blocks together, each with its own program counter.

Of the lanes that can run, those at the lowest basic block do: lanes that parted meet again where their code
does. While all lanes agree, no mask is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .copies import Copies
from .faults import DEADLOCK, DIVERGENCE, Faults
from .global_memory import GlobalAccess, GlobalMemory
from .lanes import WARP, Lanes
from .matrix import Matrices
from .numbers import Array, i8, u4
from .parse import BARRIER, BRANCH, RETURN, Immediate, Instruction
from .shared_memory import SharedMemory
from .translate import Program
from .warps import Warps
from .wgmma import Warpgroups

_ENDED = 1 << 30  # the program counter of a thread that has returned
MOST_STEPS = 2_000_000  # basic blocks: far more than a call of ours takes
_UNSET = 0xCDCDCDCDCDCDCDCD  # what a register holds that nothing was assigned to


class Machine:
    """The blocks ``blocks`` of a launch of ``programs``."""

    def __init__(
        self,
        program: Program,
        memory: GlobalMemory,
        parameters: list[int],
        shared: int,
        blocks: range,
        programs: int,
        faults: Faults,
    ) -> None:
        self.program, self.kernel, self.parameters = program, program.kernel, parameters
        self.lanes = Lanes(self.kernel.threads, blocks, faults)
        self.programs = programs
        proxy = any(i.op.startswith("wgmma.") for i in self.kernel.instructions())
        self.shared = SharedMemory(self.lanes, shared, proxy)
        self.memory = GlobalAccess(memory, self.lanes)
        self.warps = Warps(self.lanes, self.shared)
        self.matrices = Matrices(self.shared, self.warps)
        self.copies = Copies(self.shared, self.memory)
        if proxy:
            self.warpgroups = Warpgroups(self.shared, self.warps)
        self.instructions = 0  # that warps executed
        self.steps = 0  # basic blocks, each by some or all lanes
        self.visited: set[int] = set()  # their numbers
        self._constants: dict[tuple[int, str], Array] = {}

    # -- what generated code asks for ---
    def special(self, name: str) -> Array:
        """Special registers (10); blocks and grids have one dimension."""
        lanes = self.lanes
        sizes = {"%ntid.x": lanes.threads, "%nctaid.x": self.programs}
        own = {
            "%tid.x": lanes.thread,
            "%ctaid.x": lanes.block_index,
            "%laneid": lanes.lane,
            "%warpid": lanes.warp,
        }
        if name in own:
            return own[name]
        if name in sizes:
            return np.full(lanes.n, sizes[name], u4)
        if name in ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"):
            return np.zeros(lanes.n, u4)
        raise NotImplementedError(name)

    def parameter(self, place: int, dtype: Any) -> Array:
        width = np.dtype(dtype).itemsize
        return self._filled(self.parameters[place] & ((1 << 8 * width) - 1), f"u{width}")

    def _filled(self, bits: int, dtype: str) -> Array:
        key = (bits, dtype)
        if key not in self._constants:
            width = np.dtype(dtype).itemsize
            # Shared between registers and constants: no operation writes into an array of lanes.
            self._constants[key] = np.full(self.lanes.n, np.array(bits, f"u{width}").view(dtype))
        return self._constants[key]

    # -- running ---
    def run(self, most_steps: int = MOST_STEPS) -> None:
        registers = self._registers()
        constants = [self._filled(*key) for key in self.program.constants]
        threads = _Threads(self)
        while self.steps < most_steps:
            at, mask = threads.next()
            if at == _ENDED:
                return
            self.steps += 1
            self.visited.add(at)
            block = self.kernel.blocks[at]
            self.instructions += len(block.body) * threads.warps(mask)
            taken = self.program.blocks[at][0 if mask is None else 1](self, registers, constants, mask)
            if not threads.leave(at, mask, block.end, block.target, taken):
                return
        self._stuck(self.kernel.blocks[0].body[0], "no end after so many steps that it looks like none comes")

    def _registers(self) -> list[Array]:
        unset = {w: self._filled(_UNSET & ((1 << 8 * w) - 1), f"u{w}") for w in (1, 2, 4, 8)}
        unset[0] = self._filled(1, "?")
        return [unset[width] for width in self.kernel.widths]

    def _stuck(self, i: Instruction, told: str) -> None:
        self.lanes.report(DEADLOCK, i.line, np.ones(self.lanes.n, bool), told)


class _Threads:
    """Where each lane is, and which barrier it waits at."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.lanes = machine, machine.lanes
        self.pc = np.zeros(self.lanes.n, i8)
        self.waiting = np.zeros(self.lanes.n, i8)  # 1 + number of the barrier, 0: it runs
        self.together: int | None = 0  # the block that all lanes are at

    def next(self) -> tuple[int, Array | None]:
        """The block to run and the lanes that run it; _ENDED when there is none."""
        if self.together is not None:
            return self.together, None
        able = np.where(self.waiting > 0, _ENDED, self.pc)
        at = int(able.min())
        if at == _ENDED:
            stuck = self.waiting > 0
            if stuck.any() and self._release():  # the last ones it waited for have returned
                return self.next()
            if stuck.any():
                i = self.machine.kernel.blocks[int(self.pc[np.argmax(stuck)]) - 1].end
                assert i is not None
                told = "waits at a barrier that not all threads of its block reach"
                self.lanes.report(DEADLOCK, i.line, stuck, told)
            return _ENDED, None
        mask = able == at
        if mask.all():
            self.together = at
            return at, None
        return at, mask

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
        elif BARRIER.fullmatch(end.op):
            self._wait(at, mask, end)
        elif RETURN.fullmatch(end.op) or BRANCH.fullmatch(end.op):
            self._jump(at, mask, _ENDED if RETURN.fullmatch(end.op) else target, taken)
        return self.together != _ENDED

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
        """A barrier of all threads of a block (9.7.13.1)."""
        number = end.operands[0].bits if end.operands and isinstance(end.operands[0], Immediate) else 0
        if mask is None:
            self.machine.shared.barrier(None)
            self.together = at + 1
            return
        part = mask.reshape(-1, WARP)
        split = np.repeat(part.any(1) & ~part.all(1), WARP)
        self.lanes.report(DIVERGENCE, end.line, mask & split, "a barrier reached by part of a warp")
        self.pc[mask], self.waiting[mask] = at + 1, 1 + number
        self._release()

    def _release(self) -> bool:
        """Let those go whose barrier every thread of their block has reached, or never will: it returned."""
        shape = (self.lanes.count, self.lanes.threads)
        alive = (self.pc < _ENDED).reshape(shape)
        released = False
        for number in np.unique(self.waiting[self.waiting > 0]):
            here = (self.waiting == number).reshape(shape)
            complete = here.any(1) & (here.sum(1) >= alive.sum(1))
            if complete.any():
                self.waiting[(here & complete[:, None]).reshape(-1)] = 0
                self.machine.shared.barrier(complete)
                released = True
        return released

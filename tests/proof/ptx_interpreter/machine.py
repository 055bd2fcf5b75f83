"""Run a translated kernel: all threads of many blocks together, a basic block at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_interpreter.barriers import Barriers, Registers, operands
from ptx_interpreter.copies import Copies
from ptx_interpreter.faults import DEADLOCK, Faults
from ptx_interpreter.global_memory import GlobalAccess, GlobalMemory
from ptx_interpreter.lanes import Lanes
from ptx_interpreter.matrix import Matrices
from ptx_interpreter.mbarriers import Mbarriers
from ptx_interpreter.numbers import Array, u4
from ptx_interpreter.parse import BARRIER, Instruction, Kernel
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.tensor_copies import TensorCopies
from ptx_interpreter.tensor_maps import TensorMaps
from ptx_interpreter.threads import ENDED, Threads
from ptx_interpreter.translate import Program
from ptx_interpreter.warps import Warps
from ptx_interpreter.wgmma import Warpgroups

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
        families = {i.op.partition(".")[0] for i in self.kernel.instructions()}
        in_parts = "mbarrier" in families or meets_in_parts(self.kernel) or self.lanes.threads > 256
        self.shared = SharedMemory(self.lanes, shared, bool(families & {"wgmma", "mbarrier"}), in_parts)
        self.memory = GlobalAccess(memory, self.lanes)
        self.warps = Warps(self.lanes, self.shared)
        self.matrices = Matrices(self.shared, self.warps)
        self.copies = Copies(self.shared, self.memory)
        self.warpgroups = Warpgroups(self.shared, self.warps)
        self.barriers, self.registers = Barriers(self.shared), Registers(self.lanes, self.kernel)
        self.threads = Threads(self)
        self.mbarriers: Mbarriers | None = None
        self.tensors: TensorCopies | None = None
        if in_parts:
            self.maps = TensorMaps(self.shared, self.memory, self.warps)
            self.mbarriers = Mbarriers(self.shared, self.threads)
            self.tensors = TensorCopies(self.shared, self.memory, self.maps, self.mbarriers)
        self.instructions = 0  # that warps executed
        self.steps = 0  # basic blocks, each by some or all lanes
        self.visited: set[int] = set()  # their numbers
        self._constants: dict[tuple[int, str], Array] = {}

    # -- what generated code asks for ---
    def special(self, name: str) -> Array:
        """Special registers (10); blocks and grids have one dimension."""
        lanes = self.lanes
        sizes = {"%ntid.x": lanes.threads, "%nctaid.x": self.programs, "%nctaid.y": 1, "%nctaid.z": 1}
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
        threads = self.threads
        while self.steps < most_steps:
            at, mask = threads.next()
            if at == ENDED:
                break
            self.steps += 1
            self.visited.add(at)
            block = self.kernel.blocks[at]
            self.instructions += len(block.body) * threads.warps(mask)
            taken = self.program.blocks[at][0 if mask is None else 1](self, registers, constants, mask)
            if not threads.leave(at, mask, block.end, block.target, taken):
                break
        else:
            self._stuck(
                self.kernel.blocks[0].body[0], "no end after so many steps that it looks like none comes"
            )
        if self.tensors is not None:
            self.tensors.land(np.zeros(self.lanes.count, bool))

    def _registers(self) -> list[Array]:
        unset = {w: self._filled(_UNSET & ((1 << 8 * w) - 1), f"u{w}") for w in (1, 2, 4, 8)}
        unset[0] = self._filled(1, "?")
        return [unset[width] for width in self.kernel.widths]

    def _stuck(self, i: Instruction, told: str) -> None:
        self.lanes.report(DEADLOCK, i.line, np.ones(self.lanes.n, bool), told)


def meets_in_parts(kernel: Kernel) -> bool:
    """Whether some barrier is of a part of a block's threads."""
    ends = [block.end for block in kernel.blocks]
    return any(
        i.op.startswith(("bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.cta.arrive"))
        for i in kernel.instructions()
    ) or any(
        end is not None and BARRIER.fullmatch(end.op) and operands(end)[1] not in (0, kernel.threads)
        for end in ends
    )

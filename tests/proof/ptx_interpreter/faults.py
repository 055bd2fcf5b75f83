"""What the executor reports: faults of a kernel, and instructions that it does not have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptx_interpreter.parse import Kernel

OUT_OF_BOUNDS = "out of bounds"
MISALIGNED = "misaligned"
UNINITIALISED = "uninitialised"
RACE = "race"  # between warps, or a warp and a copy, that nothing orders
LANE_RACE = "race within a warp"
BLOCK_RACE = "race between blocks"
ASYNCHRONOUS = "not waited for"  # a copy or a wgmma used before its wait
DIVERGENCE = "divergence"  # an instruction of a whole warp in part of it
DEADLOCK = "deadlock"
MISUSE = "misuse"  # of a barrier, an mbarrier, a tensormap or the pool of registers


class Unsupported(Exception):
    """PTX that is not executed; ``opcodes`` are those without a translation."""

    def __init__(self, opcodes: Iterable[str]) -> None:
        self.opcodes = tuple(sorted(set(opcodes)))
        super().__init__(f"not executed: {', '.join(self.opcodes)}")


@dataclass(slots=True)
class Fault:
    """One kind of fault at one instruction, with the first thread it was seen in."""

    kind: str
    kernel: str
    source: str  # file.py:line of ours
    line: int  # of the PTX
    instruction: str
    block: int
    thread: int
    detail: str
    threads: int = 1  # that met it, over all executions of the instruction

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.kernel} at {self.source}, block {self.block} thread {self.thread}: "
            f"{self.detail} [PTX line {self.line}: {self.instruction}]"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Faults:
    """The faults of one launch, one entry per kind and instruction."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._found: dict[tuple[str, int], Fault] = {}

    def __iter__(self) -> Any:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, kind: str, line: int, block: int, thread: int, detail: str, threads: int = 1) -> None:
        known = self._found.get((kind, line))
        if known is not None:
            known.threads += threads
            return
        i = self._kernel.instruction_at(line)
        text, source = (i.text, i.source) if i else ("", "")
        self._found[kind, line] = Fault(
            kind, self._kernel.name, source, line, text, block, thread, detail, threads
        )

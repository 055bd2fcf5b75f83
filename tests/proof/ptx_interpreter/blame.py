"""Where an edited kernel goes wrong: the first instruction that does something else than in the unedited one.

Wrong numbers name no instruction. Here both kernels are executed on the same tensors, one instruction after
the other, and what each did is compared: the registers it wrote, what it asked of memory and of other
threads, the branch it took, the threads that ran it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from attnsel.backends.triton.launch import Launch
from ptx_interpreter.numbers import Array
from ptx_interpreter.parse import Address, BasicBlock, Instruction, Kernel, Operand, Register, Vector
from ptx_interpreter.run import execute
from ptx_interpreter.translate import Block, Program, translate

# Of a machine, for instructions.
_PARTS = (
    *("memory", "shared", "warps", "matrices", "copies", "warpgroups"),
    *("maps", "mbarriers", "tensors"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Blamed:
    """The instruction, as it stands in the unedited kernel, and what the edited one did there."""

    kernel: str
    source: str  # file.py:line of ours
    line: int  # of the PTX
    instruction: str
    edited: str  # what stands on that line after the edit
    detail: str
    block: int  # the first that differs, and its thread
    thread: int
    threads: int  # that differ

    def __str__(self) -> str:
        return (
            f"{self.kernel} at {self.source}, block {self.block} thread {self.thread}: {self.detail} "
            f"[PTX line {self.line}: {self.instruction}; edited: {self.edited}]"
        )


def blame(launch: Launch, arch: int, change: Callable[[str], str]) -> Blamed | None:
    """The first instruction that ``change`` makes do something else; None where the two do the same.

    ``launch`` is on CPU tensors, which stay as they are. ``change`` keeps the number of lines, by which
    instructions are told apart: what it deletes leaves an empty line. Raises ValueError where it does not,
    and what ``execute`` raises.
    """
    texts: list[str] = []

    def changed(text: str) -> str:
        texts[:] = [text, change(text)]
        if texts[0].count("\n") != texts[1].count("\n"):
            raise ValueError("the edited PTX has another number of lines")
        return texts[1]

    tensors = _Tensors(launch)
    clean, edited = _Trace(), _Trace()
    execute(tensors.fresh(), arch, watch=clean.watch)
    edited.expected = clean.digests
    _until_it_ends(edited, lambda: execute(tensors.fresh(), arch, changed, edited.watch))
    if edited.stopped is None and len(edited.digests) == len(clean.digests):
        return None
    at = len(edited.digests) if edited.stopped is None else edited.stopped.number
    again = _Trace(last=at)
    _until_it_ends(again, lambda: execute(tensors.fresh(), arch, watch=again.watch))
    step = again.stopped or edited.stopped
    assert step is not None
    return _told(step, None if step is edited.stopped else edited.stopped, texts[1])


class _Tensors:
    """Copies of a launch's tensors at one address, so that addresses are no difference."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        given = {name: t for name, t in launch.args.items() if isinstance(t, Tensor)}
        self.before = {name: _elements(t).clone() for name, t in given.items()}
        self.memory = {name: t.clone() for name, t in self.before.items()}
        self.views = {name: self.memory[name].as_strided(t.shape, t.stride()) for name, t in given.items()}

    def fresh(self) -> Launch:
        for name, t in self.before.items():
            self.memory[name].copy_(t)
        return dataclasses.replace(self.launch, args=self.launch.args | self.views)


def _elements(t: Tensor) -> Tensor:
    """From the first to the last, with what lies between."""
    last = sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.detach().as_strided((1 + last if t.numel() else 0,), (1,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One execution of an instruction: the threads that ran it, and what it did, as arrays and words."""

    number: int
    kernel: str
    instruction: Instruction
    mask: Array | None
    done: list[Any]
    blocks: range
    per_block: int


class _Differs(Exception):
    pass


def _until_it_ends(trace: _Trace, run: Callable[[], Any]) -> None:
    try:
        run()
    except _Differs:
        assert trace.stopped is not None


class _Trace:
    """Looks on at an execution. It is ended at step ``last``, or where it is not as ``expected``."""

    def __init__(self, last: int = -1) -> None:
        self.last = last
        self.digests: list[int] = []
        self.expected: list[int] | None = None
        self.stopped: _Step | None = None
        self._asked: list[Any] = []  # by the instruction at hand, of the parts of its machine

    def watch(self, program: Program) -> Program:
        single = translate(_single(program.kernel))
        blocks = [
            tuple(self._watched(block, function) for function in functions)
            for block, functions in zip(single.kernel.blocks, single.blocks, strict=True)
        ]
        return Program(single.kernel, blocks, single.constants)

    def _watched(self, block: BasicBlock, function: Block) -> Block:
        i = block.body[0] if block.body else block.end
        if i is None:
            return function
        everywhere = i.op.startswith("wgmma.wait_group")  # the registers of products that are done
        own = list(dict.fromkeys(index for o in i.operands for index in _registers(o)))

        def watched(machine: Any, registers: list[Array], constants: list[Array], mask: Array | None) -> Any:
            if not isinstance(machine.memory, _Asked):
                for name in _PARTS:
                    if getattr(machine, name, None) is not None:
                        setattr(machine, name, _Asked(getattr(machine, name), self._asked))
            self._asked.clear()
            known = range(len(registers)) if everywhere else own
            before = [registers[index] for index in known]
            taken = function(machine, registers, constants, mask)
            wrote = [
                registers[index]
                for index, old in zip(known, before, strict=True)
                if registers[index] is not old
            ]
            left = [] if taken is None else [taken if mask is None else taken & mask]
            self._step(machine, i, mask, [*wrote, *self._asked, *left])
            return taken

        return watched

    def _step(self, machine: Any, i: Instruction, mask: Array | None, done: list[Any]) -> None:
        number = len(self.digests)
        digest = hash((i.line, None if mask is None else mask.tobytes(), *map(_bits, done)))
        unlike = self.expected is not None and (
            number >= len(self.expected) or self.expected[number] != digest
        )
        if unlike or number == self.last:
            lanes = machine.lanes
            self.stopped = _Step(
                number, machine.kernel.name, i, mask, list(done), lanes.blocks, lanes.threads
            )
            raise _Differs
        self.digests.append(digest)


class _Asked:
    """A part of a machine that notes what it is asked: addresses, values, sizes.

    Of threads that take no part nothing is noted: a mask is the last argument, or stands before the line.
    """

    def __init__(self, part: Any, noted: list[Any]) -> None:
        self._part, self._noted = part, noted

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found

        def ask(*given: Any) -> Any:
            mask: Any = next((value for value in reversed(given) if not isinstance(value, int)), None)
            for value in given:
                if not isinstance(value, list):  # of all registers
                    for each in value if isinstance(value, tuple) else (value,):
                        if isinstance(mask, np.ndarray) and isinstance(each, np.ndarray):
                            each = np.where(mask, each, each.dtype.type(0))
                        self._noted.append(each)
            return found(*given)

        return ask


def _bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _registers(o: Operand) -> list[int]:
    match o:
        case Register(index):
            return [index]
        case Vector(items):
            return [index for item in items for index in _registers(item)]
        case Address(base):
            return _registers(base)
    return []


def _single(kernel: Kernel) -> Kernel:
    """The same kernel with every instruction in a basic block of its own."""
    blocks: list[BasicBlock] = []
    starts: dict[int, int] = {}
    for block in kernel.blocks:
        starts[block.number] = len(blocks)
        blocks += [BasicBlock(len(blocks) + k, [i]) for k, i in enumerate(block.body)]
        if block.end is not None or not block.body:
            blocks.append(BasicBlock(len(blocks), [], block.end, block.target))
    for block in blocks:
        if block.target >= 0:
            block.target = starts[block.target]
    return dataclasses.replace(kernel, blocks=blocks)


def _told(clean: _Step, edited: _Step | None, text: str) -> Blamed:
    i, n = clean.instruction, len(clean.blocks) * clean.per_block
    differ, detail = _difference(clean, edited, n)
    block, thread = divmod(int(np.argmax(differ)), clean.per_block)
    after = " ".join(text.split("\n")[i.line - 1].split())
    first = clean.blocks.start + block
    return Blamed(clean.kernel, i.source, i.line, i.text, after, detail, first, thread, int(differ.sum()))


def _difference(clean: _Step, edited: _Step | None, n: int) -> tuple[Array, str]:
    """Which of ``n`` threads differ, and how in words."""
    ran, also = (
        np.ones(n, bool) if step is None or step.mask is None else step.mask for step in (clean, edited)
    )
    if edited is None or edited.instruction.line != clean.instruction.line:
        other = "nothing" if edited is None else f"line {edited.instruction.line}"
        return ran, f"is not executed there, but {other}"
    if (ran != also).any():
        return ran != also, "other threads execute it"
    for one, other in zip(clean.done, edited.done, strict=False):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.shape == other.shape == (n,):
            unlike = (_bytes(one) != _bytes(other)).any(axis=1)
            if unlike.any():
                lane = int(np.argmax(unlike))
                return unlike, f"{_word(other[lane])} instead of {_word(one[lane])}"
        elif _bits(one) != _bits(other):
            return ran, f"{_word(other)} instead of {_word(one)}"
    return ran, "does more or less than before"


def _bytes(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)


def _word(value: Any) -> str:
    """Bits of a register as they are, everything else as Python has it."""
    if isinstance(value, np.generic) and value.dtype.kind in "uif":
        return f"{value.view(f'u{value.itemsize}'):#0{2 + 2 * value.itemsize}x}"
    return str(value)

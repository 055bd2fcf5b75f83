"""PTX text to instructions and basic blocks.

What Triton emits, not all of PTX: one entry, no calls. Directives that could change what a kernel computes
(local memory, static shared memory, branch tables) are refused rather than skipped.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TypeAlias

# Bytes of a fundamental type (5.2); a predicate is an array of bool.
WIDTH = {
    "pred": 0,
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
}


@dataclass(frozen=True, slots=True)
class Register:
    index: int  # into the kernel's registers
    width: int  # bytes, 0 for a predicate
    negated: bool = False  # !%p


@dataclass(frozen=True, slots=True)
class Immediate:
    bits: int  # of a float: its pattern; of a negative integer: negative
    real: bool = False


@dataclass(frozen=True, slots=True)
class Name:
    """A special register, a parameter, a symbol of shared memory or a label."""

    text: str


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that nobody wants."""


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b}``; with ``pair``, the ``p|q`` of two destinations."""

    items: tuple[Operand, ...]
    pair: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    base: Operand
    offset: int


Operand: TypeAlias = "Register | Immediate | Name | Sink | Vector | Address"


@dataclass(frozen=True, slots=True)
class Instruction:
    op: str  # with its modifiers, such as add.s32
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int  # of the PTX text, from 1
    text: str
    source: str  # file.py:line of the .loc before it, and the calls it was inlined at

    @property
    def label(self) -> str:
        """Where a branch goes."""
        (target,) = self.operands
        assert isinstance(target, Name)
        return target.text


@dataclass(slots=True)
class BasicBlock:
    """Straight-line code and what ends it: a branch, a return, a place to wait, or nothing."""

    number: int
    body: list[Instruction] = field(default_factory=list)
    end: Instruction | None = None
    target: int = -1  # number of the block that a branch leads to


@dataclass(slots=True)
class Kernel:
    name: str
    arch: str  # sm_75
    parameters: list[tuple[str, str]]  # type, name
    threads: int
    widths: list[int]  # of each register
    blocks: list[BasicBlock]
    unknown: list[str]  # directives that are not understood: such a kernel is not executed
    registers: int = 0  # of a thread at its start (.maxnreg, 11.4.1); 0: not said

    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.body
            if block.end is not None:
                yield block.end

    def instruction_at(self, line: int) -> Instruction | None:
        return next((i for i in self.instructions() if i.line == line), None)


# 9.7.12 control flow, 9.7.13.1 barriers of a block's threads, and 9.7.19.5: where threads may have to wait.
BRANCH = re.compile(r"bra(\.uni)?")
RETURN = re.compile(r"(ret(\.uni)?|exit)")
BARRIER = re.compile(r"(bar(\.cta)?\.sync|barrier(\.cta)?\.sync(\.aligned)?)")
REGISTERS = re.compile(r"setmaxnreg\.inc\.sync\.aligned\.u32")
_ENDS = (BRANCH, RETURN, BARRIER, REGISTERS)

_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|\d+)U?")
_FLOAT = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_LABEL = re.compile(r"([\w$%.]+)\s*:(?!:)")
_ENTRY = re.compile(r"\.visible\s+\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.(\w+)[^,]*?([\w$]+)\s*(?:,|$)")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+(.*)")
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", re.MULTILINE)
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_CALLED = re.compile(r"@\[ ([^\s:]+:\d+)")  # in the comment: where it was inlined, innermost first


def parse(text: str) -> Kernel:
    """The one kernel of a PTX text."""
    return _Parser(text).kernel()


class _Parser:
    def __init__(self, text: str) -> None:
        files = {number: PurePath(path).name for number, path in _FILE.findall(text)}
        lines, self.locs = [], [(0, "")]
        for number, line in enumerate(text.split("\n"), 1):
            code, _, comment = line.partition("//")
            if found := _LOC.match(code):
                source = f"{files.get(found[1], found[1])}:{found[2]}"
                source += "".join(f" in {place}" for place in _CALLED.findall(comment))
                self.locs.append((number, source))
                code = ""
            lines.append(code)
        self.text = "\n".join(lines)
        self.starts = [0]  # of lines
        for line in lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        # Inline assembly has registers and labels of its own, in braces.
        self.scopes: list[dict[str, int]] = [{}]
        self.opened = 0  # scopes so far
        self.numbers = [0]  # of the open ones
        self.widths: list[int] = []
        self.unknown: list[str] = []

    def kernel(self) -> Kernel:
        entry = _ENTRY.search(self.text)
        target = re.search(r"\.target\s+(\w+)", self.text)
        if entry is None or target is None:
            raise ValueError("the PTX has no .entry or no .target")
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", entry[3])
        if threads is None:
            raise ValueError(f"{entry[1]} declares no number of threads")
        registers = re.search(r"\.maxnreg\s+(\d+)", entry[3])
        blocks = _basic_blocks(list(self._statements(entry.end())))
        parameters = [(kind, name) for kind, name in _PARAMETER.findall(entry[2])]
        return Kernel(
            entry[1],
            target[1],
            parameters,
            int(threads[1]),
            self.widths,
            blocks,
            self.unknown,
            int(registers[1]) if registers else 0,
        )

    def _statements(self, at: int) -> Iterator[str | Instruction]:
        """Labels as text, and instructions, up to the brace that closes the kernel."""
        while True:
            while self.text[at].isspace() or self.text[at] == ";":
                at += 1
            if self.text[at] in "{}":
                if self.text[at] == "{":
                    self.opened += 1
                    self.scopes.append({})
                    self.numbers.append(self.opened)
                else:
                    self.scopes.pop()
                    self.numbers.pop()
                if not self.scopes:
                    return
                at += 1
                continue
            if label := _LABEL.match(self.text, at):
                yield self._label(label[1])
                at = label.end()
                continue
            stop = self.text.index(";", at)
            statement = " ".join(self.text[at:stop].split())
            if statement.startswith(".reg "):
                self._declare(statement)
            elif not statement.startswith("."):
                yield self._instruction(statement, bisect.bisect_right(self.starts, at))
            elif not statement.startswith(".pragma "):
                self.unknown.append(statement.split()[0])
            at = stop + 1

    def _declare(self, statement: str) -> None:
        kind, names = re.fullmatch(r"\.reg \.(\w+) (.*)", statement).groups()
        if kind not in WIDTH:
            self.unknown.append(f".reg .{kind}")
        for name in names.replace(" ", "").split(","):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            for each in [f"{many[1]}{k}" for k in range(int(many[2]))] if many else [name]:
                self.scopes[-1][each] = len(self.widths)
                self.widths.append(WIDTH.get(kind, 0))

    def _instruction(self, text: str, line: int) -> Instruction:
        guard, rest = None, text
        if found := _GUARD.match(text):
            register = self._register(found[2])
            if register is None:
                raise ValueError(f"no such predicate: {text}")
            guard, rest = Register(register.index, 0, bool(found[1])), found[3]
        op, _, arguments = rest.partition(" ")
        source = self.locs[bisect.bisect_right(self.locs, (line, "\x7f")) - 1][1]
        operands = tuple(map(self._operand, _split(arguments)))
        if BRANCH.fullmatch(op):
            operands = (Name(self._label(arguments)),)
        return Instruction(op, operands, guard, line, text, source)

    def _label(self, name: str) -> str:
        """A label of the function, or of the braces it stands in."""
        return name if name.startswith("$") else f"{name} of {self.numbers[-1]}"

    def _register(self, name: str) -> Register | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return Register(scope[name], self.widths[scope[name]])
        return None

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(map(self._operand, _split(text[1:-1]))))
        if text.startswith("["):
            inner = _split(text[1:-1])
            if len(inner) > 1:  # a tensor's descriptor and coordinates
                return Address(Vector(tuple(map(self._operand, inner))), 0)
            found = re.fullmatch(r"(.*?)\s*\+\s*(-?\w+)", inner[0])
            base, offset = (found[1], int(found[2], 0)) if found else (inner[0], 0)
            return Address(self._operand(base), offset)
        if "|" in text:
            return Vector(tuple(self._operand(part.strip()) for part in text.split("|")), pair=True)
        if text == "_":
            return Sink()
        if found := _FLOAT.fullmatch(text):
            return Immediate(int(found[1] or found[2], 16), real=True)
        if _INTEGER.fullmatch(text):
            return Immediate(int(text.rstrip("U"), 0))
        negated = text.startswith("!")
        register = self._register(text.removeprefix("!"))
        if register is not None:
            return Register(register.index, register.width, negated)
        return Name(text)


def _split(text: str) -> list[str]:
    """At commas outside of brackets and braces."""
    parts, depth, begin = [], 0, 0
    for k, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and not depth:
            parts.append(text[begin:k])
            begin = k + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


def _basic_blocks(items: list[str | Instruction]) -> list[BasicBlock]:
    wanted = {i.label for i in items if isinstance(i, Instruction) and BRANCH.fullmatch(i.op)}
    blocks, places = [BasicBlock(0)], {}
    for item in items:
        if isinstance(item, str):
            if item in wanted:  # the others are the debugger's
                if blocks[-1].body:
                    blocks.append(BasicBlock(len(blocks)))
                if item in places:
                    raise ValueError(f"two labels {item}")
                places[item] = blocks[-1].number
        elif any(kind.fullmatch(item.op) for kind in _ENDS):
            blocks[-1].end = item
            blocks.append(BasicBlock(len(blocks)))
        else:
            blocks[-1].body.append(item)
    for block in blocks:
        if block.end is not None and BRANCH.fullmatch(block.end.op):
            block.target = places[block.end.label]
    return blocks

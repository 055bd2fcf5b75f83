"""Basic blocks to Python functions over numpy arrays, one element per thread ("lane").

A register is an array of bits, bool or uint8 to uint64 by its declared width. Every assignment binds a new
array, so arrays may be shared. Each block is translated twice: for all lanes, and under a mask ``m`` of
active lanes. In the generated source ``X`` is the machine, ``R`` the registers, ``K`` constants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ptx_interpreter import forms, numbers
from ptx_interpreter import operations as _operations  # noqa: F401  registers the forms
from ptx_interpreter.faults import Unsupported
from ptx_interpreter.parse import (
    BARRIER,
    REGISTERS,
    WIDTH,
    Address,
    BasicBlock,
    Immediate,
    Kernel,
    Name,
    Operand,
    Register,
    Sink,
    Vector,
)

# A PTX type as numpy's; bfloat16 and packed pairs stay bits.
DTYPE = {
    "pred": "?",
    **{f"{sign}{8 * size}": f"u{size}" for sign in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": f"i{size}" for size in (1, 2, 4, 8)},
    **{"f16": "f2", "f32": "f4", "f64": "f8", "bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4"},
}
BITS = {0: "?", 1: "u1", 2: "u2", 4: "u4", 8: "u8"}  # numpy's type of a register of so many bytes
SYMBOLS = {"global_smem": 0}  # where Triton's shared memory begins

Block = Callable[[Any, Any, Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A kernel as functions, for any number of lanes."""

    kernel: Kernel
    blocks: list[tuple[Block, Block]]  # for all lanes, and under a mask
    constants: list[tuple[int, str]]  # bits and numpy type


def translate(kernel: Kernel) -> Program:
    """Raises Unsupported with every opcode of the kernel that no form matches."""
    if unknown := unsupported(kernel):
        raise Unsupported(unknown)
    translator = Translator(kernel)
    text = "\n".join(translator.block(block, masked) for block in kernel.blocks for masked in (False, True))
    names = numbers.names()
    exec(compile(text, f"<{kernel.name}>", "exec"), names)
    blocks = [(names[f"b{b.number}"], names[f"b{b.number}m"]) for b in kernel.blocks]
    return Program(kernel, blocks, list(translator.constants))


def unsupported(kernel: Kernel) -> list[str]:
    """Opcodes and directives without a translation, in alphabetical order."""
    found = set(kernel.unknown) | {
        i.op for block in kernel.blocks for i in block.body if forms.find(i) is None
    }
    for i in kernel.instructions():
        waits = BARRIER.fullmatch(i.op) or REGISTERS.fullmatch(i.op)
        if waits and i.guard is not None:
            found.add(f"{i.op} under a predicate")
        if waits and not all(isinstance(o, Immediate) for o in i.operands):
            found.add(f"{i.op} of a register")
    return sorted(found)


class Translator:
    """Writes the source of one block after the other."""

    def __init__(self, kernel: Kernel) -> None:
        self.constants: dict[tuple[int, str], int] = {}
        self.parameters = {name: place for place, (_, name) in enumerate(kernel.parameters)}
        self.lines: list[str] = []
        self.mask = "None"  # of the lanes that the instruction at hand runs in

    def block(self, block: BasicBlock, masked: bool) -> str:
        self.lines = []
        for i in block.body:
            self.mask = "m" if masked else "None"
            if i.guard is not None:
                self.lines.append(f"g = {self.get(i.guard, 'pred')}" + (" & m" if masked else ""))
                self.mask = "g"
            found = forms.find(i)
            if found is None:
                raise Unsupported([i.op])
            translation, modifiers = found
            translation(self, i, modifiers)
        if block.end is not None and block.end.guard is not None:
            self.lines.append(f"return {self.get(block.end.guard, 'pred')}")
        body = "\n    ".join(self.lines) or "pass"
        return f"def b{block.number}{'m' if masked else ''}(X, R, K, m):\n    {body}\n"

    def do(self, line: str) -> None:
        self.lines.append(line)

    def constant(self, value: int, dtype: str) -> str:
        bits = 8 if dtype == "?" else 8 * int(dtype[1])
        key = (value & ((1 << bits) - 1), dtype)
        return f"K[{self.constants.setdefault(key, len(self.constants))}]"

    def get(self, o: Operand, kind: str) -> str:
        """An operand as an array of PTX type ``kind``; of wider registers the lower part (9.4.1)."""
        dtype = DTYPE[kind]
        match o:
            case Immediate(bits, real):
                if real and WIDTH[kind] != 4:
                    raise Unsupported([f"a float constant as .{kind}"])
                return self.constant(int(bits != 0) if kind == "pred" else bits, dtype)
            case Register(index, width, negated):
                text = f"R[{index}]"
                if (kind == "pred") != (width == 0):
                    raise Unsupported([f"a register of {width} bytes as .{kind}"])
                if kind == "pred":
                    return f"(~{text})" if negated else text
                if WIDTH[kind] == width:
                    return text if dtype == BITS[width] else f"{text}.view({dtype})"
                if WIDTH[kind] > width:
                    raise Unsupported([f"a register of {width} bytes as .{kind}"])
                text = f"{text}.astype(u{WIDTH[kind]})"
                return text if dtype[0] == "u" else f"{text}.view({dtype})"
            case Name(text) if text in SYMBOLS:
                return self.constant(SYMBOLS[text], dtype)
            case Name(text) if text.startswith("%"):
                return f"X.special({text!r}).astype({dtype})"
            case Vector(items):  # packed, the first lowest
                part = f"b{8 * WIDTH[kind] // len(items)}"
                return f"pack({', '.join(self.get(item, part) for item in items)})"
        raise Unsupported([f"operand {o}"])

    def put(self, o: Operand, value: str, kind: str) -> None:
        """Assign an array of PTX type ``kind``; wider registers are extended by its sign (9.4.1)."""
        match o:
            case Sink():
                return
            case Vector(items):
                size = WIDTH[kind] // len(items)
                self.do(f"t = ({value}).view(u{size}).reshape(-1, {len(items)})")
                for k, item in enumerate(items):
                    self.put(item, f"t[:, {k}].copy()", f"b{8 * size}")
                return
            case Register(index, width):
                if (kind == "pred") != (width == 0) or WIDTH[kind] > width:
                    raise Unsupported([f".{kind} into a register of {width} bytes"])
                dtype, have = DTYPE[kind], BITS[width]
                if WIDTH[kind] == width:
                    value = value if dtype == have else f"({value}).view({have})"
                elif dtype[0] == "i":
                    value = f"({value}).astype(i{width}).view({have})"
                else:
                    value = f"({value}).astype({have})"
                if self.mask != "None":
                    value = f"where({self.mask}, {value}, R[{index}])"
                self.do(f"R[{index}] = {value}")
                return
        raise Unsupported([f"destination {o}"])

    def put_each(self, o: Operand, values: str, kind: str) -> None:
        """Assign ``values[0]``, ``values[1]``, ... to the registers of a vector, or to one register."""
        for k, item in enumerate(o.items if isinstance(o, Vector) else (o,)):
            self.put(item, f"{values}[{k}]", kind)

    def get_each(self, o: Operand, kind: str) -> str:
        """A tuple of the registers of a vector, or of one."""
        items = o.items if isinstance(o, Vector) else (o,)
        return "(" + "".join(f"{self.get(item, kind)}, " for item in items) + ")"

    def address(self, o: Operand, kind: str) -> str:
        """``[base + offset]``: ``kind`` b32 for shared memory, b64 for global."""
        if not isinstance(o, Address):
            raise Unsupported([f"operand {o} as an address"])
        base = self.get(o.base, kind)
        return f"({base} + {self.constant(o.offset, DTYPE[kind])})" if o.offset else base

"""9.7.9 moves, loads and stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.faults import Unsupported
from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import WIDTH, Address, Instruction, Name, Vector

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator

_MEMORY = {"shared": "shared", "global": "memory"}  # the machine's names
_TYPES = "b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f32"


@form("mov.{type:pred|b16|b32|b64|u16|u32|u64|s16|s32|s64|f32}", 2)
def mov(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    kind = modifiers["type"]
    bits = kind if kind == "pred" else f"b{8 * WIDTH[kind]}"
    t.put(d, t.get(a, bits), bits)


@form("cvta[.to].global.u64", 2)
def generic(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """9.7.9.20: a generic address of global memory is the address itself (5.1.4)."""
    d, a = i.operands
    t.put(d, t.get(a, "b64"), "b64")


@form("ld.param.{type:b32|b64|u32|u64|s32|s64|f32}", 2)
def parameter(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, at = i.operands
    if not isinstance(at, Address) or not isinstance(at.base, Name) or at.offset:
        raise Unsupported([f"{i.op} of part of a parameter"])
    bits = f"b{8 * WIDTH[modifiers['type']]}"
    t.put(d, f"X.parameter({t.parameters[at.base.text]}, u{WIDTH[bits]})", bits)


def _lanes(i: Instruction, modifiers: Modifiers, registers: object) -> int:
    """How many elements a thread moves; what stands in braces must be as many."""
    count = int(modifiers.get("vector", "v1")[1:])
    held = len(registers.items) if isinstance(registers, Vector) else 1
    if held != count:
        raise ValueError(f"{count} elements and {held} registers: {i.text}")
    return count


@form(f"ld.{{space:shared|global}}[.{{vector:v2|v4|v8}}].{{type:{_TYPES}}}", 2)
def load(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, at = i.operands
    kind, space = modifiers["type"], modifiers["space"]
    count = _lanes(i, modifiers, d)
    address = t.address(at, "b32" if space == "shared" else "b64")
    t.do(f"v = X.{_MEMORY[space]}.load({address}, {WIDTH[kind]}, {count}, {t.mask}, {i.line})")
    for k, item in enumerate(d.items if isinstance(d, Vector) else (d,)):
        # A signed type fills a wider register with its sign.
        t.put(item, f"v[{k}]" + (f".view(i{WIDTH[kind]})" if kind[0] == "s" else ""), _bits(kind))


@form(f"st.{{space:shared|global}}[.{{vector:v2|v4|v8}}].{{type:{_TYPES}}}", 2)
def store(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, s = i.operands
    kind, space = modifiers["type"], modifiers["space"]
    _lanes(i, modifiers, s)
    address = t.address(at, "b32" if space == "shared" else "b64")
    values = t.get_each(s, f"b{8 * WIDTH[kind]}")
    t.do(f"X.{_MEMORY[space]}.store({address}, {WIDTH[kind]}, {values}, {t.mask}, {i.line})")


def _bits(kind: str) -> str:
    return kind if kind[0] == "s" else f"b{8 * WIDTH[kind]}"

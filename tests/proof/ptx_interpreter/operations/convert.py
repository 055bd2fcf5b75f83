"""9.7.9.22 cvt. Each form says which roundings it may have; saturation of integers is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.operations.arithmetic import widened
from ptx_interpreter.parse import Instruction

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator

_TO_INTEGER = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_SIZES = "8|16|32|64"


@form(f"cvt.{{sign:u|s}}{{bits:{_SIZES}}}.{{from:u8|s8|u16|s16|u32|s32|u64|s64}}", 2)
def between_integers(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """Extended by the source's sign, or the low bits of it."""
    d, a = i.operands
    size = int(modifiers["bits"]) // 8
    dtype = f"{'u' if modifiers['sign'] == 'u' else 'i'}{size}"
    source = modifiers["from"]
    # Of a wider register the source is the low part: cvt.s16.s8 of a .b16 (9.4.1).
    t.put(d, f"{t.get(a, source)}.astype({dtype})", f"{modifiers['sign']}{modifiers['bits']}")


@form("cvt.f32.{from:f16|bf16}", 2)
def widen(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    t.put(d, widened(t, a, modifiers["from"]), "f32")


@form("cvt.rn.{to:f16|bf16}.f32", 2)
def narrow(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    t.put(d, f"to_{modifiers['to']}({t.get(a, 'f32')})", "b16")


@form("cvt.rn.{to:f16|bf16}x2.f32", 3)
def narrow_pair(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """The first source is the upper half."""
    d, high, low = i.operands
    to = f"to_{modifiers['to']}"
    t.put(d, f"pack({to}({t.get(low, 'f32')}), {to}({t.get(high, 'f32')}))", "b32")


@form("cvt.rna.tf32.f32", 2)
def to_tf32(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    t.put(d, f"to_tf32({t.get(a, 'f32')})", "b32")


@form("cvt.rn.f32.{from:u8|s8|u16|s16|u32|s32|u64|s64}", 2)
def from_integer(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    t.put(d, f"{t.get(a, modifiers['from'])}.astype(f4)", "f32")


@form("cvt.{mode:rni|rzi|rmi|rpi}[.{ftz:ftz}].{to:u32|s32|u64|s64}.f32", 2)
def to_integer(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    value, to = t.get(a, "f32"), modifiers["to"]
    if "ftz" in modifiers:
        value = f"ftz({value})"
    dtype = f"{'u' if to[0] == 'u' else 'i'}{int(to[1:]) // 8}"
    t.put(d, f"to_integer({_TO_INTEGER[modifiers['mode']]}({value}), {dtype})", to)


@form("cvt[.{mode:rni|rzi|rmi|rpi}][.{ftz:ftz}][.{sat:sat}].f32.f32", 2)
def within_f32(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a = i.operands
    value = t.get(a, "f32")
    if "ftz" in modifiers:
        value = f"ftz({value})"
    if "mode" in modifiers:
        value = f"{_TO_INTEGER[modifiers['mode']]}({value})"
    if "sat" in modifiers:
        value = f"saturate({value})"
    t.put(d, value, "f32")

"""9.7.1 integer and 9.7.3 floating point arithmetic, 9.7.8 logic and shifts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import Immediate, Instruction, Operand

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator

_DOUBLE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}

# Form -> what it computes of its sources, all of the form's type. {0} is the first source.
_COMPUTED = (
    ("add.{type:u16|s16|u32|s32|u64|s64}", "{0} + {1}"),
    ("sub.{type:u16|s16|u32|s32|u64|s64}", "{0} - {1}"),
    ("mul.lo.{type:u16|s16|u32|s32|u64|s64}", "{0} * {1}"),
    ("mul.hi.{type:u16|s16|u32|s32|u64}", "mul_hi({0}, {1})"),
    ("mad.lo.{type:u16|s16|u32|s32|u64|s64}", "{0} * {1} + {2}"),
    ("div.{type:u16|s16|u32|s32|u64|s64}", "divide({0}, {1})"),
    ("rem.{type:u16|s16|u32|s32|u64|s64}", "remainder({0}, {1})"),
    ("abs.{type:s16|s32|s64}", "absolute({0})"),
    ("neg.{type:s16|s32|s64}", "-{0}"),
    ("min.{type:u16|s16|u32|s32|u64|s64}", "minimum({0}, {1})"),
    ("max.{type:u16|s16|u32|s32|u64|s64}", "maximum({0}, {1})"),
    ("min.relu.{type:s32}", "maximum(minimum({0}, {1}), i4(0))"),
    ("max.relu.{type:s32}", "maximum(maximum({0}, {1}), i4(0))"),
    ("and.{type:pred|b16|b32|b64}", "{0} & {1}"),
    ("or.{type:pred|b16|b32|b64}", "{0} | {1}"),
    ("xor.{type:pred|b16|b32|b64}", "{0} ^ {1}"),
    ("not.{type:pred|b16|b32|b64}", "~{0}"),
    ("prmt.{type:b32}", "prmt({0}, {1}, {2})"),
    ("bfi.{type:b32}", "bfi({0}, {1}, {2}, {3})"),
    # Rounded to nearest even, which .rn and no modifier both mean (9.7.3).
    ("add[.rn][.{ftz:ftz}].{type:f32}", "{0} + {1}"),
    ("sub[.rn][.{ftz:ftz}].{type:f32}", "{0} - {1}"),
    ("mul[.rn][.{ftz:ftz}].{type:f32}", "{0} * {1}"),
    ("fma.rn[.{ftz:ftz}].{type:f32}", "fma({0}, {1}, {2})"),
    ("div.{rn|full|approx}[.{ftz:ftz}].{type:f32}", "{0} / {1}"),
    ("abs[.{ftz:ftz}].{type:f32}", "absolute({0})"),
    ("neg[.{ftz:ftz}].{type:f32}", "-{0}"),
    ("min[.{ftz:ftz}].{type:f32}", "fmin({0}, {1})"),
    ("max[.{ftz:ftz}].{type:f32}", "fmax({0}, {1})"),
    ("min[.{ftz:ftz}].NaN.{type:f32}", "nan_min({0}, {1})"),
    ("max[.{ftz:ftz}].NaN.{type:f32}", "nan_max({0}, {1})"),
    # Three sources, from sm100 on.
    ("max[.{ftz:ftz}].{type:f32}", "fmax(fmax({0}, {1}), {2})"),
    ("min[.{ftz:ftz}].{type:f32}", "fmin(fmin({0}, {1}), {2})"),
    ("ex2.approx[.{ftz:ftz}].{type:f32}", "exp2({0})"),
    ("lg2.approx[.{ftz:ftz}].{type:f32}", "log2({0})"),
    ("rcp.{rn|approx}[.{ftz:ftz}].{type:f32}", "reciprocal({0})"),
    ("sqrt.{rn|approx}[.{ftz:ftz}].{type:f32}", "sqrt({0})"),
    ("rsqrt.approx[.{ftz:ftz}].{type:f32}", "reciprocal(sqrt({0}))"),
    ("tanh.approx.{type:f32}", "tanh({0})"),
)

_BY_ROOT = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "fma": "fma({0}, {1}, {2})"}


def widened(t: Translator, o: Operand, kind: str) -> str:
    """A float16 or bfloat16 as float32."""
    return f"{t.get(o, 'f16')}.astype(f4)" if kind == "f16" else f"from_bf16({t.get(o, 'b16')})"


def _compute(t: Translator, i: Instruction, modifiers: Modifiers, expression: str) -> None:
    kind = modifiers["type"]
    sources = [t.get(o, kind) for o in i.operands[1:]]
    if "ftz" in modifiers:
        value = f"ftz({expression.format(*[f'ftz({source})' for source in sources])})"
    else:
        value = expression.format(*sources)
    t.put(i.operands[0], value, kind)


def _register(syntax: str, expression: str) -> None:
    sources = len(set(re.findall(r"\{\d\}", expression)))

    @form(syntax, 1 + sources)
    def translation(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
        _compute(t, i, modifiers, expression)


for _syntax, _expression in _COMPUTED:
    _register(_syntax, _expression)


@form("add[.rn][.{ftz:ftz}].f32x2", 3)
@form("sub[.rn][.{ftz:ftz}].f32x2", 3)
@form("mul[.rn][.{ftz:ftz}].f32x2", 3)
@form("fma.rn[.{ftz:ftz}].f32x2", 4)
def pairs(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """Two float32 in a register of 64 bits, each by itself (sm100 on)."""
    expression = _BY_ROOT[i.op[:3]]
    sources = [f"{t.get(o, 'b64')}.view(f4)" for o in i.operands[1:]]
    if "ftz" in modifiers:
        expression, sources = f"ftz({expression})", [f"ftz({source})" for source in sources]
    t.put(i.operands[0], f"({expression.format(*sources)}).view(u8)", "b64")


@form("add[.rn].f32.{type:f16|bf16}", 3)
@form("sub[.rn].f32.{type:f16|bf16}", 3)
@form("fma.rn.f32.{type:f16|bf16}", 4)
def mixed(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """9.7.5, from sm100 on: all sources but the last are narrow; the result is rounded once."""
    *narrow, last = i.operands[1:]
    sources = [widened(t, o, modifiers["type"]) for o in narrow]
    sources.append(t.get(last, "f32"))
    t.put(i.operands[0], _BY_ROOT[i.op[:3]].format(*sources), "f32")


@form("mul.wide.{type:u16|s16|u32|s32}", 3)
@form("mad.wide.{type:u16|s16|u32|s32}", 4)
def wide(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """The whole product, of twice the sources' width."""
    kind = modifiers["type"]
    double = _DOUBLE[kind]
    a, b = (f"{t.get(o, kind)}.astype({'iu'[kind[0] == 'u']}{int(double[1:]) // 8})" for o in i.operands[1:3])
    value = f"{a} * {b}"
    if len(i.operands) == 4:
        value += f" + {t.get(i.operands[3], double)}"
    t.put(i.operands[0], value, double)


@form("bfe.{type:u32|s32|u64|s64}", 4)
def bfe(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a, position, length = i.operands
    kind = modifiers["type"]
    t.put(d, f"bfe({t.get(a, kind)}, {t.get(position, 'b32')}, {t.get(length, 'b32')})", kind)


@form("shl.{type:b16|b32|b64}", 3)
@form("shr.{type:b16|b32|b64|u16|u32|u64|s16|s32|s64}", 3)
def shift(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a, count = i.operands
    kind = modifiers["type"]
    t.put(d, f"{i.op[:3]}({t.get(a, kind)}, {t.get(count, 'b32')})", kind)


@form("shf.{way:l|r}.{mode:wrap|clamp}.b32", 4)
def funnel(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, low, high, count = i.operands
    shift = t.get(count, "b32")
    shift = f"({shift} & u4(31))" if modifiers["mode"] == "wrap" else f"minimum({shift}, u4(32))"
    name = "funnel_left" if modifiers["way"] == "l" else "funnel_right"
    t.put(d, f"{name}({t.get(low, 'b32')}, {t.get(high, 'b32')}, {shift})", "b32")


@form("lop3.b32", 5)
def lop3(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a, b, c, table = i.operands
    assert isinstance(table, Immediate)
    t.put(d, f"lop3({', '.join(t.get(o, 'b32') for o in (a, b, c))}, {table.bits})", "b32")

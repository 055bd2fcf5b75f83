"""9.7.6 comparison and selection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import WIDTH, Instruction, Sink, Vector

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_BOOLEAN = {"and": "&", "or": "|", "xor": "^"}


@form("setp.{compare:eq|ne}.{type:b16|b32|b64}", 3)
@form("setp.{compare:eq|ne|lt|le|gt|ge}[.{boolean:and|or|xor}].{type:s16|s32|s64|u16|u32|u64}", 3, 4)
@form("setp.{compare:lo|ls|hi|hs}[.{boolean:and|or|xor}].{type:u16|u32|u64}", 3, 4)
@form(
    "setp.{compare:eq|ne|lt|le|gt|ge|equ|neu|ltu|leu|gtu|geu|num|nan}[.{boolean:and|or|xor}][.{ftz:ftz}]"
    ".{type:f32}",
    3,
    4,
)
def setp(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """``p`` and, of a pair, ``q`` its opposite; a boolean combines both with a third source."""
    kind, boolean = modifiers["type"], modifiers.get("boolean")
    a, b = (t.get(o, kind) for o in i.operands[1:3])
    if "ftz" in modifiers:
        a, b = f"ftz({a})", f"ftz({b})"
    value = _comparison(modifiers["compare"], a, b, kind == "f32")
    if (boolean is not None) != (len(i.operands) == 4):
        raise ValueError(f"a boolean and its source belong together: {i.text}")
    combined = f" {_BOOLEAN[boolean]} {t.get(i.operands[3], 'pred')}" if boolean else ""
    d = i.operands[0]
    p, q = d.items if isinstance(d, Vector) else (d, Sink())
    t.do(f"t = {value}")
    # Both before either is bound: the third source may be one of them.
    t.do(f"t, s = t{combined}, (~t){combined}")
    t.put(p, "t", "pred")
    t.put(q, "s", "pred")


def _comparison(compare: str, a: str, b: str, real: bool) -> str:
    """Ordered comparisons of floats are false on NaN, those in -u true."""
    if compare in ("num", "nan"):
        either = f"(isnan({a}) | isnan({b}))"
        return either if compare == "nan" else f"(~{either})"
    if compare in _UNSIGNED:
        return f"({a} {_UNSIGNED[compare]} {b})"
    if not real:
        return f"({a} {_SIGNS[compare]} {b})"
    if compare == "ne":
        return f"(({a} < {b}) | ({a} > {b}))"
    if compare == "neu":
        return f"({a} != {b})"
    if compare.endswith("u"):
        return f"(({a} {_SIGNS[compare[:-1]]} {b}) | isnan({a}) | isnan({b}))"
    return f"({a} {_SIGNS[compare]} {b})"


@form("selp.{type:b16|b32|b64|u16|u32|u64|s16|s32|s64|f32}", 4)
def selp(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a, b, p = i.operands
    bits = f"b{8 * WIDTH[modifiers['type']]}"
    t.put(d, f"where({t.get(p, 'pred')}, {t.get(a, bits)}, {t.get(b, bits)})", bits)

"""9.7.14.5 ldmatrix, stmatrix and mma; 9.7.15 wgmma."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import Immediate, Instruction, Operand, Register, Vector

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator


@form("ldmatrix.sync.aligned.m8n8.x{count:1|2|4}[.{trans:trans}].shared.b16", 2)
def ldmatrix(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, at = i.operands
    _hold(i, d, int(modifiers["count"]))
    arguments = f"{modifiers['count']}, {'trans' in modifiers}, {t.mask}, {i.line}"
    t.do(f"v = X.matrices.load({t.address(at, 'b32')}, {arguments})")
    t.put_each(d, "v", "b32")


@form("stmatrix.sync.aligned.m8n8.x{count:1|2|4}[.{trans:trans}].shared.b16", 2)
def stmatrix(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, s = i.operands
    _hold(i, s, int(modifiers["count"]))
    values = t.get_each(s, "b32")
    t.do(f"X.matrices.store({t.address(at, 'b32')}, {values}, {'trans' in modifiers}, {t.mask}, {i.line})")


@form("mma.sync.aligned.m16n8k{depth:8|16}.row.col.f32.{kind:f16}.f16.f32", 4)
@form("mma.sync.aligned.m16n8k{depth:8|16}.row.col.f32.{kind:bf16}.bf16.f32", 4)
@form("mma.sync.aligned.m16n8k{depth:4|8}.row.col.f32.{kind:tf32}.tf32.f32", 4)
def mma(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """16-bit elements lie two in a register; A has 16 rows, B 8 columns."""
    kind, depth = modifiers["kind"], int(modifiers["depth"])
    of_a = 16 * depth // 32 // (1 if kind == "tf32" else 2)
    for operand, count in zip(i.operands, (4, of_a, of_a // 2, 4), strict=True):
        _hold(i, operand, count)
    d, a, b, c = i.operands
    sources = ", ".join(t.get_each(o, "b32") for o in (a, b, c))
    t.do(f"v = X.matrices.multiply({kind!r}, {sources}, {t.mask}, {i.line})")
    t.put_each(d, "v", "b32")


def _hold(i: Instruction, o: Operand, count: int) -> None:
    held = len(o.items) if isinstance(o, Vector) else 1
    if held != count:
        raise ValueError(f"{held} registers where {count} belong: {i.text}")


# -- wgmma (sm90): one instruction of four warps -----------------------------------------------------------
@form("wgmma.fence.sync.aligned", 0)
def wgmma_fence(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """Orders registers between wgmma and other instructions: here an accumulator in flight is poison."""
    t.do(f"X.warpgroups.fence({t.mask}, {i.line})")


@form("wgmma.commit_group.sync.aligned", 0)
def wgmma_commit(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    t.do(f"X.warpgroups.commit({t.mask}, {i.line})")


@form("wgmma.wait_group.sync.aligned", 1)
def wgmma_wait(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    (n,) = i.operands
    assert isinstance(n, Immediate)
    t.do(f"X.warpgroups.wait(R, {n.bits}, {t.mask}, {i.line})")


_COLUMNS = "|".join(str(n) for n in range(8, 257, 8))


@form(f"wgmma.mma_async.sync.aligned.m64n{{columns:{_COLUMNS}}}k16.f32.{{kind:f16}}.f16", 7, 8)
@form(f"wgmma.mma_async.sync.aligned.m64n{{columns:{_COLUMNS}}}k16.f32.{{kind:bf16}}.bf16", 7, 8)
def wgmma(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """A in registers (7 operands: B alone may be transposed) or, like B, in shared memory (8)."""
    d, a, b, scale_d, *rest = i.operands
    values = [o.bits if isinstance(o, Immediate) else None for o in rest]
    if not isinstance(d, Vector) or values[:2] != [1, 1] or None in values:
        raise ValueError(f"negated or unknown operands: {i.text}")
    columns = int(modifiers["columns"])
    _hold(i, d, columns // 2)
    trans_a, trans_b = (0, values[2]) if len(values) == 3 else values[2:]
    indices = tuple(o.index for o in d.items if isinstance(o, Register))
    first = t.get_each(a, "b32") if isinstance(a, Vector) else t.get(a, "b64")
    t.do(
        f"X.warpgroups.multiply(R, {modifiers['kind']!r}, {columns}, {indices}, {first}, {t.get(b, 'b64')}, "
        f"{t.get(scale_d, 'pred')}, {trans_a}, {trans_b}, {t.mask}, {i.line})"
    )

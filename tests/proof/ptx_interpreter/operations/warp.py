"""9.7.9.6 shuffles, 9.7.13 votes and barriers; 9.7.19.5 registers of a warpgroup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.faults import Unsupported
from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import Immediate, Instruction, Vector

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator


@form("shfl.sync.{mode:up|down|bfly|idx}.b32", 5)
def shuffle(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, *sources = i.operands
    arguments = ", ".join(t.get(o, "b32") for o in sources)
    t.do(f"v = X.warps.shuffle({modifiers['mode']!r}, {arguments}, {t.mask}, {i.line})")
    value, *valid = d.items if isinstance(d, Vector) else (d,)
    t.put(value, "v[0]", "b32")
    for p in valid:
        t.put(p, "v[1]", "pred")


@form("vote.sync.{mode:any|all|uni}.pred", 3)
@form("vote.sync.{mode:ballot}.b32", 3)
def vote(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, p, members = i.operands
    arguments = f"{t.get(p, 'pred')}, {t.get(members, 'b32')}, {t.mask}, {i.line}"
    t.do(f"v = X.warps.vote({modifiers['mode']!r}, {arguments})")
    t.put(d, "v", "b32" if modifiers["mode"] == "ballot" else "pred")


@form("redux.sync.{mode:min|max}[.{nan:NaN}].f32", 3)
def redux(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """The least or the largest of the members (9.7.13.9); floats from sm100 on."""
    d, a, members = i.operands
    name = ("nan_" if "nan" in modifiers else "f") + modifiers["mode"]
    arguments = f"{t.get(a, 'f32')}, {t.get(members, 'b32')}, {t.mask}, {i.line}"
    t.do(f"v = X.warps.reduce(np.{name}, {arguments})")
    t.put(d, "v", "f32")


@form("redux.sync.{mode:add|min|max}.{type:s32|u32}", 3)
@form("redux.sync.{mode:and|or|xor}.{type:b32}", 3)
def integer_redux(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, a, members = i.operands
    mode = modifiers["mode"]
    name = {"min": "minimum", "max": "maximum", "add": "add"}.get(mode, f"bitwise_{mode}")
    arguments = f"{t.get(a, modifiers['type'])}, {t.get(members, 'b32')}, {t.mask}, {i.line}"
    t.do(f"v = X.warps.reduce(np.{name}, {arguments})")
    t.put(d, "v", modifiers["type"])


@form("bar.warp.sync", 1)
def warp_barrier(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    t.do(f"X.warps.barrier({t.get(i.operands[0], 'b32')}, {t.mask}, {i.line})")


@form("elect.sync", 2)
def elect(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    d, members = i.operands
    if not isinstance(d, Vector):
        raise ValueError(f"no predicate: {i.text}")
    t.do(f"v = X.warps.elect({t.get(members, 'b32')}, {t.mask}, {i.line})")
    t.put(d.items[0], "v[0]", "b32")
    t.put(d.items[1], "v[1]", "pred")


@form("bar[.cta].arrive", 2)
@form("barrier[.cta].arrive[.aligned]", 2)
def arrive(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """9.7.13.1: counted by a barrier of some threads; does not wait."""
    number, count = (o.bits if isinstance(o, Immediate) else None for o in i.operands)
    if number is None or count is None:
        raise Unsupported([f"{i.op} of a register"])
    t.do(f"X.barriers.arrive({number}, {count}, {t.mask}, {i.line})")


@form("setmaxnreg.dec.sync.aligned.u32", 1)
def give_registers(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    (count,) = i.operands
    assert isinstance(count, Immediate)
    t.do(f"X.registers.give({count.bits}, {t.mask}, {i.line})")

"""9.7.9.25.3 cp.async and its groups; 9.7.13.4 the fence before the asynchronous proxy reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import Immediate, Instruction

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator


@form("cp.async.{cache:ca|cg}.shared.global", 3, 4)
def copy(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """``size`` bytes, of which the first ``given`` are read and the rest are zeros."""
    to, source, size, *given = i.operands
    if not isinstance(size, Immediate) or size.bits not in (
        (16,) if modifiers["cache"] == "cg" else (4, 8, 16)
    ):
        raise ValueError(f"no such size: {i.text}")
    read = t.get(given[0], "b32") if given else "None"
    places = f"{t.address(to, 'b32')}, {t.address(source, 'b64')}"
    t.do(f"X.copies.begin({places}, {size.bits}, {read}, {t.mask}, {i.line})")


@form("cp.async.commit_group", 0)
def commit(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    t.do(f"X.copies.commit({t.mask})")


@form("cp.async.wait_group", 1)
@form("cp.async.wait_all", 0)
def wait(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """All but the youngest ``n`` groups; wait_all: what is not committed as well."""
    n = i.operands[0] if i.operands else Immediate(-1)
    assert isinstance(n, Immediate)
    t.do(f"X.copies.wait({n.bits}, {t.mask}, {i.line})")


@form("fence.proxy.async[.shared::cta]", 0)
def fence(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    t.do(f"X.shared.fence_proxy({t.mask})")

"""9.7.13.15 mbarriers; 9.7.9.25.5 copies of tiles, and the tensor maps they go by (9.7.9.26, 9.7.13.16)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptx_interpreter.faults import Unsupported
from ptx_interpreter.forms import Modifiers, form
from ptx_interpreter.parse import Address, Immediate, Instruction, Operand, Sink, Vector

if TYPE_CHECKING:
    from ptx_interpreter.translate import Translator


# -- mbarriers ---------------------------------------------------------------------------------------------
@form("mbarrier.init.shared[::cta].b64", 2)
def init(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, count = i.operands
    t.do(f"X.mbarriers.init({t.address(at, 'b32')}, {t.get(count, 'b32')}, {t.mask}, {i.line})")


@form("mbarrier.inval.shared[::cta].b64", 1)
def invalidate(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    t.do(f"X.mbarriers.invalidate({t.address(i.operands[0], 'b32')}, {t.mask}, {i.line})")


@form("mbarrier.arrive[.release.cta].shared[::cta].b64", 2, 3)
@form("mbarrier.arrive.{bytes:expect_tx}[.release.cta].shared[::cta].b64", 3)
def arrive(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """One arrival or as many as are given; with ``expect_tx`` one, and so many bytes are awaited."""
    state, at, *given = i.operands
    number = t.get(given[0], "b32") if given else "None"
    count, expected = ("None", number) if "bytes" in modifiers else (number, "None")
    t.do(f"v = X.mbarriers.arrive({t.address(at, 'b32')}, {count}, {expected}, {t.mask}, {i.line})")
    if not isinstance(state, Sink):
        t.put(state, "v", "b64")


@form("mbarrier.expect_tx[.relaxed.cta].shared[::cta].b64", 2)
def expect(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, size = i.operands
    t.do(f"X.mbarriers.expect({t.address(at, 'b32')}, {t.get(size, 'b32')}, {t.mask}, {i.line})")


@form("mbarrier.{kind:try_wait|test_wait}[.{parity:parity}][.acquire.cta].shared[::cta].b64", 3, 4)
def wait(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """Whether a phase has ended. The fourth operand of try_wait is a time, after which it may say no."""
    p, at, phase, *time = i.operands
    if time and modifiers["kind"] == "test_wait":
        raise ValueError(f"test_wait has no time: {i.text}")
    parity = "parity" in modifiers
    asked = t.get(phase, "b32" if parity else "b64")
    t.do(f"v = X.mbarriers.ended({t.address(at, 'b32')}, {asked}, {parity}, {t.mask}, {i.line})")
    t.put(p, "v", "pred")


# -- tensor maps -------------------------------------------------------------------------------------------
_REPLACE = "tensormap.replace.tile"
_ENTRIES = "box_dim|global_dim|element_stride"


@form(f"{_REPLACE}.{{field:global_address}}.shared::cta.b1024.b64", 2)
@form(f"{_REPLACE}.{{field:rank}}.shared::cta.b1024.b32", 2)
@form(f"{_REPLACE}.{{field:{_ENTRIES}}}.shared::cta.b1024.b32", 3)
@form(f"{_REPLACE}.{{field:global_stride}}.shared::cta.b1024.b64", 3)
@form(f"{_REPLACE}.{{field:elemtype|interleave_layout|swizzle_mode|fill_mode}}.shared::cta.b1024.b32", 2)
def replace(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, *entry, value = i.operands
    number = _number(i, entry[0]) if entry else 0
    kind = "b64" if i.op.endswith("b64") else "b32"
    arguments = f"{t.address(at, 'b64')}, {number}, {t.get(value, kind)}, {t.mask}, {i.line}"
    t.do(f"X.maps.replace({modifiers['field']!r}, {arguments})")


@form(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope:cta|gpu|sys}.sync.aligned",
    3,
)
def publish(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    to, source, size = i.operands
    _whole(i, size)
    t.do(f"X.maps.publish({t.address(to, 'b64')}, {t.address(source, 'b64')}, {t.mask}, {i.line})")


@form("fence.proxy.tensormap::generic.acquire.{scope:cta|gpu|sys}", 2)
def acquire(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    at, size = i.operands
    _whole(i, size)
    t.do(f"X.maps.acquire({t.address(at, 'b64')}, {t.mask}, {i.line})")


# -- copies ------------------------------------------------------------------------------------------------
@form(
    "cp.async.bulk.tensor.{rank:1|2|3|4|5}d.shared::{cta|cluster}.global[.tile].mbarrier::complete_tx::bytes",
    3,
)
def load(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """A block is its own cluster: an address of its shared memory is one of the cluster's."""
    to, tensor, barrier = i.operands
    where = tensor.base.items if isinstance(tensor, Address) and isinstance(tensor.base, Vector) else ()
    if len(where) != 2 or not isinstance(where[1], Vector) or len(where[1].items) != int(modifiers["rank"]):
        raise ValueError(f"coordinates are missing: {i.text}")
    arguments = f"{t.address(to, 'b32')}, {t.get(where[0], 'b64')}, {t.get_each(where[1], 'b32')}"
    t.do(f"X.tensors.load({arguments}, {t.address(barrier, 'b32')}, {t.mask}, {i.line})")


@form("cp.async.bulk.commit_group", 0)
@form("cp.async.bulk.wait_group[.read]", 1)
def bulk_groups(t: Translator, i: Instruction, modifiers: Modifiers) -> None:
    """9.7.9.25.6: groups are of copies out of shared memory, and none of those is executed: all are empty."""


def _number(i: Instruction, o: Operand) -> int:
    if not isinstance(o, Immediate):
        raise Unsupported([f"{i.op} of a register"])
    return o.bits


def _whole(i: Instruction, size: Operand) -> None:
    if _number(i, size) != 128:
        raise ValueError(f"a tensor map has 128 bytes: {i.text}")

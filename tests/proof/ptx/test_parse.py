"""PTX that is understood, and PTX that is refused rather than misread."""

from __future__ import annotations

import pytest

from ptx_interpreter.faults import Unsupported
from ptx_interpreter.parse import Address, Immediate, Register, Vector, parse
from ptx_interpreter.translate import translate, unsupported
from ptx_programs import text_of


def test_an_instruction_knows_its_operands_its_guard_and_our_line() -> None:
    text = (
        text_of(" .loc 1 42 7\n @!%p1 ld.global.v2.b32 {%r3, %r4}, [%rd4 + -8];") + '.file 1 "/a/b/tile.py"\n'
    )
    kernel = parse(text)
    i = next(i for i in kernel.instructions() if "v2" in i.op)
    assert i.source == "tile.py:42"
    assert i.guard is not None
    assert i.guard.negated
    vector, address = i.operands
    assert isinstance(vector, Vector)
    assert [item.width for item in vector.items if isinstance(item, Register)] == [4, 4]
    assert isinstance(address, Address)
    assert address.offset == -8
    assert text.split("\n")[i.line - 1].strip() == i.text + ";"


def test_blocks_end_at_branches_and_barriers_and_begin_at_their_targets() -> None:
    body = "$L0:\n add.s32 %r3, %r3, 1;\n @%p1 bra $L0;\n bar.sync 0;\n$debug:\n mov.b32 %r4, 0f3F800000;"
    kernel = parse(text_of(body))
    first, loop, barrier, last = kernel.blocks[:4]
    assert first.end is None
    assert loop.end is not None
    assert loop.target == loop.number
    assert barrier.end is not None
    assert barrier.end.op == "bar.sync"
    assert last.body[0].operands[1] == Immediate(0x3F800000, real=True)
    assert kernel.parameters == [("u64", "p0"), ("u64", "p1")]
    assert (kernel.name, kernel.arch, kernel.threads) == ("kernel", "sm_80", 32)


def test_registers_of_inline_assembly_are_its_own() -> None:
    kernel = parse(text_of("{ .reg .pred %p1; setp.eq.s32 %p1, %r1, 0; }\n setp.eq.s32 %p1, %r1, 1;"))
    inner, outer = (i.operands[0] for i in kernel.instructions() if i.op.startswith("setp"))
    assert inner != outer


def test_labels_of_inline_assembly_are_its_own() -> None:
    wait = "{\n waitLoop:\n setp.eq.s32 %p1, %r1, 0;\n @%p1 bra waitLoop;\n}\n"
    kernel = parse(text_of(wait + wait))
    loops = [block for block in kernel.blocks if block.end is not None and block.end.op == "bra"]
    assert [block.target for block in loops] == [block.number for block in loops]
    assert loops[0].number != loops[1].number


REFUSED = [
    "add.sat.s32 %r3, %r4, %r5",
    "add.rz.f32 %r3, %r4, %r5",
    "add.f32 %r3, %r4, %r5, %r6",
    "max.f32 %r3, %r4, %r5, %r6, %r7",
    "max.xorsign.abs.f32 %r3, %r4, %r5",
    "mul.rz.f32x2 %rd3, %rd4, %rd5",
    "fma.rn.sat.f32.bf16 %r3, %rs4, %rs5, %r6",
    "redux.sync.max.abs.f32 %r3, %r4, -1",
    "fma.rn.sat.f32 %r3, %r4, %r5, %r6",
    "cvt.rz.f16.f32 %rs3, %r4",
    "cvt.rn.relu.bf16x2.f32 %r3, %r4, %r5",
    "cvt.rn.satfinite.f16.f32 %rs3, %r4",
    "cvt.sat.u8.s32 %r3, %r4",
    "cvt.u32.f32 %r3, %r4",
    "setp.lt.b32 %p1, %r3, %r4",
    "shfl.bfly.b32 %r3, %r4, 1, 31",
    "ld.global.nc.b32 %r3, [%rd4]",
    "ld.local.b32 %r3, [%rd4]",
    "ld.volatile.shared.b32 %r3, [%r4]",
    "st.shared::cluster.b32 [%r4], %r3",
    "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r3, %r4}, {%r3}, {%r4}, {%r3, %r4}",
    "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r3, %r4}, [%r5]",
    "cp.async.cg.shared.global.L2::128B [%r3], [%rd4], 16",
    "mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p1, [%r3], %r4",
    "mbarrier.arrive.noComplete.shared::cta.b64 %rd3, [%r3], 1",
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd4], 16, [%r5]",
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {%r3, %r4}], [%r5]",
    "tensormap.replace.tile.rank.global.b1024.b32 [%rd4], 1",
    "atom.global.add.u32 %r3, [%rd4], 1",
]


@pytest.mark.parametrize("statement", REFUSED, ids=lambda text: text.split()[0])
def test_what_no_form_covers_is_listed_and_not_skipped(statement: str) -> None:
    kernel = parse(text_of(statement + ";"))
    op = statement.split()[0]
    assert unsupported(kernel) == [op]
    with pytest.raises(Unsupported, match="not executed"):
        translate(kernel)


def test_all_unknown_opcodes_are_listed_at_once() -> None:
    with pytest.raises(Unsupported) as caught:
        translate(
            parse(text_of("mad.hi.s32 %r3, %r4, %r5, %r6; ld.local.b32 %r3, [%rd4]; @%p1 bar.sync 1, 64;"))
        )
    assert caught.value.opcodes == ("bar.sync under a predicate", "ld.local.b32", "mad.hi.s32")


@pytest.mark.parametrize("operands", ["%r3", "1, %r3"])
def test_a_barrier_whose_number_is_not_in_the_text_is_refused(operands: str) -> None:
    with pytest.raises(Unsupported, match=r"bar\.sync of a register"):
        translate(parse(text_of(f"bar.sync {operands};")))


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("ld.global.v4.b32 {%r3, %r4}, [%rd4]", ValueError),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r3, %r4}, [%r5]", ValueError),
        ("setp.lt.and.s32 %p1, %r3, %r4", ValueError),
        ("cp.async.cg.shared.global [%r3], [%rd4], 8", ValueError),
        ("add.s64 %rd3, %r4, %rd5", Unsupported),  # a source narrower than the type
        ("mov.b64 %r3, %rd4", Unsupported),
        ("mov.b32 %r3, %clock", NotImplementedError),
    ],
)
def test_operands_have_to_fit(statement: str, error: type[Exception]) -> None:
    from ptx_programs import execute

    with pytest.raises(error):
        execute(statement + ";", [[0] * 4] * 32)


@pytest.mark.parametrize(
    "directive", [".local .align 4 .b8 stack[16]", ".shared .b8 more[16]", ".reg .b128 %x"]
)
def test_directives_that_mean_something_are_refused(directive: str) -> None:
    with pytest.raises(Unsupported, match=directive.split()[0]):
        translate(parse(text_of(directive + ";")))

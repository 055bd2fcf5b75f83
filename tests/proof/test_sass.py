"""Loops and their instructions, read from machine code as nvdisasm prints it."""

from __future__ import annotations

import importlib.util

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

from sass import Instruction, LoopMix, hottest, loops_of


def code(text: str) -> str:
    """Lines as nvdisasm's: labels stand alone, instructions behind their addresses."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * at:04x}*/                   {line} ;"
        for at, line in enumerate(lines)
    )


WGMMA = """
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT, gsb0
    {between}
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], R24, gsb0
    WARPGROUP.DEPBAR.LE gsb0, 0x0
"""


def test_every_instruction_of_a_loop_is_counted_once_by_what_it_occupies() -> None:
    (loop,) = loops_of(
        code("""
        S2R R3, SR_CTAID.X
        .L_x_1:
        LDSM.16.M88.4 R4, [R8]
        HMMA.16816.F32.BF16 R12, R4, R8, R12
        HMMA.16816.F32.BF16 R16, R4, R8, R16
        FFMA.FTZ R1, R2, R3, R4
        FMNMX.FTZ R1, R2, R3, !PT
        F2FP.BF16.F32.PACK_AB R1, R2, R3
        MUFU.EX2 R1, R1
        F2F.BF16.F32 R1, R2
        SHFL.BFLY PT, R5, R0, 0x2, 0x1f
        IADD3 R1, R2, R3, RZ
        IMAD.MOV.U32 R1, RZ, RZ, R2
        SEL R1, R2, R3, P0
        UIADD3 UR4, UR4, 0x1, URZ
        LDGSTS.E.BYPASS.128 [R1], desc[UR8][R2.64]
        LDGDEPBAR
        DEPBAR.LE SB0, 0x1
        BAR.SYNC.DEFER_BLOCKING 0x0
        STL [R1], R2
        @!PT LDS RZ, [RZ]
        @P0 BRA `(.L_x_1)
        STG.E.128 desc[UR8][R2.64], R4
        EXIT
        """)
    )
    assert loop == LoopMix(
        instructions=20, matrix=2, waits=0, mufu=2, local=1, shared=1, memory=1, barriers=3, shuffles=1,
        control=2, uniform=1, fp=3, integer=3, multiply_adds=2 * 16 * 8 * 16, matrix_per_wait=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("between", "per_wait", "serialised"),
    [("WARPGROUP.DEPBAR.LE gsb0, 0x0", 1.0, True), ("FADD R1, R2, R3", 2.0, False)],
)
def test_a_wait_behind_each_product_is_a_serialised_loop(
    between: str, per_wait: float, serialised: bool
) -> None:
    body = WGMMA.format(between=between)
    (loop,) = loops_of(code(f".L_x_1:\n{body}\n@!P0 BRA `(.L_x_1)\nEXIT"))
    assert (loop.matrix_per_wait, loop.serialised) == (per_wait, serialised)
    assert loop.multiply_adds == 2 * 64 * 128 * 16 // 4


def test_a_loop_that_never_waits_is_not_serialised() -> None:
    (loop,) = loops_of(code(".L_x_1:\nHGMMA.64x64x16.F32 R24, gdesc[UR20], RZ\n@P0 BRA `(.L_x_1)\nEXIT"))
    assert (loop.matrix, loop.waits, loop.matrix_per_wait, loop.serialised) == (1, 0, None, False)


def test_of_nested_loops_the_inner_one_counts() -> None:
    (loop,) = loops_of(
        code("""
        .L_x_1:
        HMMA.1688.F32 R12, R4, R8, R12
        .L_x_2:
        HMMA.1688.F32 R12, R4, R8, R12
        @P0 BRA `(.L_x_2)
        FADD R1, R2, R3
        @P1 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert (loop.instructions, loop.multiply_adds) == (2, 16 * 8 * 8)


def test_a_loop_inside_that_multiplies_nothing_is_part_of_its_loop() -> None:
    (loop,) = loops_of(
        code("""
        .L_x_1:
        HMMA.1688.F32 R12, R4, R8, R12
        .L_x_2:
        LDG.E R1, desc[UR8][R2.64]
        @P0 BRA `(.L_x_2)
        @P1 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert (loop.instructions, loop.memory, loop.control) == (4, 1, 2)


def test_parts_that_lie_behind_the_loop_belong_to_it_and_an_exit_does_not() -> None:
    """A far branch is printed as a call, and the code behind it is not reached from the loop alone."""
    (loop,) = loops_of(
        code("""
        .L_x_1:
        HMMA.1688.F32 R12, R4, R8, R12
        @P2 BRA `(.L_x_3)
        .L_x_4:
        @!P2 CALL.REL.NOINC `(.L_x_0)
        BRA `(.L_x_1)
        .L_x_0:
        STG.E desc[UR8][R2.64], R4
        EXIT
        .L_x_3:
        MUFU.EX2 R1, R1
        BRA `(.L_x_4)
        """)
    )
    assert (loop.instructions, loop.mufu, loop.memory) == (6, 1, 0)


def test_code_behind_a_branch_that_always_leaves_is_no_loop() -> None:
    assert loops_of(code(".L_x_1:\nEXIT\nHMMA.1688.F32 R12, R4, R8, R12\nBRA `(.L_x_1)")) == []


def test_paths_that_meet_again_are_both_in_the_loop() -> None:
    (loop,) = loops_of(
        code("""
        .L_x_1:
        BSSY B0, `(.L_x_3)
        @P1 BRA `(.L_x_2)
        HMMA.1688.F32 R12, R4, R8, R12
        BSYNC B0
        .L_x_2:
        MUFU.EX2 R1, R1
        BSYNC B0
        .L_x_3:
        @P0 BRA `(.L_x_1)
        EXIT
        """)
    )
    assert loop.instructions == 7


def test_tensor_memory_waits_for_a_phase_and_trying_again_does_not_count() -> None:
    (loop,) = loops_of(
        code("""
        .L_x_1:
        UTCHMMA gdesc[UR26], gdesc[UR18], tmem[UR10], tmem[UR20], idesc[UR21], !UPT
        UTCHMMA gdesc[UR26], gdesc[UR18], tmem[UR10], tmem[UR20], idesc[UR21], UPT
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR32], R4
        @!P1 BRA `(.L_x_2)
        .L_x_3:
        @P0 BRA `(.L_x_1)
        EXIT
        .L_x_2:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR32], R4
        @!P1 BRA `(.L_x_2)
        BRA `(.L_x_3)
        """)
    )
    assert (loop.matrix, loop.waits, loop.matrix_per_wait, loop.barriers) == (2, 1, 2.0, 0)
    assert (loop.instructions, loop.multiply_adds) == (6, 0)


def test_the_hottest_loop_takes_the_fewest_instructions_for_its_products() -> None:
    masked = ".L_x_1:\nHMMA.1688.F32 R12, R4, R8, R12\nSEL R1, R2, R3, P0\n@P0 BRA `(.L_x_1)"
    plain = ".L_x_2:\nHMMA.16816.F32 R12, R4, R8, R12\nFADD R1, R2, R3\nFADD R1, R2, R3\n@P0 BRA `(.L_x_2)"
    loops = loops_of(code(f"{masked}\n{plain}\nEXIT"))
    assert [loop.instructions for loop in loops] == [3, 4]
    assert hottest(loops) is loops[1]
    assert hottest([]) is None


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("WARPGROUP.ARRIVE", "barriers"),
        ("UTMALDG.2D", "memory"),
        ("USETMAXREG.DEALLOC", "uniform"),
        ("R2UR", "uniform"),
        ("F2FP.F16.F32.PACK_AB", "fp"),
        ("FLO.U32", "integer"),
        ("STSM.16.M88.4", "shared"),
        ("I2FP.F32.S32", "integer"),
        ("FMNMX3", "fp"),
        ("HADD2.F32", "fp"),
        ("LDCU.64", "memory"),
        ("IMMA.16832.S8.S8", "matrix"),
    ],
)
def test_kinds(opcode: str, kind: str) -> None:
    assert Instruction(opcode, "", "").kind == kind

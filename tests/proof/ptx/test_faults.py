"""Each fault provoked by a small kernel, and its neighbour without the fault."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_programs import HEAD, LOAD, STORE, execute

WORDS = np.arange(512, dtype=np.uint32).reshape(128, 4)
# Each thread puts its 16 bytes at %r30 of shared memory and gets those of a neighbour, at %r31.
FAR = LOAD + "shl.b32 %r30, %r1, 4; xor.b32 %r31, %r30, 512;\n"  # in the other warp
NEAR = LOAD + "shl.b32 %r30, %r1, 4; xor.b32 %r31, %r30, 16;\n"  # in its own
PUT = "st.shared.v4.b32 [%r30], {%r10, %r11, %r12, %r13};\n"
GET = "ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r31];\n"
OUT = "st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};\n"
COPY = "shl.b32 %r30, %r1, 4; xor.b32 %r31, %r30, 512; cp.async.cg.shared.global [%r30], [%rd4], 16;\n"
COMMIT, WAIT, BARRIER = "cp.async.commit_group;\n", "cp.async.wait_group 0;\n", "bar.sync 0;\n"

CASES: list[tuple[str, str, set[str]]] = [
    ("a barrier between warps", FAR + PUT + BARRIER + GET + OUT, set()),
    ("no barrier between warps", FAR + PUT + GET + OUT, {"race"}),
    ("bar.warp.sync between warps", FAR + PUT + "bar.warp.sync -1;\n" + GET + OUT, {"race"}),
    ("bar.warp.sync within a warp", NEAR + PUT + "bar.warp.sync -1;\n" + GET + OUT, set()),
    ("nothing within a warp", NEAR + PUT + GET + OUT, {"race within a warp"}),
    ("a write after another warp's read", FAR + PUT + BARRIER + GET + PUT + OUT, {"race"}),
    ("the same value twice", "mov.b32 %r30, 64; mov.b32 %r20, 5; st.shared.b32 [%r30], %r20;", set()),
    ("different values", "mov.b32 %r30, 64; st.shared.b32 [%r30], %r1;", {"race"}),
    ("different values in a warp",
     "and.b32 %r30, %r1, 32; st.shared.b32 [%r30], %r1;", {"race within a warp"}),
    ("never written", FAR + GET + OUT, {"uninitialised"}),
    ("beyond shared memory", FAR + "add.s32 %r30, %r30, 4000;\n" + PUT, {"out of bounds"}),
    ("misaligned in shared memory", FAR + "add.s32 %r30, %r30, 8;\n" + PUT, {"misaligned"}),
    ("a copy", COPY + COMMIT + WAIT + BARRIER + GET + OUT, set()),
    ("a copy without a wait", COPY + COMMIT + BARRIER + GET + OUT, {"not waited for"}),
    ("a wait for too few",
     COPY + COMMIT + "cp.async.wait_group 1;\n" + BARRIER + GET + OUT, {"not waited for"}),
    ("a copy without a barrier", COPY + COMMIT + WAIT + GET + OUT, {"race"}),
    ("a copy not committed", COPY + WAIT + BARRIER + GET + OUT, {"not waited for"}),
    ("wait_all needs no commit", COPY + "cp.async.wait_all;\n" + BARRIER + GET + OUT, set()),
    ("a copy over a copy", COPY + COPY + "cp.async.wait_all;\n", {"not waited for"}),
    ("beyond a tensor", "st.global.b32 [%rd5 + 16], %r1;", {"out of bounds"}),
    ("the null pointer", "mov.b64 %rd9, 0; ld.global.b32 %r20, [%rd9];", {"out of bounds"}),
    ("misaligned in a tensor", "st.global.v4.b32 [%rd5 + 4], {%r1, %r1, %r1, %r1};", {"misaligned"}),
    ("two blocks write one place", "st.global.b32 [%rd2], %r61;", {"race between blocks"}),
    ("a shuffle from lanes that left",
     "setp.lt.s32 %p1, %r1, 8; @!%p1 bra $L1; shfl.sync.bfly.b32 %r20, %r1, 8, 31, -1;\n$L1:\n",
     {"divergence"}),
    ("a matrix in part of a warp",
     FAR + PUT + BARRIER + "setp.lt.s32 %p1, %r1, 8; @!%p1 bra $L1;\n"
     "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r30];\n$L1:\n", {"divergence"}),
    ("a barrier in half of a warp",
     "and.b32 %r20, %r1, 1; setp.eq.b32 %p1, %r20, 0; @%p1 bra $L1; bar.sync 0;\n$L1:\n", {"divergence"}),
    ("a barrier that some wait at for another",
     "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L1; bar.sync 1; ret;\n$L1:\n bar.sync 2;", {"deadlock"}),
    ("a barrier that one warp has left for good",
     "setp.lt.s32 %p1, %r1, 32; @%p1 bra $L1; bar.sync 0;\n$L1:\n", set()),
    ("lanes part and meet",
     "mov.b32 %r20, 0;\n$L1:\n add.s32 %r20, %r20, 1; setp.lt.s32 %p1, %r20, %r1; @%p1 bra $L1; bar.sync 0;\n"
     + STORE,
     set()),
]  # fmt: skip


# Never reached; but a kernel with a barrier of some warps is watched by clocks and not by intervals.
IN_PARTS = "ret; bar.sync 9, 32;\n"


@pytest.mark.parametrize("more", ["", IN_PARTS], ids=["intervals", "clocks"])
@pytest.mark.parametrize(("body", "kinds"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_faults(body: str, kinds: set[str], more: str) -> None:
    got, faults = execute(body + more, WORDS, threads=64, blocks=2)
    assert {fault.kind for fault in faults} == kinds
    if not kinds and OUT in body:
        neighbour = np.arange(64) ^ (32 if "512" in body else 1)
        assert (got == WORDS.reshape(2, 64, 4)[:, neighbour].reshape(-1, 4)).all()


def test_a_fault_names_what_an_engineer_looks_for() -> None:
    body = " .loc 1 7 1\n setp.eq.s32 %p1, %r2, 70;\n @%p1 st.global.b32 [%rd5 + 2000], %r1;"
    _, (fault,) = execute(body, WORDS, threads=64, blocks=2)
    assert (fault.kernel, fault.source, fault.block, fault.thread, fault.threads) == (
        "kernel",
        "1:7",
        1,
        6,
        1,
    )
    assert fault.line == HEAD.count("\n") + 3
    assert fault.instruction == "@%p1 st.global.b32 [%rd5 + 2000], %r1"
    assert "writes out at byte 3120 of 2048" in fault.detail
    assert str(fault).startswith("out of bounds: kernel at 1:7, block 1 thread 6: writes out")


def test_the_rest_of_a_short_copy_is_zeros() -> None:
    body = COPY.replace(", 16;", ", 16, %r20;").replace("shl.b32 %r30", "mov.b32 %r20, 6; shl.b32 %r30", 1)
    got, faults = execute(
        body + COMMIT + WAIT + BARRIER + GET + OUT, WORDS + 0x01010101, threads=64, blocks=2
    )
    assert not faults
    assert (got[:, 1] < 1 << 16).all()
    assert got[:, 1].any()
    assert not got[:, 2:].any()

"""Matrix instructions, element by element after the formulas of the PTX ISA."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_interpreter.faults import Fault
from ptx_programs import LOAD, execute

SHAPES = [(8, "f16"), (16, "f16"), (8, "bf16"), (16, "bf16")]


def narrow(x: np.ndarray, kind: str) -> np.ndarray:
    """Bits of small integers, exact in both types."""
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("depth", "kind"), SHAPES)
def test_mma(depth: int, kind: str) -> None:
    """9.7.14.5.7 and 9.7.14.5.8: which lane holds which element."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((16, depth), (depth, 8), (16, 8)))
    low_a, low_b = narrow(a, kind).astype(np.uint32), narrow(b, kind).astype(np.uint32)
    of_a, of_b = depth // 4, depth // 8
    words = np.zeros((32, 12), np.uint32)
    for lane in range(32):
        group, inside = lane >> 2, lane & 3
        for i in range(2 * of_a):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            column = 2 * inside + (i & 1) + (8 if i >= 4 else 0)
            words[lane, i // 2] |= low_a[row, column] << 16 * (i & 1)
        for i in range(2 * of_b):
            row = 2 * inside + (i & 1) + (8 if i >= 2 else 0)
            words[lane, 4 + i // 2] |= low_b[row, group] << 16 * (i & 1)
        for i in range(4):
            words[lane, 8 + i] = c[group + 8 * (i >= 2), 2 * inside + (i & 1)].view(np.uint32)
    load = "".join(
        f"ld.global.v4.b32 {{%r{k}, %r{k + 1}, %r{k + 2}, %r{k + 3}}}, [%rd7 + {4 * (k - 10)}];\n"
        for k in (10, 14, 18)
    )
    first, second = (", ".join(f"%r{start + k}" for k in range(n)) for start, n in ((10, of_a), (14, of_b)))
    sums = "{%r18, %r19, %r20, %r21}"
    body = (
        f"mul.wide.u32 %rd6, %r1, 48; add.s64 %rd7, %rd1, %rd6;\n{load}"
        f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 "
        f"{sums}, {{{first}}}, {{{second}}}, {sums};\n"
        f"st.global.v4.b32 [%rd5], {sums};"
    )
    got, faults = execute(body, words.reshape(-1, 4))
    assert not faults
    wanted = a @ b + c
    for lane in range(32):
        rows = [(lane >> 2) + 8 * (i >= 2) for i in range(4)]
        columns = [2 * (lane & 3) + (i & 1) for i in range(4)]
        assert got[lane].view(np.float32).tolist() == wanted[rows, columns].tolist()


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(trans: str, count: int) -> None:
    halves = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)  # matrix, row, column
    names = ", ".join(f"%r{20 + k}" for k in range(count))
    body = (
        LOAD
        + "shl.b32 %r30, %r1, 4; st.shared.v4.b32 [%r30], {%r10, %r11, %r12, %r13}; bar.warp.sync -1;\n"
        + "".join(f"mov.b32 %r{20 + k}, 0;\n" for k in range(4))
        + f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{names}}}, [%r30];\n"
        + "st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};"
    )
    got, faults = execute(body, halves.view(np.uint32).reshape(32, 4))
    assert not faults
    for lane in range(32):
        row, column = lane // 4, 2 * (lane % 4)
        for j in range(count):
            m = halves[j].T if trans else halves[j]
            assert got[lane, j] == int(m[row, column]) | int(m[row, column + 1]) << 16


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_stmatrix_is_ldmatrix_backwards(trans: str) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, (32, 4), dtype=np.uint32)
    body = (
        LOAD
        + "shl.b32 %r30, %r1, 4;\n"
        + f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r30], {{%r10, %r11, %r12, %r13}};\n"
        + "bar.warp.sync -1;\n"
        + f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r30];\n"
        + "st.global.v4.b32 [%rd5], {%r20, %r21, %r22, %r23};"
    )
    got, faults = execute(body, words)
    assert not faults
    assert (got == words).all()


# -- wgmma: A [64, 16] at 0, B [8, 16] behind it, the image of shared memory given as words ------------------
_B_AT = 8192
_IMAGE = 640  # chunks of 16 bytes


def place(row: int, chunk: int, swizzle: bool) -> int:
    """Byte of a row's chunk along k (9.7.15.5.1): cores of 8 rows, or turned rows of 128 bytes."""
    if swizzle:
        return row * 128 + (chunk ^ row % 8) * 16
    return row // 8 * 256 + chunk * 128 + row % 8 * 16


def descriptor(at: int, swizzle: bool) -> int:
    leading, stride = (1, 64) if swizzle else (8, 16)  # in units of 16 bytes
    return at >> 4 | leading << 16 | stride << 32 | (1 << 62 if swizzle else 0)


def multiplied(
    swizzle: bool,
    fence: str = "fence.proxy.async.shared::cta;",
    wait: str = "wgmma.wait_group.sync.aligned 0;",
    commit: str = "wgmma.commit_group.sync.aligned;",
) -> tuple[np.ndarray, np.ndarray, list[Fault]]:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((64, 16), (8, 16)))
    image = np.zeros(_IMAGE * 8, np.uint16)
    for matrix, start in ((a, 0), (b, _B_AT)):
        for row in range(len(matrix)):
            for chunk in range(2):
                at = (start + place(row, chunk, swizzle)) // 2
                image[at : at + 8] = narrow(matrix[row, 8 * chunk : 8 * chunk + 8], "bf16")
    copies = "".join(
        f"ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd4 + {2048 * k}];\n"
        f"st.shared.v4.b32 [%r30 + {2048 * k}], {{%r10, %r11, %r12, %r13}};\n"
        for k in range(_IMAGE // 128)
    )
    sums = "{%r20, %r21, %r22, %r23}"
    body = (
        "shl.b32 %r30, %r1, 4;\n" + copies
        + "".join(f"mov.b32 %r{20 + k}, 0f3F800000;\n" for k in range(4))  # 1.0
        + f"{fence}\nbar.sync 0;\nwgmma.fence.sync.aligned;\nsetp.eq.s32 %p1, 0, 0;\n"
        + f"mov.b64 %rd10, {descriptor(0, swizzle)}; mov.b64 %rd11, {descriptor(_B_AT, swizzle)};\n"
        + f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {sums}, %rd10, %rd11, %p1, 1, 1, 0, 0;\n"
        + f"{commit}\n{wait}\nst.global.v4.b32 [%rd5], {sums};"
    )  # fmt: skip
    got, faults = execute(body, image.view(np.uint32).reshape(-1, 4), threads=128, shared=16 * _IMAGE)
    return got[:128].view(np.float32), a @ b.T + 1, faults


@pytest.mark.parametrize("swizzle", [False, True])
def test_wgmma(swizzle: bool) -> None:
    got, wanted, faults = multiplied(swizzle)
    assert not faults
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(4):
            row, column = 16 * warp + 8 * (i >= 2) + lane // 4, 2 * (lane % 4) + (i & 1)
            assert got[thread, i] == wanted[row, column]


def test_wgmma_wants_a_fence_and_a_wait() -> None:
    _, _, faults = multiplied(False, fence="")
    assert {fault.kind for fault in faults} == {"not waited for"}
    got, _, _ = multiplied(False, wait="")
    assert np.isnan(got).all()  # what a register in flight holds


@pytest.mark.parametrize(
    ("commits", "waits_for_all_but", "there"), [(0, 0, False), (1, 0, True), (1, 1, False), (2, 1, True)]
)
def test_a_wait_is_for_the_groups_that_were_committed(
    commits: int, waits_for_all_but: int, there: bool
) -> None:
    commit = "wgmma.commit_group.sync.aligned;\n" * commits  # the second group is empty
    wait = f"wgmma.wait_group.sync.aligned {waits_for_all_but};"
    got, wanted, _ = multiplied(False, wait=wait, commit=commit)
    assert np.isnan(got).all() != there
    if there:
        assert got[0, 0] == wanted[0, 0]

"""Tensor maps and the copies that go by them, against plain numpy; what must come before and after them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ptx_interpreter.faults import Fault, Unsupported
from ptx_programs import execute

THREADS, SHARED = 64, 16384
MAP, TILE = 128, 2048  # places in shared memory; the mbarrier lies at 0


@dataclass(frozen=True)
class Tile:
    """Of a tensor in memory, the innermost dimension first as everywhere in PTX."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    box: tuple[int, ...]
    first: tuple[int, ...]
    kind: int = 6  # elements: .f16
    size: int = 2  # bytes of them
    swizzle: int = 0

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.size


def field(name: str, arguments: str, bits: int = 32) -> str:
    return f"@%p1 tensormap.replace.tile.{name}.shared::cta.b1024.b{bits} [%rd10], {arguments};\n"


def described(tile: Tile) -> str:
    """The map at %rd2 of global memory."""
    text = f"setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32; mov.b64 %rd10, {MAP};\n"
    text += "@%p1 mbarrier.init.shared::cta.b64 [%r32], 1;\n".replace("%r32", "%r31")
    text = "mov.b32 %r31, 0; mov.b32 %r30, 0; shl.b32 %r32, %r1, 2; add.s32 %r32, %r32, 128;\n" + text
    text += "@%p2 st.shared.b32 [%r32], %r30;\nbar.warp.sync -1;\n"
    text += field("global_address", "%rd1", 64) + field("rank", f"{len(tile.dims) - 1}")
    for k, (length, box) in enumerate(zip(tile.dims, tile.box, strict=True)):
        text += f"mov.b32 %r33, {length}; mov.b32 %r34, {box}; mov.b32 %r35, 1;\n"
        text += field("global_dim", f"{k}, %r33") + field("box_dim", f"{k}, %r34")
        text += field("element_stride", f"{k}, %r35")
    for k, stride in enumerate(tile.strides):
        text += f"mov.b64 %rd11, {stride};\n" + field("global_stride", f"{k}, %rd11", 64)
    text += field("elemtype", f"{tile.kind}") + field("interleave_layout", "0")
    text += field("swizzle_mode", f"{tile.swizzle}") + field("fill_mode", "0")
    return text + COPY_MAP + ACQUIRE


COPY_MAP = (
    "@%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"
    " [%rd2], [%rd10], 128;\n"
)
ACQUIRE = "@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;\n"
MEET = "bar.sync 0;\n"
WAIT = (
    "{ .reg .pred ok;\n again:\n"
    " mbarrier.try_wait.parity.shared::cta.b64 ok, [%r31], 0; @!ok bra again; }\n"
)  # fmt: skip


def expect(size: int) -> str:
    return f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r31], {size};\n"


def started(tile: Tile, to: int = TILE) -> str:
    registers = [f"%r{40 + k}" for k in range(len(tile.first))]
    text = "".join(f"mov.b32 {r}, {c};\n" for r, c in zip(registers, tile.first, strict=True))
    op = f"cp.async.bulk.tensor.{len(tile.first)}d.shared::cta.global.mbarrier::complete_tx::bytes"
    return text + f"mov.b32 %r36, {to}; @%p1 {op} [%r36], [%rd2, {{{', '.join(registers)}}}], [%r31];\n"


def taken(size: int) -> str:
    """What lies in the tile's place, as it lies: thread t takes chunks t, t + 64, ..., to %rd2 + 256 on."""
    text = "shl.b32 %r37, %r1, 4; cvt.u64.u32 %rd12, %r37; add.s64 %rd12, %rd12, %rd2;\n"
    for at in range(0, size, 16 * THREADS):
        text += f"setp.lt.u32 %p3, %r37, {size - at}; @!%p3 bra $none{at};\n"
        text += f"ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r37 + {TILE + at}];\n"
        text += f"st.global.v4.b32 [%rd12 + {256 + at}], {{%r10, %r11, %r12, %r13}};\n$none{at}:\n"
    return text


def run(body: str, data: np.ndarray) -> tuple[np.ndarray, list[Fault]]:
    got, faults = execute(body, data.view(np.uint32).reshape(-1, 4), threads=THREADS, shared=SHARED)
    return got.reshape(-1).view(np.uint8)[256:], faults


def kinds(faults: list[Fault]) -> set[str]:
    return {fault.kind for fault in faults}


def wanted(tile: Tile, data: np.ndarray) -> np.ndarray:
    """The box element by element; then each row's chunks of 16 bytes where the swizzle has them (5.5.7)."""
    words = data.view(f"u{tile.size}")
    box = np.zeros(tile.box[::-1], words.dtype)
    for index in np.ndindex(*box.shape):
        place = [f + i for f, i in zip(tile.first, index[::-1], strict=True)]
        if all(0 <= p < length for p, length in zip(place, tile.dims, strict=True)):
            at = place[0] * tile.size + sum(p * s for p, s in zip(place[1:], tile.strides, strict=True))
            box[index] = words[at // tile.size]
    rows = box.reshape(-1).view(np.uint8).reshape(-1, {0: 16, 1: 32, 2: 64, 3: 128}[tile.swizzle] // 16, 16)
    out = np.empty_like(rows)
    for r in range(len(rows)):
        turn = {0: 0, 1: r // 4 % 2, 2: r // 2 % 4, 3: r % 8}[tile.swizzle]
        for c in range(rows.shape[1]):
            out[r, c ^ turn] = rows[r, c]
    return out.reshape(-1)


DATA = np.random.default_rng(0).integers(0, 256, 16384, dtype=np.uint8)
PLAIN = Tile((64, 40), (128,), (64, 16), (0, 8), swizzle=3)
TILES = [
    PLAIN,
    Tile((64, 40), (160,), (32, 32), (32, 8), swizzle=2),
    Tile((40, 40), (96,), (16, 24), (16, 0), swizzle=1),
    Tile((48, 40), (96,), (24, 20), (8, 5)),
    Tile((37, 30), (80,), (64, 16), (0, 20), swizzle=3),  # beyond both ends
    Tile((37, 30), (80,), (32, 16), (-5, -3), swizzle=2),  # before both beginnings
    Tile((64, 40), (128,), (64, 8), (0, 100), swizzle=3),  # nothing of it is inside
    Tile((900,), (), (128,), (700,)),
    Tile((32, 10, 9), (64, 640), (32, 4, 3), (0, 8, 7), swizzle=2),
    Tile((16, 20), (64,), (16, 9), (3, 1), kind=7, size=4, swizzle=2),
    Tile((100, 30), (112,), (128, 8), (0, 3), kind=0, size=1, swizzle=3),
    Tile((12, 3, 4, 2, 3), (32, 96, 384, 768), (8, 2, 2, 2, 2), (4, 1, 3, 0, 2)),
]


@pytest.mark.parametrize(
    "tile", TILES, ids=lambda tile: f"{tile.box} at {tile.first}, swizzle {tile.swizzle}"
)
def test_a_tile_arrives_as_it_is_described(tile: Tile) -> None:
    body = described(tile) + MEET + expect(tile.bytes) + started(tile) + WAIT + taken(tile.bytes)
    got, faults = run(body, DATA)
    assert [str(fault) for fault in faults] == []
    assert (got[: tile.bytes] == wanted(tile, DATA)).all()


HALVES = Tile((64, 40), (128,), (64, 8), (0, 8), swizzle=3)


def test_two_copies_may_share_an_mbarrier() -> None:
    second = replace(HALVES, first=(0, 16))
    body = described(HALVES) + MEET + expect(2 * HALVES.bytes) + started(HALVES)
    body += started(second, TILE + HALVES.bytes) + WAIT + taken(2 * HALVES.bytes)
    got, faults = run(body, DATA)
    assert not faults
    assert (got[: PLAIN.bytes] == wanted(PLAIN, DATA)).all()


# What must be there and in order. %p4: the threads of the other warp.
GOOD = described(PLAIN) + MEET + expect(PLAIN.bytes) + started(PLAIN) + WAIT
OTHER = "setp.ge.u32 %p4, %r1, 32;\n"
WHERE = OTHER + "shl.b32 %r37, %r1, 2;\n"
FILL = WHERE + "st.shared.b32 [%r37 + 2048], %r1;\n"  # the tile's place, by both
TOUCH = "@%p4 ld.shared.b32 %r38, [%r37 + 2048];\n"  # by warp 1
STRAY = WHERE + "@%p4 st.shared.b32 [%r37 + 2048], %r1;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
TAKE = taken(PLAIN.bytes)
START = expect(PLAIN.bytes) + started(PLAIN)
FOUND: list[tuple[str, str, set[str]]] = [
    ("as it should be", GOOD + TAKE, set()),
    ("no wait", GOOD.replace(WAIT, "") + TAKE, {"not waited for"}),
    ("only the other warp waits", GOOD.replace(WAIT, OTHER + "@!%p4 bra $on;\n" + WAIT + "$on:\n") + TAKE,
     {"not waited for"}),
    ("the other warp waits and all meet",
     GOOD.replace(WAIT, OTHER + "@!%p4 bra $on;\n" + WAIT + "$on:\n" + MEET) + TAKE, set()),
    ("fewer bytes expected", GOOD.replace(expect(PLAIN.bytes), expect(1024)) + TAKE, {"deadlock"}),
    ("more bytes expected", GOOD.replace(expect(PLAIN.bytes), expect(4096)) + TAKE, {"deadlock"}),
    ("no bytes expected",
     GOOD.replace(expect(PLAIN.bytes), "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r31];\n") + TAKE,
     {"not waited for"}),
    ("no copy", GOOD.replace(started(PLAIN), "") + TAKE, {"deadlock"}),
    ("nobody waits", described(PLAIN) + MEET + START, {"not waited for"}),
    ("no mbarrier", GOOD.replace("@%p1 mbarrier.init.shared::cta.b64 [%r31], 1;\n", ""), {"uninitialised"}),
    ("the map is not acquired", GOOD.replace(ACQUIRE, ""), {"not waited for", "deadlock"}),
    ("the map is copied anew",
     GOOD.replace(MEET, "@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;\n" + COPY_MAP + MEET),
     {"not waited for", "deadlock"}),
    ("the map was never cleared",
     GOOD.replace("@%p2 st.shared.b32 [%r32], %r30;\n", "").replace(field("rank", "1"), ""),
     {"uninitialised", "misuse", "deadlock"}),
    ("its lanes did not meet", GOOD.replace("bar.warp.sync -1;\n", ""), {"race within a warp"}),
    ("a skewed destination", GOOD.replace(started(PLAIN), started(PLAIN, TILE + 64)),
     {"misaligned", "deadlock"}),
    ("beyond shared memory", GOOD.replace(started(PLAIN), started(PLAIN, SHARED - 1024)),
     {"out of bounds", "deadlock"}),
    ("beyond the tensor's memory", GOOD.replace("%r33, 40;", "%r33, 400;").replace("%r41, 8;", "%r41, 120;"),
     {"out of bounds"}),
    ("a row's length that is no multiple of 16", GOOD.replace("%rd11, 128", "%rd11, 120"),
     {"misuse", "deadlock"}),
    ("a box wider than its swizzle", GOOD.replace(field("swizzle_mode", "3"), field("swizzle_mode", "2")),
     {"misuse", "deadlock"}),
    ("coordinates of another rank", GOOD.replace(field("rank", "1"), field("rank", "2")),
     {"misuse", "deadlock"}),
    ("read before it starts, and met", FILL + TOUCH + FENCE + GOOD + TAKE, set()),
    ("read by a warp that was not met",
     described(PLAIN) + FILL + FENCE + MEET + TOUCH + START + WAIT + TAKE, {"race"}),
    ("written by a warp that was not met",
     described(PLAIN) + MEET + STRAY + START + WAIT + TAKE, {"race", "not waited for"}),
    ("written without a fence", FILL + GOOD + TAKE, {"not waited for"}),
    ("twice to one place", described(PLAIN) + MEET + expect(2 * PLAIN.bytes) + 2 * started(PLAIN) + WAIT,
     {"not waited for"}),
    ("over the mbarrier in use", GOOD.replace(started(PLAIN), started(PLAIN, 0)),
     {"misuse", "uninitialised", "not waited for"}),
    ("the tile is written while it comes",
     described(PLAIN) + MEET + START + STRAY + WAIT, {"not waited for"}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), [case[1:] for case in FOUND], ids=[case[0] for case in FOUND])
def test_faults(body: str, wanted: set[str]) -> None:
    _, faults = run(body, DATA)
    assert kinds(faults) == wanted


def test_a_wait_for_too_many_bytes_says_how_many() -> None:
    _, faults = run(GOOD.replace(expect(PLAIN.bytes), expect(4096)), DATA)
    (fault,) = faults
    assert "the mbarrier at shared 0x0" in fault.detail
    assert fault.detail.endswith("which wants 2048 bytes")
    _, faults = run(GOOD.replace(expect(PLAIN.bytes), expect(1024)), DATA)
    (fault,) = faults
    assert fault.detail.endswith("which wants 1024 bytes too many to be expected")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (field("interleave_layout", "0"), field("interleave_layout", "1")),
        (field("fill_mode", "0"), field("fill_mode", "1")),
        (field("swizzle_mode", "3"), field("swizzle_mode", "4")),
        ("mov.b32 %r35, 1;", "mov.b32 %r35, 2;"),
    ],
)
def test_maps_that_are_not_modelled_are_refused(old: str, new: str) -> None:
    assert old in GOOD
    with pytest.raises(Unsupported, match="tensor maps"):
        run(GOOD.replace(old, new), DATA)

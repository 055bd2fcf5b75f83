"""9.7.15 wgmma: products of four warps, asynchronous, from matrices in shared memory that descriptors name.

Results appear in the registers at ``wgmma.wait_group``: until then they hold a value that no result is. What
an instruction reads may not be written before. Writes of the ordinary kind are seen after
``fence.proxy.async`` of the warps that read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .faults import ASYNCHRONOUS, DIVERGENCE, OUT_OF_BOUNDS, RACE, UNINITIALISED, Unsupported
from .lanes import ONES
from .matrix import widen
from .numbers import Array, f4, i8, u1, u2, u4, u8
from .shared_memory import SharedMemory
from .warps import Warps

_GROUP = 128  # threads of a warpgroup
_IN_FLIGHT = u4(0x7FC0DEAD)  # what a register holds while its result is under way
# 9.7.15.5.1: bits 62-63 of a descriptor -> bytes of a row of the swizzle's atom, and the address bits that
# are turned by those three above them.
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}
_TURNED = {0: 0, 1: 0x70, 2: 0x30, 3: 0x10}


class Warpgroups:
    def __init__(self, shared: SharedMemory, warps: Warps) -> None:
        self.shared, self.warps, self.lanes = shared, warps, shared.lanes
        self.groups = self.lanes.n // _GROUP
        # Of a register: its result under way, and the lanes that have not waited for it.
        self.results: dict[int, tuple[Array, Array]] = {}
        self.reads: list[tuple[Array, Array]] = []  # byte places [group, chunk], and the commit group
        self.committed = np.zeros(self.groups, i8)

    def _active(self, mask: Array | None, line: int) -> Array:
        """Warpgroups that execute the instruction, bool [groups]."""
        if self.lanes.threads % _GROUP:
            self.lanes.report(DIVERGENCE, line, np.ones(self.lanes.n, bool), "a block of part of a warpgroup")
        self.warps.whole(mask, line, _GROUP)
        return np.ones(self.groups, bool) if mask is None else mask.reshape(-1, _GROUP).all(1)

    def fence(self, mask: Array | None, line: int) -> None:
        self._active(mask, line)

    def commit(self, mask: Array | None, line: int) -> None:
        self.committed = self.committed + self._active(mask, line)

    def wait(self, registers: list[Array], n: int, mask: Array | None, line: int) -> None:
        active = self._active(mask, line)
        if n:
            # Results are kept by register, not by group: which of them are done is not known.
            raise Unsupported([f"wgmma.wait_group {n}"])
        for index, (value, lanes) in list(self.results.items()):
            now = lanes if mask is None else lanes & mask
            registers[index] = np.where(now, value, registers[index])
            self.results[index] = (value, lanes & ~now)
            if not (lanes & ~now).any():
                del self.results[index]
        rest = []
        self.shared.pinned.bytes[:] = 0
        for place, group in self.reads:
            left = np.where(active & (group < self.committed), -1, group)
            if (left >= 0).any():
                rest.append((place, left))
                self.shared.pinned.put(place[left >= 0].reshape(-1), 16, 0xFF)
        self.reads = rest

    def multiply(
        self,
        registers: list[Array],
        kind: str,
        columns: int,
        d: tuple[int, ...],
        a: Any,
        b: Array,
        scale_d: Array,
        trans_a: int,
        trans_b: int,
        mask: Array | None,
        line: int,
    ) -> None:
        """m64nNk16: D = A B + D, or A B where ``scale_d`` is false. ``a``: registers, or a descriptor."""
        g, active = self.groups, self._active(mask, line)
        places = []
        if isinstance(a, tuple):  # as mma's fragments, 16 rows of A to a warp (9.7.15.5.1.1)
            x = widen(kind, np.stack(a).reshape(-1).view(u2)).reshape(2, 2, g, 4, 8, 4, 2)
            x = x.transpose(2, 3, 1, 4, 0, 5, 6).reshape(g, 64, 16)
        else:
            bits, place = self._tile(a, 64, trans_a, active, line)
            x = widen(kind, bits)
            places.append(place)
        bits, place = self._tile(b, columns, trans_b, active, line)
        y = widen(kind, bits)
        places.append(place)
        # Register 4j + 2h + p of a lane: row 16 warp + 8h + lane / 4, column 8j + 2 (lane % 4) + p.
        nobody = np.zeros(self.lanes.n, bool)
        held = [self.results.get(k, (registers[k], nobody)) for k in d]
        before = [np.where(lanes, value, registers[k]) for k, (value, lanes) in zip(d, held, strict=True)]
        z = np.stack(before).view(f4).reshape(columns // 8, 2, 2, g, 4, 8, 4)
        z = z.transpose(3, 4, 1, 5, 0, 6, 2).reshape(g, 64, columns)
        z = np.where(scale_d.reshape(g, _GROUP)[:, :1, None], z, f4(0))
        product = np.matmul(x, y.transpose(0, 2, 1)) + z
        fragments = product.reshape(g, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        out = np.ascontiguousarray(fragments).reshape(len(d), self.lanes.n).view(u4)
        here = np.repeat(active, _GROUP)
        for k, index in enumerate(d):
            self.results[index] = (np.where(here, out[k], held[k][0]), here | held[k][1])
            registers[index] = np.where(here, _IN_FLIGHT, registers[index])
        for place in places:
            self._check(place[active], active, line)
            self.reads.append((place, np.where(active, self.committed, -1)))

    def _tile(
        self, descriptor: Array, rows: int, mn_major: int, active: Array, line: int
    ) -> tuple[Array, Array]:
        """The bits of a matrix [groups, rows, 16], and where its chunks of 16 bytes lie [groups, chunks]."""
        per = descriptor.reshape(-1, _GROUP)
        per = np.where(active[:, None], per, per[np.argmax(active)])  # the others have anything there
        unequal = per != per[:, :1]
        self.lanes.report(DIVERGENCE, line, unequal.reshape(-1), "threads give unequal descriptors")
        d = per[:, 0]
        start, leading, stride = (((d >> u8(k)) & u8(0x3FFF)) << u8(4) for k in (0, 16, 32))
        mode = int(d[0] >> u8(62))
        if (d >> u8(62) != mode).any() or ((d >> u8(49)) & u8(7)).any():
            raise Unsupported(["wgmma descriptors of several swizzles, or with a base offset"])
        width = u8(_ROW_BYTES[mode])
        if mn_major:  # chunks are 8 rows of one k
            k, c = np.arange(16, dtype=u8)[:, None], np.arange(rows // 8, dtype=u8)[None]
            outer, of_k = (stride, leading) if mode == 0 else (leading, stride)
            across = width // u8(16)
            inside = (c % across) * u8(16) + (k % u8(8)) * width
            at = start[:, None, None] + inside + (c // across) * outer[:, None, None]
            at = at + (k // u8(8)) * of_k[:, None, None]
        else:  # chunks are 8 along k of one row
            r, c = np.arange(rows, dtype=u8)[:, None], np.arange(2, dtype=u8)[None]
            inside = (r % u8(8)) * width + (c * u8(16) if mode else u8(0))
            at = start[:, None, None] + inside + (r // u8(8)) * stride[:, None, None]
            at = at + (u8(0) if mode else c * leading[:, None, None])
        at ^= (at >> u8(3)) & u8(_TURNED[mode])
        limit = self.shared.limit
        if (at + u8(16) > limit).any():
            told = f"an operand reaches shared {int(at.max()):#x}; the block has {limit} bytes"
            self.lanes.report(OUT_OF_BOUNDS, line, np.repeat(active, _GROUP), told)
            at = np.minimum(at, u8(limit // 16 * 16 - 16))
        place = at.astype(i8) + self.shared.start.reshape(-1, _GROUP)[:, 0][:, None, None]
        chunks = np.ascontiguousarray(self.shared.data.view(np.complex128)[place // 16]).view(u2)
        if mn_major:
            tile = chunks.reshape(len(d), 16, rows).transpose(0, 2, 1)
        else:
            tile = chunks.reshape(len(d), rows, 16)
        return np.ascontiguousarray(tile), place.reshape(len(d), -1)

    def _check(self, place: Array, active: Array, line: int) -> None:
        """Whether all that is read was written, fenced, and before the last barrier by others."""
        shared = self.shared
        in_block = np.arange(self.groups) % max(1, self.lanes.threads // _GROUP)
        bits = (u1(15) << (4 * in_block).astype(u1)).astype(u1)[active]  # of the warps of each group
        at, own = place.reshape(-1), np.repeat(bits, place.shape[1])
        flying = shared.flying.any(at, 16)
        unfenced = shared.unfenced.bytes[at] & own == own
        kinds = [
            (UNINITIALISED, ~shared.ready.all_ones(at, 16) & ~flying, "which nothing has written"),
            (ASYNCHRONOUS, flying, "which a cp.async not waited for writes"),
            (RACE, shared.writers.any(at, 16), "written since the last barrier"),
            (ASYNCHRONOUS, unfenced, "written without a fence.proxy.async since"),
        ]
        for kind, wrong, told in kinds:
            if wrong.any():
                block, inside = divmod(int(at[np.argmax(wrong)]), shared.size)
                lane = self.lanes.mask_of(np.array([block * self.lanes.threads]))
                self.lanes.report(kind, line, lane, f"an operand is read at shared {inside:#x}, {told}")
        words = {n: own.astype(f"u{n}") * ONES[n] for n in ONES}
        shared.readers.mark(at, 16, None, words)
        shared.pinned.mark(at, 16, None, words)

"""9.7.15 wgmma: products of four warps, asynchronous, from matrices in shared memory that descriptors name.

Results appear in the registers at ``wgmma.wait_group``: until then they hold a value that no result is. What
an instruction reads may not be written before. Writes of the ordinary kind are seen after
``fence.proxy.async`` of the warps that read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_interpreter.faults import ASYNCHRONOUS, DIVERGENCE, OUT_OF_BOUNDS, RACE, UNINITIALISED, Unsupported
from ptx_interpreter.matrix import widen
from ptx_interpreter.numbers import Array, f4, i8, u2, u4, u8
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.warps import Warps

_GROUP = 128  # threads of a warpgroup
_IN_FLIGHT = u4(0x7FC0DEAD)  # what a register holds while its result is under way
# 9.7.15.5.1: bits 62-63 of a descriptor -> bytes of a row of the swizzle's atom, and the address bits that
# are turned by those three above them.
_ROW_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}
TURNED = {0: 0, 1: 0x70, 2: 0x30, 3: 0x10}


class Warpgroups:
    def __init__(self, shared: SharedMemory, warps: Warps) -> None:
        self.shared, self.warps, self.lanes = shared, warps, shared.lanes
        self.groups = self.lanes.n // _GROUP
        # Of a register: its result under way, lanes that have not waited for it, commit groups of warpgroups.
        self.results: dict[int, tuple[Array, Array, Array]] = {}
        # What reads: warpgroups, byte places [group, chunk], and the commit group of each.
        self.reads: list[tuple[Array, Array, Array]] = []
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
        """All but the ``n`` youngest groups that were committed: their results appear."""
        active = self._active(mask, line)
        for index, (value, lanes, commit) in list(self.results.items()):
            now = lanes & np.repeat(active & (commit < self.committed - n), _GROUP)
            registers[index] = np.where(now, value, registers[index])
            self.results[index] = (value, lanes & ~now, commit)
            if not (lanes & ~now).any():
                del self.results[index]
        rest = []
        self.shared.pinned.bytes[:] = 0
        for groups, place, commit in self.reads:
            done = active[groups] & (commit < self.committed[groups] - n)
            if done.any():
                self.shared.order.group_has_read(place[done], groups[done])
            if not done.all():
                left = ~done
                rest.append((groups[left], place[left], commit[left]))
                self.shared.pinned.put(place[left].reshape(-1), 16, 0xFF)
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
        active = self._active(mask, line)
        groups = np.flatnonzero(active)
        if not len(groups):
            return
        g, everyone = len(groups), len(groups) == self.groups
        some = slice(None) if everyone else groups
        places = []
        if isinstance(a, tuple):  # as mma's fragments, 16 rows of A to a warp (9.7.15.5.1.1)
            x = np.ascontiguousarray(np.stack(a).reshape(4, -1, _GROUP)[:, some])
            x = widen(kind, x.reshape(-1).view(u2)).reshape(2, 2, g, 4, 8, 4, 2)
            x = x.transpose(2, 3, 1, 4, 0, 5, 6).reshape(g, 64, 16)
        else:
            bits, place = self._tile(a, 64, trans_a, groups, line)
            x = widen(kind, bits)
            places.append(place)
        bits, place = self._tile(b, columns, trans_b, groups, line)
        y = widen(kind, bits)
        places.append(place)
        # Register 4j + 2h + p of a lane: row 16 warp + 8h + lane / 4, column 8j + 2 (lane % 4) + p.
        nobody = np.zeros(self.lanes.n, bool)
        held = [self.results.get(k, (registers[k], nobody, self.committed)) for k in d]
        before: list[Array] = [
            np.where(lanes, value, registers[k]) for k, (value, lanes, _) in zip(d, held, strict=True)
        ]
        z = np.stack([each.reshape(-1, _GROUP)[some] for each in before]).view(f4)
        z = z.reshape(columns // 8, 2, 2, g, 4, 8, 4).transpose(3, 4, 1, 5, 0, 6, 2).reshape(g, 64, columns)
        z = np.where(scale_d.reshape(-1, _GROUP)[some, :1, None], z, f4(0))
        product = np.matmul(x, y.transpose(0, 2, 1)) + z
        fragments = product.reshape(g, 4, 2, 8, columns // 8, 4, 2).transpose(4, 2, 6, 0, 1, 3, 5)
        out = np.ascontiguousarray(fragments).reshape(len(d), -1, _GROUP).view(u4)
        here = np.repeat(active, _GROUP)
        for k, index in enumerate(d):
            value = out[k]
            if not everyone:
                value = held[k][0].reshape(-1, _GROUP).copy()
                value[some] = out[k]
            commit = np.where(active, self.committed, held[k][2])
            self.results[index] = (value.reshape(-1), here | held[k][1], commit)
            registers[index] = np.where(here, _IN_FLIGHT, registers[index])
        for place in places:
            self._check(place, groups, line)
            self.reads.append((groups, place, self.committed[groups]))

    def _tile(
        self, descriptor: Array, rows: int, mn_major: int, groups: Array, line: int
    ) -> tuple[Array, Array]:
        """The bits of a matrix [groups, rows, 16], and where its chunks of 16 bytes lie [groups, chunks]."""
        per = descriptor.reshape(-1, _GROUP)[groups]
        unequal = (per != per[:, :1]).any(1)
        self.lanes.report(DIVERGENCE, line, self._all_of(groups[unequal]), "threads give unequal descriptors")
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
        at ^= (at >> u8(3)) & u8(TURNED[mode])
        limit = self.shared.limit
        if (at + u8(16) > limit).any():
            told = f"an operand reaches shared {int(at.max()):#x}; the block has {limit} bytes"
            self.lanes.report(OUT_OF_BOUNDS, line, self._all_of(groups), told)
            at = np.minimum(at, u8(limit // 16 * 16 - 16))
        place = at.astype(i8) + self.shared.start.reshape(-1, _GROUP)[groups, 0][:, None, None]
        chunks = np.ascontiguousarray(self.shared.data.view(np.complex128)[place // 16]).view(u2)
        if mn_major:
            tile = chunks.reshape(len(d), 16, rows).transpose(0, 2, 1)
        else:
            tile = chunks.reshape(len(d), rows, 16)
        return np.ascontiguousarray(tile), place.reshape(len(d), -1)

    def _all_of(self, groups: Array) -> Array:
        mask = np.zeros((self.groups, _GROUP), bool)
        mask[groups] = True
        return mask.reshape(-1)

    def _check(self, place: Array, groups: Array, line: int) -> None:
        """Whether all that is read was written, fenced, and before the last barrier by others."""
        shared, at = self.shared, place.reshape(-1)
        flying = shared.flying.any(at, 16)
        unwritten = ~shared.ready.all_ones(at, 16) & ~flying
        raced, unfenced = shared.order.read_by_group(place, groups)
        kinds = [
            (UNINITIALISED, unwritten, "which nothing has written"),
            (ASYNCHRONOUS, flying, "which a copy not waited for writes"),
            (RACE, raced & ~flying, "written by a thread or a copy that nothing orders before"),
            (ASYNCHRONOUS, unfenced, "written without a fence.proxy.async since"),
        ]
        for kind, wrong, told in kinds:
            if wrong.any():
                inside = int(at[np.argmax(wrong)]) % shared.size
                group = groups[np.argmax(wrong.reshape(place.shape).any(1))]
                lane = self.lanes.mask_of(np.array([group * _GROUP]))
                self.lanes.report(kind, line, lane, f"an operand is read at shared {inside:#x}, {told}")
        shared.pinned.put(at, 16, 0xFF)

"""Shared memory of many blocks (5.1.5), with notes on who touched each byte since the last barrier.

Warps run in one order between two barriers. A byte remembers which warps read and wrote it in that interval,
so that what another order could change is a race, seen whatever order ran. Within a warp the same holds for
lanes between two ``bar.warp.sync``: since sm70 nothing else orders them.
"""

from __future__ import annotations

import numpy as np

from .faults import ASYNCHRONOUS, LANE_RACE, MISALIGNED, OUT_OF_BOUNDS, RACE, UNINITIALISED
from .lanes import Lanes, both, first, places
from .numbers import Array, u1, u4
from .shadow import WORD, LaneShadow, Shadow, equal

ALIGNMENT = 16


class SharedMemory:
    """``limit`` bytes for each block. ``proxy``: the kernel has wgmma, which wants a fence (9.7.13.4)."""

    def __init__(self, lanes: Lanes, limit: int, proxy: bool) -> None:
        self.lanes, self.limit, self.proxy = lanes, limit, proxy
        self.size = max(ALIGNMENT, -(-limit // ALIGNMENT) * ALIGNMENT)
        self.start = places(lanes.block, self.size)
        total = lanes.count * self.size
        self.data = np.full(total, 0xFF, u1)
        self.ready = Shadow(total)  # 1: written
        self.readers, self.writers = Shadow(total), Shadow(total)  # a bit per warp
        self.lane_readers, self.lane_writers = LaneShadow(total), LaneShadow(total)
        self.flying = Shadow(total)  # 1: a cp.async may write it at any time
        self.pinned = Shadow(total)  # not 0: a wgmma may still read it
        self.unfenced = Shadow(total)  # a bit per warp that has not fenced since it was written
        self.copies_under_way = False

    # -- places ---------------------------------------------------------------------------------------------
    def locate(self, address: Array, size: int, mask: Array | None, line: int) -> tuple[Array, Array | None]:
        """Byte places; lanes at fault leave the mask and go to place 0."""
        bad = both(mask, address & u4(size - 1) != 0)
        if bad.any():
            self.lanes.report(MISALIGNED, line, bad, f"shared {first(address, bad):#x}, {size} bytes at once")
            mask = ~bad if mask is None else mask & ~bad
        beyond = both(mask, address.astype(np.int64) > self.limit - size)
        if beyond.any():
            told = f"shared {first(address, beyond):#x}, {size} bytes; the block has {self.limit}"
            self.lanes.report(OUT_OF_BOUNDS, line, beyond, told)
            mask = ~beyond if mask is None else mask & ~beyond
        at = self.start + address
        return (at if mask is None else np.where(mask, at, 0)), mask

    def named(self, at: Array, mask: Array) -> str:
        return f"shared {first(at, mask) % self.size:#x}"

    # -- reads ----------------------------------------------------------------------------------------------
    def load(self, address: Array, size: int, count: int, mask: Array | None, line: int) -> list[Array]:
        """``count`` elements of ``size`` bytes per lane."""
        total = size * count
        at, mask = self.locate(address, total, mask, line)
        self.check_read(at, total, mask, line)
        return columns(self.data.view(WORD[total])[at // total], size, count)

    def check_read(
        self, at: Array, size: int, mask: Array | None, line: int, collective: bool = False
    ) -> None:
        """``collective``: the lane that gives an address is not the one that gets the bytes (ldmatrix)."""
        lanes = self.lanes
        cold = both(mask, ~self.ready.all_ones(at, size))
        if self.copies_under_way:
            flying = both(mask, self.flying.any(at, size))
            if flying.any():
                told = f"reads {self.named(at, flying)}, which a cp.async not waited for writes"
                lanes.report(ASYNCHRONOUS, line, flying, told)
                cold &= ~flying
        if cold.any():
            lanes.report(
                UNINITIALISED, line, cold, f"reads {self.named(at, cold)}, which nothing has written"
            )
        self.readers.mark(at, size, mask, lanes.warp_bits)
        if collective:
            near = both(mask, self.lane_writers.any(at, size))
        else:
            near = self.lane_writers.clash(at, size, mask, lanes.lane_marks)
            self.lane_readers.note(at, size, mask, lanes.lane_marks, several=True)
        far = both(mask, self.writers.others(at, size, lanes.warp_bits))
        near &= ~far
        self._report_race(line, near, far, at, "reads {}, written")

    # -- writes ---------------------------------------------------------------------------------------------
    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Array | None, line: int
    ) -> None:
        total = size * len(values)
        at, mask = self.locate(address, total, mask, line)
        joined = np.stack(values, axis=-1) if len(values) > 1 else np.ascontiguousarray(values[0])
        self.write(at, joined.view(WORD[total]).reshape(-1), total, mask, line)

    def write(self, at: Array, data: Array, size: int, mask: Array | None, line: int) -> None:
        """One word of ``size`` bytes per lane. The same value again is no race: it harms nobody."""
        lanes = self.lanes
        view: Array = self.data.view(WORD[size])
        if self.copies_under_way:
            flying = both(mask, self.flying.any(at, size))
            lanes.report(ASYNCHRONOUS, line, flying, "writes where a cp.async not waited for writes")
        if self.proxy:
            self.note_proxy_write(at, size, mask, line)
        far = self.readers.others(at, size, lanes.warp_bits)
        earlier = self.writers.others(at, size, lanes.warp_bits)
        self.writers.mark(at, size, mask, lanes.warp_bits)
        at_once = self.writers.others(at, size, lanes.warp_bits) & ~earlier
        near = self.lane_readers.clash(at, size, mask, lanes.lane_marks)
        again = self.lane_writers.clash(at, size, mask, lanes.lane_marks)
        if again.any():
            near |= again & ~equal(view[at // size], data)
        self.lane_writers.note(at, size, mask, lanes.lane_marks, several=False)
        if earlier.any():
            far |= earlier & ~equal(view[at // size], data)
        where = at // size if mask is None else (at // size)[mask]
        view[where] = data if mask is None else data[mask]
        self.ready.put(where * size, size, 1)
        # Lanes of this one instruction that disagree: the last one's value stays.
        differs = ~equal(view[at // size], data)
        if at_once.any():
            far |= at_once & differs
        near |= both(mask, differs) & ~at_once
        far = both(mask, far)
        self._report_race(line, near & ~far, far, at, "writes {}, read or written")

    def _report_race(self, line: int, near: Array, far: Array, at: Array, told: str) -> None:
        if near.any():
            words = told.format(self.named(at, near))
            self.lanes.report(LANE_RACE, line, near, f"{words} by another lane since bar.warp.sync")
        if far.any():
            words = told.format(self.named(at, far))
            self.lanes.report(RACE, line, far, f"{words} by another warp since the last barrier")

    # -- barriers and fences --------------------------------------------------------------------------------
    def barrier(self, blocks: Array | None) -> None:
        """All threads of ``blocks`` (a mask of them; None: all) met: what they did before is over."""
        for shadow in (self.readers, self.writers, self.lane_readers, self.lane_writers):
            if blocks is None:
                shadow.bytes[:] = 0
            else:
                shadow.bytes.reshape(self.lanes.count, -1)[blocks] = 0

    def warp_barrier(self, mask: Array | None) -> None:
        """Warps in ``mask`` met, each by itself: what only they touched is settled between their lanes."""
        if mask is None:
            self.lane_readers.bytes[:] = 0
            self.lane_writers.bytes[:] = 0
            return
        bits = self.lanes.blocks_warps(mask)
        touched = (self.readers.bytes | self.writers.bytes).reshape(self.lanes.count, -1)
        settled = touched & ~bits == 0
        for shadow in (self.lane_readers, self.lane_writers):
            shadow.bytes.reshape(self.lanes.count, -1)[settled] = 0

    def fence_proxy(self, mask: Array | None) -> None:
        """What a warp's threads see written by now, its next wgmma sees as well."""
        if self.proxy:
            self.unfenced.bytes.reshape(self.lanes.count, -1)[:] &= ~self.lanes.blocks_warps(mask)

    def note_proxy_write(self, at: Array, size: int, mask: Array | None, line: int) -> None:
        held = both(mask, self.pinned.any(at, size))
        self.lanes.report(ASYNCHRONOUS, line, held, "writes shared memory that a wgmma may still read")
        self.unfenced.put(at if mask is None else at[mask], size, 0xFF)


def columns(words: Array, size: int, count: int) -> list[Array]:
    """Each of the ``count`` elements of a vector, as arrays of unsigned integers."""
    if count == 1:
        return [words]
    parts = words.view(WORD[size]).reshape(-1, count)
    return [np.ascontiguousarray(parts[:, k]) for k in range(count)]

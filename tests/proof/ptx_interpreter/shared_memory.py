"""Shared memory of many blocks (5.1.5): bounds, alignment, what was written, and what is under way.

Who may touch what when is for ``order`` to say: ``Intervals`` where all barriers are of the whole block,
``Clocks`` where they are not.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_interpreter.clocks import Clocks
from ptx_interpreter.faults import ASYNCHRONOUS, LANE_RACE, MISALIGNED, OUT_OF_BOUNDS, RACE, UNINITIALISED
from ptx_interpreter.intervals import Intervals
from ptx_interpreter.lanes import Lanes, both, first, places
from ptx_interpreter.numbers import Array, u1, u4
from ptx_interpreter.shadow import WORD, Shadow, equal

ALIGNMENT = 16


class SharedMemory:
    """``limit`` bytes for each block. ``proxy``: the kernel has wgmma or tensor copies, which want a fence
    (9.7.13.4). ``in_parts``: warps meet in parts.
    """

    def __init__(self, lanes: Lanes, limit: int, proxy: bool, in_parts: bool = False) -> None:
        self.lanes, self.limit, self.proxy = lanes, limit, proxy
        self.size = max(ALIGNMENT, -(-limit // ALIGNMENT) * ALIGNMENT)
        self.start = places(lanes.block, self.size)
        total = lanes.count * self.size
        self.data = np.full(total, 0xFF, u1)
        self.ready = Shadow(total)  # 1: written
        self.flying = Shadow(total)  # 1: a copy may write it at any time
        self.pinned = Shadow(total)  # not 0: a wgmma may still read it
        self.objects = Shadow(total)  # 1: of an mbarrier
        self.copies_under_way = False
        self.order: Intervals | Clocks = Clocks(lanes, total) if in_parts else Intervals(lanes, total)
        # Told of writes to mbarriers: places, bytes, lanes and the line.
        self.overwritten: Callable[[Array, int, Array, int], None] | None = None

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
        lanes, flying = self.lanes, np.zeros(self.lanes.n, bool)
        cold = both(mask, ~self.ready.all_ones(at, size))
        if self.copies_under_way:
            flying = both(mask, self.flying.any(at, size))
            if flying.any():
                told = f"reads {self.named(at, flying)}, which a copy not waited for writes"
                lanes.report(ASYNCHRONOUS, line, flying, told)
                cold &= ~flying
        if cold.any():
            lanes.report(
                UNINITIALISED, line, cold, f"reads {self.named(at, cold)}, which nothing has written"
            )
        near, far = self.order.read(at, size, mask, collective)
        self._report_race(line, near & ~far & ~flying, far & ~flying, at, "reads {}, written")

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
        flying = np.zeros(lanes.n, bool)
        if self.copies_under_way:
            flying = both(mask, self.flying.any(at, size))
            lanes.report(ASYNCHRONOUS, line, flying, "writes where a copy not waited for writes")
        if self.proxy:
            self.note_proxy_write(at, size, mask, line)
        if self.overwritten is not None:
            struck = both(mask, self.objects.any(at, size))
            if struck.any():
                self.overwritten(at[struck], size, np.flatnonzero(struck), line)
        found = self.order.write(at, size, mask)
        near, far = found.lane_read, found.read
        if found.lane_wrote.any():
            near = near | (found.lane_wrote & ~equal(view[at // size], data))
        if found.wrote.any():
            far = far | (found.wrote & ~equal(view[at // size], data))
        where = at // size if mask is None else (at // size)[mask]
        view[where] = data if mask is None else data[mask]
        self.ready.put(where * size, size, 1)
        # Lanes of this one instruction that disagree: the last one's value stays.
        differs = ~equal(view[at // size], data)
        if found.at_once.any():
            far = far | (found.at_once & differs)
        near = near | (both(mask, differs) & ~found.at_once)
        far = both(mask, far)
        self._report_race(line, near & ~far & ~flying, far & ~flying, at, "writes {}, read or written")

    def _report_race(self, line: int, near: Array, far: Array, at: Array, told: str) -> None:
        if near.any():
            words = told.format(self.named(at, near))
            self.lanes.report(LANE_RACE, line, near, f"{words} by another lane since bar.warp.sync")
        if far.any():
            words = told.format(self.named(at, far))
            self.lanes.report(RACE, line, far, f"{words} by another warp or a copy, which nothing orders")

    # -- fences --------------------------------------------------------------------------------
    def fence_proxy(self, mask: Array | None) -> None:
        if self.proxy:
            self.order.fence(mask)

    def note_proxy_write(self, at: Array, size: int, mask: Array | None, line: int) -> None:
        held = both(mask, self.pinned.any(at, size))
        self.lanes.report(ASYNCHRONOUS, line, held, "writes shared memory that a wgmma may still read")
        self.order.unfenced(at if mask is None else at[mask], size)


def columns(words: Array, size: int, count: int) -> list[Array]:
    """Each of the ``count`` elements of a vector, as arrays of unsigned integers."""
    if count == 1:
        return [words]
    parts = words.view(WORD[size]).reshape(-1, count)
    return [np.ascontiguousarray(parts[:, k]) for k in range(count)]

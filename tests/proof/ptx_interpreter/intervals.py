"""Who touched a byte of shared memory since the last barrier, where all barriers are of the whole block.

Warps run in one order between two barriers. A byte remembers which warps read and wrote it in that interval,
so that what another order could change is a race, seen whatever order ran. Within a warp the same holds for
lanes between two ``bar.warp.sync``: since sm70 nothing else orders them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx_interpreter.lanes import ONES, Lanes, both
from ptx_interpreter.numbers import Array, u1
from ptx_interpreter.shadow import LaneShadow, Shadow

_WARPS = 8  # a bit for each in a byte


@dataclass(slots=True)
class Written:
    """Of a write, per lane: who was at its bytes, and nothing orders the two."""

    read: Array  # another warp read
    wrote: Array  # another warp wrote
    at_once: Array  # another warp wrote by this very instruction
    lane_read: Array  # another lane of the warp read
    lane_wrote: Array


class Intervals:
    """Notes on ``total`` bytes."""

    def __init__(self, lanes: Lanes, total: int) -> None:
        if lanes.threads > 32 * _WARPS:
            raise NotImplementedError(f"{lanes.threads} threads in a block, without barriers of some of them")
        self.lanes = lanes
        self.readers, self.writers = Shadow(total), Shadow(total)  # a bit per warp
        self.lane_readers, self.lane_writers = LaneShadow(total), LaneShadow(total)
        self._unfenced = Shadow(total)  # a bit per warp that has not fenced since it was written

    def read(self, at: Array, size: int, mask: Array | None, collective: bool) -> tuple[Array, Array]:
        """Lanes whose bytes another lane of the warp, and another warp, wrote."""
        lanes = self.lanes
        self.readers.mark(at, size, mask, lanes.warp_bits)
        if collective:
            near = both(mask, self.lane_writers.any(at, size))
        else:
            near = self.lane_writers.clash(at, size, mask, lanes.lane_marks)
            self.lane_readers.note(at, size, mask, lanes.lane_marks, several=True)
        return near, both(mask, self.writers.others(at, size, lanes.warp_bits))

    def write(self, at: Array, size: int, mask: Array | None) -> Written:
        lanes = self.lanes
        far = self.readers.others(at, size, lanes.warp_bits)
        earlier = self.writers.others(at, size, lanes.warp_bits)
        self.writers.mark(at, size, mask, lanes.warp_bits)
        at_once = self.writers.others(at, size, lanes.warp_bits) & ~earlier
        near = self.lane_readers.clash(at, size, mask, lanes.lane_marks)
        again = self.lane_writers.clash(at, size, mask, lanes.lane_marks)
        self.lane_writers.note(at, size, mask, lanes.lane_marks, several=False)
        return Written(far, earlier, at_once, near, again)

    def copy(self, at: Array, size: int, lanes: Array, landed: bool) -> Array:
        """A cp.async of ``lanes`` begins to write there, or has: those where other warps are."""
        bits = {unit: words[lanes] for unit, words in self.lanes.warp_bits.items()}
        far = self.readers.others(at, size, bits)
        self.writers.mark(at, size, None, bits)
        if landed:
            marks = {unit: words[lanes] for unit, words in self.lanes.lane_marks.items()}
            self.lane_writers.note(at, size, None, marks, several=False)
        return far | self.writers.others(at, size, bits)

    # -- barriers and fences --------------------------------------------------------------------------------
    def meet(self, blocks: Array | None, here: Array | None) -> None:
        """All threads of ``blocks`` (a mask of them; None: all) met: what they did before is over."""
        for shadow in (self.readers, self.writers, self.lane_readers, self.lane_writers):
            if blocks is None:
                shadow.bytes[:] = 0
            else:
                shadow.bytes.reshape(self.lanes.count, -1)[blocks] = 0

    def meet_in_warps(self, mask: Array | None) -> None:
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

    def fence(self, mask: Array | None) -> None:
        """What a warp's threads see written by now, its next wgmma sees as well."""
        self._unfenced.bytes.reshape(self.lanes.count, -1)[:] &= ~self.lanes.blocks_warps(mask)

    def unfenced(self, at: Array, size: int) -> None:
        """Written by ordinary instructions."""
        self._unfenced.put(at, size, 0xFF)

    # -- wgmma, four warps that read at once ----------------------------------------------------------------
    def read_by_group(self, place: Array, groups: Array) -> tuple[Array, Array]:
        """Chunks of 16 bytes [groups, chunks] that warpgroups read: which were written in this interval, and
        which without a fence of theirs since.
        """
        own = np.repeat(self._bits(groups), place.shape[1])
        at = place.reshape(-1)
        unfenced = self._unfenced.bytes[at] & own == own
        self.readers.mark(at, 16, None, {n: own.astype(f"u{n}") * ONES[n] for n in ONES})
        return self.writers.any(at, 16), unfenced

    def group_has_read(self, place: Array, groups: Array) -> None:
        """Its wgmma are over: the interval's bits are there already."""

    def _bits(self, groups: Array) -> Array:
        """Of the four warps of each warpgroup."""
        in_block = groups % max(1, self.lanes.threads // 128)
        return (u1(15) << (4 * in_block).astype(u1)).astype(u1)

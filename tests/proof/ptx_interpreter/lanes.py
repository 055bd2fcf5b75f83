"""The threads that run together: all of many blocks, one array element each."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.faults import Faults
from ptx_interpreter.numbers import Array, i8, u1, u4

WARP = 32
MOST_WARPS = 32  # of a block
# A value of 1 in each byte of a word, by the word's size.
ONES = {n: np.array([1] * n, dtype=u1).view(f"u{n}")[0] for n in (1, 2, 4, 8)}


class Lanes:
    """Who the lanes are: thread ``t`` of the k-th of ``blocks`` is lane ``k * threads + t``."""

    def __init__(self, threads: int, blocks: range, faults: Faults) -> None:
        if threads % WARP or threads > WARP * MOST_WARPS:
            raise NotImplementedError(
                f"{threads} threads in a block; whole warps up to {MOST_WARPS} are executed"
            )
        self.threads, self.blocks, self.faults = threads, blocks, faults
        self.count = len(blocks)
        self.n = self.count * threads
        self.thread = np.tile(np.arange(threads, dtype=u4), self.count)
        self.block = np.repeat(np.arange(self.count), threads)  # place among ``blocks``
        self.block_index = np.repeat(np.arange(blocks.start, blocks.stop, dtype=u4), threads)
        self.lane = self.thread % u4(WARP)  # within its warp
        self.warp = self.thread // u4(WARP)
        # What a lane leaves in bytes it touches, for words of each size: its warp's bit (of the first eight
        # warps; ``Intervals`` takes no more), and 1 + its lane.
        bit = u1(1) << self.warp.astype(u1)
        self.warp_bits = {n: bit.astype(f"u{n}") * ONES[n] for n in ONES}
        self.lane_marks = {n: (self.lane + u4(1)).astype(f"u{n}") * ONES[n] for n in ONES}

    def report(self, kind: str, line: int, at_fault: Array, detail: str) -> None:
        """A fault of the lanes of a mask; nothing where it is empty."""
        lanes = np.flatnonzero(at_fault)
        if len(lanes):
            block, thread = divmod(int(lanes[0]), self.threads)
            self.faults.add(kind, line, self.blocks.start + block, thread, detail, len(lanes))

    def blocks_warps(self, mask: Array | None) -> Array:
        """The bits of warps that have a lane in ``mask``, per block: uint8 [count, 1]."""
        bits = self.warp_bits[1]
        chosen = bits if mask is None else np.where(mask, bits, u1(0))
        return np.bitwise_or.reduce(chosen.reshape(self.count, -1), axis=1)[:, None]

    def mask_of(self, lanes: Array) -> Array:
        mask = np.zeros(self.n, bool)
        mask[lanes] = True
        return mask


def both(mask: Array | None, condition: Array) -> Array:
    """``condition`` where the mask is."""
    return condition if mask is None else condition & mask


def first(values: Array, mask: Array) -> int:
    return int(values[int(np.argmax(mask))])


def places(block: Array, size: int) -> Array:
    """Where a block's own part of a memory of ``size`` bytes for each begins."""
    return block.astype(i8) * size

"""Global memory (5.1.4): tensors in regions of their own, where only their elements may be touched."""

from __future__ import annotations

import numpy as np

from ptx_interpreter.faults import BLOCK_RACE, MISALIGNED, OUT_OF_BOUNDS
from ptx_interpreter.lanes import ONES, Lanes, both, first
from ptx_interpreter.numbers import Array, i8, u1, u8
from ptx_interpreter.shadow import WORD, equal
from ptx_interpreter.shared_memory import columns

_REGION_BITS = 40  # of an address within one tensor's region
_ALIGNMENT = 256  # of regions: a tensor keeps its address modulo this
_INSIDE = u8((1 << _REGION_BITS) - 1)


class GlobalMemory:
    """What the tensors of one launch hold. Addresses are made up: a region's number above 40 bits."""

    def __init__(self) -> None:
        # Region 0 is the null pointer's: nothing in it may be touched.
        self.names, self.starts, self.sizes = ["null"], [0], [0]
        self._parts: list[tuple[Array, Array]] = []
        self._total = 0

    def add(self, name: str, data: Array, valid: Array, modulo: int = 0) -> int:
        """Bytes, and which of them are elements' (1); the address. ``modulo``: the true one modulo 256."""
        pad = modulo % _ALIGNMENT
        self.names.append(name)
        self.starts.append(self._total + pad)
        self.sizes.append(len(data))
        self._parts.append((data, valid))
        # At least one region's alignment apart: an access that begins inside one never reaches the next.
        self._total += -(-(pad + len(data) + _ALIGNMENT) // _ALIGNMENT) * _ALIGNMENT
        return ((len(self.starts) - 1) << _REGION_BITS) + pad

    def freeze(self) -> None:
        """All tensors are there."""
        self._total = max(self._total, _ALIGNMENT)
        self.data, self.valid = np.zeros(self._total, u1), np.zeros(self._total, u1)
        for start, (data, valid) in zip(self.starts[1:], self._parts, strict=True):
            self.data[start : start + len(data)] = data
            self.valid[start : start + len(data)] = valid
        self.bases = np.array([start - start % _ALIGNMENT for start in self.starts], i8)
        self.ends = np.array([start + size for start, size in zip(self.starts, self.sizes, strict=True)], i8)
        self.ends[0] = -1
        self.owner = np.zeros(self._total, i8)  # 1 + the block that wrote a byte in this launch
        self.written = np.zeros(len(self.starts), bool)  # regions

    def contents(self, region: int) -> Array:
        return self.data[self.starts[region] : self.starts[region] + self.sizes[region]]

    def named(self, address: int) -> str:
        region = address >> _REGION_BITS
        if not 0 < region < len(self.starts):
            return f"address {address:#x}, which is no tensor's"
        inside = (address & int(_INSIDE)) - self.starts[region] % _ALIGNMENT
        return f"{self.names[region]} at byte {inside} of {self.sizes[region]}"


class GlobalAccess:
    """Loads and stores of some lanes."""

    def __init__(self, memory: GlobalMemory, lanes: Lanes) -> None:
        self.memory, self.lanes = memory, lanes
        self.me = lanes.block_index.astype(i8) + 1

    def locate(
        self, address: Array, size: int, mask: Array | None, line: int, verb: str
    ) -> tuple[Array, Array, Array | None]:
        """Byte places and regions; lanes at fault leave the mask."""
        g = self.memory
        region = (address >> u8(_REGION_BITS)).astype(i8)
        wild = (region >= len(g.starts)) | (region <= 0)
        region = np.where(wild, 0, region)
        at = g.bases[region] + (address & _INSIDE).astype(i8)
        skewed = both(mask, address & u8(size - 1) != 0)
        if skewed.any():
            told = f"{verb} {g.named(first(address, skewed))}, {size} bytes at once"
            self.lanes.report(MISALIGNED, line, skewed, told)
        outside = wild | (at + size > g.ends[region])
        inside = np.where(outside | (address & u8(size - 1) != 0), 0, at)
        unit = min(size, 8)
        for k in range(0, size, unit):
            outside |= g.valid.view(WORD[unit])[(inside + k) // unit] != ONES[unit]
        outside = both(mask, outside) & ~skewed
        if outside.any():
            told = f"{verb} {g.named(first(address, outside))}, {size} bytes: not an element's"
            self.lanes.report(OUT_OF_BOUNDS, line, outside, told)
        wrong = skewed | outside
        if wrong.any():
            mask = ~wrong if mask is None else mask & ~wrong
        return (at if mask is None else np.where(mask, at, 0)), region, mask

    def words(self, address: Array, size: int, mask: Array | None, line: int) -> Array:
        """One word of ``size`` bytes per lane."""
        g = self.memory
        at, region, mask = self.locate(address, size, mask, line, "reads")
        if g.written[region].any():
            stale = np.zeros(self.lanes.n, bool)
            for k in range(size):
                owner = g.owner[at + k]
                stale |= (owner != 0) & (owner != self.me)
            stale = both(mask, stale)
            if stale.any():
                told = f"reads {g.named(first(address, stale))}, which another block wrote in this launch"
                self.lanes.report(BLOCK_RACE, line, stale, told)
        return g.data.view(WORD[size])[at // size]

    def elements(self, base: int, offset: Array, size: int, lane: int, line: int) -> Array:
        """Words of ``size`` bytes at offsets to an address: what a copy of one lane reads (a tile)."""
        g, region = self.memory, base >> _REGION_BITS
        if not 0 < region < len(g.starts):
            region = 0
        at = int(g.bases[region]) + (base & int(_INSIDE)) + offset
        outside = (at < g.starts[region]) | (at + size > g.ends[region])
        at = np.where(outside, 0, at)
        view: Array = g.valid.view(WORD[size])
        outside |= view[at // size] != ONES[size]
        only = self.lanes.mask_of(np.array([lane]))
        if outside.any():
            told = f"copies {g.named(base + first(offset, outside))}, {size} bytes: not an element's"
            self.lanes.report(OUT_OF_BOUNDS, line, only, told)
        if g.written[region]:
            owner = g.owner[at[:, None] + np.arange(size)]
            if ((owner != 0) & (owner != self.me[lane])).any():
                told = f"copies part of {g.names[region]}, which another block wrote in this launch"
                self.lanes.report(BLOCK_RACE, line, only, told)
        return g.data.view(WORD[size])[at // size]

    def load(self, address: Array, size: int, count: int, mask: Array | None, line: int) -> list[Array]:
        return columns(self.words(address, size * count, mask, line), size, count)

    def store(
        self, address: Array, size: int, values: tuple[Array, ...], mask: Array | None, line: int
    ) -> None:
        g, total = self.memory, size * len(values)
        at, region, mask = self.locate(address, total, mask, line, "writes")
        joined: Array = np.ascontiguousarray(np.stack(values, axis=-1))
        data = joined.view(WORD[total]).reshape(-1)
        lanes = np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask)
        at, data, me = at[lanes], data[lanes], self.me[lanes]
        view: Array = g.data.view(WORD[total])
        where = at // total
        clash = np.zeros(len(lanes), bool)
        for k in range(total):
            owner = g.owner[at + k]
            clash |= (owner != 0) & (owner != me)
            g.owner[at + k] = me
        clash &= ~equal(view[where], data)  # the same value again harms nobody
        view[where] = data
        clash |= ~equal(view[where], data)  # lanes of this instruction disagree
        g.written[np.unique(region[lanes])] = True
        if clash.any():
            full = self.lanes.mask_of(lanes[clash])
            told = f"writes {g.named(first(address, full))}, where another thread writes something else"
            self.lanes.report(BLOCK_RACE, line, full, told)

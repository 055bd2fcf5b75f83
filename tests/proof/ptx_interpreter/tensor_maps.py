"""5.5.8 tensor maps, 9.7.9.26 tensormap.replace and 9.7.13.16 tensormap.cp_fenceproxy.

A tensor map is an object of 128 bytes whose layout no document tells. Here its fields lie one after the other
as ``_FIELDS`` says, in memory like all data: a map that was not cleared or not copied is seen as such. One in
global memory may be used after ``cp_fenceproxy`` and the fence that acquires it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx_interpreter.faults import ASYNCHRONOUS, MISALIGNED, MISUSE, Unsupported
from ptx_interpreter.global_memory import GlobalAccess
from ptx_interpreter.lanes import Lanes
from ptx_interpreter.numbers import Array, u1, u4, u8
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.warps import Warps

SIZE = 128  # bytes
# Of each field: where it begins, bytes of an entry, entries.
_FIELDS = {
    "global_address": (0, 8, 1),
    "global_stride": (8, 8, 4),  # bytes, of the dimensions above the innermost
    "global_dim": (40, 4, 5),
    "box_dim": (60, 4, 5),
    "element_stride": (80, 4, 5),
    "rank": (100, 4, 1),  # less one
    "elemtype": (104, 4, 1),
    "interleave_layout": (108, 4, 1),
    "swizzle_mode": (112, 4, 1),
    "fill_mode": (116, 4, 1),
}
# The table in 9.7.9.26: bytes of the element types .u8, .u16, ... .tf32.ftz by their number.
_ELEMENTS = (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4)
# Swizzle modes by their number: the address bits that are turned by those three above them, and the bytes
# that the innermost dimension of a box may have.
_SWIZZLES = {0: (0, 1 << 16), 1: (0x10, 32), 2: (0x30, 64), 3: (0x70, 128)}


@dataclass(frozen=True, slots=True)
class TensorMap:
    address: int
    element: int  # bytes
    dims: tuple[int, ...]  # the innermost first, as all here
    strides: tuple[int, ...]  # bytes; the innermost is dense
    box: tuple[int, ...]
    turned: int  # address bits of the swizzle


class TensorMaps:
    def __init__(self, shared: SharedMemory, memory: GlobalAccess, warps: Warps) -> None:
        self.shared, self.memory, self.warps = shared, memory, warps
        self.lanes: Lanes = shared.lanes
        self.released: set[tuple[int, int]] = set()  # block and address, since the copy
        self.acquired: set[tuple[int, int]] = set()

    def replace(self, name: str, at: Array, entry: int, value: Array, mask: Array | None, line: int) -> None:
        """One field of a map in shared memory; the instruction reads and writes the whole object."""
        start, size, count = _FIELDS[name]
        if not 0 <= entry < count:
            raise ValueError(f"tensormap.replace of entry {entry} of {name}")
        address = at.astype(u4)
        self._aligned(address, mask, line)
        for k in range(0, SIZE, 16):
            self.shared.load(address + u4(k), 16, 1, mask, line)
        self.shared.store(address + u4(start + size * entry), size, (value.astype(f"u{size}"),), mask, line)

    def publish(self, to: Array, source: Array, mask: Array | None, line: int) -> None:
        """tensormap.cp_fenceproxy: a warp copies a map to global memory and releases it to the proxy."""
        self.warps.whole(mask, line)
        self.shared.order.meet_in_warps(mask)  # .sync: it waits for what the warp's threads did
        self._aligned(to, mask, line)
        at = source.astype(u4)
        self._aligned(at, mask, line)
        own = self.lanes.lane * u4(4)
        (words,) = self.shared.load(at + own, 4, 1, mask, line)
        self.memory.store(to + own.astype(u8), 4, (words,), mask, line)
        for key in self._keys(to, mask):
            self.released.add(key)
            self.acquired.discard(key)

    def acquire(self, at: Array, mask: Array | None, line: int) -> None:
        """fence.proxy.tensormap::generic.acquire: what was released before, copies may use from now on."""
        self.acquired |= self.released & self._keys(at, mask)

    def read(self, at: Array, mask: Array | None, line: int) -> dict[int, TensorMap]:
        """The maps in global memory that lanes name; without those at fault."""
        parts = []
        for k in range(0, SIZE, 16):
            words = np.ascontiguousarray(self.memory.words(at + u8(k), 16, mask, line))
            parts.append(words.view(u1).reshape(-1, 16))
        data, found = np.concatenate(parts, axis=1), {}
        self._aligned(at, mask, line)
        for lane in np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask):
            if (int(self.lanes.block[lane]), int(at[lane])) not in self.acquired:
                told = "uses a tensor map that no fence.proxy.tensormap has acquired since it was copied"
                self.lanes.report(ASYNCHRONOUS, line, self.lanes.mask_of(np.array([lane])), told)
                continue
            fields = {
                name: data[lane, start : start + size * count].copy().view(f"u{size}").tolist()
                for name, (start, size, count) in _FIELDS.items()
            }
            made, wrong = _checked(fields)
            if made is None:
                self.lanes.report(
                    MISUSE, line, self.lanes.mask_of(np.array([lane])), f"a tensor map of {wrong}"
                )
            else:
                found[int(lane)] = made
        return found

    def _keys(self, at: Array, mask: Array | None) -> set[tuple[int, int]]:
        lanes = np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask)
        return {(int(self.lanes.block[lane]), int(at[lane])) for lane in lanes}

    def _aligned(self, at: Array, mask: Array | None, line: int) -> None:
        skewed = at % at.dtype.type(SIZE) != 0
        self.lanes.report(
            MISALIGNED,
            line,
            skewed if mask is None else skewed & mask,
            f"a tensor map lies at no multiple of {SIZE}",
        )


def _checked(fields: dict[str, list[int]]) -> tuple[TensorMap | None, str]:
    """The map, or what of it the hardware would not take. Raises Unsupported for what is not modelled."""
    (rank,), (kind,), (swizzle,) = (fields[name] for name in ("rank", "elemtype", "swizzle_mode"))
    (interleaved,), (fill,) = fields["interleave_layout"], fields["fill_mode"]
    if rank > 4 or kind >= len(_ELEMENTS):
        return None, f"{rank + 1} dimensions and element type {kind}"
    if swizzle > 4 or interleaved > 2 or fill > 1:
        return None, f"swizzle mode {swizzle}, interleave layout {interleaved} and fill mode {fill}"
    if swizzle == 4 or interleaved or fill:
        raise Unsupported(["tensor maps that interleave, fill with NaN or swizzle 96 bytes"])
    n, element = rank + 1, _ELEMENTS[kind]
    if not all(1 <= step <= 8 for step in fields["element_stride"][:n]):
        return None, f"element strides {fields['element_stride'][:n]}"
    if fields["element_stride"][:n] != [1] * n:
        raise Unsupported(["tensor maps with element strides"])
    (address,), strides = fields["global_address"], fields["global_stride"][: n - 1]
    dims, box = fields["global_dim"][:n], fields["box_dim"][:n]
    turned, widest = _SWIZZLES[swizzle]
    if address % 16 or any(stride % 16 or stride >> 40 for stride in strides):
        return None, f"address {address:#x} and strides {strides}: no multiples of 16"
    if not all(dims) or not all(1 <= b <= 256 for b in box):
        return None, f"dimensions {dims} and a box {box}"
    if box[0] * element % 16 or box[0] * element > widest:
        return None, f"a box whose rows have {box[0] * element} bytes, with swizzle mode {swizzle}"
    return TensorMap(address, element, tuple(dims), tuple(strides), tuple(box), turned), ""

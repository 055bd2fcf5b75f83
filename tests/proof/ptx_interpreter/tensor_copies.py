"""9.7.9.25.5 cp.async.bulk.tensor: tiles copied to shared memory by the tensor memory accelerator.

The elements are read when the copy starts. They land, and its bytes are counted by the mbarrier, when no
thread can go on without: as late as may be, so that a wait that is missing is seen in the numbers as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ptx_interpreter.clocks import Clocks
from ptx_interpreter.faults import ASYNCHRONOUS, MISALIGNED, MISUSE, OUT_OF_BOUNDS, RACE
from ptx_interpreter.global_memory import GlobalAccess
from ptx_interpreter.mbarriers import Mbarriers
from ptx_interpreter.numbers import Array, i8, u1
from ptx_interpreter.shared_memory import SharedMemory
from ptx_interpreter.tensor_maps import TensorMap, TensorMaps

_ALIGNMENT = 128  # bytes, of a destination


@dataclass(slots=True)
class _Copy:
    """One tile on its way."""

    block: int
    lane: int  # that started it
    place: Array  # of its chunks of 16 bytes, in shared memory
    data: Array  # bytes [chunks, 16]
    barrier: int  # address of the mbarrier it completes on
    agent: int
    clock: int
    line: int


class TensorCopies:
    def __init__(
        self, shared: SharedMemory, memory: GlobalAccess, maps: TensorMaps, mbarriers: Mbarriers
    ) -> None:
        assert isinstance(shared.order, Clocks)
        self.shared, self.memory, self.lanes, self.order = shared, memory, shared.lanes, shared.order
        self.maps, self.mbarriers = maps, mbarriers
        self.under_way: list[_Copy] = []
        self.started: dict[tuple[int, int], int] = {}  # copies so far, by block and agent

    def load(
        self,
        to: Array,
        at: Array,
        coordinates: tuple[Array, ...],
        barrier: Array,
        mask: Array | None,
        line: int,
    ) -> None:
        """The box of the map at ``at`` whose first element has ``coordinates``, to ``to`` on."""
        for lane, tensor_map in self.maps.read(at, mask, line).items():
            if len(tensor_map.dims) != len(coordinates):
                told = f"a tensor map of {len(tensor_map.dims)} dimensions"
                self.lanes.report(MISUSE, line, self._only(lane), told)
                continue
            first = [int(c[lane].astype(np.int32)) for c in coordinates]
            place = self._destination(int(to[lane]), tensor_map, lane, line)
            if place is not None:
                data = self._tile(tensor_map, first, lane, line)
                self._start(place, data, int(barrier[lane]), lane, line)

    def _destination(self, to: int, tensor_map: TensorMap, lane: int, line: int) -> Array | None:
        """Places of the box's chunks of 16 bytes: rows one after the other, swizzled (5.5.7)."""
        size = tensor_map.element * int(np.prod(tensor_map.box))
        if to % _ALIGNMENT:
            told = f"copies a tile to shared {to:#x}, which is no multiple of {_ALIGNMENT}"
            self.lanes.report(MISALIGNED, line, self._only(lane), told)
            return None
        at = to + np.arange(0, size, 16, dtype=i8)
        at ^= (at >> 3) & tensor_map.turned
        if int(at.max()) + 16 > self.shared.limit:
            told = f"copies a tile to shared {to:#x}, {size} bytes; the block has {self.shared.limit}"
            self.lanes.report(OUT_OF_BOUNDS, line, self._only(lane), told)
            return None
        return at + int(self.lanes.block[lane]) * self.shared.size

    def _tile(self, tensor_map: TensorMap, first: list[int], lane: int, line: int) -> Array:
        """The elements of a box as bytes [chunks, 16], zeros beyond the tensor."""
        rank, size = len(first), tensor_map.element
        offset, inside = np.zeros((), i8), np.ones((), bool)
        for k, (start, count, length) in enumerate(zip(first, tensor_map.box, tensor_map.dims, strict=True)):
            step = size if k == 0 else tensor_map.strides[k - 1]
            along = start + np.arange(count, dtype=i8).reshape(-1, *(1,) * k)  # the innermost last
            offset = offset + along * step
            inside = inside & (along >= 0) & (along < length)
        assert offset.ndim == rank
        data = np.zeros(offset.shape, f"u{size}")
        if inside.any():
            data[inside] = self.memory.elements(tensor_map.address, offset[inside], size, lane, line)
        return data.reshape(-1).view(u1).reshape(-1, 16)

    def _start(self, place: Array, data: Array, barrier: int, lane: int, line: int) -> None:
        shared, only, block = self.shared, self._only(lane), int(self.lanes.block[lane])
        if self.mbarriers.find(block, barrier, np.array([lane]), line) is None:
            return
        agent = self.mbarriers.agent(barrier)
        clock = self.started[block, agent] = self.started.get((block, agent), 0) + 1
        flying, pinned = shared.flying.any(place, 16), shared.pinned.any(place, 16)
        raced, unfenced = self.order.copy_in(place, int(self.order.row[lane]), agent, clock)
        for kind, wrong, told in (
            (ASYNCHRONOUS, flying, "where another copy is under way"),
            (ASYNCHRONOUS, pinned, "which a wgmma may still read"),
            (RACE, raced & ~flying, "read or written by a thread or a copy that nothing orders before"),
            (ASYNCHRONOUS, unfenced, "written without a fence.proxy.async since"),
        ):
            if wrong.any():
                where = int(place[np.argmax(wrong)]) % shared.size
                self.lanes.report(kind, line, only, f"copies to shared {where:#x}, {told}")
        struck = shared.objects.any(place, 16)
        if struck.any():
            self.mbarriers.overwritten(place[struck], 16, np.full(struck.sum(), lane), line)
        shared.flying.put(place, 16, 1)
        shared.copies_under_way = True
        self.under_way.append(_Copy(block, lane, place, data, barrier, agent, clock, line))

    def land(self, alive: Array) -> bool:
        """Of each block the copy that is under way for longest; False if there is none.

        ``alive``: blocks with threads that have not returned. Of the others nobody waits any more.
        """
        rest: list[_Copy] = []
        served: set[int] = set()
        for copy in self.under_way:
            if not alive[copy.block]:
                told = "copies a tile that nobody waits for: its block ends before"
                self.lanes.report(ASYNCHRONOUS, copy.line, self._only(copy.lane), told)
            elif copy.block in served:
                rest.append(copy)
            else:
                served.add(copy.block)
                self._write(copy)
        self.under_way, self.shared.copies_under_way = rest, bool(rest)
        return bool(served)

    def _write(self, copy: _Copy) -> None:
        self.shared.data.reshape(-1, 16)[copy.place // 16] = copy.data
        self.shared.ready.put(copy.place, 16, 1)
        self.shared.flying.put(copy.place, 16, 0)
        self.mbarriers.arrived_bytes(copy.block, copy.barrier, copy.data.size, copy.agent, copy.clock)

    def _only(self, lane: int) -> Array:
        return self.lanes.mask_of(np.array([lane]))

"""What orders two accesses of shared memory where warps meet in parts, by mbarriers and by copies: clocks.

Every warp has a clock, and for every other warp the reading of its clock up to which it knows what that one
did (a vector clock). A byte remembers who wrote it last and when, and for each warp when it last read it. An
access that finds a read or a write beyond what its warp knows of is a race, whatever order ran. Barriers join
what their warps know. An mbarrier keeps what those knew that arrived, and gives it to those that have waited
(8.9.5, causality order).

Copies by the tensor memory accelerator are nobody's instruction: those that complete on one mbarrier are an
agent with a clock of its own, known to whoever waited for that mbarrier.
"""

from __future__ import annotations

import numpy as np

from ptx_interpreter.faults import Unsupported
from ptx_interpreter.intervals import Written
from ptx_interpreter.lanes import WARP, Lanes
from ptx_interpreter.numbers import Array, i8, u1, u2, u4

AGENTS = 48  # mbarriers of a block that copies complete on
_SEVERAL = 255
_LATEST = 0xFFFF  # a clock has 16 bits


class Clocks:
    """Notes on ``total`` bytes. A row is a warp of a block: block * warps + warp."""

    def __init__(self, lanes: Lanes, total: int) -> None:
        self.lanes, self.total = lanes, total
        self.warps = lanes.threads // WARP
        self.row = lanes.block * self.warps + lanes.warp.astype(i8)  # of each lane
        rows = lanes.count * self.warps
        self.known = np.zeros((rows, self.warps + AGENTS), u2)
        self.known[np.arange(rows), np.arange(rows) % self.warps] = 1
        self.writer, self.write_clock = np.zeros(total, u1), np.zeros(total, u2)  # 0: nobody has
        self.write_lane, self.read_lane = np.zeros(total, u1), np.zeros(total, u1)  # 1 + the lane of its warp
        self.readers = np.zeros(total, u4)  # since it was written; a bit per warp
        self.read_clock = np.zeros((self.warps, total), u2)
        # When ordinary instructions wrote a byte, and when a warp last fenced (9.7.13.4), in steps of these.
        self.stored, self.fenced, self.now = np.zeros(total, u4), np.zeros(rows, u4), 0

    # -- loads and stores -----------------------------------------------------------------------------------
    def read(self, at: Array, size: int, mask: Array | None, collective: bool) -> tuple[Array, Array]:
        """Lanes whose bytes another lane of the warp, and another warp, wrote."""
        lanes = self._lanes(mask)
        spot, row, warp = at[lanes] // size, self.row[lanes], self.lanes.warp[lanes]
        mine = self._clock(lanes)[:, None]
        writer, clock = self._of(self.writer, spot, size), self._of(self.write_clock, spot, size)
        far = clock > self.known[row[:, None], writer]
        mark = self.lanes.lane_marks[1][lanes][:, None]
        near = (writer == warp[:, None]) & (clock == mine) & (clock > 0)
        if not collective:
            near &= self._of(self.write_lane, spot, size) != mark
        self._note_reads(spot, size, lanes, None if collective else mark)
        return self._spread(lanes, near), self._spread(lanes, far)

    def _note_reads(self, spot: Array, size: int, lanes: Array, mark: Array | None) -> None:
        warp = self.lanes.warp[lanes]
        for w in np.unique(warp):
            here = warp == w
            places, clock = spot[here], self._clock(lanes[here])[:, None]
            times = self.read_clock[w].reshape(-1, size)
            bits = self.readers.reshape(-1, size)
            if mark is None:
                self.read_lane.reshape(-1, size)[places] = _SEVERAL
            else:
                marks = self.read_lane.reshape(-1, size)
                own, before = np.broadcast_to(mark[here], (len(places), size)), marks[places]
                fresh = ((bits[places] >> u4(w)) & u4(1) != 0) & (times[places] == clock)
                marks[places] = own
                crowded = (marks[places] != own) | (fresh & (before != own))
                if crowded.any():
                    which, byte = np.nonzero(crowded)
                    marks[places[which], byte] = _SEVERAL
            bits[places] |= u4(1) << u4(w)
            times[places] = np.broadcast_to(clock, (len(places), size))

    def write(self, at: Array, size: int, mask: Array | None) -> Written:
        lanes = self._lanes(mask)
        found = self._write(at[lanes] // size, size, lanes)
        return Written(*(self._spread(lanes, each) for each in found))

    def _write(self, spot: Array, size: int, lanes: Array) -> tuple[Array, ...]:
        """``Written``, for each byte of ``lanes`` only."""
        row, warp = self.row[lanes], self.lanes.warp[lanes][:, None]
        mine, mark = self._clock(lanes)[:, None], self.lanes.lane_marks[1][lanes][:, None]
        writer, clock = self._of(self.writer, spot, size), self._of(self.write_clock, spot, size)
        wrote = clock > self.known[row[:, None], writer]
        lane_wrote = (writer == warp) & (clock == mine) & (self._of(self.write_lane, spot, size) != mark)
        read = self._unknown_reads(spot, size, row)
        lane_read = np.zeros_like(read)
        for w in np.unique(warp):
            here = warp[:, 0] == w
            fresh = (self._of(self.readers, spot[here], size) >> u4(w)) & u4(1) != 0
            fresh &= self.read_clock[w].reshape(-1, size)[spot[here]] == mine[here]
            lane_read[here] = fresh & (self._of(self.read_lane, spot[here], size) != mark[here])
        for notes, value in (
            (self.writer, warp.astype(u1)),
            (self.write_clock, mine),
            (self.write_lane, mark),
            (self.readers, np.zeros_like(warp)),
        ):
            notes.reshape(-1, size)[spot] = np.broadcast_to(value, (len(spot), size))
        at_once = self._of(self.writer, spot, size) != warp
        if at_once.any():  # the warp that wrote last, too
            at_once |= np.isin(spot, spot[at_once.any(1)])[:, None]
        return read, wrote, at_once, lane_read, lane_wrote

    def _unknown_reads(self, spot: Array, size: int, row: Array) -> Array:
        """[places, size]: whether a warp read there, and ``row`` (of each place) does not know of it."""
        bits = self._of(self.readers, spot, size)
        found = np.zeros(bits.shape, bool)
        for w in range(self.warps):
            reads = (bits >> u4(w)) & u4(1) != 0
            if reads.any():
                found |= reads & (self.read_clock[w].reshape(-1, size)[spot] > self.known[row, w][:, None])
        return found

    def copy(self, at: Array, size: int, lanes: Array, landed: bool) -> Array:
        """A cp.async of ``lanes`` begins to write there, or has: those where others are."""
        read, wrote, at_once, _, _ = self._write(at // size, size, lanes)
        found: Array = (read | wrote | at_once).any(1)
        return found

    # -- tensor copies and wgmma: chunks of 16 bytes --------------------------------------------------------
    def agent(self, number: int) -> int:
        """The actor that copies on a block's ``number``-th mbarrier are."""
        if number >= AGENTS:
            raise Unsupported([f"tensor copies on more than {AGENTS} mbarriers"])
        return self.warps + number

    def copy_in(self, place: Array, row: int, agent: int, clock: int) -> tuple[Array, Array]:
        """A tensor copy that warp ``row`` starts will write the chunks at ``place``: those that are read or
        written by somebody that the warp does not know of, and those that it stored to without a fence.
        """
        spot, rows = place // 16, np.full(len(place), row)
        writer, written = self._of(self.writer, spot, 16), self._of(self.write_clock, spot, 16)
        raced = ((written > self.known[row][writer]) | self._unknown_reads(spot, 16, rows)).any(1)
        unfenced = (self._of(self.stored, spot, 16) > self.fenced[row]).any(1)
        for notes, value in (
            (self.writer, agent),
            (self.write_clock, clock),
            (self.readers, 0),
            (self.stored, 0),
        ):
            notes.reshape(-1, 16)[spot] = value
        return raced, unfenced

    def read_by_group(self, place: Array, groups: Array) -> tuple[Array, Array]:
        """Chunks of 16 bytes [groups, chunks] that warpgroups read: which hold what one of its warps does not
        know of, and which were stored without a fence of theirs since.
        """
        rows = groups[:, None] * 4 + np.arange(4)
        spot = place // 16
        writer, clock = self._of(self.writer, spot, 16), self._of(self.write_clock, spot, 16)
        known = self.known[rows].min(1)  # of all four
        raced = (clock > known[np.arange(len(groups))[:, None, None], writer]).any(-1)
        unfenced = self._of(self.stored, spot, 16).max(-1) > self.fenced[rows].min(1)[:, None]
        self.group_has_read(place, groups)
        return raced.reshape(-1), unfenced.reshape(-1)

    def group_has_read(self, place: Array, groups: Array) -> None:
        """The warps of each group have read, up to now: wgmma reads until it has been waited for."""
        for of_group, group in zip(place // 16, groups, strict=True):
            for row in range(4 * group, 4 * group + 4):
                w = row % self.warps
                self.readers.reshape(-1, 16)[of_group] |= u4(1) << u4(w)
                self.read_clock[w].reshape(-1, 16)[of_group] = self.known[row, w]
            self.read_lane.reshape(-1, 16)[of_group] = _SEVERAL

    # -- what orders ----------------------------------------------------------------------------------------
    def meet(self, blocks: Array | None, here: Array | None) -> None:
        """The threads ``here`` of ``blocks`` (masks; None: all) met at a barrier."""
        everyone = np.ones((self.lanes.count, self.warps), bool)
        warps = everyone if here is None else here.reshape(self.lanes.count, self.warps, WARP).any(2)
        for block in range(self.lanes.count) if blocks is None else np.flatnonzero(blocks):
            rows = block * self.warps + np.flatnonzero(warps[block])
            self.learn(rows, self.known[rows].max(0))
            self.tick(rows)

    def meet_in_warps(self, mask: Array | None) -> None:
        """bar.warp.sync: lanes of a warp are ordered by a tick of its clock."""
        self.tick(np.unique(self.row if mask is None else self.row[mask]))

    def release(self, rows: Array) -> Array:
        """What warps know, for whoever waits for them; what they do from now on is not part of it."""
        known: Array = self.known[rows].max(0)
        self.tick(rows)
        return known

    def learn(self, rows: Array, known: Array) -> None:
        self.known[rows] = np.maximum(self.known[rows], known)

    def tick(self, rows: Array) -> None:
        own = rows % self.warps
        if (self.known[rows, own] == _LATEST).any():
            raise Unsupported(["more barriers than a clock counts"])
        self.known[rows, own] += u2(1)

    def fence(self, mask: Array | None) -> None:
        """What a warp's threads see written by now, its next wgmma or tensor copy sees as well."""
        self.fenced[np.unique(self.row if mask is None else self.row[mask])] = self.now

    def unfenced(self, at: Array, size: int) -> None:
        """Written by ordinary instructions."""
        self.now += 1
        self.stored.reshape(-1, size)[at // size] = self.now

    # -- small things ---------------------------------------------------------------------------------------
    def _lanes(self, mask: Array | None) -> Array:
        return np.arange(self.lanes.n) if mask is None else np.flatnonzero(mask)

    def _clock(self, lanes: Array) -> Array:
        return self.known[self.row[lanes], self.lanes.warp[lanes]]

    def _of(self, notes: Array, spot: Array, size: int) -> Array:
        """Those of the ``size`` bytes of each word."""
        return notes.reshape(-1, size)[spot]

    def _spread(self, lanes: Array, found: Array) -> Array:
        full = np.zeros(self.lanes.n, bool)
        full[lanes] = found.any(1)
        return full

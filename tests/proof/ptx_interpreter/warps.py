"""Instructions of a whole warp that touch no memory: shuffles (9.7.9.6), votes and bar.warp.sync (9.7.13)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_interpreter.faults import DIVERGENCE
from ptx_interpreter.lanes import WARP, Lanes, both
from ptx_interpreter.numbers import Array, i8, u4
from ptx_interpreter.shared_memory import SharedMemory


class Warps:
    def __init__(self, lanes: Lanes, shared: SharedMemory) -> None:
        self.lanes, self.shared = lanes, shared

    def whole(self, mask: Array | None, line: int, size: int = WARP) -> None:
        """``.aligned``: every lane of a warp (or of ``size`` lanes) executes the same instruction."""
        if mask is None:
            return
        groups = mask.reshape(-1, size)
        part = groups.any(1) & ~groups.all(1)
        if part.any():
            told = f"an instruction of {size} threads runs in part of them"
            self.lanes.report(DIVERGENCE, line, mask & np.repeat(part, size), told)

    def members(self, members: Array, mask: Array | None, line: int) -> None:
        """Lanes named in a member mask have to come (9.7.13.3)."""
        here = (np.ones(self.lanes.n, bool) if mask is None else mask).reshape(-1, WARP)
        words = (here.astype(u4) << np.arange(WARP, dtype=u4)).sum(1, dtype=u4)
        missing = both(mask, members & ~np.repeat(words, WARP) != 0)
        if missing.any():
            told = "waits for lanes of its warp that are elsewhere"
            self.lanes.report(DIVERGENCE, line, missing, told)

    def shuffle(
        self, mode: str, a: Array, b: Array, c: Array, members: Array, mask: Array | None, line: int
    ) -> tuple[Array, Array]:
        """The value of lane j of the segment that ``c`` describes, and whether j lies in it."""
        self.members(members, mask, line)
        lane = self.lanes.lane.astype(i8)
        b, clamp, segment = ((x & u4(31)).astype(i8) for x in (b, c, c >> u4(8)))
        bound = (lane & segment) | (clamp & ~segment)
        j = {
            "up": lane - b,
            "down": lane + b,
            "bfly": lane ^ b,
            "idx": (lane & segment) | (b & ~segment),
        }[mode]
        valid = j >= bound if mode == "up" else j <= bound
        j = np.where(valid, j, lane)
        origin = np.arange(self.lanes.n) - lane + j
        if mask is not None:
            told = "shuffles from a lane that is elsewhere"
            self.lanes.report(DIVERGENCE, line, mask & ~mask[origin], told)
        return a[origin], valid

    def vote(self, mode: str, p: Array, members: Array, mask: Array | None, line: int) -> Array:
        self.members(members, mask, line)
        active = (np.ones(self.lanes.n, bool) if mask is None else mask).reshape(-1, WARP)
        votes = p.reshape(-1, WARP) & active
        if mode == "ballot":
            return np.repeat((votes.astype(u4) << np.arange(WARP, dtype=u4)).sum(1, dtype=u4), WARP)
        counts, present = votes.sum(1), active.sum(1)
        answers = {"any": counts > 0, "all": counts == present, "uni": (counts == 0) | (counts == present)}
        return np.repeat(answers[mode], WARP)

    def reduce(
        self,
        combine: Callable[[Array, Array], Array],
        a: Array,
        members: Array,
        mask: Array | None,
        line: int,
    ) -> Array:
        """``combine`` of the values of all lanes of a warp."""
        self.members(members, mask, line)
        self.whole(mask, line)  # with some of the lanes as members it is not used
        rows = a.reshape(-1, WARP)
        made = rows[:, 0].copy()
        for k in range(1, WARP):
            made = combine(made, rows[:, k].copy())
        return np.repeat(made, WARP)

    def elect(self, members: Array, mask: Array | None, line: int) -> tuple[Array, Array]:
        """elect.sync (9.7.13.14): the leader, here the lowest member, and whether a lane is it."""
        self.members(members, mask, line)
        lowest = members & (~members + u4(1))
        leader = np.log2(np.maximum(lowest, u4(1)).astype(np.float64)).astype(u4)
        return leader, leader == self.lanes.lane

    def barrier(self, members: Array, mask: Array | None, line: int) -> None:
        self.members(members, mask, line)
        self.shared.order.meet_in_warps(mask)

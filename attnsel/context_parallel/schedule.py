"""What the ranks do, from the steps alone: kernel calls of each rank, and the bytes of each exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.params.options import EXCHANGES
from attnsel.selection.steps import (
    Band,
    KernelCall,
    Kind,
    RankLayout,
    RingSizes,
    gathered_parts,
    ring_parts,
    sampled_ranks,
    shifts,
)

_FLOAT32 = 4
EVERY_STEP = 1024
"""Up to here every step of a ring is planned."""


class StepCall(NamedTuple):
    """One kernel call. ``pairs``: visible pairs of a query and a key, per batch entry and head."""

    kind: Kind
    seqlen_q: int
    seqlen_kv: int
    pairs: int


class RankStep(NamedTuple):
    """A rank's calls for the keys of rank ``keys_of`` (None: for all keys). No calls: skipped.

    ``times``: of a long ring, how many steps one after the other are like this one, which is the first.
    """

    shift: int
    keys_of: int | None
    calls: tuple[StepCall, ...]
    times: int = 1

    def as_dict(self) -> dict[str, Any]:
        out = {**self._asdict(), "calls": [call._asdict() for call in self.calls]}
        if self.times == 1:
            del out["times"]
        return out


Phase = Literal["forward", "backward"]


class Message(NamedTuple):
    """Bytes that one rank sends at a time, ``times`` of them.

    hop to the next rank of the ring, gather one round of an all-gather, swap an all-to-all. ``hidden``: while
    a step computes, from step ``first`` on.
    """

    phase: Phase
    what: str
    way: Literal["hop", "gather", "swap"]
    bytes: int
    times: int = 1
    hidden: bool = False
    first: int = 0


@lru_cache(maxsize=256)
def steps_of(sizes: RingSizes, comm: str, rank: int) -> tuple[RankStep, ...]:
    """The steps of one rank of a ring, in the order in which keys arrive."""
    n = sizes.size
    if EXCHANGES[comm].keys == "gathered":
        return (RankStep(0, None, tuple(_call(part, sizes) for part in gathered_parts(sizes, rank))),)
    if n == 1:
        band = sizes.band
        pairs = _visible(sizes.seqlen_q, sizes.seqlen_kv, 0, band)
        return (RankStep(0, 0, (StepCall("whole", sizes.seqlen_q, sizes.seqlen_kv, pairs),)),)
    return tuple(_ring_step(sizes, rank, shift) for shift in shifts(sizes))


def _ring_step(sizes: RingSizes, rank: int, shift: int, times: int = 1) -> RankStep:
    owner = (rank - shift) % sizes.size
    calls = tuple(_call(part, sizes) for part in ring_parts(sizes, rank, owner))
    return RankStep(shift, owner, calls, times)


@lru_cache(maxsize=256)
def sampled_steps(sizes: RingSizes, comm: str) -> tuple[tuple[int, tuple[RankStep, ...]], ...]:
    """The ranks that are looked at, and the steps of each.

    In a ring of more than EVERY_STEP steps, those in which each of these ranks does what it did in the one
    before are one step, ``times`` of them. The ends of such a run are searched for, so that a step in its
    middle may be missed that is unlike those around it (at the edge of a window).
    """
    ranks = sampled_ranks(sizes.size)
    ring = EXCHANGES[comm].keys != "gathered" and sizes.size > 1
    needed = shifts(sizes) if ring else ()
    if len(needed) <= EVERY_STEP:
        return tuple((rank, steps_of(sizes, comm, rank)) for rank in ranks)
    runs = _runs(len(needed), lambda i: [_ring_step(sizes, rank, needed[i]).calls for rank in ranks])
    return tuple(
        (rank, tuple(_ring_step(sizes, rank, needed[first], times) for first, times in runs))
        for rank in ranks
    )


def _runs(count: int, calls_at: Callable[[int], Any]) -> list[tuple[int, int]]:
    """The first of steps that are alike and how many they are, at most about 2 * EVERY_STEP such runs. The
    first and the last step stand alone: messages begin and end there."""
    runs, first = [(0, 1)], 1
    while first < count - 1:
        here, reach = calls_at(first), 1
        while first + reach < count - 1 and calls_at(first + reach) == here:
            reach *= 2
        like, unlike = first + reach // 2, min(first + reach, count - 1)
        while unlike - like > 1:
            middle = (like + unlike) // 2
            like, unlike = (middle, unlike) if calls_at(middle) == here else (like, middle)
        if len(runs) > EVERY_STEP:  # nearly every step is different
            unlike = min(max(unlike, first + count // EVERY_STEP), count - 1)
        runs.append((first, unlike - first))
        first = unlike
    return [*runs, (count - 1, 1)]


def messages(p: AttentionParams, layout: RankLayout, n_steps: int) -> tuple[Message, ...]:
    """What one rank sends for one call of the module. ``n_steps``: of its ring.

    Keys and values travel in their dtype, and so does what all-to-alls bring to other heads; gradients that
    are summed on their way travel in float32 (context_parallel/passes.py).
    """
    item, b, n = ITEMSIZE[p.dtype], p.batch_size, p.cp_size
    rows_q, rows_kv = b * p.max_seqlen_q // n, b * p.max_seqlen_kv // n
    block = rows_kv * p.num_gqa_groups * (p.head_dim_qk + p.head_dim_v)  # K and V of one rank, elements
    out: list[Message] = []
    if layout.a2a > 1:
        q, o = rows_q * p.num_heads * p.head_dim_qk, rows_q * p.num_heads * p.head_dim_v
        whole, result = ((count * item * (layout.a2a - 1) // layout.a2a) for count in (q + block, o))
        out.append(Message("forward", "q, k and v for other heads", "swap", whole))
        out.append(Message("forward", "the output for its rows", "swap", result))
        if p.is_training:
            out.append(Message("backward", "the output's gradient for other heads", "swap", result))
            out.append(Message("backward", "dq, dk and dv for their rows", "swap", whole))
    if layout.gathers:
        others = layout.ring - 1
        out.append(Message("forward", "k and v to all", "gather", block * item, others))
        if p.is_training:
            out.append(Message("backward", "k and v to all", "gather", block * item, others))
            out.append(
                Message("backward", "dk and dv to be summed", "swap", block * _FLOAT32 * (layout.ring - 1))
            )
    elif layout.ring > 1 and n_steps > 1:
        out.append(Message("forward", "k and v to the next rank", "hop", block * item, n_steps - 1, True))
        if p.is_training:
            grads, hops = block * _FLOAT32, n_steps - 1
            out.append(Message("backward", "k and v to the next rank", "hop", block * item, hops, True))
            out.append(Message("backward", "dk and dv along with them", "hop", grads, hops, True, 1))
            out.append(Message("backward", "dk and dv home", "hop", grads))
    return tuple(out)


def _call(part: KernelCall, sizes: RingSizes) -> StepCall:
    m, n = len(part.q_rows), len(part.kv_rows)
    if part.kind == "full":
        return StepCall("full", m, n, m * n)
    if part.kind == "diagonal":
        return StepCall("diagonal", m, n, m * (m + 1) // 2)
    return StepCall(part.kind, m, n, _visible(m, n, part.kv[0].offset - part.q[0].offset, sizes.band))


def _visible(m: int, n: int, shift: int, band: Band) -> int:
    """Pairs (i < m, j < n) with ``lo <= shift + j - i <= hi``."""
    above = m * n if band.hi is None else _at_most(m, n, band.hi - shift)
    below = 0 if band.lo is None else _at_most(m, n, band.lo - shift - 1)
    return max(0, above - below)


def _at_most(m: int, n: int, t: int) -> int:
    """Pairs (i < m, j < n) with j - i <= t: row i has clamp(i + t + 1, 0, n) of them."""
    first = max(0, -t)  # rows before it have none
    full = max(first, min(m, n - 1 - t))  # rows from here on have n
    if first >= m:
        return 0
    ramp = full - first
    return ramp * (first + t + 1) + ramp * (ramp - 1) // 2 + (m - full) * n

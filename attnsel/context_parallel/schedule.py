"""What the ranks do, from the steps alone: kernel calls of each rank, and the bytes of each exchange."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from attnsel.context_parallel.exchanges import EXCHANGES
from attnsel.context_parallel.geometry import Band, Kind, Part, RingSizes, gathered_parts, ring_parts, shifts
from attnsel.context_parallel.step import RankLayout
from attnsel.params import ITEMSIZE, AttentionParams

_FLOAT32 = 4


class StepCall(NamedTuple):
    """One kernel call. ``pairs``: visible pairs of a query and a key, per batch entry and head."""

    kind: Kind
    seqlen_q: int
    seqlen_kv: int
    pairs: int


class RankStep(NamedTuple):
    """A rank's calls for the keys of rank ``keys_of`` (None: for all keys). No calls: skipped."""

    shift: int
    keys_of: int | None
    calls: tuple[StepCall, ...]


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
    out = []
    for shift in shifts(sizes):
        owner = (rank - shift) % n
        out.append(
            RankStep(shift, owner, tuple(_call(part, sizes) for part in ring_parts(sizes, rank, owner)))
        )
    return tuple(out)


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


def _call(part: Part, sizes: RingSizes) -> StepCall:
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

"""What the ranks do, from the steps alone: kernel calls of each rank, and the bytes of each exchange."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from attnsel.context_parallel.steps import Band, Part, Sizes, gathered_parts, ring_parts
from attnsel.params import ITEMSIZE, AttentionParams, CpCommType

EVERY_RANK = 16
"""Up to here all ranks are looked at; of more, those at the ends and in the middle, which differ most."""

_FLOAT32 = 4


class Call(NamedTuple):
    """One kernel call. ``pairs``: visible pairs of a query and a key, per batch entry and head."""

    kind: str
    seqlen_q: int
    seqlen_kv: int
    pairs: int


class Step(NamedTuple):
    """A rank's calls for the keys of rank ``keys_of`` (None: for all keys). No calls: skipped."""

    shift: int
    keys_of: int | None
    calls: tuple[Call, ...]


class Layout(NamedTuple):
    """``a2a`` ranks exchange heads for rows, ``ring`` such groups exchange keys; their product is cp_size."""

    comm: CpCommType
    a2a: int
    ring: int


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


def layouts(p: AttentionParams, comm: CpCommType) -> list[Layout]:
    """How cp_size ranks may be laid out for an exchange; several for a2a+p2p, the widest a2a first."""
    n = p.cp_size
    if comm == "a2a":
        return [Layout(comm, n, 1)]
    if comm != "a2a+p2p":
        return [Layout(comm, 1, n)]
    inner = [a for a in range(n // 2, 1, -1) if not n % a]
    fit = [a for a in inner if not p.num_heads % a and not p.num_gqa_groups % a]
    return [Layout(comm, a, n // a) for a in fit]


def sizes_of(p: AttentionParams, layout: Layout, offsets: bool) -> Sizes:
    """What the steps depend on, for kernels with or without ``offsets``."""
    left, right = p.window_size
    if p.causal:
        right = 0
    shift = p.max_seqlen_kv - p.max_seqlen_q if p.bottom_right_diagonal and not p.padding else 0
    band = Band(None if left < 0 else shift - left, None if right < 0 else shift + right)
    absolute = p.core_attention_bias_type == "alibi" or p.dropout
    return Sizes(
        p.max_seqlen_q, p.max_seqlen_kv, layout.ring, band, offsets, absolute=absolute, apart=p.has_bias
    )


def shown_ranks(size: int) -> tuple[int, ...]:
    if size <= EVERY_RANK:
        return tuple(range(size))
    return tuple(sorted({0, 1, size // 2 - 1, size // 2, size - 2, size - 1}))


@lru_cache(maxsize=256)
def steps_of(sizes: Sizes, comm: str, rank: int) -> tuple[Step, ...]:
    """The steps of one rank of a ring, in the order in which keys arrive."""
    n = sizes.size
    if comm == "all_gather":
        return (Step(0, None, tuple(_call(part, sizes) for part in gathered_parts(sizes, rank))),)
    if n == 1:
        band = sizes.band
        pairs = _visible(sizes.seqlen_q, sizes.seqlen_kv, 0, band)
        return (Step(0, 0, (Call("whole", sizes.seqlen_q, sizes.seqlen_kv, pairs),)),)
    out = []
    for shift in needed_shifts(sizes):
        owner = (rank - shift) % n
        out.append(Step(shift, owner, tuple(_call(part, sizes) for part in ring_parts(sizes, rank, owner))))
    return tuple(out)


@lru_cache(maxsize=64)
def needed_shifts(sizes: Sizes) -> tuple[int, ...]:
    """The shifts at which some rank has work; keys are not sent on to the others."""
    n = sizes.size
    ranks = shown_ranks(n)
    return (0, *(d for d in range(1, n) if any(ring_parts(sizes, r, (r - d) % n) for r in ranks)))


def messages(p: AttentionParams, layout: Layout, shifts: int) -> tuple[Message, ...]:
    """What one rank sends for one call of the module. ``shifts``: steps of its ring.

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
    if layout.ring > 1 and layout.comm == "all_gather":
        out.append(Message("forward", "k and v to all", "gather", block * item, n - 1))
        if p.is_training:
            out.append(Message("backward", "k and v to all", "gather", block * item, n - 1))
            out.append(Message("backward", "dk and dv to be summed", "swap", block * _FLOAT32 * (n - 1)))
    elif layout.ring > 1 and shifts > 1:
        out.append(Message("forward", "k and v to the next rank", "hop", block * item, shifts - 1, True))
        if p.is_training:
            grads, hops = block * _FLOAT32, shifts - 1
            out.append(Message("backward", "k and v to the next rank", "hop", block * item, hops, True))
            out.append(Message("backward", "dk and dv along with them", "hop", grads, hops, True, 1))
            out.append(Message("backward", "dk and dv home", "hop", grads))
    return tuple(out)


def _call(part: Part, sizes: Sizes) -> Call:
    m, n = len(part.q_rows), len(part.kv_rows)
    if part.kind == "full":
        return Call("full", m, n, m * n)
    if part.kind == "diagonal":
        return Call("diagonal", m, n, m * (m + 1) // 2)
    return Call(part.kind, m, n, _visible(m, n, part.kv[0].offset - part.q[0].offset, sizes.band))


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

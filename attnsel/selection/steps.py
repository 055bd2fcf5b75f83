"""What a step of context parallelism asks of a kernel: the one place where such a question is made.

The question about the whole sequence meets the rules of context parallelism; then each kind of step is a
question of its own, and a candidate must be eligible for all of them: it is the steps that a kernel gets to
see. Planning and running both ask here. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from math import gcd
from typing import Any, Literal, NamedTuple

from attnsel.base.records import json_fields
from attnsel.params import AttentionParams
from attnsel.params.options import EXCHANGES
from attnsel.verdicts.reasons import Candidate, Reason

# --------------------------------------------------------------------------------------------------------
# Which kernel calls a rank makes at each step: full ones, diagonal ones, ones that need offsets, or none.
#
# A sequence is cut into ``2 * size`` chunks and rank r holds chunks r and ``2 * size - 1 - r``, in this
# order. A step is a rank's queries against the keys of one rank (or, with all_gather, of all). Positions
# count from the start of the whole sequence; a query i sees a key j where ``lo <= j - i <= hi``.
#
# No torch here: planning reads these steps too.


Kind = Literal["full", "diagonal", "offset", "whole"]

EVERY_RANK = 16
"""Up to here all ranks are looked at."""

_EVERY_CHUNK = 256
"""Up to here a rank that gathers keys looks at every chunk of them."""


class Piece(NamedTuple):
    """Rows that lie together in the sequence as well as in a rank's tensor."""

    start: int  # in the rank's tensor
    length: int
    offset: int  # in the sequence


class KernelCall(NamedTuple):
    """One kernel call: neighbouring pieces of queries against neighbouring pieces of keys.

    full      every query sees every key
    diagonal  causal from the top left corner, queries and keys equally many
    offset    only a kernel that takes both offsets gets this right
    whole     the call as it was asked for: the rank holds all rows
    """

    q: tuple[Piece, ...]
    kv: tuple[Piece, ...]
    kind: Kind

    @property
    def q_rows(self) -> range:
        return range(self.q[0].start, self.q[-1].start + self.q[-1].length)

    @property
    def kv_rows(self) -> range:
        return range(self.kv[0].start, self.kv[-1].start + self.kv[-1].length)


class Band(NamedTuple):
    """Visible distances ``j - i``; None is no bound. The shift of a bottom-right diagonal is included."""

    lo: int | None
    hi: int | None


class RingSizes(NamedTuple):
    """What the steps of a ring depend on. Lengths are those of the whole sequence.

    offsets: the kernel takes offsets. absolute: scores depend on positions (ALiBi, dropout), so every part
    needs them. apart: a part must lie together in the sequence (a bias is indexed by it).
    """

    seqlen_q: int
    seqlen_kv: int
    size: int
    band: Band
    offsets: bool
    absolute: bool = False
    apart: bool = False


def chunks(rows: int, rank: int, size: int) -> tuple[Piece, Piece] | tuple[Piece]:
    """The pieces of a rank that holds ``rows`` rows. An odd number of rows is one piece: order says nothing
    there (rule CP001 holds all others to even numbers)."""
    if rows % 2:
        return (Piece(0, rows, rank * rows),)
    half = rows // 2
    return Piece(0, half, rank * half), Piece(half, half, (2 * size - 1 - rank) * half)


def joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Pieces that continue each other in both orders, as one."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if last and (last.start + last.length, last.offset + last.length) == (piece.start, piece.offset):
            out[-1] = last._replace(length=last.length + piece.length)
        else:
            out.append(piece)
    return tuple(out)


@lru_cache(maxsize=8192)
def ring_parts(sizes: RingSizes, rank: int, owner: int) -> tuple[KernelCall, ...]:
    """The calls of ``rank`` for the keys of ``owner``; none where every pair is masked."""
    q = chunks(sizes.seqlen_q // sizes.size, rank, sizes.size)
    kv = chunks(sizes.seqlen_kv // sizes.size, owner, sizes.size)
    return _parts(sizes, q, kv)


@lru_cache(maxsize=8192)
def gathered_parts(sizes: RingSizes, rank: int) -> tuple[KernelCall, ...]:
    """The calls of ``rank`` for all keys in the sequence's order."""
    q = chunks(sizes.seqlen_q // sizes.size, rank, sizes.size)
    n = 2 * sizes.size
    half, rest = divmod(sizes.seqlen_kv, n)
    if rest or sizes.offsets:  # neighbouring pieces: they are joined
        kv: tuple[Piece, ...] = (Piece(0, sizes.seqlen_kv, 0),)
    else:
        cuts = _cuts(sizes, q, half) if sizes.size > _EVERY_CHUNK else range(n + 1)
        kv = tuple(Piece(i * half, (j - i) * half, i * half) for i, j in pairwise(cuts))
    return _parts(sizes, q, kv)


def _cuts(sizes: RingSizes, q: Sequence[Piece], half: int) -> Sequence[int]:
    """Where chunks of keys begin, without those between chunks that these queries see wholly or not at all,
    whose calls would be merged."""
    n, (lo, hi) = 2 * sizes.size, sizes.band
    if sizes.absolute or sizes.apart or not half:
        return range(n + 1)
    cuts = {0, n}
    for piece in q:
        a, last = piece.offset, piece.offset + piece.length - 1
        if lo is not None:  # chunks that some of these rows see from their middle on
            cuts.update(range((a + lo) // half, -(-(last + lo) // half) + 1))
        if hi is not None:
            cuts.update(range((a + hi + 1) // half, (last + hi) // half + 2))
    return sorted(cut for cut in cuts if 0 <= cut <= n)


def shifts(sizes: RingSizes) -> tuple[int, ...]:
    """How far keys travel: at shift d, rank r has those of rank r - d. Shifts that no rank needs are left
    out, which is how a window saves messages; 0 always stands first."""
    lo, hi = sizes.band
    if lo is None and (hi is None or (hi >= 0 and sizes.seqlen_q == sizes.seqlen_kv)):
        return tuple(range(sizes.size))
    return _needed(sizes._replace(offsets=False, absolute=False, apart=False))


@lru_cache(maxsize=1024)
def _needed(sizes: RingSizes) -> tuple[int, ...]:
    """Chunk by chunk of the queries, the chunks of the keys that some of its rows see, and who holds them:
    of neighbouring chunks neighbouring ranks, up to the last and then back."""
    n, (lo, hi) = sizes.size, sizes.band
    pieces = chunks(sizes.seqlen_kv // n, 0, n)
    length, count = pieces[0].length, n * len(pieces)
    found = bytearray(b"\1" + bytes(n - 1))

    def need(low: int, high: int) -> None:
        """Shifts from ``low`` up to ``high``, which may lie around 0."""
        for first, last in ((max(low, 0), high), (low + n, min(high, 0) + n)):
            if first < last:
                found[first:last] = b"\1" * (last - first)

    for rank in range(n):
        for q in chunks(sizes.seqlen_q // n, rank, n):
            if not q.length or not length:
                continue
            first = 0 if lo is None else max(0, (q.offset + lo) // length)
            last = count if hi is None else min(count, (q.offset + q.length - 1 + hi) // length + 1)
            if first < min(last, n):
                need(rank - min(last, n) + 1, rank - first + 1)
            if max(first, n) < last:  # chunk c is the second one of rank 2n - 1 - c
                need(rank - 2 * n + 1 + max(first, n), rank - 2 * n + 1 + last)
        if 0 not in found:
            break
    return tuple(shift for shift, needed in enumerate(found) if needed)


def sampled_ranks(size: int) -> tuple[int, ...]:
    """The ranks that are looked at: all, or of many the first, the last and those in the middle, which differ
    most."""
    if size <= EVERY_RANK:
        return tuple(range(size))
    return tuple(sorted({0, 1, size // 2 - 1, size // 2, size - 2, size - 1}))


def shapes(sizes: RingSizes, comm: str) -> tuple[tuple[int, int, Kind], ...]:
    """(queries, keys, kind) of every call that some rank makes, most pairs first."""
    n, (lo, hi) = sizes.size, sizes.band
    q, kv = sizes.seqlen_q, sizes.seqlen_kv
    if n == 1:
        return ((q, kv, "whole"),)
    alike = lo is None and (hi is None or (hi == 0 and q == kv))
    if not alike or q % (2 * n) or kv % (2 * n):
        return _shapes(sizes, comm)
    # Chunks of two rows tell a diagonal from a full pair; the others are like them, so they are remembered.
    rows = 4 * n
    few = _shapes(sizes._replace(seqlen_q=rows, seqlen_kv=rows), comm)
    return tuple((m * q // rows, k * kv // rows, kind) for m, k, kind in few)


@lru_cache(maxsize=1024)
def _shapes(sizes: RingSizes, comm: str) -> tuple[tuple[int, int, Kind], ...]:
    ranks = sampled_ranks(sizes.size)
    found: dict[tuple[int, int, Kind], None] = {}
    for rank in ranks:
        owners = (None,) if EXCHANGES[comm].keys == "gathered" else ranks
        for owner in owners:
            calls = gathered_parts(sizes, rank) if owner is None else ring_parts(sizes, rank, owner)
            for part in calls:
                found[len(part.q_rows), len(part.kv_rows), part.kind] = None
    return tuple(sorted(found, key=lambda s: (-s[0] * s[1], s)))


# ---- one step ---------------------------------------------------------------------------------------


def _parts(sizes: RingSizes, q: Sequence[Piece], kv: Sequence[Piece]) -> tuple[KernelCall, ...]:
    if sizes.offsets:
        q, kv = joined(q), joined(kv)
    parts = [part for a in q for c in kv if (part := _pair(a, c, sizes)) is not None]
    if sizes.absolute or sizes.apart:
        return tuple(parts)
    return tuple(_merge_full(_merge_diagonal(parts)))


def _pair(q: Piece, kv: Piece, sizes: RingSizes) -> KernelCall | None:
    """What of two pieces is visible; the keys of a call with offsets are cut to those that are."""
    lo, hi = sizes.band
    a, m, c, n = q.offset, q.length, kv.offset, kv.length
    nearest, farthest = c - (a + m - 1), c + n - 1 - a
    if m == 0 or n == 0 or (lo is not None and farthest < lo) or (hi is not None and nearest > hi):
        return None
    left = lo is not None and nearest < lo
    right = hi is not None and farthest > hi
    if not sizes.absolute:
        if not left and not right:
            return KernelCall((q,), (kv,), "full")
        if not left and c - a == hi and m == n:
            return KernelCall((q,), (kv,), "diagonal")
    first = 0 if lo is None else max(0, a + lo - c)
    last = n if hi is None else min(n, a + m + hi - c)
    return KernelCall((q,), (Piece(kv.start + first, last - first, c + first),), "offset")


def _merge_diagonal(parts: list[KernelCall]) -> list[KernelCall]:
    """Two diagonals and the full call between them are one diagonal of twice the length."""
    diagonals = [part for part in parts if part.kind == "diagonal"]
    for one, two in pairwise(diagonals):
        between = KernelCall(two.q, one.kv, "full")
        if _adjacent(one.q, two.q) and _adjacent(one.kv, two.kv) and between in parts:
            rest = [part for part in parts if part not in (one, two, between)]
            return _merge_diagonal([KernelCall(one.q + two.q, one.kv + two.kv, "diagonal"), *rest])
    return parts


def _merge_full(parts: list[KernelCall]) -> list[KernelCall]:
    """Neighbouring full calls as one: first those of the same queries, then those over the same keys."""
    out: list[KernelCall] = []
    for part in parts:
        last = out[-1] if out else part
        if out and last.kind == part.kind == "full" and last.q == part.q and _adjacent(last.kv, part.kv):
            out[-1] = KernelCall(part.q, last.kv + part.kv, "full")
        else:
            out.append(part)
    rows: list[KernelCall] = []
    for part in out:
        for i, one in enumerate(rows):
            if one.kind == part.kind == "full" and one.kv == part.kv and _adjacent(one.q, part.q):
                rows[i] = KernelCall(one.q + part.q, part.kv, "full")
                break
        else:
            rows.append(part)
    return rows


def _adjacent(one: tuple[Piece, ...], two: tuple[Piece, ...]) -> bool:
    return one[-1].start + one[-1].length == two[0].start


class RankLayout(NamedTuple):
    """``a2a`` ranks exchange heads for rows, ``ring`` such groups exchange keys; their product is cp_size."""

    comm: str
    a2a: int
    ring: int

    @property
    def gathers(self) -> bool:
        """Whether each of several groups gathers the keys of all."""
        return self.ring > 1 and EXCHANGES[self.comm].keys == "gathered"


class StepShape(NamedTuple):
    """Rows of queries and keys of a kernel call, and its kind (see step_geometry.py)."""

    seqlen_q: int
    seqlen_kv: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind} {self.seqlen_q}×{self.seqlen_kv}"


@json_fields(
    "candidate",
    ("step", lambda r: {name: getattr(r.step, name) for name in ("kind", "seqlen_q", "seqlen_kv")}),
    "reasons",
)
class StepRefusal(NamedTuple):
    """Why a step of this shape refuses a candidate that stands for the whole."""

    candidate: str
    step: StepShape
    reasons: tuple[Reason, ...]

    @property
    def noted_reasons(self) -> tuple[Reason, ...]:
        """The reasons, with the step beside each."""
        return tuple(reason.noted(f"in a step that is {self.step}") for reason in self.reasons)


Judge = Callable[[str, AttentionParams], "Candidate"]
"""``judge(name, p)``: a candidate's verdict on a step, which is a question without ranks."""


def layouts(p: AttentionParams) -> list[RankLayout]:
    """How cp_size ranks may be laid out for an exchange; several for a nested one, the widest a2a first."""
    n, comm = p.cp_size, p.cp_comm_type
    record = EXCHANGES[comm]
    if not record.nested:
        return [RankLayout(comm, n, 1) if record.swaps_heads else RankLayout(comm, 1, n)]
    common = gcd(n, p.num_heads, p.num_gqa_groups)
    return [RankLayout(comm, a, n // a) for a in range(min(n // 2, common), 1, -1) if not common % a]


def merges_parts(p: AttentionParams, layout: RankLayout) -> bool:
    """Whether results of parts are merged, if only with a sink."""
    return layout.ring > 1 or p.softmax_type != "vanilla"


def sizes_of(p: AttentionParams, layout: RankLayout, offsets: bool) -> RingSizes:
    """What the steps depend on, for kernels with or without ``offsets``."""
    left, right = p.window_size
    shift = p.max_seqlen_kv - p.max_seqlen_q if p.bottom_right_diagonal and not p.padding else 0
    return RingSizes(
        p.max_seqlen_q,
        p.max_seqlen_kv,
        layout.ring,
        Band(None if left < 0 else shift - left, None if right < 0 else shift + right),
        offsets,
        absolute=p.core_attention_bias_type == "alibi" or p.dropout,
        apart=p.has_bias,
    )


def step_shapes(p: AttentionParams, layout: RankLayout, offsets: bool) -> tuple[StepShape, ...]:
    """The different calls that the ranks make, most pairs first."""
    return tuple(StepShape(*shape) for shape in shapes(sizes_of(p, layout, offsets), layout.comm))


def step_question(p: AttentionParams, layout: RankLayout, step: StepShape) -> AttentionParams:
    """One call as a question: its lengths and mask, a rank's heads. Sinks are added in the merge."""
    heads = p.num_heads // layout.a2a
    changes: dict[str, Any] = {
        "cp_size": 1,
        "num_heads": heads,
        "num_gqa_groups": p.num_gqa_groups // layout.a2a,
        "max_seqlen_q": step.seqlen_q,
        "max_seqlen_kv": step.seqlen_kv,
        "softmax_type": "vanilla",
        "return_lse": p.return_lse or merges_parts(p, layout),
    }
    if p.qkv_format == "thd":
        changes["pad_between_seqs"] = True  # a rank's rows of a sequence are chunks, filled or not
    if p.alibi_slopes_shape is not None:
        changes["alibi_slopes_shape"] = (*p.alibi_slopes_shape[:-1], heads)
    if step.kind in ("full", "diagonal"):
        causal = step.kind == "diagonal"
        base = "padding_causal" if p.padding else "causal"
        changes |= {
            "attn_mask_type": base if causal else ("padding" if p.padding else "no_mask"),
            "window_size": (-1, 0) if causal else (-1, -1),
            "bottom_right_diagonal": not causal,
        }
    elif step.kind == "offset":
        changes |= {
            "attn_mask_type": p.attn_mask_type.replace("_bottom_right", ""),
            "bottom_right_diagonal": not p.causal,
        }
    return p.rewritten(**changes)


def refused_step(
    name: str, offsets: bool, p: AttentionParams, layout: RankLayout, judge: Judge
) -> StepRefusal | None:
    """The first step that refuses a candidate; None where every step takes it."""
    for step in step_shapes(p, layout, offsets):
        seen = judge(name, step_question(p, layout, step))
        if seen.verdict == "refused":
            return StepRefusal(name, step, seen.reasons)
    return None


def steps_against(name: str, offsets: bool, p: AttentionParams, judge: Judge) -> StepRefusal | None:
    """Why a candidate is refused in the steps of every layout that the ranks may have."""
    first: StepRefusal | None = None
    for layout in layouts(p):
        refusal = refused_step(name, offsets, p, layout, judge)
        if refusal is None:
            return None
        first = first or refusal
    return first

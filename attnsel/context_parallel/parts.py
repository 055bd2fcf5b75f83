"""Parts of steps as kernel calls: which rows, columns, lengths and offsets each of them gets.

Sequences that are cut alike share a slot. A dense batch is one slot, but where its diagonals differ. Packed
sequences are one slot as long as the same chunks of all of them are visible; then a piece counts chunks, of
whatever length they are in each sequence. Otherwise those of equal lengths share one, and in the calls for a
slot the other sequences are empty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.selection.steps import Band, KernelCall, Piece, RingSizes

CHUNK = 2  # what the pieces of a slot "in_chunks" count per chunk


class Slot(NamedTuple):
    sizes: RingSizes
    shift: int = 0  # of its diagonal
    only: Tensor | None = None  # bool [b]; None: all sequences
    in_chunks: bool = False  # pieces count chunks instead of rows


@dataclass(frozen=True)
class Batch:
    """One rank's call, after heads were exchanged: rows in ring order, this rank's heads.

    lengths_*: int32 [b] real rows of the whole sequences, or None; starts_*: int32 [b + 1] where packed ones
    start in this rank's rows, gaps included.
    """

    spec: Spec
    size: int  # of the ring
    slots: tuple[Slot, ...]
    lengths_q: Tensor | None = None
    lengths_kv: Tensor | None = None
    starts_q: Tensor | None = None
    starts_kv: Tensor | None = None
    starts_all: Tensor | None = None  # starts of gathered keys
    head_offset: int = 0  # this rank's first query head among all
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    bounds: tuple[int | None, int | None] = (None, None)  # longest packed sequences, where they are known

    @property
    def merges(self) -> bool:
        """Whether results of parts are merged, if only with a sink."""
        return self.size > 1 or self.spec.softmax_type != "vanilla"

    def spec_of(self, slot: Slot, part: KernelCall) -> Spec:
        """Sinks stay out of parts: they are added when these are merged."""
        spec = replace(
            self.spec,
            softmax_type="vanilla",
            need_lse=self.merges or self.spec.need_lse,
            head_offset=self.head_offset if self.spec.dropout_p else 0,
        )
        if part.kind == "whole":
            return spec
        if part.kind != "offset":
            right = 0 if part.kind == "diagonal" else -1
            return replace(spec, bottom_right=False, window_left=-1, window_right=right)
        q, kv = part.q[0].offset, part.kv[0].offset
        if spec.dropout_p and slot.shift:
            # Dropout counts real positions, so the shift goes into the bound (rule CP015 keeps it one).
            hi = slot.sizes.band.hi
            return replace(
                spec, bottom_right=False, window_right=-1 if hi is None else hi, q_offset=q, kv_offset=kv
            )
        return replace(spec, bottom_right=False, q_offset=q + slot.shift, kv_offset=kv)

    def inputs(
        self,
        slot: Slot,
        part: KernelCall,
        qkv: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        *,
        gathered: bool,
    ) -> Inputs:
        """The part's tensors; packed ones stay whole and say by their starts what is meant."""
        q, k, v = qkv
        if part.kind == "whole":
            return self._whole(q, k, v, bias)
        if self.spec.packed:
            return self._packed(slot, part, qkv, gathered)
        rows, cols = part.q_rows, part.kv_rows
        real_q = _real(self.lengths_q, part.q, slot, None)
        return self._common(
            q[:, :, rows.start : rows.stop],
            k[:, :, cols.start : cols.stop],
            v[:, :, cols.start : cols.stop],
            bias=None if bias is None else bias[pairs_of(bias, part)],
            seqlens_q=real_q,
            seqlens_kv=real_q if self._alike(part) else _real(self.lengths_kv, part.kv, slot, None),
        )

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Inputs:
        if not self.spec.packed:
            return self._common(q, k, v, bias=bias, seqlens_q=self.lengths_q, seqlens_kv=self.lengths_kv)
        assert self.lengths_q is not None
        assert self.lengths_kv is not None
        return self._common(
            q,
            k,
            v,
            cu_seqlens_q=_boundaries(self.lengths_q),
            cu_seqlens_kv=_boundaries(self.lengths_kv),
            cu_seqlens_q_padded=self.starts_q,
            cu_seqlens_kv_padded=self.starts_kv,
            max_seqlen_q=self.bounds[0],
            max_seqlen_kv=self.bounds[1],
        )

    def _packed(
        self, slot: Slot, part: KernelCall, qkv: tuple[Tensor, Tensor, Tensor], gathered: bool
    ) -> Inputs:
        assert self.starts_q is not None
        assert self.starts_kv is not None
        starts_kv, size_kv = (self.starts_all, 1) if gathered else (self.starts_kv, self.size)
        assert starts_kv is not None
        sides = []
        for lengths, starts, pieces, size in (
            (self.lengths_q, self.starts_q, part.q, self.size),
            (self.lengths_kv, starts_kv, part.kv, size_kv),
        ):
            chunk = starts.diff() * size // (2 * self.size) if slot.in_chunks else None
            real = _real(lengths, pieces, slot, chunk)
            assert real is not None
            first = pieces[0].start if chunk is None else pieces[0].start // CHUNK * chunk
            at = torch.cat([starts[:-1] + first, starts[-1:]]).int()
            sides.append((_boundaries(real), at))
        (cu_q, at_q), (cu_kv, at_kv) = sides
        if self._alike(part):
            cu_kv = cu_q
        longest = self.bounds if slot.in_chunks else (len(part.q_rows), len(part.kv_rows))
        return self._common(
            *qkv,
            cu_seqlens_q=cu_q,
            cu_seqlens_kv=cu_kv,
            cu_seqlens_q_padded=at_q,
            cu_seqlens_kv_padded=at_kv,
            max_seqlen_q=longest[0],
            max_seqlen_kv=longest[1],
        )

    def _alike(self, part: KernelCall) -> bool:
        """On the diagonal a sequence has as many queries as keys, which one tensor tells a kernel."""
        return part.kind == "diagonal" and self.lengths_q is self.lengths_kv

    def _common(self, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Inputs:
        seed = self.dropout_seed
        offset = None if seed is None else torch.zeros((), dtype=torch.int64, device=q.device)
        made = Inputs(q, k, v, alibi_slopes=self.alibi_slopes, dropout_seed=seed, dropout_offset=offset)
        return made._replace(**others)


def whole_part(q: Tensor, k: Tensor, packed: bool) -> KernelCall:
    rows, cols = (q.shape[0], k.shape[0]) if packed else (q.shape[2], k.shape[2])
    return KernelCall((Piece(0, rows, 0),), (Piece(0, cols, 0),), "whole")


def pairs_of(bias: Tensor, part: KernelCall) -> tuple[slice, ...]:
    """Where a part's pairs lie in a bias [.., rows of this rank, columns of the whole sequence]."""
    rows, first, last = part.q_rows, part.kv[0].offset, part.kv[-1].offset + part.kv[-1].length
    return (
        slice(None),
        slice(None),
        slice(rows.start, rows.stop) if bias.shape[2] != 1 else slice(None),
        slice(first, last) if bias.shape[3] != 1 else slice(None),
    )


def _boundaries(lengths: Tensor) -> Tensor:
    """int32 [b + 1] from [b]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()


def _real(
    lengths: Tensor | None, pieces: tuple[Piece, ...], slot: Slot, chunk: Tensor | None
) -> Tensor | None:
    """int32 [b]: how many real rows these pieces have. They come first: later pieces are later rows."""
    if lengths is None:
        return None
    total = torch.zeros_like(lengths)
    for piece in pieces:
        first, most = torch.tensor(piece.offset), torch.tensor(piece.length)
        if chunk is not None:
            first, most = piece.offset // CHUNK * chunk, piece.length // CHUNK * chunk
        total += torch.minimum((lengths - first.to(lengths)).clamp_(min=0), most.to(lengths))
    return total if slot.only is None else total * slot.only


# ---- slots ------------------------------------------------------------------------------------------


def chunk_sizes(sizes: RingSizes) -> RingSizes:
    """The same steps with chunks of two rows, the fewest that tell a diagonal from a full pair."""
    n = 2 * sizes.size * CHUNK
    hi = sizes.band.hi
    band = Band(None, None if hi is None else 0)
    return sizes._replace(seqlen_q=n, seqlen_kv=n, band=band, offsets=False)


def slots_of(
    sizes: RingSizes,
    spec: Spec,
    alike: bool,
    lengths: tuple[Tensor | None, Tensor | None],
    padded: tuple[Tensor | None, Tensor | None],
) -> tuple[Slot, ...]:
    """``alike``: queries and keys are cut by the very same lengths. ``padded``: [b] rows of packed sequences.

    Reads lengths back where a part depends on them: packed sequences under anything but a plain mask, and
    bottom-right diagonals of padded ones.
    """
    left, right, packed = spec.window_left, spec.window_right, spec.packed
    if sizes.size == 1:
        return (Slot(sizes),)
    plain = left < 0 and right in (-1, 0) and not sizes.absolute
    if packed and plain and (right < 0 or (alike and not spec.bottom_right)):
        return (Slot(chunk_sizes(sizes), in_chunks=True),)
    anchored = spec.bottom_right and (left >= 0 or right >= 0 or sizes.absolute)
    if not packed and (lengths[0] is None or not anchored):
        shift = sizes.seqlen_kv - sizes.seqlen_q if anchored else 0
        return (Slot(_shifted(sizes, spec, shift), shift),)
    real_q, real_kv = (_listed(t) for t in lengths)
    room_q, room_kv = (_listed(t) for t in padded)
    cuts: dict[tuple[int, int, int], list[int]] = {}
    for n, (len_q, len_kv) in enumerate(zip(real_q, real_kv, strict=True)):
        rows, cols = (room_q[n], room_kv[n]) if packed else (sizes.seqlen_q, sizes.seqlen_kv)
        cuts.setdefault((rows, cols, len_kv - len_q if anchored else 0), []).append(n)
    slots = []
    for (rows, cols, shift), members in cuts.items():
        only = torch.zeros(len(real_q), dtype=torch.bool)
        only[members] = True
        assert lengths[0] is not None
        cut = _shifted(sizes._replace(seqlen_q=rows, seqlen_kv=cols), spec, shift)
        slots.append(Slot(cut, shift, only.to(lengths[0].device)))
    return tuple(slots)


def _shifted(sizes: RingSizes, spec: Spec, shift: int) -> RingSizes:
    left, right = spec.window_left, spec.window_right
    return sizes._replace(band=Band(None if left < 0 else shift - left, None if right < 0 else shift + right))


def _listed(t: Tensor | None) -> list[int]:
    return [] if t is None else t.tolist()


# --------------------------------------------------------------------------------------------------------
# Partial results over different keys, merged by their log-sum-exp in float32 (float64 for float64).


NEG_INF = float("-inf")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class RunningMerge:
    """out and lse over the keys seen so far. Dense [b, h, s, e], [b, h, s]; packed [t, h, e], [h, t]."""

    def __init__(self, q: Tensor, head_dim_v: int, packed: bool) -> None:
        dtype = accumulation_dtype(q.dtype)
        self.packed, self.dtype = packed, q.dtype
        self.out = torch.zeros(*q.shape[:-1], head_dim_v, dtype=dtype, device=q.device)
        shape = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
        self.lse = torch.full(shape, NEG_INF, dtype=dtype, device=q.device)

    def add(self, out: Tensor, lse: Tensor, rows: range) -> None:
        """A part's result. ``rows`` are the dense rows it is for; of packed tensors it is for all."""
        mine, my_lse = self.out, self.lse
        if not self.packed:
            mine, my_lse = mine[:, :, rows.start : rows.stop], my_lse[:, :, rows.start : rows.stop]
        merged = torch.logaddexp(my_lse, lse.to(my_lse.dtype))
        base = merged.masked_fill(merged == NEG_INF, 0.0)  # -inf - -inf would be NaN
        mine.mul_(self._per_row((my_lse - base).exp()))
        mine.addcmul_(out.to(mine.dtype), self._per_row((lse - base).exp()))
        my_lse.copy_(merged)

    def add_sink(self, sink: Tensor) -> None:
        """One more key per head, of this logit [h] and of value 0: once, whatever the number of parts."""
        logit = sink.to(self.lse.dtype)
        logit = logit[:, None] if self.packed else logit[None, :, None]
        merged = torch.logaddexp(self.lse, logit)
        self.out.mul_(self._per_row((self.lse - merged).exp()))
        self.lse = merged

    def finished(self) -> tuple[Tensor, Tensor]:
        return self.out.to(self.dtype), self.lse

    def _per_row(self, weight: Tensor) -> Tensor:
        return weight.t()[..., None] if self.packed else weight[..., None]


def sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, dout: Tensor, packed: bool) -> Tensor:
    """[h] from the merged out and lse, sinks included: minus the sink's probability times ``out * dout``."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1)
    if packed:
        return -(torch.exp(sink.to(lse.dtype)[:, None] - lse) * delta.t()).sum(1)
    return -(torch.exp(sink.to(lse.dtype)[None, :, None] - lse) * delta).sum((0, 2))

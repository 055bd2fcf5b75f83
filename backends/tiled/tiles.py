"""One tile of the score matrix: which pairs it holds, which of them are visible, what they score.

Tiles are ``[n, g, r, q, k]``: n batch entries, g key/value heads, r = h // g query heads of each, q rows and
k columns, so that grouped queries meet their keys without the keys being copied per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import check_tensors
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.rows import check_rows_given, longest_paged
from attnsel.backends.tiled.candidate import tile_elements

# --------------------------------------------------------------------------------------------------------
# Counter-based dropout: whether an entry is kept depends only on its position, head and sequence.
#
# Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), word for word what
# ``tl.philox(seed, c0, c1, c2, c3)`` of Triton gives, so that both backends drop the same entries. The 32-bit
# words live in int64 tensors: PyTorch has little unsigned arithmetic.


_WORD = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


class Key(NamedTuple):
    """The 64-bit key as two 32-bit words, each a scalar int64 tensor."""

    low: Tensor
    high: Tensor


def make_key(seed: Tensor, offset: Tensor | None) -> Key:
    """``seed XOR rotate_left64(offset, 32)``, without reading either on the host."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    if offset is None:
        return Key(low, high)
    # Rotating by 32 swaps the halves.
    return Key(low ^ ((offset >> 32) & _WORD), high ^ (offset & _WORD))


def philox4x32(
    key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over counters that broadcast with each other; four int64 tensors of 32-bit words."""
    k0, k1 = key
    for _ in range(10):
        # A product may wrap past 2**63; its 64 bits stay right, and the mask removes the sign's copies.
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL_A) & _WORD, (k1 + _WEYL_B) & _WORD
    return c0, c1, c2, c3


def keep_mask(key: Key, dropout_p: float, sequences: range, heads: range, rows: range, cols: range) -> Tensor:
    """Which entries dropout keeps: bool ``[sequences, heads, rows, cols]``.

    All four ranges are absolute: indices into the whole batch, query heads, and positions within a
    sequence (offsets included). Four neighbouring keys share one counter and take one output word each.
    """
    device = key.low.device
    words = range(cols.start // 4, (cols.stop + 3) // 4)

    def counter(r: range, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(r)
        return torch.arange(r.start, r.stop, device=device).bitwise_and_(_WORD).view(shape)

    out = philox4x32(key, counter(words, 3), counter(rows, 2), counter(heads, 1), counter(sequences, 0))
    threshold = round(dropout_p * 2**32)
    kept = torch.stack([word >= threshold for word in out], dim=-1).flatten(-2)
    first = cols.start - 4 * words.start
    return kept[..., first : first + len(cols)]


def keep_scale(dropout_p: float) -> float:
    """What a kept entry is multiplied by; 0 where nothing is kept."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0


NEG_INF = float("-inf")


class Blocks(NamedTuple):
    """How large a tile may be: rows, columns, and elements of everything one tile holds at a time."""

    q: int
    kv: int
    elements: int


def choose_blocks(dense: Dense) -> Blocks:
    """Tiles that stay in cache on a CPU, and that fill an accelerator elsewhere."""
    q, k, v = dense.q, dense.k, dense.v
    on_cpu = q.device.type == "cpu"
    rows, cols = (256, 512) if on_cpu else (2048, 2048)
    elements = tile_elements(on_cpu, dense.dropout_key is not None)
    rows, cols = max(1, min(rows, q.shape[-2])), max(1, min(cols, dense.s_kv))
    while rows > 16 and _group_elements(q, k, v, rows, cols) > elements:
        rows //= 2
    return Blocks(rows, cols, elements)


def _group_elements(q: Tensor, k: Tensor, v: Tensor, rows: int, cols: int) -> int:
    """Elements one key/value head brings into a tile: scores, and blocks of q, k, v and out."""
    width = q.shape[-1] + v.shape[-1]
    rows *= q.shape[1] // max(1, k.shape[1])
    return rows * cols + (rows + cols) * width


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense call, or one sequence of a packed one. Letters as in the contract; ``a`` the float
    type everything is accumulated in.
    """

    spec: Spec
    q: Tensor  # [b, h, s_q, d]
    k: Tensor  # [b, g, s_kv, d]; with a block_table [pages, g, page_size, d]
    v: Tensor  # [b, g, s_kv, e]
    s_kv: int
    a: torch.dtype
    bias: Tensor | None  # 4 dims, each full or 1; so is the mask
    mask: Tensor | None
    alibi_slopes: Tensor | None  # [1 | b, h]
    sinks: Tensor | None  # [h], in a
    seqlens_q: Tensor | None  # [b]
    seqlens_kv: Tensor | None
    dropout_key: Key | None
    block_table: Tensor | None = None  # [b, n]
    first_sequence: int = 0  # index of batch entry 0 in the whole call

    @property
    def static_shift(self) -> int | None:
        """The diagonal's shift, or None where only the device knows it."""
        if not self.spec.bottom_right:
            return 0
        if self.seqlens_q is None and self.seqlens_kv is None:
            return self.s_kv - self.q.shape[2]
        return None


class Chunk(NamedTuple):
    """Batch entries and key/value heads that are worked on together, with r query heads each."""

    n: range
    g: range
    r: int

    @property
    def h(self) -> range:
        return range(self.g.start * self.r, self.g.stop * self.r)


def split(n: int, size: int, start: int = 0) -> Iterator[range]:
    for first in range(start, n, size):
        yield range(first, min(first + size, n))


def chunks(dense: Dense, blocks: Blocks) -> Iterator[Chunk]:
    """Cover batch and heads with as many at a time as ``blocks.elements`` allows."""
    b, h, g = dense.q.shape[0], dense.q.shape[1], dense.k.shape[1]
    groups = max(1, blocks.elements // _group_elements(dense.q, dense.k, dense.v, blocks.q, blocks.kv))
    for n in split(b, max(1, groups // max(1, g))):
        for heads in split(g, groups):
            yield Chunk(n, heads, h // g)


def columns(dense: Dense, rows: range, size: int) -> Iterator[range]:
    """Column blocks that the band lets these rows reach; all of them where the shift is not static."""
    spec, shift, first, last = dense.spec, dense.static_shift, 0, dense.s_kv
    if shift is not None:
        to_column = spec.q_offset + shift - spec.kv_offset
        if spec.window_left >= 0:
            first = max(first, rows.start + to_column - spec.window_left)
        if spec.window_right >= 0:
            last = min(last, rows.stop + to_column + spec.window_right)
    return split(last, size, first)


def pick(t: Tensor, chunk: Chunk) -> Tensor:
    """``[b, h, ...]`` to the chunk's ``[n, g, r, ...]``, a view; dimensions of size 1 broadcast."""
    if t.shape[0] != 1:
        t = t[chunk.n.start : chunk.n.stop]
    if t.shape[1] == 1:
        return t.unsqueeze(2)
    return torch.unflatten(t[:, chunk.h.start : chunk.h.stop], 1, (len(chunk.g), chunk.r))


def pick_pairs(t: Tensor, chunk: Chunk, rows: range, cols: range) -> Tensor:
    """The tile of a bias or mask whose four dimensions are each full or 1."""
    if t.shape[2] != 1:
        t = t[:, :, rows.start : rows.stop]
    if t.shape[3] != 1:
        t = t[:, :, :, cols.start : cols.stop]
    return pick(t, chunk)


def padding(seqlens: Tensor | None, chunk: Chunk, positions: range) -> Tensor | None:
    """True where a row or column lies past its sequence's end: ``[n, len(positions)]``."""
    if seqlens is None:
        return None
    index = torch.arange(positions.start, positions.stop, device=seqlens.device)
    return index >= seqlens[chunk.n.start : chunk.n.stop, None]


def load_kv(t: Tensor, dense: Dense, chunk: Chunk, cols: range) -> Tensor:
    """``[n, g, k, d]`` in the accumulation type; padding is zeroed, as 0 * NaN would leak."""
    if dense.block_table is not None:
        block = _gather_pages(t, dense.block_table, chunk, cols).to(dense.a)
    else:
        n, g, at = (slice(x.start, x.stop) for x in (chunk.n, chunk.g, cols))
        block = t[n, g, at].to(dense.a)
    pad = padding(dense.seqlens_kv, chunk, cols)
    return block if pad is None else block.masked_fill(pad[:, None, :, None], 0.0)


def _gather_pages(pool: Tensor, table: Tensor, chunk: Chunk, cols: range) -> Tensor:
    """``[n, g, k, d]`` of a pool ``[pages, g, page_size, d]``; entries that point nowhere read some page."""
    page_size = pool.shape[2]
    index = torch.arange(cols.start, cols.stop, device=pool.device)
    pages = table[chunk.n.start : chunk.n.stop, index // page_size].long().clamp(0, pool.shape[0] - 1)
    # Two index tensors around a slice put their dimensions in front: [n, k, g, d].
    picked = pool[pages, chunk.g.start : chunk.g.stop, index % page_size]
    return picked.transpose(1, 2)


def load_rows(t: Tensor, dense: Dense, chunk: Chunk, rows: range, dead: Tensor | None) -> Tensor:
    """``[n, g, r, q, d]`` in the accumulation type, zero in the ``dead`` rows ``[n, ., ., q, 1]``."""
    block = pick(t[:, :, rows.start : rows.stop], chunk).to(dense.a)
    return block if dead is None else block.masked_fill(dead, 0.0)


def row_padding(dense: Dense, chunk: Chunk, rows: range) -> Tensor | None:
    """``[n, 1, 1, q, 1]``: True for rows past the end of their sequence."""
    pad = padding(dense.seqlens_q, chunk, rows)
    return None if pad is None else pad[:, None, None, :, None]


def times_keys(x: Tensor, keys: Tensor) -> Tensor:
    """``[n, g, r, q, i] @ [n, g, i, j] -> [n, g, r, q, j]``, one product for all r heads of a group."""
    return torch.unflatten(x.flatten(2, 3) @ keys, 2, x.shape[2:4])


def sum_rows(x: Tensor, y: Tensor) -> Tensor:
    """``[n, g, r, q, k], [n, g, r, q, d] -> [n, g, k, d]``: summed over rows and the heads of a group."""
    return x.flatten(2, 3).transpose(-1, -2) @ y.flatten(2, 3)


def distances(dense: Dense, chunk: Chunk, rows: range, cols: range) -> Tensor:
    """``j - i - shift`` of every pair: int64 ``[1 | n, 1, 1, q, k]``."""
    spec, device = dense.spec, dense.q.device
    i = torch.arange(rows.start, rows.stop, device=device) + spec.q_offset
    j = torch.arange(cols.start, cols.stop, device=device) + spec.kv_offset
    distance = (j - i[:, None])[None, None, None]
    if dense.static_shift is not None:
        return distance - dense.static_shift
    shift: Tensor | int = 0
    for seqlens, whole, sign in (
        (dense.seqlens_kv, dense.s_kv, 1),
        (dense.seqlens_q, dense.q.shape[2], -1),
    ):
        length = whole if seqlens is None else seqlens[chunk.n.start : chunk.n.stop]
        shift = shift + sign * length
    assert isinstance(shift, Tensor)
    return distance - shift[:, None, None, None, None]


def _band(dense: Dense, rows: range, cols: range) -> tuple[bool, bool]:
    """Whether the left and the right bound can hide any pair of the tile."""
    spec, shift = dense.spec, dense.static_shift
    left, right = spec.window_left >= 0, spec.window_right >= 0
    if shift is None:
        return left, right
    to_distance = spec.kv_offset - spec.q_offset - shift
    nearest, farthest = cols.start - (rows.stop - 1) + to_distance, cols.stop - 1 - rows.start + to_distance
    return left and nearest < -spec.window_left, right and farthest > spec.window_right


def _hide_outside(x: Tensor, dense: Dense, chunk: Chunk, rows: range, cols: range) -> None:
    """Set pairs of ``x`` in padding or under the mask to -inf, whatever they hold."""
    hidden: list[Tensor] = []
    row_pad, col_pad = row_padding(dense, chunk, rows), padding(dense.seqlens_kv, chunk, cols)
    if row_pad is not None:
        hidden.append(row_pad)
    if col_pad is not None:
        hidden.append(col_pad[:, None, None, None, :])
    if dense.mask is not None:
        hidden.append(pick_pairs(dense.mask, chunk, rows, cols))
    for pairs in hidden:
        x.masked_fill_(pairs, NEG_INF)


def scores(
    dense: Dense, chunk: Chunk, rows: range, cols: range, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Scores of a tile, -inf where invisible, and the tanh that the softcap's derivative needs.

    ``q`` [n, g, r, q, d] already carries the softmax scale; ``k`` is [n, g, k, d].
    """
    spec = dense.spec
    x, tanh = times_keys(q, k.transpose(-1, -2)), None
    if spec.softcap:
        tanh = x.div_(spec.softcap).tanh_()
        x = tanh * spec.softcap
    if dense.bias is not None:
        x.add_(pick_pairs(dense.bias, chunk, rows, cols))
    left, right = _band(dense, rows, cols)
    if dense.alibi_slopes is not None or left or right:
        distance = distances(dense, chunk, rows, cols)
        if dense.alibi_slopes is not None:
            slopes = pick(dense.alibi_slopes, chunk).to(dense.a)[..., None, None]
            x.sub_(slopes * distance.abs())
        if left:
            x.masked_fill_(distance < -spec.window_left, NEG_INF)
        if right:
            x.masked_fill_(distance > spec.window_right, NEG_INF)
    _hide_outside(x, dense, chunk, rows, cols)
    return x, tanh


def dropout_factor(dense: Dense, chunk: Chunk, rows: range, cols: range) -> Tensor | None:
    """What probabilities are multiplied by, 0 or 1 / (1 - p): ``[n, g, r, q, k]``; None without dropout."""
    if dense.dropout_key is None:
        return None
    spec, first = dense.spec, dense.first_sequence
    kept = keep_mask(
        dense.dropout_key,
        spec.dropout_p,
        range(chunk.n.start + first, chunk.n.stop + first),
        range(chunk.h.start + spec.head_offset, chunk.h.stop + spec.head_offset),
        range(rows.start + spec.q_offset, rows.stop + spec.q_offset),
        range(cols.start + spec.kv_offset, cols.stop + spec.kv_offset),
    )
    return torch.unflatten(kept.to(dense.a) * keep_scale(spec.dropout_p), 1, (len(chunk.g), chunk.r))


# ---- A call as one or more dense problems: itself, or one per sequence of a packed batch ---------------


SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Sequence(NamedTuple):
    """Where a sequence lies in the packed tensors, and its place in the batch."""

    number: int
    q: range
    kv: range

    def of_q(self, t: Tensor) -> Tensor:
        """``[t_q, h, ...]`` to a ``[1, h, s_q, ...]`` view."""
        return t[self.q.start : self.q.stop].transpose(0, 1).unsqueeze(0)

    def of_kv(self, t: Tensor) -> Tensor:
        """``[t_kv, g, ...]`` to a ``[1, g, s_kv, ...]`` view."""
        return t[self.kv.start : self.kv.stop].transpose(0, 1).unsqueeze(0)

    def of_lse(self, t: Tensor) -> Tensor:
        """``[h, t_q]`` to a ``[1, h, s_q]`` view."""
        return t[None, :, self.q.start : self.q.stop]

    def of_pairs(self, t: Tensor) -> Tensor:
        """A 4-dimensional bias or mask to this sequence's part of it; dimensions of size 1 broadcast."""
        if t.shape[0] != 1:
            t = t[self.number : self.number + 1]
        if t.shape[2] != 1:
            t = t[:, :, : len(self.q)]
        return t[..., : len(self.kv)] if t.shape[3] != 1 else t


def accumulation_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def four_dims(t: Tensor) -> Tensor:
    """A view with ones in front, so that the dimensions are b, h, s_q, s_kv. No index: that would ask for the
    device, and a fake tensor's may not be there."""
    return t.view((1,) * (4 - t.dim()) + t.shape)


def check(spec: Spec, inputs: Inputs) -> None:
    """ValueError for tensors that do not fit each other, or that the spec calls for and are missing."""
    if spec.softmax_type not in SOFTMAX_TYPES:
        raise ValueError(f"softmax_type is {spec.softmax_type!r}; allowed: {', '.join(SOFTMAX_TYPES)}")
    if spec.softmax_type == "learnable" and inputs.softmax_offset is None:
        raise ValueError("softmax_type 'learnable' needs inputs.softmax_offset, a tensor [h]")
    if spec.dropout_p and inputs.dropout_seed is None:
        raise ValueError("dropout_p > 0 needs inputs.dropout_seed, an int64 scalar tensor")
    check_rows_given(spec, inputs)
    check_tensors(spec, inputs)


def _longest_kv(inputs: Inputs) -> int:
    return inputs.k.shape[-2] if inputs.block_table is None else longest_paged(inputs)


def dense_problem(spec: Spec, inputs: Inputs) -> Dense:
    """The dense call itself. Of a packed call: what its sequences share, q, k and v still packed."""
    a, h = accumulation_dtype(inputs.q), inputs.q.shape[1]
    sinks = None
    if spec.softmax_type == "off-by-one":
        sinks = torch.zeros(h, dtype=a, device=inputs.q.device)
    elif spec.softmax_type == "learnable" and inputs.softmax_offset is not None:
        sinks = inputs.softmax_offset.to(a)
    key = None
    if spec.dropout_p and inputs.dropout_seed is not None:
        device = inputs.q.device
        offset = inputs.dropout_offset
        key = make_key(inputs.dropout_seed.to(device), None if offset is None else offset.to(device))
    slopes = inputs.alibi_slopes
    return Dense(
        spec=spec,
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        s_kv=_longest_kv(inputs),
        a=a,
        bias=None if inputs.bias is None else four_dims(inputs.bias),
        mask=None if inputs.attn_mask is None else four_dims(inputs.attn_mask),
        alibi_slopes=slopes[None] if slopes is not None and slopes.dim() == 1 else slopes,
        sinks=sinks,
        seqlens_q=None if spec.packed else inputs.seqlens_q,
        seqlens_kv=None if spec.packed and inputs.block_table is None else inputs.seqlens_kv,
        dropout_key=key,
        block_table=inputs.block_table,
    )


def packed_problems(spec: Spec, inputs: Inputs) -> Iterator[tuple[Sequence, Dense]]:
    """One dense problem of batch size 1 per sequence. Reads the cu_seqlens on the host, once.

    Raises ValueError when a sequence does not lie inside the packed tensors.
    """
    whole = dense_problem(spec, inputs)
    bias, mask, slopes, table, lengths = (
        getattr(whole, name) for name in ("bias", "mask", "alibi_slopes", "block_table", "seqlens_kv")
    )
    for sequence in _sequences(inputs):
        i = sequence.number
        yield (
            sequence,
            replace(
                whole,
                q=sequence.of_q(whole.q),
                k=sequence.of_kv(whole.k) if table is None else whole.k,
                v=sequence.of_kv(whole.v) if table is None else whole.v,
                s_kv=len(sequence.kv),
                bias=None if bias is None else sequence.of_pairs(bias),
                mask=None if mask is None else sequence.of_pairs(mask),
                alibi_slopes=slopes[i : i + 1] if slopes is not None and slopes.shape[0] != 1 else slopes,
                seqlens_kv=None if lengths is None else lengths[i : i + 1],
                block_table=None if table is None else table[i : i + 1],
                first_sequence=i,
            ),
        )


def _sequences(inputs: Inputs) -> list[Sequence]:
    cu_q, cu_kv = inputs.cu_seqlens_q, inputs.cu_seqlens_kv
    assert cu_q is not None
    start_q = cu_q if inputs.cu_seqlens_q_padded is None else inputs.cu_seqlens_q_padded
    if inputs.block_table is not None:
        lengths, begins = torch.stack([cu_q, start_q]).tolist()
        columns = range(_longest_kv(inputs))
        return [
            Sequence(i, _rows(i, lengths, begins, inputs.q.shape[0]), columns)
            for i in range(cu_q.numel() - 1)
        ]
    assert cu_kv is not None
    start_kv = cu_kv if inputs.cu_seqlens_kv_padded is None else inputs.cu_seqlens_kv_padded
    # One device-to-host copy for all four.
    lists: list[list[int]] = torch.stack([cu_q, cu_kv, start_q, start_kv]).tolist()
    t_q, t_kv = inputs.q.shape[0], inputs.k.shape[0]
    return [
        Sequence(i, _rows(i, lists[0], lists[2], t_q), _rows(i, lists[1], lists[3], t_kv))
        for i in range(cu_q.numel() - 1)
    ]


def _rows(i: int, cu_seqlens: list[int], starts: list[int], t: int) -> range:
    length = cu_seqlens[i + 1] - cu_seqlens[i]
    if not 0 <= starts[i] <= starts[i] + length <= t:
        raise ValueError(f"sequence {i} has {length} rows from row {starts[i]} on, outside {t} packed rows")
    return range(starts[i], starts[i] + length)


def empty_like_rows(t: Tensor, width: int) -> Tensor:
    """Uninitialised ``[..., width]`` in t's dtype, its dimensions laid out in memory in t's order.

    So a [b, h, s, d] view of bshd memory gets a result that is contiguous once viewed as bshd again.
    """
    outer = sorted(range(t.dim() - 1), key=lambda dim: t.stride(dim), reverse=True)
    order = [*outer, t.dim() - 1]
    shape = [*t.shape[:-1], width]
    empty = torch.empty([shape[dim] for dim in order], dtype=t.dtype, device=t.device)
    return empty.permute([order.index(dim) for dim in range(t.dim())])

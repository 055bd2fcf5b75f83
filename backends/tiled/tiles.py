"""One tile of the score matrix: which pairs it holds, which of them are visible, what they score.

Tiles are ``[n, g, r, q, k]``: n batch entries, g key/value heads, r = h // g query heads of each, q rows and
k columns, so that grouped queries meet their keys without the keys being copied per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Spec
from attnsel.backends.tiled.candidate import tile_elements

from .philox import Key, keep_mask, keep_scale

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

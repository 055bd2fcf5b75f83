"""Where sequences lie among rows, as FlashAttention's kernels with lengths are told.

These kernels take rows [t, h, d] and the first row of each sequence (``cu_seqlens``): a sequence ends where
the next one begins, so there is no room between two. Padding and gaps are therefore sequences of their own:
behind each real one stands one of the rows that belong to none. They see each other and nothing else,
whatever they hold, and what comes out for them is overwritten. No mask is made, and q, k and v are not
copied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.pages import longest_paged


class Side(NamedTuple):
    """Queries, or keys and values, as the kernel is told. ``outside`` is bool [t], None where every row is in
    a sequence."""

    cu_seqlens: Tensor  # int32 [n + 1]
    longest: int
    outside: Tensor | None
    rows: int  # t; of keys in pages 0


class Sequences(NamedTuple):
    """One call's. ``seqused_kv`` int32 [n] and ``block_table`` [n, pages]: keys in pages."""

    q: Side
    kv: Side
    seqused_kv: Tensor | None = None
    block_table: Tensor | None = None


def sequences_of(spec: Spec, inputs: Inputs) -> Sequences | None:
    """None for a dense call whose rows are all real: the kernel needs no lengths then."""
    i = inputs
    if i.block_table is not None:
        return _in_pages(spec, inputs)
    if spec.packed:
        assert i.cu_seqlens_q is not None
        assert i.cu_seqlens_kv is not None
        q = _packed(i.cu_seqlens_q, i.cu_seqlens_q_padded, i.q.shape[0], i.max_seqlen_q)
        if i.cu_seqlens_kv is i.cu_seqlens_q and i.cu_seqlens_kv_padded is i.cu_seqlens_q_padded:
            return Sequences(q, q)
        return Sequences(q, _packed(i.cu_seqlens_kv, i.cu_seqlens_kv_padded, i.k.shape[0], i.max_seqlen_kv))
    if i.seqlens_q is None and i.seqlens_kv is None:
        return None
    q = _padded(i.seqlens_q, i.q)
    same = i.seqlens_kv is i.seqlens_q and i.k.shape[2] == i.q.shape[2]
    return Sequences(q, q if same else _padded(i.seqlens_kv, i.k))


def _packed(cu: Tensor, starts: Tensor | None, rows: int, longest: int | None) -> Side:
    """thd. Rows behind the last sequence belong to none, and the kernel leaves them as they are."""
    longest = rows if longest is None else min(longest, rows)
    row = torch.arange(rows, dtype=torch.int32, device=cu.device)
    if starts is None:
        end = cu.narrow(0, cu.shape[0] - 1, 1)
        return Side(cu.to(torch.int32).contiguous(), _at_least_two(longest), row >= end, rows)
    starts = starts.narrow(0, 0, cu.shape[0] - 1)
    ends = torch.stack((starts, starts + cu.diff()), -1).flatten().to(torch.int32)
    both = torch.cat((ends, ends.new_full((1,), rows)))
    # As many entries as are at or before a row: an odd number within a real sequence.
    return Side(both, _at_least_two(longest), torch.searchsorted(both, row, right=True) % 2 == 0, rows)


def _padded(lengths: Tensor | None, t: Tensor) -> Side:
    """A dense batch [b, h, s, d], whose rows lie one after the other in memory."""
    b, _, s, _ = t.shape
    starts = torch.arange(0, b * s, s, dtype=torch.int32, device=t.device)
    if lengths is None:
        lengths = torch.full_like(starts, s)
    ends = torch.stack((starts, starts + lengths), -1).flatten().to(torch.int32)
    outside = torch.arange(s, device=t.device) >= lengths.unsqueeze(1)
    return Side(torch.cat((ends, ends.new_full((1,), b * s))), _at_least_two(s), outside.flatten(), b * s)


def _in_pages(spec: Spec, inputs: Inputs) -> Sequences:
    """Keys in pages: lengths say how many are real; sequences of padded queries have none."""
    i = inputs
    table, used = i.block_table, i.seqlens_kv
    assert table is not None
    assert used is not None
    if spec.packed:
        assert i.cu_seqlens_q is not None
        q = _packed(i.cu_seqlens_q, i.cu_seqlens_q_padded, i.q.shape[0], i.max_seqlen_q)
        apart = i.cu_seqlens_q_padded is not None
    elif i.seqlens_q is None:
        b, _, s, _ = i.q.shape
        cu = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=i.q.device)
        q, apart = Side(cu, _at_least_two(s), None, b * s), False
    else:
        q, apart = _padded(i.seqlens_q, i.q), True
    if apart:
        table = table.repeat_interleave(2, 0)
        used = torch.stack((used, torch.zeros_like(used)), -1).flatten()
    used = used.to(torch.int32).contiguous()
    # The kernel asks for cumulated lengths of keys as well, and reads ``seqused_kv`` instead.
    cu = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    return Sequences(q, Side(cu, _at_least_two(longest_paged(inputs)), None, 0), used, table.contiguous())


def _at_least_two(longest: int) -> int:
    """With grouped heads, a longest sequence of one is taken for as many rows as there are sequences."""
    return max(2, longest)


def rows_of(t: Tensor) -> Tensor:
    """A dense [b, h, s, d] as the rows [b * s, h, d] that it lies as; RuntimeError where it does not."""
    b, h, s, d = t.shape
    return t.transpose(1, 2).view(b * s, h, d)


def dense(rows: Tensor, b: int) -> Tensor:
    """The way back, a view."""
    return rows.unflatten(0, (b, -1)).transpose(1, 2)


def lse_by_row(lse: Tensor, side: Side) -> Tensor:
    """[h, t] from what the op gives: that, or [n, h, longest] before torch 2.8."""
    if lse.dim() == 2:
        return lse
    longest = lse.shape[2]
    sequence, row, _ = _places(side, longest)
    rows = lse.transpose(1, 2).flatten(0, 1)  # [n * longest, h]
    return rows.index_select(0, sequence * longest + row).transpose(0, 1)


def lse_by_sequence(lse: Tensor, side: Side) -> Tensor:
    """[n, h, longest] from [h, t], for the backward of torch before 2.8."""
    rows = (side.cu_seqlens.shape[0] - 1) * side.longest
    sequence, row, inside = _places(side, side.longest)
    # Rows that are in no sequence, or beyond what the kernel computes, land in one that is cut off.
    made = lse.new_full((rows + 1, lse.shape[0]), torch.inf)
    made.index_copy_(0, torch.where(inside, sequence * side.longest + row, rows), lse.transpose(0, 1))
    return made.narrow(0, 0, rows).unflatten(0, (-1, side.longest)).transpose(1, 2).contiguous()


def _places(side: Side, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [t] its sequence, its place there and whether the kernel computes it."""
    cu = side.cu_seqlens.long()
    at = torch.arange(side.rows, device=cu.device)
    sequence = (torch.searchsorted(cu, at, right=True) - 1).clamp_(0, cu.shape[0] - 2)
    row = at - cu.index_select(0, sequence)
    inside = (row >= 0) & (row < longest) & (at < cu.index_select(0, sequence + 1))
    return sequence, row.clamp_(0, longest - 1), inside

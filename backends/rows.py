"""What FlashAttention's functions take and give, from the contract's tensors and back.

Dense q, k and v are [b, s, h, d] there. Calls with lengths are rows [t, h, d] and the first row of each
sequence; see ``sequences`` for padding and gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec

# ---- Keys and values in pages: what a block table must be, and what it holds ---------------------------


def check_pages(spec: Spec, inputs: Inputs) -> None:
    """ValueError for a block table that no kernel can take.

    Entries are held against the pool on CPU tensors only: on a GPU that would be a synchronisation, and the
    kernels clamp page numbers instead, so that nothing outside the pool is read.
    """
    table, k, v, lengths = inputs.block_table, inputs.k, inputs.v, inputs.seqlens_kv
    assert table is not None
    if spec.need_grad:
        raise ValueError("keys and values in pages (block_table) have no backward")
    if k.dim() != 4 or v.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            "with a block_table k and v are pools [pages, g, page_size, head_dim] of equal pages, got "
            f"{list(k.shape)} and {list(v.shape)}"
        )
    if k.shape[2] < 1:
        raise ValueError(f"page_size must be at least 1, got k of {list(k.shape)}")
    batch = inputs.q.shape[0]
    if spec.packed and inputs.cu_seqlens_q is not None:
        batch = inputs.cu_seqlens_q.numel() - 1
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise ValueError(f"block_table must be int32 [{batch}, n], got {table.dtype} {list(table.shape)}")
    if table.shape[1] > 1 and table.stride(1) != 1:
        raise ValueError(f"rows of block_table must be contiguous, got strides {table.stride()}")
    if lengths is None or lengths.dtype != torch.int32 or lengths.shape != (batch,):
        got = "none" if lengths is None else f"{lengths.dtype} {list(lengths.shape)}"
        raise ValueError(f"with a block_table seqlens_kv must be int32 [{batch}], got {got}")
    if table.device.type != "cpu" or lengths.device.type != "cpu":
        return
    wrong = wrong_page(table, lengths, pages=k.shape[0], page_size=k.shape[2])
    if wrong is not None:
        sequence, entry, page = wrong
        allowed = f"0 to {k.shape[0] - 1}" if k.shape[0] else "none: the pools are empty"
        raise ValueError(
            f"block_table[{sequence}, {entry}] is {page}; allowed: {allowed} "
            f"(sequence {sequence} has {int(lengths[sequence])} rows in pages of {k.shape[2]})"
        )


def wrong_page(table: Tensor, lengths: Tensor, *, pages: int, page_size: int) -> tuple[int, int, int] | None:
    """The first entry in use that is no page of the pool: (sequence, entry, page). Reads the tensors."""
    used = torch.arange(table.shape[1], device=table.device) * page_size < lengths[:, None]
    found = (used & ((table < 0) | (table >= pages))).nonzero()
    if len(found) == 0:
        return None
    sequence, entry = found[0].tolist()
    return sequence, entry, int(table[sequence, entry])


def page_size(inputs: Inputs) -> int:
    """Rows of a page; 0 where keys and values are not in pages."""
    return 0 if inputs.block_table is None else inputs.k.shape[2]


def longest_paged(inputs: Inputs) -> int:
    """What bounds a sequence's keys: the table's width, and ``max_seqlen_kv`` where it is given."""
    assert inputs.block_table is not None
    # Nothing can be read from a pool without pages.
    rows = inputs.block_table.shape[1] * inputs.k.shape[2] if inputs.k.shape[0] else 0
    return rows if inputs.max_seqlen_kv is None else min(rows, inputs.max_seqlen_kv)


# ---- Where sequences lie among rows, as FlashAttention's kernels with lengths are told -----------------
# These kernels take rows [t, h, d] and the first row of each sequence (``cu_seqlens``): a sequence ends where
# the next one begins, so there is no room between two. Padding and gaps are therefore sequences of their own:
# behind each real one stands one of the rows that belong to none. They see each other and nothing else,
# whatever they hold, and what comes out for them is overwritten. No mask is made, and q, k and v are not
# copied.


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


INT32_MOST = 2**31 - 1


def bottom_right_window(name: str, spec: Spec, inputs: Inputs) -> tuple[int, int]:
    """The bounds from the bottom-right diagonal of each sequence, -1 for none.

    Raises ValueError, saying it is ``name`` that has no such window, where there is none.
    """
    left, right = spec.window_left, spec.window_right
    if left < 0 and right < 0:
        return -1, -1
    shift = 0 if spec.bottom_right else _longer(name, spec, inputs)
    if (left >= 0 and left + shift < 0) or (right >= 0 and right - shift < 0):
        raise ValueError(
            f"{name}: window ({left}, {right}) from the top left is none that goes to the bottom right: "
            f"there are {inputs.q.shape[2]} queries and {inputs.k.shape[2]} keys"
        )
    left = min(left + shift, INT32_MOST) if left >= 0 else -1
    right = min(right - shift, INT32_MOST) if right >= 0 else -1
    return left, right


def _longer(name: str, spec: Spec, inputs: Inputs) -> int:
    """By how many rows keys are more than queries, in every sequence. ValueError where it may differ."""
    if inputs.block_table is None:
        if spec.packed:
            if inputs.cu_seqlens_q is inputs.cu_seqlens_kv:
                return 0
        elif inputs.seqlens_q is inputs.seqlens_kv:
            return 0 if inputs.seqlens_q is not None else inputs.k.shape[2] - inputs.q.shape[2]
    raise ValueError(
        f"{name}: a diagonal from the top left needs one tensor for the lengths of queries and of keys"
    )


def check_open_right(name: str, left: int, right: int, longest_q: int, longest_kv: int) -> None:
    """ValueError for a window that FlashAttention 2 would widen, or narrow, without a word.

    Where only one side is bounded it gives the other the number of keys for a bound, and drops a bound that
    is as large: the same as none, unless there are more queries than keys and the right side is meant.
    Source: mha_fwd and set_params_fprop in flash_api.cpp of flash-attn 2.5.9 to 2.8.3 and of PyTorch 2.13.
    """
    if longest_q <= longest_kv + 1 or (left < 0 and right < 0):
        return
    if right < 0 or longest_kv <= right < longest_q - 1:
        raise ValueError(
            f"{name}: window ({left}, {right}): with more queries ({longest_q}) than keys ({longest_kv}) a "
            "bound on the left alone, or one on the right of so many keys, would hide other pairs"
        )


def longest_rows(spec: Spec, inputs: Inputs) -> tuple[int, int]:
    """What bounds the queries and the keys of a sequence, as ``Form.lengths`` says it."""
    q, k = inputs.q, inputs.k
    if spec.packed:
        longest_q = q.shape[0] if inputs.max_seqlen_q is None else min(inputs.max_seqlen_q, q.shape[0])
    else:
        longest_q = q.shape[2]
    if inputs.block_table is not None:
        return longest_q, longest_paged(inputs)
    if not spec.packed:
        return longest_q, k.shape[2]
    longest = inputs.max_seqlen_kv
    return longest_q, k.shape[0] if longest is None else min(longest, k.shape[0])


def same_lengths(spec: Spec, inputs: Inputs) -> bool:
    """Whether every sequence is known to have as many queries as keys."""
    if inputs.block_table is not None:
        return False
    if spec.packed:
        return inputs.cu_seqlens_q is inputs.cu_seqlens_kv
    return inputs.seqlens_q is inputs.seqlens_kv and inputs.q.shape[2] == inputs.k.shape[2]


def above_zero(scale: float) -> tuple[float, float]:
    """(factor of q, scale above 0) for the same scores: a row's maximum is taken before it is scaled."""
    if scale > 0.0:
        return 1.0, scale
    return (-1.0, -scale) if scale else (0.0, 1.0)


def check_rows_given(spec: Spec, inputs: Inputs) -> None:
    """ValueError for a block table that no kernel can take, and for packed rows without cu_seqlens."""
    if inputs.block_table is not None:
        check_pages(spec, inputs)
    elif spec.packed and (inputs.cu_seqlens_q is None or inputs.cu_seqlens_kv is None):
        raise ValueError("a packed (thd) call needs inputs.cu_seqlens_q and inputs.cu_seqlens_kv")
    if spec.packed and inputs.cu_seqlens_q is None:
        raise ValueError("a packed (thd) call needs inputs.cu_seqlens_q")


def lse_of_forward(spec: Spec, result: Result) -> Tensor:
    """What a backward starts from. ValueError where the forward left no lse, or not what it dropped by."""
    if result.lse is None:
        raise ValueError("the forward gave no lse: it needs need_lse or need_grad")
    if spec.dropout_p and not result.saved:
        raise ValueError("dropout_p: the forward's random numbers are not there (result.saved)")
    return result.lse


def check_rows(name: str, spec: Spec, inputs: Inputs) -> None:
    """ValueError where a dense batch with lengths does not lie in memory as rows."""
    if spec.packed or (inputs.seqlens_q is None and inputs.seqlens_kv is None):
        return
    for which in ("q",) if inputs.block_table is not None else ("q", "k", "v"):
        t = getattr(inputs, which)
        b, _, s, _ = t.shape
        if b > 1 and s > 1 and t.stride(0) != s * t.stride(2):
            raise ValueError(
                f"{name}: {which}: with lengths, one sequence must begin in memory where the one before ends "
                f"(bshd); its strides are {t.stride()}"
            )


class Form:
    """One call's tensors on their way to the op and back: dense [b, s, h, d] where it needs no lengths, else
    rows [t, h, d]."""

    def __init__(self, spec: Spec, inputs: Inputs, lse_by_sequence: bool = False) -> None:
        """``lse_by_sequence``: a packed call's lse is [n, h, longest] to this kernel, not [h, t]."""
        self.packed, self.inputs = spec.packed, inputs
        self.sequences: Sequences | None = sequences_of(spec, inputs)
        self.lse_by_sequence = lse_by_sequence

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.inputs[:3]
        if self.sequences is None:
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if not self.packed:
            q = rows_of(q)
        if self.inputs.block_table is not None:
            return q, k.transpose(1, 2), v.transpose(1, 2)
        return (q, k, v) if self.packed else (q, rows_of(k), rows_of(v))

    def rows(self, t: Tensor) -> Tensor:
        """What the caller's out and dout are to the op."""
        if self.packed:
            return t
        t = t.transpose(1, 2)
        return t if self.sequences is None else t.flatten(0, 1)

    def lengths(self) -> tuple[Any, Any, int, int]:
        if self.sequences is None:
            return None, None, self.inputs.q.shape[2], self.inputs.k.shape[2]
        q, kv = self.sequences[:2]
        return q.cu_seqlens, kv.cu_seqlens, q.longest, kv.longest

    def out(self, rows: Tensor) -> Tensor:
        """An output, or a gradient of q, with zeros where no sequence is."""
        return self._back(rows, self.sequences and self.sequences.q)

    def kv_grad(self, rows: Tensor) -> Tensor:
        return self._back(rows, self.sequences and self.sequences.kv)

    def _back(self, rows: Tensor, side: Side | None) -> Tensor:
        if side is None:
            return rows.transpose(1, 2)
        if side.outside is not None:
            rows = rows.masked_fill_(side.outside.view(-1, 1, 1), 0.0)
        return rows if self.packed else dense(rows, self.inputs.q.shape[0])

    def lse(self, lse: Tensor) -> Tensor:
        """The contract's [b, h, s] or [h, t], -inf where no sequence is."""
        if self.sequences is None:
            return lse
        side = self.sequences.q
        lse = lse_by_row(lse, side)
        if side.outside is not None:
            lse = lse.masked_fill(side.outside, -torch.inf)
        return lse if self.packed else lse.unflatten(1, (self.inputs.q.shape[0], -1)).transpose(0, 1)

    def lse_rows(self, dlse: Tensor) -> Tensor:
        """A number for each row of ``rows(out)``."""
        if self.packed:
            return dlse.transpose(0, 1)
        return dlse.transpose(1, 2) if self.sequences is None else dlse.transpose(1, 2).flatten(0, 1)

    def lse_of_op(self, lse: Tensor) -> Tensor:
        """The way back of ``lse``."""
        if self.sequences is None:
            return lse.contiguous()
        if not self.packed:
            lse = lse.transpose(0, 1).flatten(1)
        return lse_by_sequence(lse, self.sequences.q) if self.lse_by_sequence else lse.contiguous()

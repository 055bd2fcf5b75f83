"""What FlashAttention's functions take and give, from the contract's tensors and back.

Dense q, k and v are [b, s, h, d] there. Calls with lengths are rows [t, h, d] and the first row of each
sequence; see ``sequences`` for padding and gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec

from .pages import check_pages, longest_paged
from .sequences import Sequences, Side, dense, lse_by_row, rows_of, sequences_of
from .sequences import lse_by_sequence as by_sequence

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

    def pages(self) -> dict[str, Tensor | None]:
        if self.sequences is None or self.sequences.block_table is None:
            return {}
        return {"seqused_k": self.sequences.seqused_kv, "block_table": self.sequences.block_table}

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
        return by_sequence(lse, self.sequences.q) if self.lse_by_sequence else lse.contiguous()

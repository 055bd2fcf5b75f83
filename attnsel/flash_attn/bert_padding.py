"""Padded batches to packed sequences and back, under ``flash_attn.bert_padding``'s names; with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.flash_attn.options import refuse


class _Take(torch.autograd.Function):
    """Rows that occur once each: their gradient is a copy, where that of indexing would add with atomics."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = values.shape[0]
        return values.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return index_put_first_axis(grad, indices, ctx.rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        ctx.save_for_backward(indices)
        out = values.new_zeros(first_axis_dim, *values.shape[1:])
        return out.index_copy_(0, indices.long(), values)  # transformers decodes with int32

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (indices,) = ctx.saved_tensors
        return index_first_axis(grad, indices), None, None


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """``input[indices]``. Every index at most once: the gradient relies on it."""
    if input.dim() < 2:
        refuse("input.shape", tuple(input.shape), "must have at least 2 dimensions")
    out: Tensor = _Take.apply(input, indices)
    return out


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros [first_axis_dim, ...] with ``values`` in the rows ``indices``."""
    if indices.dim() != 1 or values.dim() < 2:
        refuse("indices.shape", tuple(indices.shape), "must be [n] beside values [n, ...]")
    out: Tensor = _Put.apply(values, indices, first_axis_dim)
    return out


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """``input[indices]`` and input itself; the gradients of both are added."""
    return index_first_axis(input, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """hidden_states [b, s, ...] and a mask [b, s], 1 for valid ->

    (rows [total, ...], their indices in the flattened batch, cu_seqlens int32 [b + 1], the longest sequence,
    seqused int32 [b]). ``unused_mask`` [b, s] is 1 for rows that are kept in memory but are not part of a
    sequence: they count in cu_seqlens and not in seqused. Waits for the device to read the number of rows.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    seqused = attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    return *_unpadded(hidden_states, indices, lengths), seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The same for batch rows that hold several sequences one after the other, then padding.

    attention_mask_in_length: integers [b, s]; the first entries of a row are the lengths of its sequences,
    the others 0: [[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]] is three sequences of 2, 3 and 6 rows. Returns
    (rows, indices, cu_seqlens int32 [sequences + 1], the longest).
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    rows = torch.arange(attention_mask_in_length.shape[-1], device=used.device)
    indices = (rows < used).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    return _unpadded(hidden_states, indices, lengths)


def _unpadded(hidden_states: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)),
        int(lengths.max()),
    )


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Rows [total, ...] back to [batch, seqlen, ...], 0 where there is none."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))

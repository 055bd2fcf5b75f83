"""Where rows lie: those of packed sequences and of a padded batch, those added to it, and its padding.

Nothing here reads a tensor on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.runtime.inputs import real_lengths


class Places:
    """Which rows of packed sequences and of a padded batch are each other's; see ``apply.Unpack``."""

    def __init__(self, cu: Any, cu_padded: Any, rows: int, fmt: str) -> None:
        self.cu, self.starts = cu.long(), (cu if cu_padded is None else cu_padded).long()
        self.rows, self.format = rows, fmt

    def unpacked(self, packed: Tensor, empty: float = 0.0) -> Tensor:
        """[t, ...] -> [b, s, ...] (or the format's order), ``empty`` beyond each length."""
        rows = torch.arange(self.rows, device=packed.device)
        inside = rows < (self.cu[1:] - self.cu[:-1])[:, None]
        packed = lengthened(packed, 0, max(1, packed.shape[0]))  # a row to take, where there is none
        index = (self.starts[:-1, None] + rows).clamp(max=packed.shape[0] - 1)
        if self.format == "sbhd":
            index, inside = index.T, inside.T
        taken = packed.index_select(0, index.flatten())
        taken = taken.masked_fill_(~inside.reshape(-1, *[1] * (packed.dim() - 1)), empty)
        dense = torch.unflatten(taken, 0, index.shape)
        return dense.transpose(1, 2) if self.format == "bhsd" else dense

    def packed(self, dense: Tensor, tokens: int, empty: float = 0.0) -> Tensor:
        """[b, s, ...] (or the format's order) -> [tokens, ...], ``empty`` where no sequence lies."""
        at = torch.arange(tokens, device=dense.device)
        # The last sequence that starts at or before a row; empty ones start where the next does.
        sequence = torch.searchsorted(self.starts, at, right=True) - 1
        inside = (sequence >= 0) & (sequence < self.cu.shape[0] - 1)
        sequence = sequence.clamp(0, self.cu.shape[0] - 2)
        row = at - self.starts[sequence]
        inside &= row < (self.cu[1:] - self.cu[:-1])[sequence]
        row = row.clamp(0, self.rows - 1)
        if self.format == "bhsd":
            dense = dense.transpose(1, 2)
        dense = lengthened(dense, 0 if self.format == "sbhd" else 1, max(1, self.rows))
        taken = dense[row, sequence] if self.format == "sbhd" else dense[sequence, row]
        return taken.masked_fill_(~inside.reshape(-1, *[1] * (taken.dim() - 1)), empty)


def cu_seqlens_of(extras: Any) -> tuple[Tensor, Tensor]:
    """cu_seqlens of q and kv of a padded batch; one tensor where one mask says both."""
    if extras.cu_seqlens_q is not None and extras.cu_seqlens_kv is not None:
        return extras.cu_seqlens_q, extras.cu_seqlens_kv
    made = [
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        for lengths in dict.fromkeys(real_lengths(extras))
        if lengths is not None
    ]
    return made[0], made[-1]


def with_room(cu: Tensor, rows: int) -> Tensor:
    """Starts of packed sequences whose memory goes on to ``rows`` after the last of them."""
    return torch.cat([cu[:-1], cu.new_full((1,), rows)])


def lengthened(t: Tensor, axis: int, to: int, value: float = 0.0) -> Tensor:
    """``t`` with ``value`` behind what it holds along one axis; dense, and itself where nothing is added."""
    return enlarged(t, {axis: to}, value)


def enlarged(t: Tensor, to: dict[int, int], value: float = 0.0) -> Tensor:
    """``lengthened`` along several axes at once, in one piece of memory.

    ``torch.nn.functional.pad`` would keep channels-last strides, which some shapes seem to have.
    """
    shape = list(t.shape)
    for axis, length in to.items():
        shape[axis] = length
    if shape == list(t.shape):
        return t
    held = made = t.new_full(shape, value)
    for axis in to:
        held = held.narrow(axis, 0, t.shape[axis])
    held.copy_(t)
    return made


def outside(extras: Any, rows: int) -> Tensor:
    """Bool [b, rows], True for the padding of a batch whose queries and keys are equally long."""
    lengths, _ = real_lengths(extras)
    assert lengths is not None
    beyond: Tensor = torch.arange(rows, device=lengths.device) >= lengths[:, None]
    return beyond

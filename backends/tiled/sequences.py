"""A call as one or more dense problems: itself, or one per sequence of a packed batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import check_tensors
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.pages import check_pages, longest_paged

from .philox import make_key
from .tiles import Dense

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
    """A view with ones in front, so that the dimensions are b, h, s_q, s_kv."""
    return t[(None,) * (4 - t.dim())]


def check(spec: Spec, inputs: Inputs) -> None:
    """ValueError for tensors that do not fit each other, or that the spec calls for and are missing."""
    if spec.softmax_type not in SOFTMAX_TYPES:
        raise ValueError(f"softmax_type is {spec.softmax_type!r}; allowed: {', '.join(SOFTMAX_TYPES)}")
    if spec.softmax_type == "learnable" and inputs.softmax_offset is None:
        raise ValueError("softmax_type 'learnable' needs inputs.softmax_offset, a tensor [h]")
    if spec.dropout_p and inputs.dropout_seed is None:
        raise ValueError("dropout_p > 0 needs inputs.dropout_seed, an int64 scalar tensor")
    if inputs.block_table is not None:
        check_pages(spec, inputs)
    elif spec.packed and inputs.cu_seqlens_kv is None:
        raise ValueError("a packed (thd) call needs inputs.cu_seqlens_q and inputs.cu_seqlens_kv")
    if spec.packed and inputs.cu_seqlens_q is None:
        raise ValueError("a packed (thd) call needs inputs.cu_seqlens_q")
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
    for sequence in _sequences(inputs):
        i = sequence.number
        slopes, table, lengths = whole.alibi_slopes, whole.block_table, whole.seqlens_kv
        yield (
            sequence,
            Dense(
                spec=spec,
                q=sequence.of_q(whole.q),
                k=sequence.of_kv(whole.k) if table is None else whole.k,
                v=sequence.of_kv(whole.v) if table is None else whole.v,
                s_kv=len(sequence.kv),
                a=whole.a,
                bias=None if whole.bias is None else sequence.of_pairs(whole.bias),
                mask=None if whole.mask is None else sequence.of_pairs(whole.mask),
                alibi_slopes=slopes[i : i + 1] if slopes is not None and slopes.shape[0] != 1 else slopes,
                sinks=whole.sinks,
                seqlens_q=None,
                seqlens_kv=None if lengths is None else lengths[i : i + 1],
                dropout_key=whole.dropout_key,
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

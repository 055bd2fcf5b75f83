"""Which rows of a sequence lie on which rank: head and tail chunks, so that all ranks work equally.

A sequence is cut into ``2 * size`` chunks of equal length; rank r holds chunks r and ``2 * size - 1 - r``, in
this order. Under a causal mask a row costs as much as there are rows before it, so an early chunk and a late
one together cost the same on every rank. It is the order of PyTorch's
``torch.distributed.tensor.experimental.context_parallel`` (its head-tail load balancer) and of
TransformerEngine (DualChunkSwap), so tensors sharded there fit here and the other way round.

``group`` is a ProcessGroup, a DeviceMesh of one dimension, None for the default group, or a pair
``(size, rank)``, with which torch.distributed is not needed.

Gradients are those of the sum of all ranks' losses: ``shard_*`` gives each rank the gradient of its rows,
``unshard_*`` adds up what the ranks make of a row. Where every rank computes the same loss from unsharded
tensors, divide it by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from attnsel import settings
from attnsel.context_parallel.group import sequence_order
from attnsel.errors import InvalidInput

Group: TypeAlias = "dist.ProcessGroup | dist.device_mesh.DeviceMesh | tuple[int, int] | None"


def shard_sequence(x: Tensor, group: Group, dim: int = 1) -> Tensor:
    """This rank's rows of ``x``, the whole sequence along ``dim``: [.., s, ..] → [.., s / size, ..].

    The result is a new tensor. Raises InvalidInput for a length that is no multiple of ``2 * size``.
    """
    size, rank = place_of(group)
    dim = _dimension(x, dim)
    chunk = _chunk_length(x.shape[dim], size, f"x.shape[{dim}]")
    tail = 2 * size - 1 - rank
    return torch.cat([x.narrow(dim, rank * chunk, chunk), x.narrow(dim, tail * chunk, chunk)], dim)


def unshard_sequence(x: Tensor | Sequence[Tensor], group: Group = None, dim: int = 1) -> Tensor:
    """The whole sequence from the ranks' rows, in its own order: [.., s / size, ..] → [.., s, ..].

    ``x`` is this rank's part, and every rank of ``group`` takes part; or it is a list of all parts in the
    order of the ranks, and ``group`` is not read. Raises InvalidInput for a part of odd length, for parts of
    different shapes, and for a ``(size, rank)`` that would have to be communicated with.
    """
    parts = _all_parts(x, group)
    dim = _dimension(parts[0], dim)
    local = parts[0].shape[dim]
    if local % 2:
        raise InvalidInput(f"x.shape[{dim}]", local, "must be even: a rank holds a head and a tail chunk")
    chunk = local // 2
    heads = [part.narrow(dim, 0, chunk) for part in parts]
    tails = [part.narrow(dim, chunk, chunk) for part in reversed(parts)]
    return torch.cat([*heads, *tails], dim)


def sequence_positions(
    length: int, group: Group, device: torch.device | str | None = None
) -> Tensor:  # [s / size]
    """Where in a sequence of ``length`` this rank's rows lie, int64: for embeddings of positions.

    Raises InvalidInput for a length that is no multiple of ``2 * size``.
    """
    size, rank = place_of(group)
    chunk = _chunk_length(length, size, "length")
    row = torch.arange(2 * chunk, device=device)
    return row + torch.where(row < chunk, rank * chunk, (2 * size - 2 - rank) * chunk)


def shard_packed(x: Tensor, cu_seqlens: Tensor, group: Group, dim: int = 0) -> Tensor:
    """This rank's rows of packed sequences, each of which is split on its own: [t, ..] → [t / size, ..].

    ``cu_seqlens`` [b + 1] are the boundaries of the whole sequences, gaps between them included
    (cu_seqlens_padded where there are gaps), from 0 to t; those on each rank are ``cu_seqlens // size``. No
    length is read back from a GPU. Raises InvalidInput for a length that is no multiple of ``2 * size``: read
    on a CPU, and on a GPU under ``attnsel.configure(check=True)``.
    """
    size, rank = place_of(group)
    dim = _dimension(x, dim)
    total = x.shape[dim]
    _check_packed(cu_seqlens, total, size)
    starts = cu_seqlens.to(device=x.device, dtype=torch.int64)
    row = torch.arange(total // size, device=x.device)
    sequence = torch.searchsorted(starts // size, row, right=True) - 1
    chunk = (starts.diff() // (2 * size))[sequence]
    start = starts[sequence]
    within = row - start // size
    tail = (2 * size - 2 - rank) * chunk
    return x.index_select(dim, start + within + torch.where(within < chunk, rank * chunk, tail))


def unshard_packed(
    x: Tensor | Sequence[Tensor], cu_seqlens: Tensor, group: Group = None, dim: int = 0
) -> Tensor:
    """The whole packed sequences from the ranks' rows: the inverse of :func:`shard_packed`.

    ``x`` and ``group`` as in :func:`unshard_sequence`, ``cu_seqlens`` and errors as in :func:`shard_packed`.
    """
    parts = _all_parts(x, group)
    size, dim = len(parts), _dimension(parts[0], dim)
    local = parts[0].shape[dim]
    _check_packed(cu_seqlens, local * size, size)
    order = sequence_order(local, size, parts[0].device, cu_seqlens // size)
    return torch.cat(parts, dim).index_select(dim, order)


# ---- groups and checks ------------------------------------------------------------------------------


def place_of(group: Group) -> tuple[int, int]:
    """(size, rank) of this process in ``group``. Raises InvalidInput when it has none there."""
    if isinstance(group, tuple):
        if len(group) != 2 or not all(type(number) is int for number in group):
            raise InvalidInput("group", group, "must be a process group, a DeviceMesh or (size, rank)")
        size, rank = group
        if size < 1 or not 0 <= rank < size:
            raise InvalidInput("group", group, "must be (size, rank) with 0 <= rank < size")
        return size, rank
    group = _process_group(group)
    return dist.get_world_size(group), dist.get_rank(group)


def _process_group(group: Any) -> dist.ProcessGroup | None:
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidInput(
            "group", group, "torch.distributed is not initialised: init_process_group, or give (size, rank)"
        )
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise InvalidInput("group", group, 'a DeviceMesh must have one dimension: mesh["cp"]')
        return group.get_group()
    if group is None or isinstance(group, dist.ProcessGroup):
        return group
    if group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to those outside
        raise InvalidInput("group", group, "this process is no member of it")
    raise InvalidInput("group", group, "must be a process group, a DeviceMesh, None or (size, rank)")


def _dimension(x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise InvalidInput("dim", dim, f"x has {x.ndim} dimensions")
    return dim % x.ndim


def _chunk_length(length: int, size: int, name: str) -> int:
    """Rows of one chunk."""
    chunks = 2 * size
    if length % chunks:
        padded = -(-length // chunks) * chunks
        raise InvalidInput(
            name,
            length,
            f"must be a multiple of {chunks}, two chunks for each of {size} ranks; pad to {padded}",
        )
    return length // chunks


def _check_packed(cu_seqlens: Tensor, total: int, size: int) -> None:
    if cu_seqlens.ndim != 1 or not cu_seqlens.numel() or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        raise InvalidInput("cu_seqlens", got, "must be int32 or int64 of shape [b + 1]")
    _chunk_length(total, size, "rows of x")
    if cu_seqlens.device.type != "cpu" and not settings.current().check:
        return
    ends: list[int] = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != total or ends != sorted(ends):
        raise InvalidInput("cu_seqlens", ends, f"must rise from 0 to the rows of x, {total}")
    for number in range(len(ends) - 1):
        _chunk_length(ends[number + 1] - ends[number], size, f"length of sequence {number}")


# ---- gathering --------------------------------------------------------------------------------------


def _all_parts(x: Tensor | Sequence[Tensor], group: Group) -> list[Tensor]:
    """Every rank's part, in the order of the ranks."""
    if isinstance(x, Tensor):
        if isinstance(group, tuple):
            size, _ = place_of(group)
            if size > 1:
                raise InvalidInput("group", group, "cannot fetch other ranks' parts: give a list of all")
            return [x]
        return list(_Gather.apply(x, _process_group(group)).unbind(0))
    parts = list(x)
    if not parts:
        raise InvalidInput("x", parts, "must hold one tensor per rank")
    for rank, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise InvalidInput(
                f"x[{rank}].shape", tuple(part.shape), f"must be {tuple(parts[0].shape)}, as x[0]"
            )
    return parts


class _Gather(torch.autograd.Function):
    """[..] → [size, ..], every rank's tensor; backwards each rank gets the sum of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = x.new_empty(dist.get_world_size(group), *x.shape)
        dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        if dist.get_backend(ctx.group) == "nccl":
            out = torch.empty_like(grad[0])
            dist.reduce_scatter_tensor(out, grad, group=ctx.group)
            return out, None
        # Gloo of older releases has no reduce_scatter.
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[dist.get_rank(ctx.group)].clone(), None

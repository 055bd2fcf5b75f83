"""Sharding of sequences over ranks: head and tail chunks, as PyTorch and TransformerEngine lay them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ranks
from attnsel import InvalidInput
from attnsel.context_parallel import (
    sequence_positions,
    shard_packed,
    shard_sequence,
    unshard_packed,
    unshard_sequence,
)
from tables import each

torch.set_num_threads(1)

SIZES = st.integers(1, 5)


@given(size=SIZES, chunk=st.integers(0, 3), dim=st.sampled_from([0, 1, 2, -1, -3]))
def test_all_ranks_together_hold_the_sequence(size: int, chunk: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = 2 * size * chunk
    x = torch.randn(shape)
    shards = [shard_sequence(x, (size, rank), dim) for rank in range(size)]
    assert torch.equal(unshard_sequence(shards, dim=dim), x)
    rows = [sequence_positions(shape[dim], (size, rank)) for rank in range(size)]
    for shard, positions in zip(shards, rows, strict=True):
        assert torch.equal(shard, x.index_select(dim, positions))


@given(size=SIZES, chunks=st.lists(st.integers(0, 3), max_size=4), dtype=st.sampled_from(["int32", "int64"]))
def test_packed_sequences_are_split_each_on_its_own(size: int, chunks: list[int], dtype: str) -> None:
    lengths = [2 * size * chunk for chunk in chunks]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(getattr(torch, dtype))
    x = torch.randn(sum(lengths), 2)
    for rank in range(size):
        expected = [shard_sequence(part, (size, rank), 0) for part in x.split(lengths)] or [x]
        assert torch.equal(shard_packed(x, cu_seqlens, (size, rank)), torch.cat(expected))
    shards = [shard_packed(x, cu_seqlens, (size, rank)) for rank in range(size)]
    assert torch.equal(unshard_packed(shards, cu_seqlens), x)


def test_gradients_go_back_to_the_rows() -> None:
    x = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    cu_seqlens = torch.tensor([0, 4, 12])
    assert torch.autograd.gradcheck(lambda t: shard_sequence(t, (2, 1)), x)
    assert torch.autograd.gradcheck(lambda t: shard_packed(t, cu_seqlens, (2, 0), 1), x)
    assert torch.autograd.gradcheck(lambda t: unshard_sequence([t, 2 * t]), x)
    assert torch.autograd.gradcheck(lambda t: unshard_packed([t, 2 * t], 2 * cu_seqlens, dim=1), x)


X = torch.zeros(1, 10, 2)


def packed(rows: int, cu_seqlens: list[float]) -> Tensor:
    return shard_packed(X[0, :rows], torch.tensor(cu_seqlens), (2, 0))


@each(
    ("call", "told"),
    [
        (lambda: shard_sequence(X, (2, 0)), r"x.shape\[1\] = 10: must be a multiple of 4.* pad to 12"),
        (lambda: shard_sequence(X, (2, 0), 3), "dim = 3: x has 3 dimensions"),
        (lambda: shard_sequence(X, (2, 2)), r"group = \(2, 2\): must be \(size, rank\) with"),
        (lambda: unshard_sequence(X, (2, 0)), "cannot fetch other ranks' parts"),
        (lambda: unshard_sequence([X[:, :5], X[:, :5]]), r"x.shape\[1\] = 5: must be even"),
        (lambda: unshard_sequence([X, X[:, :4]]), r"x\[1\].shape = \(1, 4, 2\): must be \(1, 10, 2\)"),
        (lambda: packed(8, [0, 2, 8]), "length of sequence 0 = 2: must be a multiple of 4.*pad to 4"),
        (lambda: packed(8, [0, 4]), r"cu_seqlens = \[0, 4\]: must rise .* 8"),
        (lambda: packed(8, [0.0, 8.0]), "must be int32 or int64"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        call()


# ---- two processes ----------------------------------------------------------------------------------

WORLD = 2


def work(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    whole = torch.randn(2, 3, 8, 4)
    groups: dict[str, Any] = {"mesh": mesh, "group": dist.group.WORLD, "default": None, "pair": (WORLD, rank)}
    mine = {name: shard_sequence(whole, group, 2) for name, group in groups.items()}
    theirs = whole.clone()
    with context_parallel(mesh, buffers=[theirs], buffer_seq_dims=[2], no_restore_buffers={theirs}):
        for name, shard in mine.items():
            assert torch.equal(shard, theirs), name
    [back] = context_parallel_unshard(mesh, [mine["mesh"]], [2])
    assert torch.equal(back, whole)
    for group in (mesh, dist.group.WORLD, None):
        assert torch.equal(unshard_sequence(theirs, group, 2), whole)

    cu_seqlens = torch.tensor([0, 4, 16, 16, 24])
    packed = torch.randn(24, 2)
    assert torch.equal(unshard_packed(shard_packed(packed, cu_seqlens, mesh), cu_seqlens, mesh), packed)

    # Each rank weighs the whole differently; the gradient of the sum of their losses is the sum of weights.
    part: Tensor = mine["mesh"].clone().requires_grad_()
    weights = [torch.randn_like(whole) for _ in range(WORLD)]
    (unshard_sequence(part, mesh, 2) * weights[rank]).sum().backward()
    assert part.grad is not None
    torch.testing.assert_close(part.grad, shard_sequence(weights[0] + weights[1], mesh, 2))

    alone = [dist.new_group([member]) for member in range(WORLD)]
    with pytest.raises(InvalidInput, match="no member"):
        shard_sequence(whole, alone[1 - rank], 2)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no Gloo")
def test_two_ranks_hold_what_pytorchs_context_parallel_gives_them(tmp_path: Path) -> None:
    ranks.run(work, WORLD, tmp_path)

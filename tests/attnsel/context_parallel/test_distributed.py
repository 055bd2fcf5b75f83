"""The module inside FSDP2: the gradients of two processes are those of one. Gloo, on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ranks
from attnsel import DotProductAttention

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no Gloo")

WORLD = 2


class Block(nn.Module):
    """One transformer layer; the learnable sinks are a parameter inside the attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.core = DotProductAttention(4, 8, qkv_format="bshd", softmax_type="learnable")
        self.plain = DotProductAttention(4, 8, qkv_format="bshd")
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return self.out(self.core(q, k, v) + self.plain(q, k, v))


def make() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block()
    nn.init.normal_(block.core.softmax_offset)
    return block, torch.randn(WORLD, 6, 32)


def job(rank: int, size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (size,))
    block, x = make()
    block(x).square().mean().backward()
    wanted = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}  # of one process
    assert len(wanted) == 5
    block, x = make()
    fully_shard(block.core, mesh=mesh)
    wrapped: Any = fully_shard(block, mesh=mesh)
    for _ in range(2):  # the second step meets the cached closures
        wrapped.zero_grad()
        wrapped(x[rank : rank + 1]).square().mean().backward()
    for name, p in block.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name], msg=name)
    assert block.core.last_selection.backend == "tiled"
    assert block.plain.last_selection.backend == "sdpa.flash"


def test_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    ranks.run(job, WORLD, tmp_path)

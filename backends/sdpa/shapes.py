"""What an op gives back and its backward takes: its own lse, and a gradient of lse."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from attnsel.backends.lse_gradient import Five
from attnsel.backends.lse_gradient import with_lse_gradient as general

from .ops import CUDNN, EFFICIENT, FLASH_CPU, forward_op
from .plan import Traits

HEAD_DIM_MULTIPLE = 8  # of flash, efficient and cuDNN on CUDA: 16 bytes of half precision
LSE_MULTIPLE = 32  # kAlignLSE of the memory-efficient kernels


def with_lse_gradient(traits: Traits, five: Five, dlse: Tensor) -> list[Five]:
    """``lse_gradient.with_lse_gradient`` for one op."""
    multiple = 1 if traits is FLASH_CPU else HEAD_DIM_MULTIPLE
    return general(
        five, dlse, multiple=multiple, room=traits.head_dim_room, equal_head_dims=traits.equal_head_dims
    )


def plain_lse(lse: Tensor, s_q: int) -> Tensor:
    """An op's lse as the contract's [b, h, s_q]."""
    return lse.squeeze(3) if lse.dim() == 4 else lse.narrow(2, 0, s_q)


def op_lse(traits: Traits, lse: Tensor) -> Tensor:
    """The contract's lse as the op's backward reads it."""
    if traits is EFFICIENT:
        return torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=torch.inf)
    if traits is FLASH_CPU:
        return lse
    lse = lse.contiguous()
    return lse.unsqueeze(3) if traits is CUDNN and cudnn_lse_dims() == 4 else lse


@cache
def cudnn_lse_dims() -> int:
    """Dimensions of the cuDNN op's lse: [b, h, s] before torch 2.9, whose backward appends one itself, then
    [b, h, s, 1]. This torch's own shape function is asked."""
    q = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="meta")
    return int(forward_op(CUDNN)(q, q, q, None, True, 0.0, False)[1].dim())

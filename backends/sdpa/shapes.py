"""What an op gives back and its backward takes: its own lse, and a gradient of lse."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ops import CUDNN, EFFICIENT, FLASH_CPU, forward_op
from .plan import Traits

HEAD_DIM_MULTIPLE = 8  # of flash, efficient and cuDNN on CUDA: 16 bytes of half precision
LSE_MULTIPLE = 32  # kAlignLSE of the memory-efficient kernels


class Five(NamedTuple):
    """What one plain backward differentiates."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor


def with_lse_gradient(traits: Traits, five: Five, dlse: Tensor) -> list[Five]:
    """Inputs whose plain backwards, one or two, add up to that of (dout, dlse); dv is the first one's alone.

    The kernels compute dS = P * (dout.v - dout.out). Extra columns, 0 in v, -dlse in out and 1 in dout, leave
    dout.v alone and add +dlse; 16-bit types carry dlse in three columns, whose sum has 24 bits or more. Where
    the kernel's head_dim has no room for them, they are a backward of their own, of v = 0.
    """
    q, k, v, out, dout = five
    columns, rest = [], -dlse.to(torch.promote_types(out.dtype, torch.float32))
    for _ in range(3 if out.element_size() == 2 else 1):
        columns.append(rest.to(out.dtype))
        rest = rest - columns[-1]
    multiple = 1 if traits is FLASH_CPU else HEAD_DIM_MULTIPLE
    width = -(-(v.shape[-1] + len(columns)) // multiple) * multiple - v.shape[-1]
    pad = torch.nn.functional.pad
    extra = torch.stack(columns, -1)
    if traits.head_dim_room is not None and v.shape[-1] + width > traits.head_dim_room:
        rest_of_row = (0, v.shape[-1] - len(columns))
        minus_dlse, ones = pad(extra, rest_of_row), pad(torch.ones_like(extra), rest_of_row)
        return [five, Five(q, k, torch.zeros_like(v), minus_dlse, ones)]
    if traits.equal_head_dims:
        q, k = pad(q, (0, width)), pad(k, (0, width))
    out = pad(torch.cat((out, extra), -1), (0, width - len(columns)))
    dout = pad(torch.cat((dout, torch.ones_like(extra)), -1), (0, width - len(columns)))
    return [Five(q, k, pad(v, (0, width)), out, dout)]


def added(parts: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """What the backwards of ``with_lse_gradient`` give together: dq and dk of all, the rest of the first."""
    dq, dk, *others = parts[0]
    for more_dq, more_dk, *_ in parts[1:]:
        dq, dk = dq + more_dq, dk + more_dk
    return (dq, dk, *others)


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

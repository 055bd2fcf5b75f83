"""What an op wants and gives back: padded head dims, expanded heads, its own lse, a gradient of lse."""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs

from .ops import EFFICIENT, FLASH_CPU, FLASH_CUDA
from .plan import Traits

HEAD_DIM_MULTIPLE = 8  # F.sdpa's pad_last_dim for flash on CUDA
LSE_MULTIPLE = 32  # kAlignLSE of the memory-efficient kernels


def prepared(traits: Traits, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the op takes them: heads expanded for efficient, head_dim padded for flash on CUDA."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if traits is EFFICIENT:
        k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    if traits is FLASH_CUDA:
        q, k, v = pad_head_dim(q), pad_head_dim(k), pad_head_dim(v)
    return q, k, v


def pad_head_dim(t: Tensor) -> Tensor:
    """``t`` with zeros up to a head_dim that is a multiple of 8: scores stay, since the scale is given."""
    missing = -t.shape[-1] % HEAD_DIM_MULTIPLE
    return torch.nn.functional.pad(t, (0, missing)) if missing else t


def cut_head_dim(t: Tensor, width: int) -> Tensor:
    """``t`` without the columns that padding added."""
    return t if t.shape[-1] == width else t.narrow(-1, 0, width)


def expand_heads(t: Tensor, h: int) -> Tensor:
    """[b, g, s, d] -> [b, h, s, d], a copy: query head n reads head n // (h // g)."""
    b, g, s, d = t.shape
    return t if g == h else t.unsqueeze(2).expand(b, g, h // g, s, d).reshape(b, h, s, d)


def sum_heads(t: Tensor, g: int) -> Tensor:
    """The gradient of ``expand_heads``: [b, h, s, d] -> [b, g, s, d], summed in float32 or better."""
    b, h, s, d = t.shape
    if g == h:
        return t
    dtype = torch.promote_types(t.dtype, torch.float32)
    return t.reshape(b, g, h // g, s, d).sum(2, dtype=dtype).to(t.dtype)


def with_lse_gradient(
    traits: Traits, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, dlse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs whose plain backward is that of (dout, dlse).

    The kernels compute dS = P * (dout.v - dout.out). Extra columns, 0 in v, -dlse in out and 1 in dout, leave
    dout.v alone and add +dlse; 16-bit types carry dlse in three columns, whose sum has 24 bits or more.
    """
    columns, rest = [], -dlse.to(torch.promote_types(out.dtype, torch.float32))
    for _ in range(3 if out.element_size() == 2 else 1):
        columns.append(rest.to(out.dtype))
        rest = rest - columns[-1]
    multiple = 1 if traits is FLASH_CPU else HEAD_DIM_MULTIPLE
    width = -(-(v.shape[3] + len(columns)) // multiple) * multiple - v.shape[3]
    pad = torch.nn.functional.pad
    if traits.equal_head_dims:
        q, k = pad(q, (0, width)), pad(k, (0, width))
    extra = torch.stack(columns, -1)
    out = pad(torch.cat((out, extra), -1), (0, width - len(columns)))
    dout = pad(torch.cat((dout, torch.ones_like(extra)), -1), (0, width - len(columns)))
    return q, k, pad(v, (0, width)), out, dout


def plain_lse(lse: Tensor, s_q: int) -> Tensor:
    """An op's lse as the contract's [b, h, s_q]."""
    return lse.squeeze(3) if lse.dim() == 4 else lse.narrow(2, 0, s_q)


def op_lse(traits: Traits, lse: Tensor) -> Tensor:
    """The contract's lse as the op's backward reads it."""
    if traits is EFFICIENT:
        return torch.nn.functional.pad(lse, (0, -lse.shape[2] % LSE_MULTIPLE), value=torch.inf)
    if traits is FLASH_CPU:
        return lse
    return lse.contiguous() if traits is FLASH_CUDA else lse.contiguous().unsqueeze(3)

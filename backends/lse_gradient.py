"""A gradient of lse, for kernels whose backward takes none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Five(NamedTuple):
    """What one plain backward differentiates."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    dout: Tensor


def with_lse_gradient(
    five: Five, dlse: Tensor, *, multiple: int, room: int | None, equal_head_dims: bool
) -> list[Five]:
    """Inputs whose plain backwards, one or two, add up to that of (dout, dlse); dv is the first one's alone.

    The kernels compute dS = P * (dout.v - dout.out). Extra columns, 0 in v, -dlse in out and 1 in dout, leave
    dout.v alone and add +dlse; 16-bit types carry dlse in three columns, whose sum has 24 bits or more. Where
    the kernel's head_dim has no room for them, they are a backward of their own, of v = 0.

    ``multiple``: of a head_dim. ``room``: a head_dim that every release and GPU has a kernel for; None: any.
    ``equal_head_dims``: q and k are widened with v.
    """
    q, k, v, out, dout = five
    columns, rest = [], -dlse.to(torch.promote_types(out.dtype, torch.float32))
    for _ in range(3 if out.element_size() == 2 else 1):
        columns.append(rest.to(out.dtype))
        rest = rest - columns[-1]
    width = -(-(v.shape[-1] + len(columns)) // multiple) * multiple - v.shape[-1]
    pad = torch.nn.functional.pad
    extra = torch.stack(columns, -1)
    if room is not None and v.shape[-1] + width > room:
        rest_of_row = (0, v.shape[-1] - len(columns))
        minus_dlse, ones = pad(extra, rest_of_row), pad(torch.ones_like(extra), rest_of_row)
        return [five, Five(q, k, torch.zeros_like(v), minus_dlse, ones)]
    if equal_head_dims:
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

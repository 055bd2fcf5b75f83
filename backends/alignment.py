"""Where rows begin in memory: what 128-bit loads want, and what a copy mends."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; 128-bit loads of FlashAttention, CUTLASS and cuDNN


def misalignment(t: Tensor) -> str | None:
    """What keeps a kernel from reading the rows of ``t`` [..., d] 16 bytes at once, behind its name."""
    size = t.element_size()
    if _address(t) % ALIGNMENT:
        return f" must start at a multiple of {ALIGNMENT} bytes; off by {_address(t) % ALIGNMENT}"
    for dim in range(t.dim() - 1):
        if t.shape[dim] > 1 and t.stride(dim) * size % ALIGNMENT:
            return f".stride({dim}) must be a multiple of {ALIGNMENT // size}; got {t.stride(dim)}"
    return None


def _address(t: Tensor) -> int:
    """Where the first element lies, in bytes; for fake tensors as if storage began at 0."""
    if type(t) in (Tensor, torch.nn.Parameter):
        return t.data_ptr()
    return int(t.storage_offset()) * t.element_size()


def readable(t: Tensor) -> Tensor:
    """``t`` [..., d], an out or its gradient, or a copy where rows cannot be read 16 bytes at once."""
    if t.stride(-1) == 1 and misalignment(t) is None:
        return t
    return t.clone(memory_format=torch.contiguous_format)

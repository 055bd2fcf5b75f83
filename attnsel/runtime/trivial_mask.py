"""Masks that are known to hide nothing, without reading a GPU.

Three ways to know: the mask lies on the CPU, where it is read (of an expanded one, what it is made of); it
was made by ``trivial_mask``; or the caller said so with ``assume_all_visible``. The last two are a note on
the tensor that holds until PyTorch changes it in place. Reading a CPU mask is part of looking a call up:
contents may change between two calls, and memory shared with NumPy changes without a trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_NOTE = "_attnsel_hides_nothing"


def assume_all_visible(mask: Tensor) -> Tensor:
    """Say that an ``attention_mask`` (True = masked out) is False everywhere; returns it.

    For masks on a GPU: attnsel does not read them, as that would wait, so that kernels without a mask
    argument stay out of reach. The note is on this tensor object, not on views or copies of it, and ends with
    the next in-place change by PyTorch. Not checked, unless ``configure(check=True)`` asks for it.
    """
    setattr(mask, _NOTE, _version(mask))
    return mask


def trivial_mask(*shape: int, device: Any = None) -> Tensor:
    """A bool mask that hides nothing, known as such: one element, expanded, so that it takes no memory."""
    return assume_all_visible(torch.zeros(1, dtype=torch.bool, device=device).expand(*shape))


def known_to_be_trivial(mask: Any) -> bool:
    """Whether a mask, or each of a pair, is known to hide nothing. Never waits for a device."""
    if isinstance(mask, (tuple, list)):
        return bool(mask) and all(known_to_be_trivial(one) for one in mask)
    if not isinstance(mask, Tensor):
        return False
    noted = getattr(mask, _NOTE, None)
    if noted is not None and noted == _version(mask):
        return True
    if mask.device.type != "cpu" or type(mask) is not Tensor or mask.dtype != torch.bool:
        return False
    return not _any(mask)


def is_noted(mask: Any) -> bool:
    """Whether somebody said so, rather than the mask's contents."""
    return isinstance(mask, Tensor) and getattr(mask, _NOTE, None) == _version(mask)


def _any(mask: Tensor) -> bool:
    """Whether a CPU mask masks something out. Its last column alone often tells: causal masks hide it."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())
    mask = mask[once]
    return (mask.dim() > 1 and bool(mask[..., :1, -1:].any())) or bool(mask.any())


def _version(mask: Tensor) -> int:
    """Counts in-place changes. Those of an inference tensor are not counted: a note holds for its life."""
    return -1 if mask.is_inference() else mask._version

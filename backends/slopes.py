"""The slopes ALiBi uses when none are given."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor


def default_slopes(num_heads: int, device: torch.device) -> Tensor:
    """float32 [h]: a geometric sequence that ends at 2^-8 for a power of two of heads.

    Other head counts take the slopes of the next lower power of two, then every other slope of the next
    higher one. Source: "Train Short, Test Long" (Press et al., 2022), section 3 and its reference code;
    TransformerEngine computes the same.

    Remembered, but for what is made while a CUDA graph is captured: its memory is the graph's, and holds the
    slopes only once the graph has run.
    """
    place = _place(num_heads, device)
    if place:
        return place[0]
    with torch.inference_mode(False):  # autograd could not save an inference tensor later
        slopes = _computed(num_heads, device)
    if type(slopes) is Tensor and not capturing(device):  # nor one without memory
        place.append(slopes)
    return slopes


def is_default(slopes: Tensor) -> bool:
    """Whether a tensor came from ``default_slopes``, which kernels may then compute themselves."""
    return getattr(slopes, _MARK, False)


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_MARK = "_attnsel_default_slopes"


@lru_cache(maxsize=64)
def _place(num_heads: int, device: torch.device) -> list[Tensor]:
    return []


def _computed(num_heads: int, device: torch.device) -> Tensor:
    """On the device: nothing is copied to it, which a capture does not allow."""
    power = 2 ** math.floor(math.log2(num_heads))
    first = torch.arange(1, power + 1, dtype=torch.float64, device=device) * (-8.0 / power)
    rest = torch.arange(num_heads - power, dtype=torch.float64, device=device)
    slopes = torch.cat((first, (2.0 * rest + 1.0) * (-4.0 / power))).exp2_().float()
    setattr(slopes, _MARK, True)
    return slopes

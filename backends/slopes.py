"""The slopes ALiBi uses when none are given."""

from __future__ import annotations

import math
from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def default_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """float32 [h]: a geometric sequence that ends at 2^-8 for a power of two of heads.

    Other head counts take the slopes of the next lower power of two, then every other slope of the next
    higher one. Source: "Train Short, Test Long" (Press et al., 2022), section 3 and its reference code;
    TransformerEngine computes the same.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(num_heads - power)]
    with torch.inference_mode(False):  # autograd could not save an inference tensor later
        return torch.tensor(slopes, dtype=torch.float32, device=device)

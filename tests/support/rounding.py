"""How far a right answer may be from the exact one."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

# One unit of rounding. float32: PyTorch's kernels take exp to 20 bits on a CPU. float64 alike, with room.
UNITS = {torch.float64: 2.0**-44, torch.float32: 2.0**-19, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Definition(Protocol):
    """The definition of a call, carried out in this dtype.

    ``change``: every input first changes at random, by up to so much of itself.
    """

    def __call__(self, dtype: torch.dtype, change: float = 0.0, seed: int = 0) -> dict[str, Tensor]: ...


def error(actual: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN or infinite and the other is not the same."""
    if not actual.numel():
        return 0.0
    actual, wanted = actual.double(), wanted.double()
    difference = torch.where(actual == wanted, 0.0, (actual - wanted).abs())
    return difference.nan_to_num(math.inf, math.inf).max().item()


def unexplained(
    actual: dict[str, Tensor], definition: Definition, dtype: torch.dtype, coarsest: torch.dtype
) -> str:
    """The first result that rounding does not explain, in words; nothing where there is none.

    Allowed is, as FlashAttention's own tests have it, three times the error of plain PyTorch in the same
    dtype, and two units of rounding of the largest value. Where that is not enough, what the answer changes
    by when each input changes by one such unit counts too: a kernel is not better than its inputs.
    """
    exact = definition(torch.float64)
    plain: dict[str, Tensor] = {}
    changed: list[dict[str, Tensor]] = []
    for name, found in actual.items():
        wanted = exact[name]
        if found.shape != wanted.shape:
            return f"{name} is {tuple(found.shape)}, not {tuple(wanted.shape)}"
        off, unit = error(found, wanted), UNITS[coarsest]
        size = wanted[wanted.isfinite()].abs().max().item() if wanted.isfinite().any() else 0.0
        # A logarithm: what is a unit of the sum is one of 1 here.
        size = max(size, 1.0) if name == "lse" else size
        allowed = 2 * unit * size
        if off > allowed and not plain:  # it costs as much as all the rest
            plain = definition(dtype)
        if off > allowed:
            allowed += 3 * finite(error(plain[name], wanted))
        if off > allowed and not changed:
            # Enough of them: three at random may all cancel where the kernel's rounding does not.
            changed = [definition(torch.float64, unit, seed) for seed in range(12)]
        if off > allowed:
            allowed += 2 * max(finite(error(other[name], wanted)) for other in changed)
        if not off <= allowed:
            return f"{name} is off by {off:.3g} of {size:.3g}, where rounding explains {allowed:.3g}"
    return ""


def finite(number: float) -> float:
    return number if math.isfinite(number) else 0.0

"""What transformers' mask functions let a row see, read from how they were made and not from their values.

transformers makes them in its masking_utils: a causal one, windows, chunks, packed sequences, and several of
these together. One that is made elsewhere, or in another way, is not known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils


class Pattern(NamedTuple):
    """A recognised mask function."""

    causal: bool = False
    left: int = -1  # how far back, and ahead, a row sees; -1 no bound
    right: int = -1
    chunk: int = 0  # tokens that see each other alone; 0: no such bound
    sequences: Tensor | None = None  # [b, s]: equal numbers see each other

    @property
    def window(self) -> tuple[int, int] | None:
        return None if self.left == self.right == -1 else (self.left, self.right)


def read_pattern(mask_function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function, None for one that is not known."""
    if torch.compiler.is_compiling():  # closures cannot be traced; a mask can
        return Pattern(causal=True) if mask_function is masking_utils.causal_mask_function else None
    pattern = Pattern()
    for part in _conjuncts(mask_function):
        held = _closure_of(part)
        maker = getattr(part, "__qualname__", "").partition(".")[0]
        if part is masking_utils.causal_mask_function:
            pattern = pattern._replace(causal=True)
        elif part is getattr(masking_utils, "bidirectional_mask_function", None):
            pass
        elif maker == "sliding_window_overlay" and set(held) == {"sliding_window"}:
            pattern = pattern._replace(left=int(held["sliding_window"]) - 1)
        elif maker == "sliding_window_bidirectional_overlay" and set(held) == {"sliding_window"}:
            pattern = pattern._replace(left=int(held["sliding_window"]), right=int(held["sliding_window"]))
        elif maker == "chunked_overlay" and set(held) == {"chunk_size", "left_padding"}:
            pattern = pattern._replace(chunk=int(held["chunk_size"]))
        elif maker == "packed_sequence_mask_function" and set(held) == {"packed_sequence_mask"}:
            pattern = pattern._replace(sequences=held["packed_sequence_mask"])
        else:
            return None
    return pattern


def _conjuncts(mask_function: Callable[..., Any]) -> list[Callable[..., Any]]:
    held = _closure_of(mask_function)
    name = getattr(mask_function, "__qualname__", "")
    if name == "and_masks.<locals>.and_mask" and "mask_functions" in held:
        return [part for each in held["mask_functions"] for part in _conjuncts(each)]
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask" and "mask_function" in held:
        return _conjuncts(held["mask_function"])  # distances inside a packed sequence are unchanged
    return [mask_function]


def _closure_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables of a closure, by name; none unless it was made in transformers' masking_utils."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return {}
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}

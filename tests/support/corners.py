"""PyTorch's causal masks that hold no numbers."""

from __future__ import annotations

from typing import Any


def corner(word: str, rows: int, keys: int) -> Any:
    """``causal_upper_left`` or ``causal_lower_right`` of torch.nn.attention.bias.

    That module loads Dynamo, for more than a second: not while tests are collected.
    """
    from torch.nn.attention import bias

    return {"upper_left": bias.causal_upper_left, "lower_right": bias.causal_lower_right}[word](rows, keys)

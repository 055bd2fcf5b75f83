"""Counter-based dropout: whether an entry is kept depends only on its position, head and sequence.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), word for word what
``tl.philox(seed, c0, c1, c2, c3)`` of Triton gives, so that both backends drop the same entries. The 32-bit
words live in int64 tensors: PyTorch has little unsigned arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


class Key(NamedTuple):
    """The 64-bit key as two 32-bit words, each a scalar int64 tensor."""

    low: Tensor
    high: Tensor


def make_key(seed: Tensor, offset: Tensor | None) -> Key:
    """``seed XOR rotate_left64(offset, 32)``, without reading either on the host."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    if offset is None:
        return Key(low, high)
    # Rotating by 32 swaps the halves.
    return Key(low ^ ((offset >> 32) & _WORD), high ^ (offset & _WORD))


def philox4x32(
    key: Key, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds over counters that broadcast with each other; four int64 tensors of 32-bit words."""
    k0, k1 = key
    for _ in range(10):
        # A product may wrap past 2**63; its 64 bits stay right, and the mask removes the sign's copies.
        a, b = c0 * _MULTIPLIER_A, c2 * _MULTIPLIER_B
        c0, c1 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD
        c2, c3 = ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _WEYL_A) & _WORD, (k1 + _WEYL_B) & _WORD
    return c0, c1, c2, c3


def keep_mask(key: Key, dropout_p: float, sequences: range, heads: range, rows: range, cols: range) -> Tensor:
    """Which entries dropout keeps: bool ``[sequences, heads, rows, cols]``.

    All four ranges are absolute: indices into the whole batch, query heads, and positions within a
    sequence (offsets included). Four neighbouring keys share one counter and take one output word each.
    """
    device = key.low.device
    words = range(cols.start // 4, (cols.stop + 3) // 4)

    def counter(r: range, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = len(r)
        return torch.arange(r.start, r.stop, device=device).bitwise_and_(_WORD).view(shape)

    out = philox4x32(key, counter(words, 3), counter(rows, 2), counter(heads, 1), counter(sequences, 0))
    threshold = round(dropout_p * 2**32)
    kept = torch.stack([word >= threshold for word in out], dim=-1).flatten(-2)
    first = cols.start - 4 * words.start
    return kept[..., first : first + len(cols)]


def keep_scale(dropout_p: float) -> float:
    """What a kept entry is multiplied by; 0 where nothing is kept."""
    return 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0

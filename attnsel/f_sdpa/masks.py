"""What an ``attn_mask`` of F.sdpa becomes: bool with True = takes part, or floating and added to the scores.

attnsel means the opposite by True. Masks on the CPU are read, at every call, as their contents may change: a
causal one is said as such, and one that changes nothing is left out. A mask on a GPU is never read, since
that would wait; one of ``torch.nn.attention.bias`` says what it is without.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attnsel.runtime.call import NO_EXTRAS, Extras

UNMASKED = ("no_mask", "no_bias", NO_EXTRAS)


class Mask(NamedTuple):
    """A mask as attnsel's arguments say it."""

    attn_mask_type: str = "no_mask"
    bias_type: str = "no_bias"
    extras: Extras = NO_EXTRAS


NO_MASK, CAUSAL = Mask(), Mask("causal")


def read_mask(mask: Tensor, rows: int, keys: int) -> Mask:
    """``mask`` broadcasts to [b, h, rows, keys], and is bool or of a floating-point type."""
    once = _once(mask)
    readable = mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.requires_grad
    if mask.dtype == torch.bool:
        hidden = ~once
        kind = _kind(hidden, rows, keys) if readable else None
        return kind or Mask("arbitrary", extras=Extras(attention_mask=hidden))
    if readable:
        kind = _kind_of_scores(once.detach(), rows, keys)
        if kind is not None:
            return kind
    return Mask(bias_type="post_scale_bias", extras=Extras(core_attention_bias=mask))


def read_causal_bias(mask: CausalBias, rows: int, keys: int) -> Mask | None:
    """What a mask of torch.nn.attention.bias says; None where PyTorch has words or NaN of its own for it."""
    if (mask.seq_len_q, mask.seq_len_kv) != (rows, keys) or rows > keys:
        return None
    return CAUSAL if mask.variant == CausalVariant.UPPER_LEFT else _from_the_bottom_right(rows, keys)


def _once(mask: Tensor) -> Tensor:
    """What an expanded mask is made of."""
    if torch.compiler.is_compiling() or 0 not in mask.stride():
        return mask
    return mask[tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())]


def _kind(hidden: Tensor, rows: int, keys: int) -> Mask | None:
    """Causal, or nothing at all; None for any other pattern. Most are told by their first row."""
    if hidden.dim() < 2 or hidden.shape[-2:] != (rows, keys):
        return None if hidden.any() else NO_MASK
    if rows == 1 or keys == 1:
        return None if hidden.any() else NO_MASK
    seen = keys - int(hidden[(0,) * (hidden.dim() - 2)][0].sum())
    if seen == keys:
        return None if hidden.any() else NO_MASK
    shift = seen - 1
    if shift not in (0, keys - rows):
        return None
    pattern = torch.ones(rows, keys, dtype=torch.bool).triu_(shift + 1)
    if not (hidden == pattern).all():
        return None
    return CAUSAL if shift == 0 else _from_the_bottom_right(rows, keys)


def _kind_of_scores(bias: Tensor, rows: int, keys: int) -> Mask | None:
    """``_kind`` of a mask that is added, where all that it adds is 0 or minus infinity."""
    corner = bias[(0,) * (bias.dim() - 1)][-1].item() if bias.dim() else bias.item()
    if corner == 0.0:
        return None if bias.any() else NO_MASK
    if corner != -torch.inf:
        return None
    hidden = bias == -torch.inf
    if not ((bias == 0) | hidden).all():
        return None
    return _kind(hidden, rows, keys)


def _from_the_bottom_right(rows: int, keys: int) -> Mask:
    return CAUSAL if rows == keys else Mask("causal_bottom_right")

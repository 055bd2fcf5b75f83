"""What the masks of attention written by hand hide: a causal triangle, padding, a window, nothing, or more.

Written by hand, a mask is added to the scores or overwrites them with a large negative number. Read from the
values, once for each tensor: two masks over the same scores hide what either hides.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

LARGEST = 1 << 24  # elements of a mask that is read; a larger one is called "arbitrary"
_HIDES = -1e3  # what is added to a score that shall not count: finfo.min, -1e4 (BERT), -1e9, -inf
_MAYBE_HIDES = -50.0  # Swin adds -100: a mask only where nothing else but 0 is added


class Addition(NamedTuple):
    """A change of the scores before softmax. ``hides``: True where ``tensor`` is bool and True hides a pair,
    False where True shows it, None where ``tensor`` is added ``times`` times."""

    tensor: Tensor
    hides: bool | None = None
    times: float = 1.0


class Visibility(NamedTuple):
    """What the masks of one call leave. ``kind`` is an attn_mask_type; ``window`` (left, right) or None."""

    kind: str = "no_mask"
    window: tuple[int, int] | None = None
    hides_nothing: bool = False
    shape: tuple[int, ...] | None = None
    note: str = ""


class Bias(NamedTuple):
    """What is added to scores and hides nothing. ``kind``: alibi or post_scale_bias."""

    kind: str = "no_bias"
    shape: tuple[int, ...] = ()
    requires_grad: bool = False


def read_masks(additions: list[Addition], s_q: int, s_kv: int) -> tuple[Visibility, Bias]:
    """What masks and biases of [.., s_q, s_kv] scores mean together."""
    hidden: Tensor | None = None
    bias = Bias()
    unread = False
    for one in additions:
        if one.tensor.dim() and one.tensor.shape[-1] == 1 and s_kv > 1:
            continue  # the same for all keys of a row: softmax takes no notice
        if one.tensor.numel() > LARGEST or not _can_read(one.tensor):
            unread = True
            continue
        its, rest = _parts(one)
        if its is not None:
            hidden = its if hidden is None else hidden | its
        if rest is not None:
            bias = _bias(rest, one.tensor)
    if unread:
        return Visibility("arbitrary", note="the mask was too large to read"), bias
    if hidden is None:
        return Visibility(), bias
    return _visibility(hidden, s_q, s_kv), bias


def _can_read(tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and not isinstance(tensor, torch.nn.Parameter):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _parts(one: Addition) -> tuple[Tensor | None, Tensor | None]:
    """What it hides, as bool with True for hidden, and what it adds to the rest; None for nothing."""
    values = one.tensor.detach()
    if one.hides is not None:
        mask = values if values.dtype == torch.bool else values != 0
        return (mask if one.hides else ~mask).cpu(), None
    added = (values.float() * one.times).cpu()
    hidden = added < _HIDES
    kept = torch.where(hidden, 0.0, added)
    lowest = kept.min() if kept.numel() else torch.zeros(())
    if lowest <= _MAYBE_HIDES and bool(((kept == 0) | (kept == lowest)).all()):
        hidden, kept = hidden | (kept == lowest), torch.zeros(())
    is_mask = bool(hidden.any()) or not bool(kept.any())
    return (hidden if is_mask else None), (kept if bool(kept.any()) else None)


def _bias(kept: Tensor, given: Tensor) -> Bias:
    """ALiBi where it is linear in the key's position, and the same for no two heads."""
    kind = "post_scale_bias"
    if kept.dim() >= 3 and kept.shape[-1] >= 3 and not given.requires_grad:
        step = kept[..., 1:] - kept[..., :-1]
        row = step[..., -1:, :]  # a causal mask hides the upper rows; the last row sees all
        if bool((row - row[..., :1]).abs().max() <= 1e-3 * row.abs().max()):
            kind = "alibi"
    return Bias(kind, tuple(kept.shape), given.requires_grad)


def _visibility(hidden: Tensor, s_q: int, s_kv: int) -> Visibility:
    shape = tuple(hidden.shape)
    if not bool(hidden.any()):
        return Visibility(hides_nothing=True, shape=shape)
    planes = hidden.expand(*hidden.shape[:-2], s_q, s_kv) if hidden.dim() >= 2 else hidden.expand(s_q, s_kv)
    planes = planes.reshape(-1, s_q, s_kv)
    rows = torch.arange(s_q)[:, None]
    columns = torch.arange(s_kv)[None, :]
    for kind, shift in (("causal", 0), ("causal_bottom_right", s_kv - s_q)):
        distance = columns - rows - shift
        if not bool(planes[:, distance > 0].all()):
            continue
        kind = "causal" if s_q == s_kv else kind
        if bool((planes == (distance > 0)).all()):
            return Visibility(kind, shape=shape)
        left = shift + s_q - 1 - int((~planes[0, -1]).int().argmax())
        if bool((planes == ((distance > 0) | (distance < -left))).all()):
            return Visibility(kind, (left, 0), shape=shape)
        if _is_padding(planes, distance <= 0):
            return Visibility("padding_" + kind, shape=shape)
        return Visibility("arbitrary", shape=shape, note=f"{kind.replace('_', ' ')} and more")
    if _is_padding(planes, torch.ones(s_q, s_kv, dtype=torch.bool)):
        return Visibility("padding", shape=shape)
    return Visibility("arbitrary", shape=shape)


def _is_padding(planes: Tensor, among: Tensor) -> bool:
    """Whether, of the pairs ``among``, exactly those with keys from some length on are hidden."""
    visible = (~planes & among).any(dim=1)  # keys that some row sees
    lengths = visible.sum(dim=-1, keepdim=True)
    prefix = torch.arange(planes.shape[-1])[None, :] < lengths
    return bool((visible == prefix).all()) and bool((planes == ~(among & prefix[:, None, :])).all())


def first_value(value: Any) -> float | None:
    """A number, or the first element of a tensor that can be read; None where there is none."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and value.numel() and _can_read(value) and value.dtype != torch.bool:
        return float(value.detach().flatten()[0])
    return None


def zeros_and_ones(value: Any) -> bool:
    """Whether it is a tensor of nothing else."""
    if not isinstance(value, Tensor) or value.numel() > LARGEST or not _can_read(value):
        return False
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all())

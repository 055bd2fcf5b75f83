"""transformers' visibility as a few lengths instead of a [b, 1, s, s] tensor, where lengths can express it.

transformers describes visibility by a function of (batch, head, q index, kv index), composed of known parts,
and a padding mask [b, s]. The known parts are recognised. Anything else becomes the boolean mask that
transformers itself makes for SDPA, which is always right and takes O(s²) memory.

The padding mask is read once per forward pass (one wait for a GPU, as in transformers' SDPA path), and never
while a graph is traced or captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils


class Visible(NamedTuple):
    """What a layer sees. A named tuple, so that code which moves arguments between devices moves its tensors.

    Dense (``packed`` False): without cu_seqlens every row is real; with them they count the real rows of each
    sequence, and ``order_q`` / ``order_kv`` [b, s] reorder those to the front (None: they are there already);
    ``back_q`` is the inverse of order_q. Packed: the rows of the whole batch, one after another, are divided
    at cu_seqlens.
    """

    causal: bool  # from the bottom right corner
    window: tuple[int, int] | None  # (left, right) inclusive, -1 no bound
    seqlen_q: int
    seqlen_kv: int
    packed: bool = False
    cu_seqlens_q: Tensor | None = None  # int32 [n + 1]
    cu_seqlens_kv: Tensor | None = None
    order_q: Tensor | None = None
    order_kv: Tensor | None = None
    back_q: Tensor | None = None
    longest: int | None = None  # packed


class Pattern(NamedTuple):
    """A recognised mask function."""

    causal: bool = False
    left: int = -1  # how far back, and ahead, a row sees; -1 no bound
    right: int = -1
    sequences: Tensor | None = None  # [b, s]: equal numbers see each other


def visible(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **rest: Any,
) -> Visible | Tensor | None:
    """transformers' mask interface: makes the ``attention_mask`` that attention functions get.

    None: the layer's own causality is all there is. Visible: as lengths. A tensor: bool [b, 1, s_q, s_kv],
    True where a row sees a key.
    """
    seqlen_q = rest["q_length"] if "q_length" in rest else rest["cache_position"].shape[0]
    pattern = read_pattern(mask_function)
    seen: Visible | None = None
    if pattern is not None and _last_row_at_last_key(pattern, seqlen_q, kv_offset + kv_length, rest):
        padding = None if attention_mask is None else _key_padding(attention_mask, kv_length, kv_offset)
        if all(t is None or can_read(t) for t in (padding, pattern.sequences)):
            seen = as_lengths(pattern, padding, seqlen_q, kv_length)
    if seen is None:
        skips = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
        mask: Tensor | None = masking_utils.sdpa_mask(
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **{**rest, **skips},
        )
        return mask
    return None if seen.causal and seen.window is None and seen.cu_seqlens_q is None else seen


def _last_row_at_last_key(pattern: Pattern, seqlen_q: int, keys_end: int, rest: dict[str, Any]) -> bool:
    """Whether the last row is at the last key. A static cache has unused keys after it."""
    if pattern.sequences is not None:
        return True  # packed sequences come without a cache
    if "q_offset" in rest:  # transformers 5
        skip = rest.get("allow_is_causal_skip", True) or rest.get("allow_is_bidirectional_skip", False)
        if not skip or isinstance(rest["q_offset"], Tensor):
            return False
        return not pattern.causal or rest["q_offset"] + seqlen_q == keys_end
    return bool(rest.get("allow_is_causal_skip", True))


def can_read(t: Tensor) -> bool:
    """Whether the values of a tensor can be read now."""
    if torch.compiler.is_compiling() or type(t) is not Tensor or t.is_meta or torch._C._get_tracing_state():
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def as_lengths(pattern: Pattern, padding: Tensor | None, seqlen_q: int, seqlen_kv: int) -> Visible | None:
    """Visibility as lengths; None where they cannot express it. ``padding``: bool [b, s_kv], True = real."""
    left = -1 if pattern.left >= seqlen_kv - 1 else pattern.left
    right = -1 if pattern.right >= seqlen_kv - 1 else pattern.right
    window = None if left == right == -1 else (left, right)
    dense = Visible(pattern.causal, window, seqlen_q, seqlen_kv)
    if pattern.sequences is not None:
        return None if padding is not None else _packed(dense, pattern)
    return dense if padding is None else _padded(dense, pattern, padding)


def _packed(dense: Visible, pattern: Pattern) -> Visible:
    assert pattern.sequences is not None
    ids = pattern.sequences
    starts = torch.ones_like(ids, dtype=torch.bool)
    torch.ne(ids[:, 1:], ids[:, :-1], out=starts[:, 1:])
    bounds = starts.flatten().nonzero().flatten()  # waits for the number of sequences
    if bounds.numel() == ids.shape[0]:
        return dense  # one sequence per row
    ends = torch.cat([bounds, bounds.new_tensor([ids.numel()])]).to(torch.int32)
    longest = int(ends.diff().max())
    return dense._replace(
        window=None if pattern.left == pattern.right == -1 else (pattern.left, pattern.right),
        packed=True,
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        longest=longest,
    )


def _padded(dense: Visible, pattern: Pattern, padding: Tensor) -> Visible | None:
    first, count = _extent(padding)
    if pattern.causal:
        first_q, count_q = _extent(padding[:, -dense.seqlen_q :])
    else:  # q may belong to another sequence than the keys; all of its rows are real
        first_q, count_q = torch.zeros_like(first), torch.full_like(count, dense.seqlen_q)
    last = padding.flip(1).int().argmax(1)
    whole = (count == 0) | (count + first + last == padding.shape[1])
    flags = torch.stack([padding.all(), whole.all(), (first == 0).all(), (first_q == 0).all()])
    everything, no_holes, keys_in_front, rows_in_front = flags.tolist()
    if everything:
        return dense
    if not no_holes or dense.seqlen_q == 1:
        return None  # holes count as distance in a window; for a single row a mask is as small as lengths
    if (pattern.causal and padding.shape[1] < dense.seqlen_q) or (not pattern.causal and dense.window):
        return None
    return dense._replace(
        cu_seqlens_q=_cumulated(count_q),
        cu_seqlens_kv=_cumulated(count),
        order_q=None if rows_in_front else _rotated(first_q, dense.seqlen_q),
        back_q=None if rows_in_front else _rotated(-first_q, dense.seqlen_q),
        order_kv=None if keys_in_front else _rotated(first, dense.seqlen_kv),
    )


def _extent(real: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of a bool [b, s]: the index of the first True (0 without one), and how many there are."""
    return real.int().argmax(1), real.sum(1)


def _cumulated(count: Tensor) -> Tensor:
    return torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)


def _rotated(by: Tensor, length: int) -> Tensor:
    """int64 [b, length]: row j comes from (j + by) % length."""
    return (torch.arange(length, device=by.device) + by[:, None]) % length


def _key_padding(attention_mask: Tensor, kv_length: int, kv_offset: int) -> Tensor:
    """bool [b, kv_length]; keys beyond the mask count as padding, as in transformers."""
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)


# ---- recognition -----------------------------------------------------------------------------------------


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

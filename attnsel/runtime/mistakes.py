"""Calls that run as they stand and were probably meant otherwise, by people who come from another library.

Looked for where a kernel is chosen, so once for each kind of call and never on a hit. Sizes and flags tell on
every device. Contents tell on the CPU; a GPU is read, which waits for it, with ``check=True`` alone (and
ATTNSEL_DEBUG=2). What the caller said so that it cannot be mistaken (``Config.said``,
``bottom_right_diagonal``) is taken at its word. What is promised of which call: docs/reference/mistakes.md.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import reduce
from itertools import islice
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.checks import is_transformed
from attnsel.debug import Suspicion
from attnsel.decision import Selection
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY
from attnsel.runtime.call import Call
from attnsel.runtime.inputs import real_lengths

_INVERTED = "{}. True means masked out here, as in TransformerEngine, and visible in F.sdpa: {}"
_INSTEAD = "attn_mask=mask, or attention_mask=~mask"
_SIGN = (
    "alibi_slopes below 0 favour what is far away, as -slope * distance is added here: alibi_slopes=-slopes"
)


def suspicions_of(call: Call, selection: Selection) -> list[Suspicion]:
    """Every reason to think that this call was meant otherwise."""
    config, p, found = call.config, selection.params, []
    kind = (config.qkv_format, config.attn_mask_type, p.num_heads, p.num_gqa_groups, p.head_dim_qk)
    codes = [] if "layout" in config.said else ["HINT004", "HINT011"]
    if _sees_too_little(call, p):
        codes.append("HINT002" if p.max_seqlen_q == 1 else "HINT001")
    for code in codes:
        advice = REGISTRY.pages[code].advice(p, selection.environment)  # type: ignore[attr-defined]
        if advice is not None:
            found.append(Suspicion(code, advice.text, kind))
    if call.extras.attention_mask is not None and "mask" not in config.said:
        looks = looks_inverted(call)
        if looks:
            found.append(Suspicion("HINT009", _INVERTED.format(looks, _INSTEAD), (*kind, looks)))
    slopes = call.extras.alibi_slopes
    if slopes is not None and _may_read(slopes, call) and bool((slopes < 0).any()):
        found.append(Suspicion("HINT012", _SIGN, kind))
    return found


def _may_read(t: Any, call: Call) -> bool:
    """Whether a tensor's contents are looked at: on a GPU only where somebody asked for it."""
    if type(t) is not Tensor or is_transformed():
        return False
    return t.is_cpu or (t.is_cuda and (call.settings.check or call.settings.debug > 1))


def _sees_too_little(call: Call, p: AttentionParams) -> bool:
    """Whether a causal mask from the top left hides keys that stand before the queries, as in a cache.

    With lengths: whether some sequence has fewer queries than keys. Where they cannot be read, one query has,
    and so has a packed batch of fewer queries than keys.
    """
    config, extras, s_q = call.config, call.extras, p.max_seqlen_q
    if config.attn_mask_type not in ("causal", "padding_causal") or config.bottom_right_diagonal is not None:
        return False
    if "diagonal" in config.said or not 0 < s_q < p.max_seqlen_kv:
        return False
    if not config.has_padding:
        return True
    rows, keys = real_lengths(extras)
    if rows is keys:
        return False
    if keys is not None and _may_read(keys, call) and (rows is None or _may_read(rows, call)):
        counts = keys.tolist()
        asked = [s_q] * len(counts) if rows is None else rows.tolist()
        return any(0 < n < m for n, m in zip(asked, counts, strict=True))
    whole = extras.block_table is None and extras.cu_seqlens_kv_padded is None
    return s_q == 1 or (config.qkv_format == "thd" and whole and call.q.shape[0] < call.k.shape[0])


# ---- A bool mask that hides what it should show ----------------------------------------------------------
# A pattern that models use shows each query its own key, and its visible keys are one run, or two where the
# first begins at key 0 (sinks, global tokens). A mask that hides such a set is inverted. One that hides every
# key from a row is too, unless the row is padding: then its own key is hidden from all, or it stands at an
# end of the rows of cross attention.
#
# Of a long mask some rows are looked at, evenly spaced, and some whose own key is hidden: bytes, as they lie.

_ROWS = 16  # of one pattern, and as many whose own key is hidden
_ROWS_IN_ALL = 64
_MOST_COPIED = 1 << 20  # elements of a mask whose rows are no runs of memory

# Bytes at an address as a memoryview. An array type of ctypes costs 85 µs for each new size, and slices of
# its views 30 times what slices of bytes do.
_SIGNATURE = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_of: Any = _SIGNATURE(("PyMemoryView_FromMemory", ctypes.pythonapi))
_READ = 0x100  # PyBUF_READ


def looks_inverted(call: Call) -> str | None:
    """What about the call's mask looks as if True meant visible; None where nothing does."""
    given: Any = call.extras.attention_mask
    for mask in given if isinstance(given, (tuple, list)) else (given,):
        if _may_read(mask, call) and mask.dtype == torch.bool and mask.numel():
            for pattern in _patterns(mask if mask.is_cpu else mask.cpu()):
                looks = _told_of(*pattern)
                if looks:
                    return looks
    return None


def _patterns(mask: Tensor) -> Iterator[tuple[memoryview, int, int, int]]:
    """Each [rows, keys] of a mask on the CPU, of many some: memory, rows, keys, bytes from row to row."""
    mask = mask if mask.dim() > 1 else mask.reshape(1, -1)
    if mask.stride(-1) != 1 and mask.shape[-1] > 1:
        if mask.numel() > _MOST_COPIED:
            return
        mask = mask.contiguous()
    *sizes, keys = mask.shape
    *outer, step, _ = strides = mask.stride()
    *leading, rows = [1 if far == 0 else n for n, far in zip(sizes, strides, strict=False)]
    size, begin = (rows - 1) * step + keys, mask.data_ptr()
    for number in _evenly(math.prod(leading), _ROWS_IN_ALL // min(rows, _ROWS)):
        start = begin
        for count, far in zip(reversed(leading), reversed(outer), strict=True):
            number, place = divmod(number, count)
            start += place * far
        yield _view_of(start, size, _READ), rows, keys, step


def _evenly(count: int, most: int) -> list[int]:
    """At most so many of the first ``count`` numbers, both ends among them."""
    return list(range(count)) if count <= most else [n * (count - 1) // (most - 1) for n in range(most)]


def _told_of(lies: memoryview, rows: int, keys: int, step: int) -> str | None:
    own = b""
    if 1 < rows <= keys:
        own = lies[keys - rows :: step + 1].tobytes()  # on the diagonal that ends at the bottom right
        if 1 not in own and (rows == keys or 1 not in lies[:: step + 1].tobytes()[:rows]):
            return None  # no row hides everything, or its own key: almost every mask
        if rows == keys and _is_padded(lies, own, step):
            return None
    concealed = islice((n for n, hidden in enumerate(own) if hidden), _ROWS)
    looked_at = sorted({*_evenly(rows, _ROWS), *concealed})
    picked = [lies[n * step : n * step + keys].tobytes() for n in looked_at]
    hidden = [row for row, seen in zip(looked_at, picked, strict=True) if 0 not in seen]
    if len(hidden) == len(picked):
        return "the mask hides every key"
    marks = [int.from_bytes(seen, "little") for seen in picked]
    marked = reduce(or_, marks).to_bytes(keys, "little")  # hidden from some row
    for shift in {0, keys - rows} if rows > 1 else ():
        own_keys = [(row + shift, seen) for row, seen in zip(looked_at, picked, strict=True)]
        if _hides_a_pattern([one for one in own_keys if 0 <= one[0] < keys], marked, shift, rows == keys):
            return "the mask hides each query's own key, and what it hides looks like what should be visible"
    padding = hidden in (looked_at[: len(hidden)], looked_at[-len(hidden) :])
    if rows == keys:
        never = reduce(and_, marks).to_bytes(keys, "little")  # hidden from every row
        padding = all(never[row] for row in hidden)
    some = " that were looked at" if len(picked) < rows else ""
    return f"the mask hides every key from {len(hidden)} of {len(picked)} rows{some}" if not padding else None


def _is_padded(lies: memoryview, own: bytes, step: int) -> bool:
    """Whether rows and keys at the ends alone are hidden by all, and no row between hides what a pattern
    would show: the other masks that there are, told from a few of their bytes."""
    rows, first, last = len(own), own.find(0), own.rfind(0)
    if first < 0 or own.find(1, first, last) >= 0:
        return False
    for row in (first, last):
        seen = lies[row * step : row * step + rows].tobytes()
        if seen.find(0, 0, first) >= 0 or seen.find(0, last + 1) >= 0:
            return False
    return bool(lies[last] or lies[(rows - 1) * step + first])


def _hides_a_pattern(own: list[tuple[int, bytes]], marked: bytes, shift: int, square: bool) -> bool:
    """Whether what rows hide is a visible pattern, with the diagonal ``shift`` keys to the right.

    own: the place of each row's own key, and what the row hides. One whose own key no row hides (``marked``)
    is padding of the pattern.
    """
    concerned = [(key, seen) for key, seen in own if marked[key]]
    if not all(
        seen[key] and (_is_run(seen) or (shift > 0 and 0 not in seen[:shift])) for key, seen in concerned
    ):
        return False
    if not any(seen.find(1) < key for key, seen in concerned):
        return False  # each hides itself alone, or itself and what follows
    if square or shift:  # else keys are padding: the same for all rows, or at the end of each
        return any(not seen[-1] for _, seen in concerned) and any(seen != own[0][1] for _, seen in own)
    return all(key == seen.rfind(1) == seen.find(1) + seen.count(1) - 1 for key, seen in concerned)


def _is_run(seen: bytes) -> bool:
    """One run of marked keys, or two where the first begins at key 0."""
    first, last, count = seen.find(1), seen.rfind(1), seen.count(1)
    if first == 0 and count < last + 1:
        count -= seen.find(0)
        first = seen.find(1, seen.find(0))
    return count == last - first + 1

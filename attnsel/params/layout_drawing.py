"""A layout as text: what an engineer would draw on paper before believing a kernel's numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnsel.params.layout import Layout, Row, TensorLayout


_WORDS = {"b": "batch", "s": "rows", "t": "tokens", "h": "heads", "d": "head_dim"}
_OWNER = {".": "(q)"}  # heads of q that were copied: no strided view of them can be had
_NARROWEST = 9  # columns of a segment that has to hold its label


def describe(layout: Layout, width: int = 80) -> list[str]:
    """Lines of at most ``width`` columns (60 and more): the name, one row of a shared buffer, the tensors."""
    lines = _wrap(f"layout {layout.name}: {_headline(layout)}", width, "")
    if layout.row is not None:
        lines += _row_lines(layout, layout.row, width)
    for t in layout.tensors:
        lines += _tensor_lines(t, layout, width)
    if layout.traced:
        return lines + _wrap("storages and offsets: not known while torch.compile traces", width, "  ")
    lines += _wrap(f"shared: {_shared(layout)}; overlap: {_overlap(layout)}", width, "  ")
    return lines


def _headline(layout: Layout) -> str:
    if layout.plain:
        return "q, k and v are dense"
    row = layout.row
    if row is not None:
        who = "q, k and v" if row.members == "qkv" else "k and v"
        text = f"{who} are views of one buffer"
        if layout.qkv_format not in (None, row.outer + "h" + row.inner):
            text += f", indexed as {layout.qkv_format}"
        return text
    if all(t.dense for t in layout.tensors) and not any("1" in t.memory for t in layout.tensors):
        return f"dense, but indexed as {layout.qkv_format}: not in memory order"
    return "not dense: a kernel must honour the strides"


# ---- one row of a shared buffer ---------------------------------------------------------------------


def _row_lines(layout: Layout, row: Row, width: int) -> list[str]:
    size = layout.k.itemsize
    # k has every outer dimension, with the same sizes as q where q is in the row too.
    steps = "".join(f"[{letter} {layout.k.shape[layout.k.dims.index(letter)]}]" for letter in row.outer)
    what = "rows" if row.inner == "d" else f"blocks ({row.inner})"
    text = f"{steps} {what} of {row.width} elements ({row.width * size} bytes), each:"
    lines = _wrap(text.strip(), width, "  ")
    segments, repeats = _segments(row)
    total = sum(heads for _, heads in segments) * row.cell
    marks, bar = _bar(segments, row, total, repeats, width - 4)
    lines += [f"    {marks}", f"    {bar}"]
    rest = row.width - len(row.cells) * row.cell
    if rest:
        lines.append(f"    and {rest} elements that are none of theirs")
    return lines


def _segments(row: Row) -> tuple[list[tuple[str, int]], int]:
    """Runs of heads in one period, and how often the period comes: (("Q", 4), ("K", 1), ("V", 1)), 2."""
    groups = row.cells.count("K")
    repeats = groups if row.pattern in ("h3", "h2", "hg(h/hg+2)") else 1
    period = row.cells[: len(row.cells) // repeats]
    runs: list[tuple[str, int]] = []
    for letter in period:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs, repeats


def _bar(segments: list[tuple[str, int]], row: Row, total: int, repeats: int, width: int) -> tuple[str, str]:
    """Where segments start, and the segments, wider ones wider; each at least as wide as its label."""
    labels = [f" {_OWNER.get(letter, letter.lower())} {heads}×{row.cell} " for letter, heads in segments]
    tail = f"×{repeats}" if repeats > 1 else ""
    least = [max(_NARROWEST, len(label), len(str(total)) + 1) for label in labels]
    spare = max(0, width - max(len(tail) + 1, len(str(total))) - sum(least) - len(labels))
    widths = [n + spare * heads * row.cell // total for n, (_, heads) in zip(least, segments, strict=True)]
    marks, bar, at = "", "", 0
    for label, columns, (_, heads) in zip(labels, widths, segments, strict=True):
        marks += f"{at:<{columns + 1}}"
        bar += "|" + label.center(columns, "-")
        at += heads * row.cell
    return f"{marks}{at}", f"{bar}|{tail}"


# ---- the tensors ------------------------------------------------------------------------------------


def _tensor_lines(t: TensorLayout, layout: Layout, width: int) -> list[str]:
    shape = ", ".join(f"{letter} {n}" for letter, n in zip(t.dims, t.shape, strict=True))
    text = f"{t.name} [{shape}]"
    if t.stride is None:
        return _wrap(f"{text}: has no strides to show", width, "  ")
    if t.offset is not None:
        text += f", offset {t.offset}"
    if t.alignment is not None:
        rows = "" if t.row_alignment == t.alignment else f", each row to {t.row_alignment}"
        text += f", aligned to {t.alignment} bytes{rows}"
    lines = _wrap(text, width, "  ")
    strides = f"strides {list(t.stride)}"
    if not layout.traced and not t.dense:
        strides += f", packed they would be {list(t.packed_stride)}"
    lines += _wrap(strides, width, "    ")
    if not layout.traced:
        for dim, n in enumerate(t.shape):
            if t.expanded(dim):
                lines += _wrap(f"{_WORDS[t.dims[dim]]}: one in memory stands for all {n}", width, "    ")
    return lines


def _shared(layout: Layout) -> str:
    groups = [", ".join(names) + " in one storage" for names in layout.shared]
    unknown = [t.name for t in layout.tensors if t.storage is None]
    if unknown:
        groups.append(f"not known for {', '.join(unknown)}")
    return "; ".join(groups) or "nothing"


def _overlap(layout: Layout) -> str:
    pairs = []
    for a, b, sure in layout.overlaps:
        pair = f"{a} with itself" if a == b else f"{a} with {b}"
        pairs.append(pair if sure else f"{pair} not known")
    return ", ".join(pairs) or "none"


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_on_hyphens=False,
    )


# --------------------------------------------------------------------------------------------------------
# Whether strided tensors meet in memory: a linear equation in bounded integers, solved exactly.
#
# Two elements share an address iff ``sum(step * x) == target`` has a solution with ``0 <= x <= most`` for
# each term. Deciding that is hard in general and easy for the strides tensors have: steps in descending
# order leave one or two choices each. The search stops after a number of steps that real layouts stay far
# below.


_MOST_STEPS = 20_000  # some 10 ms

Term = tuple[int, int]  # (step, most)


@lru_cache(maxsize=512)
def meets_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool | None:
    """Whether two different indices are one element. None: not decided within the steps allowed.

    Strides are at least 0, as in torch.
    """
    if 0 in shape:
        return False
    terms = sorted(((s, n - 1) for n, s in zip(shape, stride, strict=True) if n > 1), reverse=True)
    if terms and terms[-1][0] == 0:
        return True
    reach = 0
    nested = True
    for step, most in reversed(terms):
        nested = nested and step > reach
        reach += step * most
    if nested:
        return False
    undecided = False
    for i, (step, most) in enumerate(terms):
        # The first index that differs, differs by 1 or more; the later ones by anything, so that with
        # x = most - difference all unknowns count from 0.
        rest = terms[i + 1 :]
        target = step * most + sum(s * m for s, m in rest)
        found = _solvable([(step, most - 1), *((s, 2 * m) for s, m in rest)], target)
        if found:
            return True
        undecided = undecided or found is None
    return None if undecided else False


@lru_cache(maxsize=512)
def meet(
    a_start: int,
    a_shape: tuple[int, ...],
    a_stride: tuple[int, ...],
    a_size: int,
    b_start: int,
    b_shape: tuple[int, ...],
    b_stride: tuple[int, ...],
    b_size: int,
) -> bool | None:
    """Whether two tensors share a byte. Starts in bytes from a common origin, strides in elements of
    ``a_size`` and ``b_size`` bytes. None: not decided within the steps allowed.
    """
    if 0 in a_shape or 0 in b_shape:
        return False
    # Where b counts from its far end, both sides of a_address == b_address add up.
    terms = [(s * a_size, n - 1) for n, s in zip(a_shape, a_stride, strict=True)]
    far = [(s * b_size, n - 1) for n, s in zip(b_shape, b_stride, strict=True)]
    target = b_start - a_start + sum(step * most for step, most in far)
    terms += far
    if a_size == b_size and (b_start - a_start) % a_size == 0:
        return _solvable([(step // a_size, most) for step, most in terms], target // a_size)
    return _solvable([*terms, (1, a_size - 1), (1, b_size - 1)], target + b_size - 1)


def _solvable(terms: Iterable[Term], target: int) -> bool | None:
    """Whether ``sum(step * x) == target`` with ``0 <= x <= most``; None after too many steps."""
    merged: dict[int, int] = {}
    for step, most in terms:
        if step and most:
            merged[step] = merged.get(step, 0) + most
    ordered = sorted(merged.items(), reverse=True)
    reach, divisor = [0], [0]  # of the terms from each on
    for step, most in reversed(ordered):
        reach.insert(0, reach[0] + step * most)
        divisor.insert(0, math.gcd(divisor[0], step))
    stack = [(0, target)]
    steps = 0
    while stack:
        i, left = stack.pop()
        if left == 0:
            return True
        if not 0 < left <= reach[i] or left % divisor[i]:
            continue
        steps += 1
        if steps > _MOST_STEPS:
            return None
        step, most = ordered[i]
        least = max(0, -((reach[i + 1] - left) // step))
        most = min(most, left // step)
        if most - least > _MOST_STEPS:
            return None
        stack += [(i + 1, left - step * x) for x in range(least, most + 1)]
    return False

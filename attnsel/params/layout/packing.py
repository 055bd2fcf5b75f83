"""Buffers that hold several tensors: q, k and v, or k and v, cut from one along the head axis."""

from __future__ import annotations

from typing import NamedTuple

from attnsel.params.layout.tensors import TensorLayout


class Row(NamedTuple):
    """How one buffer is divided among tensors: along the head axis, in cells of ``cell`` elements."""

    members: str  # "qkv" or "kv"
    outer: str  # dimensions outside the head axis, in memory order
    pattern: str  # 3h, h3, (h+2hg), hg(h/hg+2), 2h or h2
    inner: str  # dimensions inside it: one cell
    cells: str  # whose each cell is: "QQQQKV"; "." for nobody's
    cell: int
    width: int  # elements from one row to the next
    exact: bool  # rows follow each other without gaps

    @property
    def token(self) -> str:
        text = f"{self.outer}{self.pattern}{self.inner}"
        return text if self.exact else f"view({text})"


class _Axis(NamedTuple):
    """A tensor along its head axis."""

    outer: tuple[tuple[str, int, int], ...]  # (letter, size, stride) of what is stepped along outside
    inner: str
    cell: int
    heads: int
    step: int


def _axis(t: TensorLayout, order: str) -> _Axis | None:
    """None where the dimensions inside the head axis are not dense, or none is like this in memory."""
    assert t.stride is not None
    at = {letter: t.dims.index(letter) for letter in order}
    cell, inside = 1, order[order.index("h") + 1 :]
    for letter in reversed(inside):
        n, step = t.shape[at[letter]], t.stride[at[letter]]
        if n > 1 and step != cell:
            return None
        cell *= n
    heads = t.shape[at["h"]]
    step = t.stride[at["h"]] if heads > 1 else cell
    outer = tuple(
        (letter, t.shape[at[letter]], t.stride[at[letter]])
        for letter in order[: order.index("h")]
        if t.shape[at[letter]] > 1
    )
    return _Axis(outer, inside, cell, heads, step)


def divided(members: str, tensors: tuple[TensorLayout, ...]) -> Row | None:
    first = tensors[0]
    if first.storage is None or any(
        t.storage != first.storage
        or t.stride is None
        or t.start is None
        or t.itemsize != first.itemsize
        or t.dims != first.dims
        or 0 in t.shape
        or "1" in t.memory
        for t in tensors
    ):
        return None
    # The tensor with most heads tells where its head axis lies; one with a single head could not.
    order = max(tensors, key=lambda t: t.shape[t.dims.index("h")]).memory
    axes = [_axis(t, order) for t in tensors]
    one = axes[0]
    if one is None or any(a is None or (a.outer, a.cell) != (one.outer, one.cell) for a in axes):
        return None
    starts = [t.start or 0 for t in tensors]
    cells: dict[int, str] = {}
    for letter, axis, start in zip(members.upper(), axes, starts, strict=True):
        assert axis is not None
        at, rest = divmod(start - min(starts), axis.cell * first.itemsize)
        step, uneven = divmod(axis.step, axis.cell)
        if rest or uneven:
            return None
        for head in range(axis.heads):
            cells[at + head * step] = letter
    total = sum(a.heads for a in axes if a is not None)
    if len(cells) != total:
        return None  # heads that two tensors share
    width = one.outer[-1][2] if one.outer else (max(cells) + 1) * one.cell
    if members == "kv" and max(cells) >= total:
        cells = _grouped(cells, width // one.cell, one.heads)
    if sorted(cells) != list(range(len(cells))):
        return None
    text = "".join(cells[i] for i in range(len(cells)))
    pattern = _pattern(text, members)
    if pattern is None or width < len(cells) * one.cell:
        return None
    exact, inside = width == len(cells) * one.cell, width
    for _, size, stride in reversed(one.outer):
        exact = exact and stride == inside
        inside = stride * size
    outer = order[: order.index("h")]
    return Row(members, outer, pattern, one.inner, text, one.cell, width, exact)


def _grouped(cells: dict[int, str], width: int, groups: int) -> dict[int, str]:
    """The cells of rows [g, r + 2], r query heads before each key and value head, if these are such.

    The queries are no view of it: their heads are not evenly spaced.
    """
    period = width // groups
    wanted = {at: letter for i in range(groups) for at, letter in ((i * period, "K"), (i * period + 1, "V"))}
    if groups < 2 or width % groups or cells != wanted:
        return cells
    return dict(enumerate(("." * (period - 2) + "KV") * groups))


def _pattern(cells: str, members: str) -> str | None:
    """The name of an order of heads; None for one that has none. Of two names the later one here is used."""
    h, g = cells.count("Q"), cells.count("K")
    if "." in cells:
        return "hg(h/hg+2)"
    if members == "kv":
        return {"KV" * g: "h2", "K" * g + "V" * g: "2h"}.get(cells)
    named = {
        ("Q" * (h // g) + "KV") * g: "hg(h/hg+2)",
        "Q" * h + "K" * g + "V" * g: "(h+2hg)",
    }
    if h == g:
        named |= {"QKV" * h: "h3", "Q" * h + "K" * h + "V" * h: "3h"}
    return named.get(cells)

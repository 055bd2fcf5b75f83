"""How q, k and v lie in memory: TransformerEngine's names of layouts and what they mean, what tensors say of
themselves, buffers that hold several, whether they overlap, and all that as text."""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Iterable
from functools import lru_cache
from itertools import groupby
from typing import Any, Literal, NamedTuple

from attnsel.base.records import json_fields
from attnsel.errors import InvalidInput

# ---- Layouts by name -----------------------------------------------------------------------------------
# The names are TransformerEngine's (NVTE_QKV_Layout): letters in memory order, ``_`` between
# tensors, ``3`` or ``2`` where several tensors interleave in one buffer. The name is for people; where
# tensor specs are given, their strides decide.


QkvFormat = Literal["bshd", "sbhd", "thd", "bhsd"]


class Format(NamedTuple):
    """Where the dimensions of one tensor stand. ``rows`` is the axis of s, of t in a packed one.

    ``to_contract`` and ``from_contract`` permute to ``[b, h, s, d]`` and back; None: nothing to do.
    """

    name: QkvFormat
    rank: int
    rows: int
    heads: int
    batch: int | None  # None: packed
    to_contract: tuple[int, ...] | None
    from_contract: tuple[int, ...] | None

    @property
    def packed(self) -> bool:
        return self.batch is None


FORMATS: dict[str, Format] = {
    each.name: each
    for each in (
        Format("bshd", 4, 1, 2, 0, (0, 2, 1, 3), (0, 2, 1, 3)),
        Format("sbhd", 4, 0, 2, 1, (1, 2, 0, 3), (2, 0, 1, 3)),
        Format("thd", 3, 0, 1, None, None, None),
        Format("bhsd", 4, 2, 1, 0, None, None),
    )
}


class LayoutName(NamedTuple):
    """What a layout's name says."""

    q_format: QkvFormat
    kv_format: QkvFormat
    group: str  # 3hd, h3d, hd_2hd, hd_h2d, hd_hd_hd or sd_sd_sd: how the tensors share buffers
    paged: bool


def _known_layouts() -> dict[str, LayoutName]:
    names: dict[str, LayoutName] = {}
    lead: dict[QkvFormat, str] = {"sbhd": "sb", "bshd": "bs", "thd": "t"}
    for fmt, front in lead.items():
        names[f"{front}3hd"] = LayoutName(fmt, fmt, "3hd", False)
        names[f"{front}h3d"] = LayoutName(fmt, fmt, "h3d", False)
        names[f"{fmt}_{front}2hd"] = LayoutName(fmt, fmt, "hd_2hd", False)
        names[f"{fmt}_{front}h2d"] = LayoutName(fmt, fmt, "hd_h2d", False)
        names[f"{fmt}_{fmt}_{fmt}"] = LayoutName(fmt, fmt, "hd_hd_hd", False)
    mixed: tuple[tuple[QkvFormat, QkvFormat], ...] = (
        ("sbhd", "bshd"),
        ("bshd", "sbhd"),
        ("thd", "bshd"),
        ("thd", "sbhd"),
    )
    for q, kv in mixed:
        names[f"{q}_{kv}_{kv}"] = LayoutName(q, kv, "hd_hd_hd", False)
    paged: tuple[tuple[QkvFormat, QkvFormat], ...] = (("bshd", "bshd"), ("sbhd", "sbhd"), *mixed)
    for q, kv in paged:
        names[f"paged_kv_{q}_{kv}_{kv}"] = LayoutName(q, kv, "hd_hd_hd", True)
    names["bhsd_bhsd_bhsd"] = LayoutName("bhsd", "bhsd", "sd_sd_sd", False)
    return names


LAYOUTS: dict[str, LayoutName] = _known_layouts()


def read_layout(name: str) -> str:
    """The full layout name; a bare format such as ``"bshd"`` stands for three separate tensors.

    Raises ValueError listing what is allowed.
    """
    if name in FORMATS:
        return f"{name}_{name}_{name}"
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout; allowed: {', '.join(FORMATS)}, {', '.join(LAYOUTS)}")
    return name


# ---- How one tensor lies, as it says itself; and what it does not say as None --------------------------


_MOST_ALIGNED = 256  # bytes; what allocators give, and more than any load is wide


@json_fields(
    "name", "dims", ("shape", lambda t: [_number(n) for n in t.shape]), "stride", "offset", "itemsize",
    "storage", "memory", "dense", "contiguous", "alignment", "row_alignment", "overlaps_itself",
)  # fmt: skip
class TensorLayout(NamedTuple):
    """How one tensor lies. Strides and offset count elements, as torch does.

    ``base.as_strided(shape, stride, offset)`` over the whole of its storage is the tensor again.
    """

    name: str  # q, k or v
    dims: str  # a letter for each dimension: b batch (or page), s rows, t packed rows, h heads, d head_dim
    shape: tuple[int, ...]  # -1 where even that is not said (nested tensors)
    stride: tuple[int, ...] | None  # None: sparse, nested, or of symbolic sizes
    itemsize: int
    contiguous: bool  # as torch says
    offset: int | None = (
        None  # from the start of its storage; None where strides are, and under torch.compile
    )
    storage: int | None = None  # tensors with the same number share memory; None: not known, or there is none
    start: int | None = (
        None  # bytes from the start of what they share; offset * itemsize but for foreign memory
    )
    alignment: int | None = None  # bytes, at most 256, that the first element's address is a multiple of
    real: bool = False  # it has an address; without one (meta, fake) storage is taken to start aligned

    @property
    def memory(self) -> str:
        """The dimensions in memory order, ``1`` for one of stride 0: its one element serves all."""
        if self.stride is None:
            return self.dims
        order = _memory_order(self.shape, self.stride)
        return "".join("1" if self.expanded(dim) else self.dims[dim] for dim in order)

    def expanded(self, dim: int) -> bool:
        return self.stride is not None and self.stride[dim] == 0 and self.shape[dim] > 1

    @property
    def dense(self) -> bool:
        """No gaps and no steps, in whatever order; stride 0 aside."""
        if self.stride is None:
            return self.contiguous
        return all(step == packed for step, packed in zip(self.stride, self.packed_stride, strict=True))

    @property
    def packed_stride(self) -> tuple[int, ...]:
        """The strides its dimensions would have without gaps, in their order in memory. A dimension of size
        1, or of stride 0, keeps its own."""
        assert self.stride is not None
        packed, inside = list(self.stride), 1
        for dim in reversed(_memory_order(self.shape, self.stride)):
            if self.shape[dim] > 1 and self.stride[dim]:
                packed[dim] = inside
                inside *= self.shape[dim]
        return tuple(packed)

    @property
    def overlaps_itself(self) -> bool | None:
        """Whether two indices are one element; None: not known."""
        return None if self.stride is None else _overlaps_itself(self.shape, self.stride)

    def overlaps(self, other: TensorLayout) -> bool | None:
        """Whether the two share a byte; None: not known."""
        if self.storage is None or other.storage is None:
            return None
        if self.storage != other.storage:
            return False
        if self.start is None or other.start is None or self.stride is None or other.stride is None:
            return None
        if 0 in self.shape or 0 in other.shape:
            return False
        # Where the other counts from its far end, both sides of "one address == the other" add up.
        size, step = self.itemsize, other.itemsize
        terms = [(s * size, n - 1) for n, s in zip(self.shape, self.stride, strict=True)]
        far = [(s * step, n - 1) for n, s in zip(other.shape, other.stride, strict=True)]
        apart = other.start - self.start
        target = apart + sum(s * most for s, most in far)
        terms += far
        if size == step and apart % size == 0:
            return _solvable([(s // size, most) for s, most in terms], target // size)
        return _solvable([*terms, (1, size - 1), (1, step - 1)], target + step - 1)

    @property
    def row_alignment(self) -> int | None:
        """Bytes, at most 256, that the address of every row along the last dimension is a multiple of."""
        if self.alignment is None or self.stride is None:
            return None
        steps = [s * self.itemsize for n, s in zip(self.shape[:-1], self.stride[:-1], strict=True) if n > 1]
        return math.gcd(self.alignment, *steps)

    @property
    def token(self) -> str:
        """Its part of a layout's name."""
        if self.dense:
            return self.memory
        steps = () if self.stride is None else tuple(zip(self.shape, self.stride, strict=True))
        # What stride 0 repeats is said by the letter 1.
        stepped = [(n, step) for n, step in steps if step]
        meets = _overlaps_itself(tuple(n for n, _ in stepped), tuple(step for _, step in stepped))
        return f"{'overlap' if meets else 'view'}({self.memory})"


class _Storage(NamedTuple):
    number: int
    address: int  # 0: it has none
    origin: int  # the address that ``start`` counts from


def storages(tensors: tuple[Any, ...]) -> list[_Storage | None]:
    """The storage of each, numbered in order; memory that lies in two storages counts as one."""
    found: list[tuple[Any, int, int] | None] = [_storage(t) for t in tensors]
    numbered: list[_Storage | None] = []
    for i, one in enumerate(found):
        if one is None:
            numbered.append(None)
            continue
        storage, address, size = one
        number, origin = i, address
        for j, other in enumerate(found):
            if other is None:
                continue
            begins, ends = other[1], other[1] + other[2]
            touching = bool(address and begins) and address < ends and begins < address + size
            if other[0] is storage or touching:
                number, origin = min(number, j), min(origin, begins)
        numbered.append(_Storage(number, address, origin))
    order = {number: i for i, number in enumerate(dict.fromkeys(s.number for s in numbered if s is not None))}
    return [None if s is None else s._replace(number=order[s.number]) for s in numbered]


def _storage(t: Any) -> tuple[Any, int, int] | None:
    """(the storage, its address, its size in bytes); None where there is none."""
    try:
        storage = t.untyped_storage()
        address = int(storage.data_ptr())
        return storage, address, int(storage.nbytes()) if address else 0  # a fake one's may be symbolic
    except Exception:  # sparse, functorch's and wrapping tensors each raise something else
        return None


def read(name: str, dims: str, t: Any, held: _Storage | None) -> TensorLayout:
    shape, stride, offset = _said(lambda: tuple(t.shape), (-1,) * len(dims)), None, None
    strided = bool(_said(lambda: str(t.layout) == "torch.strided" and not t.is_nested, False))
    if strided:
        stride, offset = _said(lambda: (tuple(t.stride()), t.storage_offset()), (None, None))
    if stride is not None and any(type(n) is not int for n in (*shape, *stride, offset)):
        stride = offset = None  # symbolic: comparing them would guard on them, or fail
    itemsize = _said(t.element_size, 1)
    start = alignment = None
    if held is not None and offset is not None:
        alignment = math.gcd(held.address + offset * itemsize, _MOST_ALIGNED)
        start = held.address - held.origin + offset * itemsize
    number = None if held is None or offset is None else held.number
    real = held is not None and held.address != 0
    contiguous = strided and bool(_said(t.is_contiguous, False))
    return TensorLayout(
        name, dims, shape, stride, itemsize, contiguous, offset, number, start, alignment, real
    )


def _said(ask: Any, otherwise: Any) -> Any:
    try:
        return ask()
    except Exception:
        return otherwise


def _number(n: Any) -> int | str:
    return n if type(n) is int else str(n)


def _memory_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Dimensions from the widest stride to the narrowest. One that is never stepped along (of size 1 or
    stride 0) goes where it is indexed: right before the next that is."""
    keys: list[int] = []
    inside = 0
    for n, step in zip(reversed(shape), reversed(stride), strict=True):
        if n > 1 and step:
            inside = step
        keys.append(inside)
    keys.reverse()
    return sorted(range(len(shape)), key=lambda dim: (-keys[dim], dim))


# ---- Buffers that hold several tensors: q, k and v, or k and v, cut from one along the head axis -------


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


# --------------------------------------------------------------------------------------------------------
# The layout of three tensors: found from their strides, offsets and storages, never from their data.
#
# Nothing here imports torch: tensors are asked for ``shape``, ``stride()``, ``storage_offset()`` and
# ``untyped_storage()``, and what one cannot say is None. While ``torch.compile`` traces, offsets and storages
# are not asked for: Dynamo can neither trace nor guard them.


_MIXED = {"sbhd_2bshd": "bshd", "bshd_2sbhd": "sbhd", "thd_2bshd": "bshd", "thd_2sbhd": "sbhd"}


@json_fields(
    "name", "qkv_format", "plain", ("known_to_transformer_engine", "known"), "shared", "overlaps", "row",
    "tensors",
)  # fmt: skip
class Layout(NamedTuple):
    """Where q, k and v lie. ``name`` says how memory is ordered, ``qkv_format`` how it is indexed."""

    name: str
    qkv_format: str
    q: TensorLayout
    k: TensorLayout
    v: TensorLayout
    row: Row | None  # of a buffer that q, k and v, or k and v, were cut from
    traced: bool = False  # found while torch.compile traced: strides are known, storages are not

    @property
    def tensors(self) -> tuple[TensorLayout, TensorLayout, TensorLayout]:
        return self.q, self.k, self.v

    @property
    def plain(self) -> bool:
        """Each tensor is dense in the order it is indexed in: strides have nothing to tell."""
        return self.q.contiguous and self.k.contiguous and self.v.contiguous

    @property
    def known(self) -> bool:
        """TransformerEngine has a name for it."""
        return self.name in LAYOUTS

    @property
    def shared(self) -> tuple[str, ...]:
        """Which tensors lie in one storage: ``("qkv",)``, ``("kv",)``, …"""
        groups: dict[int, str] = {}
        for t in self.tensors:
            if t.storage is not None:
                groups[t.storage] = groups.get(t.storage, "") + t.name
        return tuple(names for names in groups.values() if len(names) > 1)

    @property
    def overlaps(self) -> tuple[tuple[str, str, bool | None], ...]:
        """Pairs that share elements: (q, k, True); (q, q, True) for a tensor that meets itself. None in the
        third place: it could not be decided."""
        found = [(t.name, t.name, t.overlaps_itself) for t in self.tensors]
        for a, b in ((self.q, self.k), (self.q, self.v), (self.k, self.v)):
            found.append((a.name, b.name, a.overlaps(b)))
        return tuple(pair for pair in found if pair[2] is not False)

    def describe(self, width: int = 80) -> str:
        """As text, in lines of at most ``width`` columns (60 and more): what one row of a shared buffer
        holds, which strides, what is shared, what overlaps, how it is aligned."""
        lines = _wrap(f"layout {self.name}: {_headline(self)}", width, "")
        if self.row is not None:
            lines += _wrap(_row_text(self.k, self.row), width, "  ")
        for t in self.tensors:
            lines += _tensor_lines(t, width, traced=self.traced)
        if self.traced:
            end = "storages and offsets: not known while torch.compile traces"
        else:
            end = f"shared: {_shared(self)}; overlap: {_overlap(self)}"
        return "\n".join(lines + _wrap(end, width, "  "))


def detect_layout(q: Any, k: Any, v: Any, qkv_format: str, *, paged: bool = False) -> Layout:
    """How three tensors lie in memory, by TransformerEngine's name where it has one.

    ``qkv_format`` says how they are indexed: bshd, sbhd, thd, bhsd, or one of TransformerEngine's mixed ones,
    such as thd_2bshd. ``paged``: k and v are pools of pages, [pages, page_size, g, d]. No data is read, and
    nothing waits for a GPU. Every triple of the right ranks has an answer: meta and fake tensors, subclasses
    without storage and sparse tensors too, with None for what they do not say.

    Raises InvalidInput for an unknown format, or a tensor of another rank.
    """
    if qkv_format not in FORMATS and qkv_format not in _MIXED:
        raise InvalidInput("qkv_format", qkv_format, f"must be one of {', '.join((*FORMATS, *_MIXED))}")
    dims_q, dims_kv = qkv_format.split("_")[0], _MIXED.get(qkv_format, qkv_format)
    if paged:
        dims_kv = "bshd"
    for name, t, dims in (("query_layer", q, dims_q), ("key_layer", k, dims_kv), ("value_layer", v, dims_kv)):
        if t.dim() != len(dims):
            raise InvalidInput(f"{name}.shape", tuple(t.shape), f"must have {len(dims)} dimensions, {dims}")
    prefix = "paged_kv_" if paged else ""
    if _tracing():
        # Sizes may be symbolic here: nothing is compared, so that no guard is added.
        seen = [
            TensorLayout(name, dims, tuple(t.shape), tuple(t.stride()), t.element_size(), t.is_contiguous())
            for name, t, dims in (("q", q, dims_q), ("k", k, dims_kv), ("v", v, dims_kv))
        ]
        tokens = [t.dims if t.contiguous else f"view({t.dims})" for t in seen]
        return Layout(prefix + "_".join(tokens), qkv_format, seen[0], seen[1], seen[2], None, traced=True)
    held = storages((q, k, v))
    of_q = read("q", dims_q, q, held[0])
    of_k, of_v = read("k", dims_kv, k, held[1]), read("v", dims_kv, v, held[2])
    row = None if paged else divided("qkv", (of_q, of_k, of_v)) or divided("kv", (of_k, of_v))
    if row is None:
        name = f"{of_q.token}_{of_k.token}_{of_v.token}"
    else:
        name = row.token if row.members == "qkv" else f"{of_q.token}_{row.token}"
    return Layout(prefix + name, qkv_format, of_q, of_k, of_v, row)


def _tracing() -> bool:
    """Whether Dynamo is reading this; torch is only looked for where it is imported already."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


# ---- A layout as text ----------------------------------------------------------------------------------

_WORDS = {"b": "batch", "s": "rows", "t": "tokens", "h": "heads", "d": "head_dim"}


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


def _row_text(k: TensorLayout, row: Row) -> str:
    """What one row of a shared buffer holds, in order: runs of heads, and how often they come."""
    # k has every outer dimension, with the same sizes as q where q is in the row too.
    steps = "".join(f"[{letter} {k.shape[k.dims.index(letter)]}]" for letter in row.outer)
    what = "rows" if row.inner == "d" else f"blocks ({row.inner})"
    repeats = row.cells.count("K") if row.pattern in ("h3", "h2", "hg(h/hg+2)") else 1
    period = row.cells[: len(row.cells) // repeats]
    # Heads of q that were copied are "(q)": no strided view of them can be had.
    runs = [
        f"{'(q)' if letter == '.' else letter.lower()} {len(list(heads))}×{row.cell}"
        for letter, heads in groupby(period)
    ]
    held = ", ".join(runs) if repeats == 1 else f"{repeats} times ({', '.join(runs)})"
    rest = row.width - len(row.cells) * row.cell
    end = f", and {rest} elements that are none of theirs" if rest else ""
    return (
        f"{steps} {what} of {row.width} elements ({row.width * k.itemsize} bytes), each: {held}{end}".strip()
    )


def _tensor_lines(t: TensorLayout, width: int, *, traced: bool) -> list[str]:
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
    if not traced and not t.dense:
        strides += f", packed they would be {list(t.packed_stride)}"
    lines += _wrap(strides, width, "    ")
    if not traced:
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


@lru_cache(maxsize=512)
def _overlaps_itself(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool | None:
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


def _solvable(terms: Iterable[tuple[int, int]], target: int) -> bool | None:
    """Whether ``sum(step * x) == target`` with ``0 <= x <= most`` of ``terms`` (step, most); None after too
    many steps."""
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

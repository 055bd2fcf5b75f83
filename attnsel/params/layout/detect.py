"""The layout of three tensors: found from their strides, offsets and storages, never from their data.

Nothing here imports torch: tensors are asked for ``shape``, ``stride()``, ``storage_offset()`` and
``untyped_storage()``, and what one cannot say is None. While ``torch.compile`` traces, offsets and storages
are not asked for: Dynamo can neither trace nor guard them.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from attnsel.errors import InvalidInput
from attnsel.params.layout.describe import describe
from attnsel.params.layout.names import FORMATS, LAYOUTS
from attnsel.params.layout.overlap import meet
from attnsel.params.layout.packing import Row, divided
from attnsel.params.layout.tensors import TensorLayout, read, storages, traced

_MIXED = {"sbhd_2bshd": "bshd", "bshd_2sbhd": "sbhd", "thd_2bshd": "bshd", "thd_2sbhd": "sbhd"}


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
            found.append((a.name, b.name, _meeting(a, b)))
        return tuple(pair for pair in found if pair[2] is not False)

    def describe(self, width: int = 80) -> str:
        """A drawing for reports: what is shared, which strides, what overlaps, how it is aligned."""
        return "\n".join(describe(self, width))

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "name": self.name,
            "qkv_format": self.qkv_format,
            "plain": self.plain,
            "known_to_transformer_engine": self.known,
            "shared": list(self.shared),
            "overlaps": [list(pair) for pair in self.overlaps],
            "row": None if self.row is None else self.row._asdict(),
            "tensors": [t.as_dict() for t in self.tensors],
        }


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
        seen_q, seen_k, seen_v = traced("q", dims_q, q), traced("k", dims_kv, k), traced("v", dims_kv, v)
        tokens = [t.dims if t.contiguous else f"view({t.dims})" for t in (seen_q, seen_k, seen_v)]
        return Layout(prefix + "_".join(tokens), qkv_format, seen_q, seen_k, seen_v, None, traced=True)
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


def _meeting(a: TensorLayout, b: TensorLayout) -> bool | None:
    if a.storage is None or b.storage is None:
        return None
    if a.storage != b.storage:
        return False
    if a.start is None or b.start is None or a.stride is None or b.stride is None:
        return None
    return meet(a.start, a.shape, a.stride, a.itemsize, b.start, b.shape, b.stride, b.itemsize)

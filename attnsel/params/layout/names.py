"""Layouts by name.

The names are TransformerEngine's (NVTE_QKV_Layout): letters in memory order, ``_`` between
tensors, ``3`` or ``2`` where several tensors interleave in one buffer. The name is for people; where
tensor specs are given, their strides decide.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

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

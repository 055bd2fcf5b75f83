"""Published times of kernels, as rows: what the order of candidates rests on, and what a report quotes.

Nothing on the way of a decision reads them. data/figures.csv says what its columns are; a line is split when
its architecture is first asked about.
"""

from __future__ import annotations

import math
import pkgutil
from functools import lru_cache
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows
from attnsel.params import AttentionParams
from attnsel.verdicts.measured import Row, microseconds

_APART = 2.0  # powers of two that a length may be from what is asked, and still be quoted; and a head, half


class Measurement(NamedTuple):
    """What one person measured in one run for one shape: a row for each kernel, the fastest first. ``name``
    is that of the pair, such as p30; ``same_card``: whether it is that of a question it is quoted for."""

    name: str
    rows: tuple[Row, ...]
    same_card: bool = False

    @property
    def shape(self) -> Row:
        return self.rows[0]

    @property
    def source(self) -> Row:
        if self.here:
            return {"title": "measured here", "date": self.shape["date"], "source": self.shape["file"]}
        return sources()[self.shape["source"]]

    @property
    def here(self) -> bool:
        """Whether it was measured on this machine: a file's (attnsel/verdicts/measured.py)."""
        return "file" in self.shape

    @property
    def times(self) -> dict[str, float]:
        """By kernel, what is smaller the faster it is: to be compared within one measurement."""
        return {row["kernel"]: microseconds(row) for row in self.rows}


def size(row: Row, column: str) -> int:
    """A length or a number of heads; 0 where the source does not state it."""
    return int(row[column] or 0)


@lru_cache(maxsize=1)
def sources() -> dict[str, Row]:
    """Who published, by the name that rows have for them."""
    return {row["name"]: row for row in read_rows("attnsel.rules", "figure_sources")}


@lru_cache(maxsize=64)
def measured(
    arch: int, direction: str = "", alike: tuple[bool, ...] | None = None
) -> tuple[Measurement, ...]:
    """Every measurement on an architecture (0: of cards that nobody named), in one direction or in all;
    ``alike``: those in FP8, causal, with a window, deterministic, or not."""
    content = pkgutil.get_data("attnsel.rules", "data/figures.csv")
    assert content is not None, "attnsel.rules is not read from files"
    mark = f"\n{arch or ''},{direction}{',' if direction else ''}".encode()
    first, last = content.find(mark), content.rfind(mark)  # they stand together, as all lines are in order
    if first < 0:
        return ()
    columns = content[content.find(b"\narch,") + 1 :].split(b"\n", 1)[0].decode().split(",")
    found: dict[str, list[Row]] = {}
    for number, line in enumerate(content[first + 1 : content.find(b"\n", last + 1)].decode().split("\n")):
        cells = line.split(",")
        kind = ("fp8" in cells[3], cells[4] == "causal", cells[5] != "", cells[6] != "")
        if alike is None or kind == alike:
            row = dict(zip(columns, cells, strict=True))
            found.setdefault(row["pair"] or f"row {number}", []).append(row)
    return tuple([Measurement(name, tuple(sorted(rows, key=microseconds))) for name, rows in found.items()])


def nearest(p: AttentionParams, arch: int, card: str, standing: tuple[str, ...]) -> tuple[Measurement, ...]:
    """What was published nearest to a question about its choice, the first of ``standing``, beside another
    family: forward, and in training backward. Nothing is worked out: what is not near is not quoted."""
    found = (_nearest(p, arch, card, way, standing) for way in ("fwd", "bwd")[: 1 + p.is_training])
    return tuple(one for one in found if one is not None) if standing and _plain(p) else ()


def _plain(p: AttentionParams) -> bool:
    """Whether nothing is asked that no row is about: a bias, pages, dropout, ranks."""
    more = p.has_bias, p.attention_dropout, p.softcap, p.context_parallel, p.kv_cache != "none"
    usual = (
        p.core_attention_bias_type != "alibi" and p.softmax_type == "vanilla" and p.dtype in ("bf16", "fp16")
    )
    return usual and not any(more) and p.attn_mask_type != "arbitrary"


def _nearest(
    p: AttentionParams, arch: int, card: str, way: str, standing: tuple[str, ...]
) -> Measurement | None:
    near: list[tuple[tuple[bool, float, str], Measurement]] = []
    alike = p.fp8_attention, p.causal, p.windowed, p.deterministic and way == "bwd"
    for one in measured(arch, way, alike):
        apart = _distance(p, one.shape)
        if apart is None:
            continue
        rows = tuple(row for row in one.rows if any(_runs(name, row["kernel"]) for name in standing))
        families = {CANDIDATES[row["kernel"]].kernel_family for row in rows}
        if len(families) > 1 and any(_runs(standing[0], row["kernel"]) for row in rows):
            same = one.shape["gpu"] == card
            near.append(((not same, apart, one.name), Measurement(one.name, rows, same)))
    return min(near)[1] if near else None


def _runs(name: str, kernel: str) -> bool:
    """Whether a row is of a candidate, or of one that runs the same kernels."""
    of, other = CANDIDATES[name], CANDIDATES.get(kernel)
    if name == kernel or other is None or not of.efficiency:
        return name == kernel
    return (of.kernel_family, of.efficiency) == (other.kernel_family, other.efficiency)


def _distance(p: AttentionParams, shape: Row) -> float | None:
    """How far the sizes of a measurement are from a question's; None for too far, or not stated."""
    pairs = (
        (p.max_seqlen_q, size(shape, "seqlen_q")),
        (p.max_seqlen_kv, size(shape, "seqlen_kv")),
        (p.head_dim_qk**2, size(shape, "head_dim_qk") ** 2),
        (p.head_dim_v**2, size(shape, "head_dim_v") ** 2),
    )
    if shape["other"] or not all(map(all, pairs)):
        return None
    apart = [abs(math.log2(asked / stated)) for asked, stated in pairs]
    return None if max(apart) > _APART else sum(apart)

"""Published times of kernels, as rows: what the order of candidates rests on, and what a report quotes.

Nothing on the way of a decision reads them. A line is split when its architecture is first asked about.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.rows import read_rows


class Source(NamedTuple):
    """Who published: ``address`` is where, ``date`` the month, ``notes`` how it was measured."""

    name: str
    title: str
    date: str
    cudnn_frontend: str
    notes: str
    address: str
    read: str


class Shape(NamedTuple):
    """What was measured, as far as the source says it; 0 and "" stand for what it does not.

    ``window``: keys to the left, "?" for a window whose length is not stated.
    """

    arch: int
    direction: str  # fwd, bwd, or fwd+bwd
    gpu: str
    dtype: str
    mask: str
    window: str
    deterministic: bool
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int
    other: str

    @property
    def training(self) -> bool:
        return self.direction != "fwd"

    @property
    def few_queries(self) -> bool:
        return few_queries(self.seqlen_q, self.seqlen_kv)


class Figure(NamedTuple):
    """One kernel's time: ``value`` in ``unit`` as the source states it, TFLOP/s where they can be told."""

    kernel: str
    value: float
    unit: str
    tflops: float
    kernel_version: str
    cudnn: str
    torch: str

    @property
    def time(self) -> float:
        """What is smaller the faster it is: to be compared within one measurement."""
        return 1 / self.value if self.unit == "TFLOP/s" else self.value


class Measurement(NamedTuple):
    """What one person measured in one run for one shape: kernels, the fastest first. ``name``: as p30."""

    name: str
    source: str
    shape: Shape
    figures: tuple[Figure, ...]

    def time(self, family: str) -> float | None:
        """Of the fastest candidate of a kernel family (or of one name)."""
        times = [f.time for f in self.figures if family in (f.kernel, family_of(f.kernel))]
        return min(times, default=None)

    def ratio(self, slower: str, faster: str) -> float | None:
        """How many times as long one family takes as another; below 1 where it is the faster one."""
        a, b = self.time(slower), self.time(faster)
        return a / b if a and b else None


def family_of(kernel: str) -> str:
    """The family of a candidate by which it is ranked; what is no candidate has none."""
    record = CANDIDATES.get(kernel)
    return record.kernel_family if record is not None else ""


def few_queries(queries: int, keys: int) -> bool:
    """So few queries over so many keys that a kernel which does not split the keys leaves the GPU idle."""
    return 0 < queries * 16 <= keys


@lru_cache(maxsize=1)
def sources() -> dict[str, Source]:
    """The sources by the name that rows have for them."""
    return {row["name"]: Source(*row.values()) for row in read_rows("attnsel.rules", "figure_sources")}


@lru_cache(maxsize=1)
def _lines() -> tuple[str, ...]:
    content = pkgutil.get_data("attnsel.rules", "data/figures.csv")
    assert content is not None, "attnsel.rules is not read from files"
    return tuple(content.decode().splitlines())


@lru_cache(maxsize=64)
def measured(arch: int, direction: str = "") -> tuple[Measurement, ...]:
    """Every measurement on an architecture (0: of cards that nobody named), in one direction or in all."""
    begin = f"{arch or ''},{direction}{',' if direction else ''}"
    found: dict[str, tuple[str, Shape, list[Figure]]] = {}
    for number, line in enumerate(_lines()):
        if not line.startswith(begin) or line.startswith("arch"):
            continue
        shape, figure, pair, source = _split(line)
        found.setdefault(pair or f"row {number}", (source, shape, []))[2].append(figure)
    return tuple(
        Measurement(name, source, shape, tuple(sorted(figures, key=lambda figure: figure.time)))
        for name, (source, shape, figures) in found.items()
    )


def every() -> Iterator[Measurement]:
    """Every measurement of two kernels or more."""
    archs = {line.split(",", 1)[0] for line in _lines() if line[:1] not in ("#", "a")}
    for arch in sorted(int(arch or 0) for arch in archs):
        yield from (one for one in measured(arch) if len(one.figures) > 1)


def _split(line: str) -> tuple[Shape, Figure, str, str]:
    cells = line.split(",")
    arch, direction, gpu, dtype, mask, window, deterministic, *lengths = cells[:14]
    other, kernel, value, unit, tflops, version, cudnn, torch, pair, source = cells[14:]
    sizes = [int(cell or 0) for cell in lengths]
    shape = Shape(int(arch or 0), direction, gpu, dtype, mask, window, bool(deterministic), *sizes, other)
    figure = Figure(kernel, float(value), unit, float(tflops or 0), version, cudnn, torch)
    return shape, figure, pair, source

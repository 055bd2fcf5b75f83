"""Published times of kernels, as rows: what the order of candidates rests on, and what a report quotes.

Nothing on the way of a decision reads them. A line is split when its architecture is first asked about.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.gpus import ARCHITECTURES
from attnsel.params import AttentionParams


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
def _content() -> bytes:
    content = pkgutil.get_data("attnsel.rules", "data/figures.csv")
    assert content is not None, "attnsel.rules is not read from files"
    return content


def _lines(begin: str) -> list[str]:
    """The lines that begin so; they stand together, as all of them are in order."""
    content, mark = _content(), f"\n{begin}".encode()
    first, last = content.find(mark), content.rfind(mark)
    return content[first + 1 : content.find(b"\n", last + 1)].decode().split("\n") if first >= 0 else []


class Alike(NamedTuple):
    """What a measurement and a question must share for the one to be quoted about the other."""

    fp8: bool
    causal: bool
    window: bool
    deterministic: bool


@lru_cache(maxsize=64)
def measured(arch: int, direction: str = "", alike: Alike | None = None) -> tuple[Measurement, ...]:
    """Every measurement on an architecture (0: of cards that nobody named), in one direction or in all."""
    found: dict[str, tuple[str, Shape, list[Figure]]] = {}
    for number, line in enumerate(_lines(f"{arch or ''},{direction}{',' if direction else ''}")):
        cells = line.split(",")
        if alike is not None and alike != _alike(cells):
            continue
        shape, figure, pair, source = _told_apart(cells)
        found.setdefault(pair or f"row {number}", (source, shape, []))[2].append(figure)
    return tuple(
        Measurement(name, source, shape, tuple(sorted(figures, key=lambda figure: figure.time)))
        for name, (source, shape, figures) in found.items()
    )


def every() -> Iterator[Measurement]:
    """Every measurement of two kernels or more."""
    for arch in (0, *ARCHITECTURES):
        yield from (one for one in measured(arch) if len(one.figures) > 1)


def _alike(cells: list[str]) -> Alike:
    dtype, mask, window, deterministic = cells[3:7]
    return Alike("fp8" in dtype, mask == "causal", bool(window), bool(deterministic))


def _told_apart(cells: list[str]) -> tuple[Shape, Figure, str, str]:
    arch, direction, gpu, dtype, mask, window, deterministic, *lengths = cells[:14]
    other, kernel, value, unit, tflops, version, cudnn, torch, pair, source = cells[14:]
    sizes = [int(cell or 0) for cell in lengths]
    shape = Shape(int(arch or 0), direction, gpu, dtype, mask, window, bool(deterministic), *sizes, other)
    figure = Figure(kernel, float(value), unit, float(tflops or 0), version, cudnn, torch)
    return shape, figure, pair, source


@json_fields(
    ("pair", "measurement.name"),
    ("direction", "measurement.shape.direction"),
    ("shape", "measurement.shape"),
    "same_card",
    ("kernels", "figures"),
    ("source", lambda quoted: sources()[quoted.measurement.source].address),
    ("title", lambda quoted: sources()[quoted.measurement.source].title),
    ("date", lambda quoted: sources()[quoted.measurement.source].date),
)
class Quoted(NamedTuple):
    """The nearest measurement to a question in one direction: figures of kernels that stand for it, at the
    shape and on the card that were measured. ``same_card``: False for another of the architecture."""

    measurement: Measurement
    figures: tuple[Figure, ...]
    same_card: bool


_APART = 2.0  # powers of two that a length may be from what is asked, and still be quoted
_HEADS_APART = 1.0


def nearest(p: AttentionParams, env: Environment, standing: tuple[str, ...]) -> tuple[Quoted, ...]:
    """What was published nearest to a question about its choice, the first of ``standing``, beside another
    family: forward, and in training backward. Nothing is worked out: what is not near is not quoted."""
    arch = env.arch
    if arch is None or not standing or not _plain(p):
        return ()
    found = (_nearest(p, arch, env.device.name, way, standing) for way in ("fwd", "bwd")[: 1 + p.is_training])
    return tuple(quoted for quoted in found if quoted is not None)


def _plain(p: AttentionParams) -> bool:
    """Whether nothing is asked beside what rows tell apart: none is of a bias, of pages or of dropout."""
    return not (
        p.has_bias
        or p.core_attention_bias_type == "alibi"
        or p.attention_dropout
        or p.softcap
        or p.softmax_type != "vanilla"
        or p.kv_cache != "none"
        or p.context_parallel
        or p.attn_mask_type == "arbitrary"
        or p.dtype not in ("bf16", "fp16")
    )


def _nearest(
    p: AttentionParams, arch: int, card: str, direction: str, standing: tuple[str, ...]
) -> Quoted | None:
    best: tuple[tuple[bool, float, int], Quoted] | None = None
    deterministic = p.deterministic and direction == "bwd"
    for one in measured(arch, direction, Alike(p.fp8_attention, p.causal, p.windowed, deterministic)):
        apart = _distance(p, one.shape)
        if apart is None:
            continue
        stand = tuple(f for f in one.figures if any(_is(name, f.kernel) for name in standing))
        if len({family_of(f.kernel) for f in stand}) < 2 or not any(
            _is(standing[0], f.kernel) for f in stand
        ):
            continue
        same = bool(card) and one.shape.gpu == card
        key = (not same, apart, -int(sources()[one.source].date.replace("-", "") or 0))
        if best is None or key < best[0]:
            best = key, Quoted(one, stand, same)
    return None if best is None else best[1]


def _is(name: str, kernel: str) -> bool:
    """Whether a row is of a candidate, or of one that runs the same kernels."""
    if name == kernel:
        return True
    of, other = CANDIDATES[name], CANDIDATES.get(kernel)
    return (
        other is not None
        and of.kernel_family == other.kernel_family != ""
        and of.efficiency == other.efficiency
    )


def _distance(p: AttentionParams, shape: Shape) -> float | None:
    """How far a measurement is from a question; None where it is of another kind, or too far."""
    same = (shape.head_dim_qk == shape.head_dim_v) == (p.head_dim_qk == p.head_dim_v)
    stated = shape.seqlen_q and shape.head_dim_qk and not shape.other
    if not (stated and same and p.max_seqlen_q and p.max_seqlen_kv):
        return None
    lengths = (p.max_seqlen_q / shape.seqlen_q, p.max_seqlen_kv / shape.seqlen_kv)
    apart = [abs(math.log2(ratio)) for ratio in lengths]
    heads = abs(math.log2(p.head_dim_qk / shape.head_dim_qk))
    if max(apart) > _APART or heads > _HEADS_APART:
        return None
    work = p.batch_size * p.num_heads / (shape.batch * shape.heads) if shape.batch * shape.heads else 1.0
    return 4 * heads + sum(apart) + abs(math.log2(max(work, 1e-6))) / 8

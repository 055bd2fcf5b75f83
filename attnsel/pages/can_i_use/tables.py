"""Cells as tables of labels: one feature over kernels and GPUs, or all features over kernels on one GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from attnsel.environment import component_name
from attnsel.pages.can_i_use.cells import Cell
from attnsel.pages.can_i_use.words import LOOKS, Look, label

_LONGEST = 6  # letters of a column's name


class Table(NamedTuple):
    """A head and rows of texts."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def by_gpu(cells: Sequence[Cell]) -> Table:
    """Of one feature: a row for each kernel, a column for each GPU. GPUs with the same answers share one."""
    kernels = dict.fromkeys(cell.kernel for cell in cells)
    columns: dict[str, tuple[str, ...]] = {}
    for gpu in dict.fromkeys(cell.gpu for cell in cells):
        columns[gpu] = tuple(label(cell) for cell in cells if cell.gpu == gpu)
    shared = [(list(gpus), column) for column, gpus in groupby(columns, key=columns.__getitem__)]
    head = ("kernel", *(_together(gpus) for gpus, _ in shared))
    rows = zip(kernels, *(column for _, column in shared), strict=True)
    return Table(head, tuple(rows))


def _together(gpus: Sequence[str]) -> str:
    """``sm80 86 89``."""
    first, *others = gpus
    return " ".join([first, *(gpu.removeprefix("sm") for gpu in others)])


def table_lines(table: Table, width: int) -> list[str]:
    """A table as text in columns, further apart where there is room."""
    tight = tuple(tuple(text.replace(" ", "", 1) for text in row) for row in table.rows)
    for gap, rows in ((3, table.rows), (2, table.rows), (1, table.rows), (1, tight)):
        widths = [max(map(len, column)) for column in zip(table.head, *rows, strict=True)]
        if sum(widths) + gap * (len(widths) - 1) <= width:
            break
    lines = (table.head, tuple("─" * each for each in widths), *rows)
    blank = " " * gap
    return [
        blank.join(f"{text:<{each}}" for text, each in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def by_kernel(cells: Sequence[Cell]) -> Table:
    """On one GPU: a row for each feature, a column for each kernel, with nothing but marks."""
    kernels = tuple(dict.fromkeys(cell.kernel for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: kernels.index(cell.kernel)):
        rows.setdefault(cell.feature.name, []).append(LOOKS[cell.state].mark)
    return Table(("feature", *kernels), tuple((name, *marks) for name, marks in rows.items()))


def overview_lines(cells: Sequence[Cell]) -> list[str]:
    """``by_kernel`` as text below two lines of heading, in groups of features."""
    table = by_kernel(cells)
    groups = {cell.feature.name: cell.feature.group for cell in cells}
    families = [name.rpartition(".")[0] for name in table.head[1:]]
    columns = [_cut(name.rpartition(".")[2]) for name in table.head[1:]]
    wide = max(len(row[0]) for row in table.rows) + 1
    above, below = " " * wide, " " * wide
    for family, members in groupby(range(len(columns)), key=families.__getitem__):
        names = " ".join(columns[place] for place in members)
        room = max(len(names), len(family))
        above += f" {family:<{room}}"
        below += f" {names:<{room}}"
    at = [*_starts(families, columns, wide)]
    lines = [above.rstrip(), below.rstrip()] if any(families) else [below.rstrip()]
    before = ""
    for name, *marks in table.rows:
        if groups[name] != before:
            before = groups[name]
            lines += ["", before]
        line = f" {name:<{wide - 1}}"
        for place, mark in zip(at, marks, strict=True):
            line = f"{line:<{place}}{mark}"
        lines.append(line)
    return lines


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 2]}…"


def _starts(families: Sequence[str], columns: Sequence[str], wide: int) -> Iterator[int]:
    """The column in which each kernel's mark stands: below the first letter of its name."""
    start = wide
    for family, members in groupby(range(len(columns)), key=families.__getitem__):
        begins = start + 1
        for place in members:
            yield begins
            begins += len(columns[place]) + 1
        start = max(begins - 1, start + 1 + len(family))


def legend(cells: Iterable[Cell]) -> list[Look]:
    """The marks that are there, and what they mean."""
    shown = {cell.state for cell in cells}
    return [look for state, look in LOOKS.items() if state in shown]


def components_line(cells: Iterable[Cell]) -> str:
    """Whose releases are meant: ``cudnn: cuDNN; sdpa.flash, tiled: torch``."""
    kernels: dict[str, list[str]] = {}
    for cell in cells:
        named = kernels.setdefault(component_name(cell.component), [])
        if cell.kernel not in named:
            named.append(cell.kernel)
    return "; ".join(f"{', '.join(names)}: {component}" for component, names in kernels.items())

"""Can I use it? as a page: features over kernels or GPUs as a map, and what stands behind each answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from attnsel.pages.can_i_use import Cell
from attnsel.pages.can_i_use_tables import LOOKS, codes_of, label, on_one_gpu, sentence
from attnsel.report.document import Block, Code, Inline, Item, Prose, Ref, Section
from attnsel.report.html import Fold, Map, Page, Part, Tile
from attnsel.rules import REGISTRY


def matrix_page(cells: Sequence[Cell], title: str, before: tuple[Block, ...] = ()) -> Page:
    """Features over kernels on one GPU, or of each feature kernels over GPUs; each answer by its feature."""
    features = dict.fromkeys(cell.feature for cell in cells)
    gpus = dict.fromkeys(cell.gpu for cell in cells)
    blocks: list[Any] = [*before]
    if len(gpus) == 1:
        blocks.append(Part("The map", (_over_kernels(cells),)))
    for feature in () if len(gpus) == 1 else features:
        among = [cell for cell in cells if cell.feature is feature]
        blocks.append(Part(f"{feature.title}: every GPU", (Item(Prose(feature.about)), _over_gpus(among))))
    folds = []
    for feature in features:
        for gpu in gpus:
            among = [cell for cell in cells if cell.feature is feature and cell.gpu == gpu]
            section = on_one_gpu(feature, among)
            told = tuple(block for block in section.blocks if not isinstance(block, Section))
            where = Item(feature.title, label=Code(feature.name), tag=gpu)
            folds.append(Fold(where, told, anchor=_anchor(among[0]), open=len(features) * len(gpus) == 1))
    blocks.append(Part("Each answer, with its releases and rules", tuple(folds)))
    return Page(title, title, tuple(blocks), tuple(codes_of(cells)))


def _anchor(cell: Cell) -> str:
    return f"{cell.feature.name}-{cell.gpu}"


def _over_kernels(cells: Sequence[Cell]) -> Map:
    kernels = tuple(dict.fromkeys(cell.kernel for cell in cells))
    rows: list[tuple[Inline, tuple[Tile, ...]]] = []
    for group, members in groupby(dict.fromkeys(cell.feature for cell in cells), key=lambda each: each.group):
        rows += [(group, ())] if group else []
        for feature in members:
            by_kernel = {cell.kernel: cell for cell in cells if cell.feature is feature}
            rows.append((feature.title, tuple(_tile(by_kernel[kernel]) for kernel in kernels)))
    head = tuple((kernel, 1) for kernel in kernels)
    return Map("Features down, kernels along", head, tuple(rows), _legend(cells))


def _over_gpus(cells: Sequence[Cell]) -> Map:
    rows: list[tuple[Inline, tuple[Tile, ...]]] = []
    for kernel, members in groupby(cells, key=lambda cell: cell.kernel):
        rows.append((Code(kernel), tuple(map(_tile, members))))
    head = tuple((gpu, 1) for gpu in dict.fromkeys(cell.gpu for cell in cells))
    return Map("Kernels down, GPUs along", head, tuple(rows), _legend(cells))


def _tile(cell: Cell) -> Tile:
    """What holds with the release at hand, since when, and the rules against it."""
    tip: list[Inline] = [f"{cell.feature.title}: {cell.kernel} on {cell.gpu}", sentence(cell)]
    named = dict.fromkeys(code for mode in cell.spans for code in cell.span(mode).codes)
    tip += [(Ref(code), f": {REGISTRY.pages[code].title}") for code in named]
    return Tile(label(cell), f"state-{cell.state}", tuple(tip), to=_anchor(cell))


def _legend(cells: Iterable[Cell]) -> tuple[tuple[str, str], ...]:
    there = {cell.state for cell in cells}
    return tuple(
        (f"state-{state}", f"{look.mark} {look.means}") for state, look in LOOKS.items() if state in there
    )

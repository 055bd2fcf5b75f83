"""The answer about a whole model as a page: layers and phases as a map, then each answer with its reasons."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from attnsel.diagnose.models import document
from attnsel.diagnose.models.calls import Call, Other
from attnsel.diagnose.models.plan import PHASES, Cell, ModelPlan, cache_bytes
from attnsel.pages.pictures import Ask, drawn
from attnsel.report.html import Line, Page, Plot
from attnsel.report.words import short_length


def model_page(plan: ModelPlan, ask: Ask) -> Page:
    """``ask``: the engine, for the pictures of each call."""
    by_call = groupby(plan.cells, key=lambda cell: cell.call)
    kinds = [(call, [(cell, drawn(cell.selection, ask)) for cell in cells]) for call, cells in by_call]
    told = {"plan": plan, "maps": list(layer_maps(plan)), "kinds": kinds, "memory": cache_plot(plan)}
    return Page("model", told | {"among": document.model_document(plan).blocks, "model": document})


Run = tuple[int, Cell | Other | None]
"""Neighbouring layers of one kind: how many, and what they do in one phase."""


def layer_maps(plan: ModelPlan) -> Iterator[tuple[str, int, list[tuple[str, list[Run]]]]]:
    """Each stack with the number of its layers, and for each phase these layers."""
    every: list[Call | Other] = [*plan.layers.calls, *plan.layers.other]
    for stack in dict.fromkeys(one.stack for one in every):
        count = 1 + max(layer for one in every if one.stack == stack for layer in one.layers)
        others = {layer: one for one in plan.layers.other if one.stack == stack for layer in one.layers}
        rows: list[tuple[str, dict[int, Cell | Other]]] = []
        for phase in PHASES:
            for cell in (one for one in plan.cells if (one.call.stack, one.phase) == (stack, phase)):
                own = dict.fromkeys(cell.call.layers, cell)
                free = (among for label, among in rows if label.startswith(phase) and not among.keys() & own)
                among = next(free, None)
                if among is None:  # of layers that make several calls a further row
                    label = f"{phase}, {cell.call.attn}" if cell.call.attn == "cross" else phase
                    rows.append((label, among := {}))
                among |= own
        runs = []
        for label, among in rows or [("any phase", {})]:
            kinds = groupby(range(count), key=lambda layer: among.get(layer, others.get(layer)))
            runs.append((label, [(len(list(layers)), kind) for kind, layers in kinds]))
        yield stack, count, runs


def cache_plot(plan: ModelPlan) -> Plot:
    """What is kept of the keys and values of a whole sequence, over its length."""
    lengths = sorted({plan.lengths.seqlen, *(1 << power for power in range(10, 18))})
    lines: list[Line] = []
    for cell in (cell for cell in plan.cells if cache_bytes(cell, plan.lengths)):
        window = f", window {short_length(cell.call.window)}" if cell.call.window else ""
        name = f"{len(cell.call.layers)} layers, d{cell.call.head_dim_qk}{window}"
        points = tuple((at, cache_bytes(cell, plan.lengths._replace(seqlen=at))) for at in lengths)
        lines.append(Line(name, f"k k-{len(lines)}", points))
    if len(lines) > 1:
        sums = (sum(line.points[place][1] for line in lines) for place in range(len(lengths)))
        lines.append(Line("all of them", "k k-all", tuple(zip(lengths, sums, strict=True))))
    room = plan.environment.device.memory
    if lines and room:
        lines.append(Line("memory of the GPU", "limit", tuple((at, room) for at in lengths)))
    return Plot(f"Keys and values of a batch of {plan.lengths.batch}, over the length", tuple(lines))

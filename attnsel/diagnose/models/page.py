"""The answer about a whole model as a page: layers and phases as a map, then each answer with its reasons."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from attnsel.diagnose.models.calls import Call, Other
from attnsel.diagnose.models.document import call_words, facts_of, fixes, notes, other_words, outcome, verdict
from attnsel.diagnose.models.other import thread_of
from attnsel.diagnose.models.plan import PHASES, Cell, Lengths, ModelPlan, cache_bytes
from attnsel.pages.pictures import Ask, also, pictures, taken, tree
from attnsel.report.answer import verdict as verdict_on
from attnsel.report.document import MARK, Code, Fields, Inline, Item, Link, Prose, Ref
from attnsel.report.html import Fold, Line, Map, Page, Part, Plot, Tile, kernel_tone, runs_of
from attnsel.report.words import environment_words, short_length
from attnsel.rules import REGISTRY
from attnsel.verdicts.requirements import size

_LEGEND = {
    "best": "nothing better is known",
    "blocked": "a better kernel is kept away",
    "slow": "a slow path",
    "nothing": "nothing runs",
    "other": "no softmax attention",
}


def model_page(plan: ModelPlan, ask: Ask) -> Page:
    """``ask``: the engine, for the pictures of each call."""
    name = plan.layers.model_type or "a model"
    kinds = tuple(groupby_call(plan, ask))
    codes = (*(code for cell in plan.cells for code in also(cell.selection)),)
    others = tuple((each.kind, (Prose(other_words(each)),)) for each in plan.layers.other)
    memory = cache_plot(plan)
    sections = (
        Part("Layers and phases", tuple(layer_maps(plan))),
        Part("What helps most layers", tuple(fixes(plan))),
        Part("Layers that are no softmax attention", (Fields(others),) if others else ()),
        Part("Each kind of attention", kinds),
        Part("Keys and values", (memory,) if memory.lines else ()),
    )
    shown = tuple(section for section in sections if section.blocks)
    title = f"{name} on {environment_words(plan.environment)[0]}"
    return Page(title, verdict(plan), (facts_of(plan), *shown, *notes(plan)), codes)


def groupby_call(plan: ModelPlan, ask: Ask) -> Iterator[Part]:
    """Each kind of attention with its phases; what is behind one is shown when it is opened."""
    for call, cells in groupby(plan.cells, key=lambda cell: cell.call):
        folds = []
        for cell in cells:
            mark = "!" if cell.slow else MARK["eligible" if cell.kernel else "refused"]
            head = Item(outcome(cell, cache_bytes(cell, plan.lengths)), mark, label=cell.phase)
            verdict_words = Item(verdict_on(cell.selection))
            drawn = Fold(
                Item("Memory over length, and the choice beside it"), (*pictures(cell.selection, ask),)
            )
            folds.append(Fold(head, (verdict_words, tree(cell.selection), drawn), anchor=_anchor(plan, cell)))
        thread = thread_of(call)
        told = (Item(Link(thread, thread), label="A thread about such layers"),) if thread else ()
        count = f"{len(call.layers)} layers" if len(call.layers) != 1 else "1 layer"
        yield Part(f"{count}: {call_words(call)}", (*told, *folds))


def _anchor(plan: ModelPlan, cell: Cell) -> str:
    return f"call-{plan.layers.calls.index(cell.call) + 1}-{cell.phase}"


def layer_maps(plan: ModelPlan, where: str = "", linked: bool = True) -> Iterator[Map]:
    """Of each stack its layers, phase by phase: what runs, and what keeps a better one away. ``linked``: to
    each answer, where the page has it."""
    every: list[Call | Other] = [*plan.layers.calls, *plan.layers.other]
    stacks = dict.fromkeys(one.stack for one in every)
    for stack in stacks:
        others = [one for one in plan.layers.other if one.stack == stack]
        cells = [cell for cell in plan.cells if cell.call.stack == stack]
        count = 1 + max(layer for one in every if one.stack == stack for layer in one.layers)
        rows = [
            (label, runs_of([among.get(layer, _GAP) for layer in range(count)]))
            for label, among in _rows(plan, cells, others, linked)
        ]
        tones = {tile.tone.partition(" ")[0] for _, tiles in rows for tile in tiles}
        legend = [(tone, words) for tone, words in _LEGEND.items() if tone in tones]
        named = f"{stack} layers" if len(stacks) > 1 else "layers"
        yield Map(f"{where}{count} {named}, each phase a row", _ticks(count), tuple(rows), tuple(legend))


_GAP = Tile("", "gap", ())


def _ticks(count: int) -> tuple[tuple[Inline, int], ...]:
    """Numbers of layers, about twelve."""
    step = max(1, count // 12)
    return tuple((str(first), min(step, count - first)) for first in range(0, count, step))


def _rows(
    plan: ModelPlan, cells: list[Cell], others: list[Other], linked: bool
) -> Iterator[tuple[str, dict[int, Tile]]]:
    """A row for each phase, and further ones where a layer makes several calls."""
    for phase in PHASES:
        lanes: list[tuple[list[str], dict[int, Tile]]] = []
        for cell in (cell for cell in cells if cell.phase == phase):
            tile = _tile(cell, plan.lengths, _anchor(plan, cell) if linked else "")
            words, among = next(
                (lane for lane in lanes if not lane[1].keys() & set(cell.call.layers)), ([], {})
            )
            if not among:
                lanes.append((words, among))
            words.append(cell.call.attn)
            among |= dict.fromkeys(cell.call.layers, tile)
        for words, among in lanes:
            for one in others:
                among |= {layer: _other_tile(one) for layer in one.layers if layer not in among}
            several = f", {'/'.join(dict.fromkeys(words))}" if len(lanes) > 1 else ""
            yield f"{phase}{several}", among
    if not cells and others:
        yield "any phase", {layer: _other_tile(one) for one in others for layer in one.layers}


def _tile(cell: Cell, lengths: Lengths, anchor: str) -> Tile:
    selection, blocked = cell.selection, cell.blocked
    name = taken(selection)
    tone = "nothing" if name is None else "slow" if cell.slow else "best" if blocked is None else "blocked"
    own = [f"{size(amount)} of {what}" for what, amount in cell.memory.items()]
    cache = cache_bytes(cell, lengths)
    own += [f"{size(cache)} of keys and values in all of them"] if cache else []
    tip: list[Inline] = [f"{cell.phase}: {name or 'nothing runs'}", call_words(cell.call)]
    tip += [" · ".join(own)] if own else []
    if selection.dispatched is not None:
        tip.append(f"attnsel itself: {selection.backend or 'nothing'}")
    if blocked is not None:
        page = REGISTRY.pages.get(blocked[1])
        because = f": {page.title}" if page is not None else ""
        tip.append((Code(blocked[0]), " would be first but for ", Ref(blocked[1]), because))
    tip += [(Ref(bug.code), f": {bug.rule.title}") for bug in selection.known_bugs]
    if name is None:
        reasons = {r.code: r.rule.title for c in selection.candidates for r in c.reasons}
        tip += [(Ref(code), f": {title}") for code, title in list(reasons.items())[:4]]
    text = f"{name or 'none'}{'!' * bool(selection.known_bugs)}"
    return Tile(text, f"{tone} {kernel_tone(name)}", tuple(tip), to=anchor)


def _other_tile(other: Other) -> Tile:
    return Tile(other.kind, "other", (other.kind, other_words(other)))


def cache_plot(plan: ModelPlan) -> Plot:
    """What is kept of the keys and values of a whole sequence, over its length."""
    kept = [cell for cell in plan.cells if cache_bytes(cell, plan.lengths)]
    lengths = sorted({plan.lengths.seqlen, *(1 << power for power in range(10, 18))})
    lines: list[Any] = []
    for cell in kept:
        points = tuple((at, cache_bytes(cell, plan.lengths._replace(seqlen=at))) for at in lengths)
        lines.append(Line(_short(cell.call), f"k k-{len(lines)}", points))
    if len(lines) > 1:
        sums = tuple((at, sum(line.points[place][1] for line in lines)) for place, at in enumerate(lengths))
        lines.append(Line("all of them", "k k-all", sums))
    room = plan.environment.device.memory
    if lines and room:
        lines.append(Line("memory of the GPU", "limit", tuple((at, room) for at in lengths)))
    return Plot(f"Keys and values of a batch of {plan.lengths.batch}, over the length", tuple(lines))


def _short(call: Call) -> str:
    words = f"{len(call.layers)} layers, d{call.head_dim_qk}"
    return words + (f", window {short_length(call.window)}" if call.window else "")

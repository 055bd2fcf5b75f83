"""One answer as a page: every kernel with its reasons and ways out, and pictures that the engine draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.decision import Selection
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.report.answer import (
    assumption_words,
    facts,
    runs_notes,
    verdict,
    way_item,
    ways,
    worth,
)
from attnsel.report.document import (
    MARK,
    Block,
    Code,
    Drawing,
    Inline,
    Item,
    Items,
    Prose,
    Ref,
    joined,
)
from attnsel.report.html import Fold, Line, Map, Page, Part, Plot, Tile, Tree, kernel_tone
from attnsel.report.short import dispatch_blocks
from attnsel.report.words import environment_words, params_words, short_length
from attnsel.rules import REGISTRY
from attnsel.selection.evaluate import memory_parts, tensor_bytes
from attnsel.verdicts.reasons import Candidate, Reason

Ask = Callable[[AttentionParams, Environment], Selection]
_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)
_LENGTHS = tuple(1 << power for power in range(7, 18))
_MOST_WAYS = 3


def call_page(selection: Selection, ask: Ask, more: tuple[Block, ...] = ()) -> Page:
    """``ask``: the engine, for the pictures; ``more``: what other flags add to the answer."""
    question = " ".join(params_words(selection.params))
    blocks: list[Any] = [facts(selection)]
    if selection.layout is not None:
        blocks.append(Drawing(selection.layout.describe))
    if selection.dispatched is not None:
        theirs = selection.dispatched
        blocks.append(Part(f"What {theirs.dispatcher} {theirs.release} takes", dispatch_blocks(selection)))
    assumed = [Item(assumption_words(one), "?") for one in selection.assumptions]
    told = (*assumed, *map(_linked, worth(selection, sources=True)))
    blocks += [
        Part("Every kernel, and why", (tree(selection),)),
        Part("Ways to another kernel", (Items(tuple(ways(selection))),)),
        Part("What was measured, and what is assumed", (Items(told),) if told else ()),
        Part("Pictures", tuple(pictures(selection, ask))),
        Part("Beside the choice", more),
    ]
    kept = tuple(one for one in blocks if not isinstance(one, Part) or any(_full(b) for b in one.blocks))
    title = f"{selection.backend or 'nothing'} on {environment_words(selection.environment)[0]}: {question}"
    return Page(title, verdict(selection), kept, also(selection))


def _full(block: Any) -> bool:
    return not isinstance(block, Items) or bool(block.items)


def also(selection: Selection) -> tuple[str, ...]:
    """Codes that are no reason of a candidate: what places one behind another."""
    return tuple(c.placed_by for c in selection.candidates if c.placed_by is not None)


def tree(selection: Selection) -> Tree:
    """The question, its verdicts, the kernels of each, and their reasons and ways out."""
    groups = {
        "eligible": "run this call, best first",
        "unknown": "may run it: nobody has checked",
        "refused": "cannot run it",
    }
    folds = []
    for kind, words in groups.items():
        among = [c for c in selection.candidates if c.verdict == kind]
        if among:
            places = {c.name: place for place, c in enumerate(selection.ranked, 1)}
            below = tuple(_candidate(c, places.get(c.name, ""), selection) for c in among)
            folds.append(Fold(Item(words, MARK[kind], len(among)), below, open=True))
    return Tree(" ".join(params_words(selection.params)), tuple(folds))


def _candidate(candidate: Candidate, place: int | str, selection: Selection) -> Fold:
    title = CANDIDATES[candidate.name].title
    head: Inline = " · ".join(runs_notes(candidate, selection))
    if candidate.verdict == "refused":
        codes = dict.fromkeys(reason.code for reason in candidate.reasons)
        head = (joined(map(Ref, codes)), f": {candidate.reasons[0].rule.title}" if len(codes) == 1 else "")
    below = [_reason(reason) for reason in candidate.reasons]
    for made in candidate.adaptations:
        below.append(Item(made.text, label="On every call"))
        below += [_reason(reason) for reason in made.avoids]
    if candidate.placed_by is not None:
        page = REGISTRY.pages[candidate.placed_by]
        below.append(Item(page.title, label=("Not before it: ", Ref(page.code))))
    ways_out = [way for way in selection.unlocks if way.candidate == candidate.name][:_MOST_WAYS]
    below += [way_item(way, (), "Way out", selection) for way in ways_out]
    own = (Item(title), *below)
    item = Item(head, MARK[candidate.verdict], place, Code(candidate.name))
    return Fold(item, (Items(own),), open=candidate.name == selection.backend)


def _linked(item: Item) -> Item:
    """With what it rests on as links."""
    below = (one._replace(text=Prose(str(one.text))) for one in item.below if isinstance(one, Item))
    return item._replace(below=tuple(below))


def _reason(reason: Reason) -> Item:
    written = Item(Prose(f"Source: {reason.source}"))
    return Item(reason.message, label=Ref(reason.code), tag=reason.evidence, below=(written,))


# ---- what the engine says beside the question: at other lengths and head dimensions --------------------


def pictures(selection: Selection, ask: Ask) -> Iterator[Any]:
    """Memory over length and the choice over head dimension and length; of a call whose tensors are stated
    neither, since they hold for these sizes alone."""
    p = selection.params
    if any((p.tensors.q, p.tensors.k, p.tensors.v, p.tensors.mask)):
        yield Item("where its tensors lie is stated for these sizes alone: no picture of others", "!")
        return
    plot = memory(selection, ask)
    yield from [plot] if plot.lines else ()
    yield plane(selection, ask)


def _resized(p: AttentionParams, length: int, head_dim: int | None = None) -> AttentionParams:
    """The call at another length, where its queries are as many as its keys of both, and head dimension."""
    changes = {"max_seqlen_kv": length}
    changes |= {"max_seqlen_q": length} if p.max_seqlen_q == p.max_seqlen_kv else {}
    if head_dim is not None:
        changes |= {"head_dim_qk": head_dim}
        changes |= {"head_dim_v": head_dim} if p.head_dim_qk == p.head_dim_v else {}
    return p.replace(**changes)


def _asked(selection: Selection, ask: Ask, length: int, head_dim: int | None = None) -> Selection | str:
    """An answer, or why that is no question."""
    try:
        return ask(_resized(selection.params, length, head_dim), selection.environment)
    except InvalidInput as error:
        return str(error)


def _among(own: int, others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({own, *others}))


def memory(selection: Selection, ask: Ask) -> Plot:
    """What each kernel takes beside the call's own tensors, as far as it runs; and what these take."""
    found: dict[str, list[tuple[int, int]]] = {}
    ends: dict[str, Inline] = {}
    tensors = []
    for length in _among(selection.params.max_seqlen_kv, _LENGTHS[1:]):
        answer = _asked(selection, ask, length)
        if isinstance(answer, str):
            continue
        p, env = answer.params, answer.environment
        tensors.append((length, tensor_bytes(p)))
        for c in answer.candidates:
            if c.verdict == "refused":
                if c.name in found and c.name not in ends:
                    ends[c.name] = joined(map(Ref, dict.fromkeys(reason.code for reason in c.reasons)))
            elif c.name not in ends:
                taken = sum(amount for _, amount in memory_parts(c.name, p, env, c.adaptations))
                found.setdefault(c.name, []).append((length, taken))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, points in found.items():
        alike.setdefault((tuple(points), ends.get(name, "")), []).append(name)
    lines = [Line(", ".join(names), kernel_tone(names[0]), *key) for key, names in alike.items()]
    room = selection.environment.device.memory
    if lines:
        lines.append(Line("the call's own tensors", "limit", tuple(tensors)))
    if lines and room:
        lines.append(Line("memory of the GPU", "limit", tuple((length, room) for length, _ in tensors)))
    return Plot("Memory of each kernel beside the call's own tensors, over the length", tuple(lines))


def plane(selection: Selection, ask: Ask) -> Map:
    """Which kernel runs over head dimension and length, and what keeps this call's own from it."""
    p, own = selection.params, taken(selection)
    lengths, dims = _among(p.max_seqlen_kv, _LENGTHS), _among(p.head_dim_qk, _HEAD_DIMS)
    rows: list[tuple[Inline, tuple[Tile, ...]]] = []
    seen: dict[str, None] = {}
    for dim in dims:
        tiles = []
        for length in lengths:
            here = dim == p.head_dim_qk and length == p.max_seqlen_kv
            answer = selection if here else _asked(selection, ask, length, dim)
            where = f"head_dim {dim}, {short_length(length)} keys"
            if isinstance(answer, str):
                tiles.append(Tile("invalid", "invalid", (where, answer)))
                continue
            name = taken(answer)
            seen.setdefault(name or "nothing")
            tip: tuple[Inline, ...] = (where, f"{name or 'nothing'} runs")
            if own in CANDIDATES and name != own and answer.dispatched is None:
                tip = (*tip, (f"{own}: ", joined(map(Ref, answer.keeps_away(own)))))
            tiles.append(Tile(name or "nothing", kernel_tone(name), tip, here=here))
        rows.append((str(dim), tuple(tiles)))
    who = "attnsel" if selection.dispatched is None else selection.dispatched.dispatcher
    legend = tuple((kernel_tone(None if name == "nothing" else name), name) for name in seen)
    head = tuple((short_length(length), 1) for length in lengths)
    caption = f"Which kernel {who} takes, over the head dimension and the length"
    return Map(caption, head, tuple(rows), legend, ("head_dim", "length"))


def taken(selection: Selection) -> str | None:
    """The choice; of another library's chooser, where that was asked, its own."""
    if selection.dispatched is None:
        return selection.backend
    chosen = selection.dispatched.chosen
    return None if chosen is None else chosen.name

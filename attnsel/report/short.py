"""The answer on one screen, and what another library's chooser would take with that answer below it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Any

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped, to_json
from attnsel.report.answer import (
    absent_packages,
    answer_document,
    assumption_words,
    better_way,
    easily_taken_for,
    hints,
    known_bug_words,
    names,
    needing_gpu,
    presumed,
    runs_notes,
    source,
    to_paste,
    verdict,
    warnings,
)
from attnsel.report.document import (
    MARK,
    Block,
    Code,
    Document,
    Facts,
    Fields,
    Inline,
    Item,
    Items,
    Paragraph,
    Ref,
    Screen,
    Strong,
    joined,
)
from attnsel.report.text import to_text
from attnsel.report.words import clause_words, environment_words, figure_record, params_words

if TYPE_CHECKING:
    from attnsel.selection.unlock import Unlock
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal
    from attnsel.verdicts.reasons import Candidate


_LINES = 12  # of 80 columns
_MOST = 2  # lines of a reason; where the message takes more, its rule's title says it


def short_document(selection: SelectionView) -> Document:
    """One screen: twelve lines, and more only for what is newer than anything read or was assumed. Nothing is
    cut within a sentence: what has no room is left to the whole report."""
    if selection.dispatched is None:
        return Document((_screen(selection, _newer(selection)),))
    return Document((Screen((*_dispatched_blocks(selection), Paragraph("attnsel:"), _screen(selection))),))


def _screen(selection: SelectionView, newer: tuple[Item, ...] = ()) -> Screen:
    """attnsel's own answer."""
    above: tuple[Block, ...] = (
        Paragraph(Strong(verdict(selection, elsewhere=selection.chosen is None))),
        *newer,
    )
    rests = [word[:-1] for word in environment_words(selection.environment) if word.endswith("*")]
    below: tuple[Block, ...] = (
        *(Item(assumption_words(one), "?", " ") for one in selection.assumptions[:1]),
        *warnings(selection.environment, ()),
        *(*presumed(selection), *hints(selection))[:1],
        *_way(selection),
        *([Item(", ".join(rests), label="Assumed")] if rests else ()),
    )
    room = _LINES - _height(*above, *below)
    return Screen((*above, Items(tuple(_candidates(selection, room))), *below))


def _height(*blocks: Block) -> int:
    """The lines of blocks on a screen of 80 columns."""
    return len(to_text(Document((Screen(blocks),))).split("\n")) if blocks else 0


def _newer(selection: SelectionView) -> tuple[Item, ...]:
    """What is newer than anything that was read: one sentence, and one more for all others."""
    texts = [str(one) for one in selection.unread]
    if len(texts) > 2:
        rest = selection.unread[1:]
        answered = (f"{one.what} {one.value} as {one.read_as} ({one.on})" for one in rest)
        texts[1:] = [f"so are {', '.join(answered)}"]
    return tuple(Item(f"{text}.", "!", " ") for text in texts)


_OTHERS = {"eligible": "also run", "unknown": "nobody has checked", "refused": "refused"}


def _candidates(selection: SelectionView, room: int) -> Iterator[Item]:
    """Entries as far as there is ``room`` for their lines: always of the choice, or of the one that was asked
    for, and of the one that a change would bring; then of the next, of what is refused, of what else runs.
    Below them the names of all others."""
    apart = {
        "not installed": list(absent_packages(selection)),
        "need a GPU": needing_gpu(selection),
    }
    gone = [name for among in apart.values() for name in among]
    runs = {c.name: _runs(c, selection, place) for place, c in enumerate(selection.ranked, 1)}
    refused = {c.name: _refused(c) for c in selection if c.verdict == "refused" and c.name not in gone}
    entries, way = runs | refused, _better(selection)
    first = {selection.backend or selection.policy.backend, None if way is None else way.candidate}
    height = {name: _height(Items((item,))) for name, item in entries.items()}
    room -= sum(map(bool, apart.values()))
    kept = [name for name in entries if name in first]
    # The slow ones that run nearly everything, and what only a policy forbids, have no room of their own.
    by_worth = [name for name in (*list(runs)[:2], *refused, *runs) if not CANDIDATES[name].last_resort]
    by_worth = [n for n in by_worth if all(r.evidence != "policy" for r in selection[n].reasons[:1])]
    for name in by_worth:
        tried = {*kept, name}
        others = {selection[one].verdict for one in entries if one not in tried}
        if sum(height[one] for one in tried) + len(others) <= room:
            kept.append(name)
    for shown in (runs, refused):
        yield from (item for name, item in shown.items() if name in kept)
        for kind, what in _OTHERS.items():
            rest = [name for name in shown if name not in kept and selection[name].verdict == kind]
            yield from [Item((f"{what}: ", names(rest)), MARK[kind], " ")] if rest else ()
    for why, among in apart.items():
        yield from [Item((names(among), f": {why}"), MARK["refused"], " ")] if among else ()


def _runs(candidate: Candidate, selection: SelectionView, place: int) -> Item:
    """What it does; of the choice also what was published of it, in a clause (of training, the backward), and
    the memory that it takes."""
    chosen = candidate.name == selection.backend
    verb, *notes = runs_notes(candidate, selection, memory=chosen)
    if chosen and selection.figures:
        told = selection.figures[0 if selection.figures[0].here else -1]
        notes.insert(0, clause_words(told, candidate.name))
    return Item(" · ".join((verb, *notes)), MARK[candidate.verdict], place, Code(candidate.name))


def _and_more(reasons: Sized) -> str:
    """What stands beside the first of several reasons."""
    return f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""


def _refused(candidate: Candidate) -> Item:
    """Its first reason: as the rule found it, or only what the rule says of every call."""
    first = candidate.reasons[0]
    lead = (Ref(first.code), f"{_and_more(candidate.reasons)}  ")
    whole = Item((*lead, first.message), MARK["refused"], " ", Code(candidate.name))
    fits = _height(Items((whole,))) <= _MOST
    return whole if fits else whole._replace(text=(*lead, first.rule.title))


def _better(selection: SelectionView) -> Unlock | None:
    """The change that the sentence names."""
    way = better_way(selection, elsewhere=False)
    return way or (next(iter(selection.unlocks), None) if selection.chosen is None else None)


def _way(selection: SelectionView) -> Iterator[Block]:
    """What is installed for it, and the last reason why it is that."""
    way = _better(selection)
    if way is not None and way.install is not None:
        yield to_paste(way.install.commands, way.install.why[-1:])


# ---- What another library's chooser would take: its kernels in its order, each with every reason against it


TITLES = {
    "torch": "F.scaled_dot_product_attention of torch",
    "te": "TransformerEngine",
    "transformers": "transformers",
}
_NAMES = {"torch": "F.sdpa", "te": "TransformerEngine", "transformers": "transformers"}


def difference(selection: SelectionView) -> str:
    """What the other chooser takes and attnsel does not, in a sentence; empty where none was asked."""
    dispatch = selection.dispatched
    if dispatch is None:
        return ""
    ours, theirs = selection.backend, dispatch.chosen
    name = f"{TITLES[dispatch.dispatcher]} {dispatch.release}".rstrip()
    taken = f"{name} takes {'no kernel' if theirs is None else theirs.name}"
    taken += known_bug_words((bug.code, bug.text) for bug in dispatch.known_bugs)
    one = len(dispatch.known_bugs) == 1
    if theirs is None:
        also = "attnsel has none either" if ours is None else f"attnsel runs {ours}"
        why = f" ({dispatch.error.rstrip('.')})" if not dispatch.offers else ""
        return f"{taken}{why}; {also}."
    if ours is None:
        return f"{taken}; attnsel has no kernel for this call."
    if theirs.candidate == ours:
        adapts = selection[ours].adaptations
        more = f", and {', '.join(made.text for made in adapts)}" if adapts else ""
        if dispatch.known_bugs and not adapts and not selection.known_bugs:
            return f"{taken}; attnsel calls {ours} another way, without {'it' if one else 'them'}."
        return f"{taken}; attnsel takes the same kernel{more}."
    return f"{taken}; attnsel runs {ours}, {_why(dispatch, ours)}."


def _why(dispatch: Dispatch, ours: str) -> str:
    """Why the dispatcher does not take what attnsel does."""
    name = _NAMES[dispatch.dispatcher]
    offer = next((offer for offer in dispatch.offers if offer.candidate == ours), None)
    if offer is None:
        return f"which {name} does not have{easily_taken_for(ours, dispatch.offers)}"
    if offer.taken:
        return f"which {name} has too and tries later"
    first = offer.refusals[0].text.rstrip(".")
    return f"which {name} refuses: {first}{_and_more(offer.refusals)}"


def dispatched_document(selection: SelectionView, sources: bool = False) -> Document:
    """The whole answer of the other chooser, and attnsel's in short below it."""
    dispatch = selection.dispatched
    assert dispatch is not None
    offered = joined(Code(offer.name) for offer in dispatch.offers)
    held = ", ".join(f"{name}={value}" for name, value in dispatch.switches)
    fields: list[tuple[str, tuple[Inline, ...]]] = [
        ("call", (dispatch.call,)),
        ("tries", ((offered, f"  [{dispatch.order_source}]" if sources else ""),)),
        ("switches", (held or "none set",)),
    ]
    if dispatch.inferred and dispatch.unread is None:
        fields.append(("source", (f"read in {dispatch.read}: {dispatch.inferred}",)))
    where, asked = environment_words(selection.environment), params_words(selection.params)
    blocks: list[Block] = [
        Paragraph(Strong(difference(selection))),
        Facts((tuple(where), tuple(asked), *warnings(selection.environment, selection.unread))),
        Fields(tuple(fields)),
        *map(Items, filter(None, [presumed(selection)])),
        Items(
            tuple(
                item._replace(below=tuple(_against(refusal, sources) for refusal in offer.refusals))
                for item, offer in _offers(dispatch)
            )
        ),
    ]
    if dispatch.error:
        blocks.append(Item(f"It says: {dispatch.error}"))
    told = dict.fromkeys(r.told for offer in dispatch.offers for r in offer.refusals if r.told)
    if told:
        blocks.append(Paragraph(f"What {_NAMES[dispatch.dispatcher]} tells of it: {'; '.join(told)}."))
    if dispatch.notes:
        blocks.append(Items(tuple(Item(note, "·") for note in dispatch.notes)))
    return Document((*blocks, Paragraph("attnsel's own answer:"), _screen(selection)))


def _dispatched_blocks(selection: SelectionView) -> Iterator[Block]:
    """The sentence, and a line for each of its kernels."""
    dispatch = selection.dispatched
    assert dispatch is not None
    yield Paragraph(Strong(difference(selection)))
    yield from _newer(selection)
    items = []
    for item, offer in _offers(dispatch):
        if offer.refusals:
            first = offer.refusals[0]
            lead: Inline = (Ref(first.code), "  ") if first.code else ""
            item = item._replace(text=(lead, _refusal_text(first), _and_more(offer.refusals)))
        items.append(item)
    yield Items(tuple(items))


def _offers(dispatch: Dispatch) -> Iterator[tuple[Item, Offer]]:
    """A kernel to a line, in the dispatcher's order."""
    for place, offer in enumerate(dispatch.offers, 1):
        mark = MARK["eligible" if offer.taken else "refused"]
        bugs = ", ".join(bug.code or "wrong numbers" for bug in dispatch.known_bugs)
        taken = f"taken, with {bugs}" if bugs else "taken"
        status = taken if offer == dispatch.chosen else "would do" if offer.taken else ""
        same = offer.candidate if offer.candidate != offer.name else ""
        text = " · ".join(filter(None, (status, same, offer.note)))
        yield Item(text, mark, place, Code(offer.name)), offer


def _against(refusal: Refusal, sources: bool) -> Item:
    below = (source(refusal.source),) if sources else ()
    return Item(_refusal_text(refusal), label=Ref(refusal.code) if refusal.code else "", below=below)


def _refusal_text(refusal: Refusal) -> str:
    more = f" ({refusal.switch})" if refusal.switch and refusal.switch not in refusal.text else ""
    return f"{refusal.text}{more}"


def report_document(selection: SelectionView, sources: bool = False) -> Document:
    """The whole answer; where another chooser was asked, its answer first.

    ``sources``: below each reason where it is written.
    """
    whole = answer_document if selection.dispatched is None else dispatched_document
    return whole(selection, sources)


def selection_record(selection: SelectionView, unlocks: bool = True) -> dict[str, Any]:
    """The whole answer as JSON."""
    out: dict[str, Any] = {
        "backend": selection.backend,
        "params": to_json(selection.params),
        "environment": to_json(selection.environment),
        "unread": to_json(selection.unread),
        "policy": to_json(selection.policy),
        "candidates": [
            {"name": one.name, "title": CANDIDATES[one.name].title, **to_json(one)}
            for one in selection.candidates
        ],
        "assumptions": to_json(selection.assumptions),
        "hints": to_json(selection.hints),
        "figures": list(map(figure_record, selection.figures)),
    }
    if selection.layout is not None:
        out["layout"] = to_json(selection.layout)
    if selection.dispatched is not None:
        out["dispatched"] = {**to_json(selection.dispatched), "difference": difference(selection)}
    if selection.known_bugs:
        out["known_bugs"] = to_json(selection.known_bugs)
    if unlocks:
        out["unlocks"] = to_json(selection.unlocks)
    return stamped("selection", out)

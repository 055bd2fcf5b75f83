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
    hints,
    known_bug_words,
    names,
    needing_gpu,
    presumed,
    runs_text,
    source,
    verdict,
    warnings,
    worth_showing,
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
from attnsel.report.words import clause_words, environment_words, figure_record, params_words

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal
    from attnsel.verdicts.reasons import Candidate


# Lines; what is newer than anything read and an assumption take theirs from the candidates'.
_SENTENCE, _CANDIDATES, _NEWER, _ASSUMPTION, _WAY = 2, 8, 2, 2, 2


def short_document(selection: SelectionView) -> Document:
    """At most twelve lines of text. What does not fit is cut with an ellipsis: the whole report has it."""
    if selection.dispatched is None:
        return Document((_screen(selection, _newer(selection)),))
    return Document((Screen((*_dispatched_blocks(selection), Paragraph("attnsel:"), _screen(selection))),))


def _screen(selection: SelectionView, newer: tuple[Item, ...] = ()) -> Screen:
    """attnsel's own answer."""
    # Beside two sentences about what is newer there is no room for an assumption.
    asked = selection.assumptions[:1] if len(newer) < 2 else ()
    assumed = [Item(assumption_words(one), "?", " ", most=_ASSUMPTION) for one in asked]
    notes = [note._replace(most=1) for note in (*presumed(selection), *hints(selection))[:1]]
    room = _CANDIDATES - _ASSUMPTION * len(assumed) - len(notes) - _NEWER * len(newer)
    listed = Items((*_candidates(selection, room), *assumed))
    sentence = Paragraph(Strong(verdict(selection)), most=_SENTENCE)
    return Screen((sentence, *newer, listed, *notes, *_first_way(selection)))


def _newer(selection: SelectionView) -> tuple[Item, ...]:
    """What is newer than anything that was read: one sentence, and one more for all others."""
    texts = [str(one) for one in selection.unread]
    if len(texts) > 2:
        rest = selection.unread[1:]
        answered = (f"{one.what} {one.value} as {one.read_as} ({one.on})" for one in rest)
        texts[1:] = [f"so are {', '.join(answered)}"]
    return tuple(Item(f"{text}.", "!", " ", most=_NEWER) for text in texts)


def _candidates(selection: SelectionView, room: int) -> Iterator[Item]:
    """A line for each candidate, for all that are not installed, and for all that need a GPU."""
    shown = {
        c.name: Item(_runs(c, selection), MARK[c.verdict], place, Code(c.name), most=1)
        for place, c in enumerate(selection.ranked, 1)
    }
    apart = {
        "not installed": list(absent_packages(selection)),
        "need a GPU": needing_gpu(selection),
    }
    gone = [name for among in apart.values() for name in among]
    shown |= {c.name: _refused(c) for c in selection if c.verdict == "refused" and c.name not in gone}
    last = [
        Item((names(among), f": {why}"), MARK["refused"], " ", most=1)
        for why, among in apart.items()
        if among
    ]
    room -= len(last)
    if len(shown) > room:
        # The slow ones that run nearly everything go first, then the last.
        by_worth = sorted(shown, key=lambda name: CANDIDATES[name].last_resort and name != selection.backend)
        kept = by_worth[: room - 1]
        also = names(name for name in shown if name not in kept)
        last = [Item(("also ", also), " ", " ", most=1), *last]
        shown = {name: item for name, item in shown.items() if name in kept}
    yield from (*shown.values(), *last)


def _runs(candidate: Candidate, selection: SelectionView) -> str:
    """What it does; of the choice also what was published of it, in a clause: of training, the backward."""
    text = runs_text(candidate, selection)
    if candidate.name != selection.backend or not selection.figures:
        return text
    verb, *notes = text.split(" · ")
    told = selection.figures[0 if selection.figures[0].here else -1]
    return " · ".join(filter(None, (verb, clause_words(told, candidate.name), *notes)))


def _and_more(reasons: Sized) -> str:
    """What stands beside the first of several reasons."""
    return f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""


def _refused(candidate: Candidate) -> Item:
    first = candidate.reasons[0]
    text = (Ref(first.code), f"{_and_more(candidate.reasons)}  {first.message}")
    return Item(text, MARK["refused"], " ", Code(candidate.name), most=1)


def _first_way(selection: SelectionView) -> Iterator[Item]:
    way = next((way for way in selection.unlocks if worth_showing(way, selection)), None)
    if way is not None:
        what = way.change if way.install is None else Code(" && ".join(way.install.commands))
        yield Item(("To get ", Code(way.candidate), ": ", what), most=_WAY)


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
        return f"which {name} does not have"
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
        items.append(item._replace(most=1))
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

"""What another library's chooser would take: its kernels in its order, each with every reason against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.errors import printable
from attnsel.report.lines import MARK, fold, join_items
from attnsel.report.short import cut, render_short
from attnsel.report.words import environment_words, params_words

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal

TITLES = {
    "torch": "F.scaled_dot_product_attention of torch",
    "te": "TransformerEngine",
    "transformers": "transformers",
}
_NAMES = {"torch": "F.sdpa", "te": "TransformerEngine", "transformers": "transformers"}


def title(dispatch: Dispatch) -> str:
    return f"{TITLES[dispatch.dispatcher]} {dispatch.release}".rstrip()


def taken(dispatch: Dispatch) -> str:
    """What it does with the call, in a clause."""
    if dispatch.chosen is None:
        return f"{title(dispatch)} takes no kernel"
    return f"{title(dispatch)} takes {dispatch.chosen.name}"


def difference(selection: SelectionView) -> str:
    """What the other chooser takes and attnsel does not, in a sentence; empty where none was asked."""
    dispatch = selection.dispatched
    if dispatch is None:
        return ""
    ours, theirs = selection.backend, dispatch.chosen
    if theirs is None:
        also = "attnsel has none either" if ours is None else f"attnsel runs {ours}"
        return f"{taken(dispatch)}; {also}."
    if ours is None:
        return f"{taken(dispatch)}; attnsel has no kernel for this call."
    if theirs.candidate == ours:
        adapts = selection[ours].adaptations
        more = f", and {', '.join(made.text for made in adapts)}" if adapts else ""
        return f"{taken(dispatch)}; attnsel takes the same kernel{more}."
    return f"{taken(dispatch)}; attnsel runs {ours}, {_why(dispatch, ours)}."


def _why(dispatch: Dispatch, ours: str) -> str:
    """Why the dispatcher does not take what attnsel does."""
    name = _NAMES[dispatch.dispatcher]
    offer = next((offer for offer in dispatch.offers if offer.candidate == ours), None)
    if offer is None:
        return f"which {name} does not have"
    if offer.taken:
        return f"which {name} has too and tries later"
    first, *others = offer.refusals
    more = f" (and {len(others)} more)" if others else ""
    return f"which {name} refuses: {first.text.rstrip('.')}{more}"


def render_dispatched(selection: SelectionView, width: int = 80, sources: bool = False) -> str:
    """The whole answer of the other chooser, and attnsel's in short below it."""
    dispatch = selection.dispatched
    assert dispatch is not None
    lines = [*fold(difference(selection), width), ""]
    lines += join_items(environment_words(selection.environment), width)
    lines += join_items(params_words(selection.params), width)
    lines += [f"! {warning}" for warning in selection.environment.warnings]
    lines += ["", *fold(dispatch.call, width, "call      ", " " * 10)]
    names = ", ".join(offer.name for offer in dispatch.offers)
    lines += fold(f"{names}  [{dispatch.order_source}]" if sources else names, width, "tries     ", " " * 10)
    held = ", ".join(f"{name}={value}" for name, value in dispatch.switches)
    lines += fold(held or "none set", width, "switches  ", " " * 10)
    if dispatch.inferred:
        lines += fold(f"read in {dispatch.read}: {dispatch.inferred}", width, "source    ", " " * 10)
    lines += ["", *offer_lines(dispatch, width, sources)]
    if dispatch.error:
        lines += ["", *fold(dispatch.error, width, "It says: ", "  ")]
    lines += _told(dispatch, width)
    for note in dispatch.notes:
        lines += fold(note, width, "  · ", "    ")
    lines += ["", "attnsel's own answer:", "", render_short(selection, width)]
    return "\n".join(printable(line.rstrip()) for text in lines for line in text.splitlines() or [""])


def render_dispatched_short(selection: SelectionView, width: int = 80) -> str:
    """The sentence, a line for each of its kernels, and attnsel's own lines."""
    dispatch = selection.dispatched
    assert dispatch is not None
    lines, wide = fold(difference(selection), width), _name_width(dispatch)
    for place, offer in enumerate(dispatch.offers, 1):
        mark = MARK["eligible" if offer.taken else "refused"]
        text = offer_text(offer, dispatch.chosen)
        if offer.refusals:
            first, *others = offer.refusals
            text = f"{refusal_text(first)}{f' (and {len(others)} more)' if others else ''}"
        lines.append(cut(f"{place:>3} {mark} {offer.name:<{wide}} {text}".rstrip(), width))
    lines += ["attnsel:", *render_short(selection, width).splitlines()]
    return "\n".join(map(printable, lines))


def _name_width(dispatch: Dispatch) -> int:
    """Columns for a kernel's name."""
    return max((len(offer.name) for offer in dispatch.offers), default=0)


def offer_lines(dispatch: Dispatch, width: int, sources: bool = False) -> list[str]:
    """A kernel to a line, in the dispatcher's order, and below it every reason against it."""
    lines: list[str] = []
    wide = _name_width(dispatch)
    for place, offer in enumerate(dispatch.offers, 1):
        lead = f"{place:>3} {MARK['eligible' if offer.taken else 'refused']} {offer.name:<{wide}} "
        lines += fold(offer_text(offer, dispatch.chosen), width, lead, " " * len(lead)) or [lead.rstrip()]
        for refusal in offer.refusals:
            lines += fold(refusal_text(refusal), width, "      ", "        ")
            if sources:
                lines += fold(f"Source: {refusal.source}", width, "        ", "          ")
    return lines


def offer_text(offer: Offer, chosen: Offer | None) -> str:
    same = offer.candidate if offer.candidate and offer.candidate != offer.name else ""
    parts = ["taken" if offer == chosen else "would do" if offer.taken else "", same, offer.note]
    return " · ".join(part for part in parts if part)


def refusal_text(refusal: Refusal) -> str:
    text = f"{refusal.code}  {refusal.text}" if refusal.code else refusal.text
    return f"{text} ({refusal.switch})" if refusal.switch and refusal.switch not in text else text


def _told(dispatch: Dispatch, width: int) -> list[str]:
    """What the dispatcher itself tells of these reasons."""
    told = dict.fromkeys(r.told for offer in dispatch.offers for r in offer.refusals if r.told)
    if not told:
        return []
    return ["", *fold(f"What {_NAMES[dispatch.dispatcher]} tells of it: {'; '.join(told)}.", width)]

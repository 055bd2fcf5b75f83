"""The answer on one screen: the sentence, a line for each candidate, the first way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.errors import printable
from attnsel.report.answer import (
    absent_packages,
    assumption_words,
    hint_lines,
    needing_gpu,
    runs_text,
    verdict,
    worth_showing,
)
from attnsel.report.document import MARK, fold, join_items
from attnsel.report.words import environment_words, params_words

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.dispatch import Dispatch, Offer, Refusal
    from attnsel.verdicts.reasons import Candidate


_SENTENCE, _CANDIDATES, _WAY = 2, 8, 2  # lines of each part, at most
_WIDE = 10_000
_ASSUMPTION = 2  # of the candidates' lines


def render_short(selection: SelectionView, width: int = 80) -> str:
    """At most twelve lines. What does not fit is cut with an ellipsis: the whole report has it."""
    lines = _at_most(_SENTENCE, fold(printable(verdict(selection)), width), width)
    assumed: list[str] = []
    for assumption in selection.assumptions[:1]:
        words = fold(printable(assumption_words(assumption)), width, "   ? ", "     ")
        assumed = _at_most(_ASSUMPTION, words, width)
    assumed += [cut(printable(line), width) for line in hint_lines(selection, _WIDE)[:1]]
    shown = _candidate_lines(selection, _CANDIDATES - len(assumed))
    lines += [*(cut(printable(line), width) for line in shown), *assumed]
    lines += _at_most(_WAY, _way_lines(selection, width), width)
    return "\n".join(lines)


def _candidate_lines(selection: SelectionView, most: int) -> list[str]:
    """A line for each candidate, for all that are not installed, and for all that need a GPU."""
    shown = {
        c.name: f"{place:>2} {MARK[c.verdict]} {c.name:<14}  {runs_text(c, selection)}"
        for place, c in enumerate(selection.ranked, 1)
    }
    apart = {
        "not installed": list(absent_packages(selection)),
        "need a GPU": needing_gpu(selection),
    }
    gone = [name for names in apart.values() for name in names]
    shown |= {c.name: _refused_line(c) for c in selection if c.verdict == "refused" and c.name not in gone}
    last = [f"   {MARK['refused']} {', '.join(names)}: {why}" for why, names in apart.items() if names]
    room = most - len(last)
    if len(shown) > room:
        # The slow ones that run nearly everything go first, then the last.
        by_worth = sorted(shown, key=lambda name: CANDIDATES[name].last_resort and name != selection.backend)
        kept = by_worth[: room - 1]
        others = ", ".join(name for name in shown if name not in kept)
        last = [f"     also {others}", *last]
        shown = {name: line for name, line in shown.items() if name in kept}
    return [*shown.values(), *last]


def _refused_line(candidate: Candidate) -> str:
    first, *others = candidate.reasons
    more = f" (and {len(others)} more)" if others else ""
    return f"   {MARK['refused']} {candidate.name:<14}  {first.code}{more}  {first.message}"


def _way_lines(selection: SelectionView, width: int) -> list[str]:
    way = next((way for way in selection.unlocks if worth_showing(way, selection)), None)
    if way is None:
        return []
    what = way.change if way.install is None else " && ".join(way.install.commands)
    return fold(printable(f"To get {way.candidate}: {what}"), width, "", "  ")


def _at_most(most: int, lines: list[str], width: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: most - 1], cut(f"{lines[most - 1]} …", width)]


def cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1].rstrip() + "…"


# --------------------------------------------------------------------------------------------------------
# What another library's chooser would take: its kernels in its order, each with every reason against it.


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

"""The answer on one screen: the sentence, a line for each candidate, the first way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.backends.registry import CANDIDATES
from attnsel.errors import printable
from attnsel.report.assumed import assumption_words
from attnsel.report.hints import hint_lines
from attnsel.report.lines import MARK, fold
from attnsel.report.ranked import runs_text
from attnsel.report.reasons import absent_packages, needing_gpu
from attnsel.report.verdict import verdict
from attnsel.report.ways import worth_showing

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView
    from attnsel.verdicts.verdict import Candidate

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

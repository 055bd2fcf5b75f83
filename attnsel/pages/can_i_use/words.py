"""An answer in words: its mark, a sentence, its releases in ranges, and the command that asks it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import component_name
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use.cells import ANSWERS, Cell, Range, Span, State
from attnsel.pages.can_i_use.feature import Mode, half_on
from attnsel.pages.commands import command_of, flag_name
from attnsel.report.ranked import adaptation_words, unproven_words
from attnsel.rules import REGISTRY
from attnsel.verdicts.verdict import Candidate


class Look(NamedTuple):
    """How a state is shown: a sign, a word, and what it means."""

    mark: str
    word: str
    means: str


LOOKS: dict[State, Look] = {
    "yes": Look("✔", "yes", "runs as it is, in training and in inference where both are asked"),
    "adapts": Look(
        "◐", "adapts", "runs after an exact change of the call: a copy, padding, a mask written out"
    ),
    "forward": Look("▷", "forward", "inference only: there is no backward for it"),
    "backward": Look("◁", "training", "training only"),
    "version": Look("△", "version", "not with the release at hand, but with another known one"),
    "unknown": Look("?", "unknown", "nobody has checked, or sources differ"),
    "never": Look("✖", "never", "no known release"),
}
_OUTCOMES: dict[str, State] = {"yes": "yes", "adapts": "adapts", "unknown": "unknown", "no": "never"}


class Part(NamedTuple):
    """What is said alike of these modes."""

    modes: tuple[Mode, ...]
    spans: tuple[Span, ...]

    @property
    def title(self) -> str:
        return " and ".join(self.modes)


def label(cell: Cell) -> str:
    """A cell in a few columns: its mark and the first release. ``+``: that and all later ones; ``*``: not all
    of them; ``≤``: none after it. No release stands where all are meant that run a plain
    call on that GPU."""
    mark = LOOKS[cell.state].mark
    if cell.state == "version":
        other = cell.unlocked_at
        assert other is not None
        return f"{mark} {short_version(other)}+" if other > cell.at else f"{mark} ≤{short_version(other)}"
    if cell.state in ("never", "unknown") or cell.whenever:
        return mark
    return f"{mark} {short_version(cell.since)}{'+' if cell.always else '*'}"


def short_version(version: Version) -> str:
    """Without a last number of 0; of a beta its number."""
    text = str(version)
    return text.rpartition("0b")[2].join(("b", "")) if "b" in text else text.removesuffix(".0")


def sentence(cell: Cell) -> str:
    """What holds with the release at hand, and since when."""
    name = component_name(cell.component)
    oldest, newest = cell.ranges[0].first, cell.ranges[-1].last
    known = f"{oldest} to {newest}" if oldest != newest else str(oldest)
    if cell.state == "never":
        return f"no known release of {name} runs it ({known})"
    if cell.state == "version":
        return f"not with {name} {cell.at}, {_elsewhere(cell)}"
    text = {
        "yes": "runs", "adapts": "runs after a change of the call", "forward": "runs forward only",
        "backward": "runs in training only", "unknown": "nobody knows",
    }[cell.state]  # fmt: skip
    here = " and ".join(map(range_words, _of(cell, cell.state_at(cell.at))))
    if cell.always and cell.from_the_oldest:
        text += f", with every known release of {name} ({known})"
    elif cell.whenever:
        text += f", with every release of {name} that has this kernel on this GPU ({here})"
    elif cell.always:
        text += f", from {name} {cell.since} on"
    else:
        text += f", with {name} {here}"
    more = next(
        (each for each in cell.ranges if each.first > cell.at and each.state in ("yes", "adapts")), None
    )
    if cell.state in ("forward", "backward") and more is not None:
        text += f"; both ways from {more.first} on"
    return text


def _elsewhere(cell: Cell) -> str:
    """Where it would run, of a cell that another release unlocks."""
    there = [each for state in ANSWERS for each in _of(cell, state)]
    ranges = sorted(there, key=lambda each: each.first)
    if ranges[-1].last == cell.ranges[-1].last and ranges[-1].first > cell.at:
        return f"but from {ranges[-1].first} on"
    return f"but with {' and '.join(map(range_words, ranges))}"


def _of(cell: Cell, state: str) -> list[Range]:
    return [each for each in cell.ranges if each.state == state]


def range_words(releases: Range | Span | Row) -> str:
    """``9.1.0 to 9.4.0``, or the one release."""
    first, last = releases.first, releases.last
    return str(first) if first == last else f"{first} to {last}"


class Row(NamedTuple):
    """Releases in a row in which every mode has one answer, and that answer by mode."""

    first: Version
    last: Version
    said: dict[Mode, Span]


def rows(cell: Cell) -> list[Row]:
    """All known releases, the newest first, cut where the answer of some mode changes."""
    firsts = sorted({span.first for spans in cell.spans.values() for span in spans})
    found = []
    for first in reversed(firsts):
        said = {mode: cell.span(mode, first) for mode in cell.spans}
        found.append(Row(first, min(span.last for span in said.values()), said))
    return found


def parts(cell: Cell) -> tuple[Part, ...]:
    """Its modes, those of one answer together."""
    found: list[Part] = []
    for mode, spans in cell.spans.items():
        said = [(span.first, span.outcome, span.codes, _changes(span)) for span in spans]
        for place, other in enumerate(found):
            if said == [(span.first, span.outcome, span.codes, _changes(span)) for span in other.spans]:
                found[place] = Part((*other.modes, mode), other.spans)
                break
        else:
            found.append(Part((mode,), spans))
    return tuple(found)


def _changes(span: Span) -> tuple[str, ...]:
    return tuple(made.name for made in span.candidate.adaptations)


def span_mark(span: Span) -> str:
    """The sign of an outcome."""
    return LOOKS[_OUTCOMES[span.outcome]].mark


def cost_words(cell: Cell, mode: Mode, span: Span) -> list[str]:
    """What is changed in the call, each with what it costs on every call."""
    p = cell.feature.params(mode, half_on(cell.environment(span.last).arch))
    return [adaptation_words(made, p) for made in span.candidate.adaptations]


def evidence_words(cell: Cell, span: Span) -> list[str]:
    """What a yes rests on beyond the rules: whether such a call is proven there, and whether attnsel runs it
    itself."""
    candidate: Candidate = span.candidate
    if candidate.verdict == "refused":
        return []
    said = []
    if candidate.plan_only is not None:
        said.append(candidate.plan_only)
    if candidate.unproven:
        said.append(f"unproven on {cell.environment().target}: {unproven_words(candidate)}")
    return said


def command(cell: Cell, mode: Mode, version: Version | None = None) -> str:
    """``attnsel explain …``, which asks just this. ``version``: of what decides, the one at hand if None."""
    env = cell.environment(version)
    line = command_of(cell.feature.asked(mode, half_on(env.arch)), env)
    if line is None:
        raise ValueError(f"{cell!r}: no command line says it")
    limits = [word for field, value in cell.feature.policy.items() for word in (flag_name(field), value)]
    return " ".join([line, shlex.join(limits)]) if limits else line


def avoided(span: Span) -> tuple[str, ...]:
    """The rules that the changes of the call answer; each once."""
    return tuple(dict.fromkeys(r.code for made in span.candidate.adaptations for r in made.avoids))


def codes_of(cells: Iterable[Cell]) -> Iterator[str]:
    """Every rule that some answer names, in the order of the rules."""
    named = {
        code
        for cell in cells
        for spans in cell.spans.values()
        for span in spans
        for code in (*span.codes, *avoided(span))
    }
    return (code for code in REGISTRY.pages if code in named)


def title_of(kernel: str) -> str:
    """What a kernel is."""
    return CANDIDATES[kernel].title

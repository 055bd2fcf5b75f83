"""Cells as tables of labels: one feature over kernels and GPUs, or all features over kernels on one GPU."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.schemas import stamped
from attnsel.environment import component_name
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use import (
    ANSWERS,
    Cell,
    Feature,
    Mode,
    Range,
    Span,
    State,
    component_of,
    half_on,
    releases,
)
from attnsel.pages.commands import command_of, flag_name, jsonable
from attnsel.report.answer import adaptation_words, unproven_words
from attnsel.report.markdown import code, escape, table
from attnsel.rules import REGISTRY
from attnsel.verdicts.reasons import Candidate

# --------------------------------------------------------------------------------------------------------
# An answer in words: its mark, a sentence, its releases in ranges, and the command that asks it.


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


_LONGEST = 6  # letters of a column's name


class Table(NamedTuple):
    """A head and rows of texts."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def by_gpu(cells: Sequence[Cell]) -> Table:
    """Of one feature: a row for each kernel, a column for each GPU. GPUs with the same answers share one."""
    kernels = dict.fromkeys(cell.kernel for cell in cells)
    columns: dict[str, tuple[str, ...]] = {}
    for gpu in dict.fromkeys(cell.gpu for cell in cells):
        columns[gpu] = tuple(label(cell) for cell in cells if cell.gpu == gpu)
    shared = [(list(gpus), column) for column, gpus in groupby(columns, key=columns.__getitem__)]
    head = ("kernel", *(_together(gpus) for gpus, _ in shared))
    rows = zip(kernels, *(column for _, column in shared), strict=True)
    return Table(head, tuple(rows))


def _together(gpus: Sequence[str]) -> str:
    """``sm80 86 89``."""
    first, *others = gpus
    return " ".join([first, *(gpu.removeprefix("sm") for gpu in others)])


def table_lines(table: Table, width: int) -> list[str]:
    """A table as text in columns, further apart where there is room."""
    tight = tuple(tuple(text.replace(" ", "", 1) for text in row) for row in table.rows)
    for gap, rows in ((3, table.rows), (2, table.rows), (1, table.rows), (1, tight)):
        widths = [max(map(len, column)) for column in zip(table.head, *rows, strict=True)]
        if sum(widths) + gap * (len(widths) - 1) <= width:
            break
    lines = (table.head, tuple("─" * each for each in widths), *rows)
    blank = " " * gap
    return [
        blank.join(f"{text:<{each}}" for text, each in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def by_kernel(cells: Sequence[Cell]) -> Table:
    """On one GPU: a row for each feature, a column for each kernel, with nothing but marks."""
    kernels = tuple(dict.fromkeys(cell.kernel for cell in cells))
    rows: dict[str, list[str]] = {}
    for cell in sorted(cells, key=lambda cell: kernels.index(cell.kernel)):
        rows.setdefault(cell.feature.name, []).append(LOOKS[cell.state].mark)
    return Table(("feature", *kernels), tuple((name, *marks) for name, marks in rows.items()))


def overview_lines(cells: Sequence[Cell]) -> list[str]:
    """``by_kernel`` as text below two lines of heading, in groups of features."""
    table = by_kernel(cells)
    groups = {cell.feature.name: cell.feature.group for cell in cells}
    families = [name.rpartition(".")[0] for name in table.head[1:]]
    columns = [_cut(name.rpartition(".")[2]) for name in table.head[1:]]
    wide = max(len(row[0]) for row in table.rows) + 1
    above, below = " " * wide, " " * wide
    for family, members in groupby(range(len(columns)), key=families.__getitem__):
        names = " ".join(columns[place] for place in members)
        room = max(len(names), len(family))
        above += f" {family:<{room}}"
        below += f" {names:<{room}}"
    at = [*_starts(families, columns, wide)]
    lines = [above.rstrip(), below.rstrip()] if any(families) else [below.rstrip()]
    before = ""
    for name, *marks in table.rows:
        if groups[name] != before:
            before = groups[name]
            lines += ["", before]
        line = f" {name:<{wide - 1}}"
        for place, mark in zip(at, marks, strict=True):
            line = f"{line:<{place}}{mark}"
        lines.append(line)
    return lines


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 2]}…"


def _starts(families: Sequence[str], columns: Sequence[str], wide: int) -> Iterator[int]:
    """The column in which each kernel's mark stands: below the first letter of its name."""
    start = wide
    for family, members in groupby(range(len(columns)), key=families.__getitem__):
        begins = start + 1
        for place in members:
            yield begins
            begins += len(columns[place]) + 1
        start = max(begins - 1, start + 1 + len(family))


def legend(cells: Iterable[Cell]) -> list[Look]:
    """The marks that are there, and what they mean."""
    shown = {cell.state for cell in cells}
    return [look for state, look in LOOKS.items() if state in shown]


def components_line(cells: Iterable[Cell]) -> str:
    """Whose releases are meant: ``cudnn: cuDNN; sdpa.flash, tiled: torch``."""
    kernels: dict[str, list[str]] = {}
    for cell in cells:
        named = kernels.setdefault(component_name(cell.component), [])
        if cell.kernel not in named:
            named.append(cell.kernel)
    return "; ".join(f"{', '.join(names)}: {component}" for component, names in kernels.items())


# --------------------------------------------------------------------------------------------------------
# The matrix as Markdown, for an issue: a table, what the marks mean, each answer's releases and rules.


def markdown_lines(found: Sequence[Cell]) -> list[str]:
    """All cells: one table for each feature over GPUs; on one GPU the reasons too, or all features in one."""
    features = list(dict.fromkeys(cell.feature for cell in found))
    gpus = list(dict.fromkeys(cell.gpu for cell in found))
    if len(gpus) == 1 and len(features) > 1:
        made = by_kernel(found)
        lines = [f"What runs on {escape(gpus[0])}", "", _table(made.head, made.rows), ""]
        return [*lines, *_legend(found)]
    lines = []
    for feature in features:
        about = [cell for cell in found if cell.feature is feature]
        lines += [f"### {escape(feature.title)}", "", escape(feature.about), ""]
        if len(gpus) > 1:
            made = by_gpu(about)
            lines += [_table(made.head, made.rows), "", *_legend(about), ""]
            lines += [escape(f"Releases are those of {components_line(about)}."), ""]
        else:
            lines += [*_answers(about), ""]
    return lines[:-1]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return table([*map(escape, head)], [[*map(escape, row)] for row in rows])


def _legend(found: Sequence[Cell]) -> list[str]:
    return [f"- {look.mark} {look.means}" for look in legend(found)]


def _answers(found: Sequence[Cell]) -> list[str]:
    """Each kernel on the one GPU, with its releases in ranges and the rules that are named."""
    lines = []
    for cell in found:
        lines.append(f"- {LOOKS[cell.state].mark} {code(cell.kernel)}: {escape(sentence(cell))}")
        for part in parts(cell):
            for span in reversed(part.spans):
                if span.codes or len(part.spans) > 1:
                    named = f" {', '.join(span.codes)}" if span.codes else ""
                    lines.append(f"  - {part.title}, {range_words(span)}: {span_mark(span)}{named}")
        mode = next(iter(cell.spans))
        lines.append(f"  - asked: {code(command(cell, mode))}")
    named_by_any = list(codes_of(found))
    if named_by_any:
        lines += ["", *(f"- {name}: {escape(REGISTRY.pages[name].title)}" for name in named_by_any)]
    return lines


# ---- The matrix as JSON: docs/schemas/can-i-use-1.json -------------------------------------------------


def as_dict(found: Sequence[Cell]) -> dict[str, Any]:
    """Cells, with what they are about: features, kernels, and the rules that they name."""
    features = {cell.feature.name: cell.feature for cell in found}
    kernels = dict.fromkeys(cell.kernel for cell in found)
    return stamped(
        "can-i-use",
        {
            "states": [{"state": state, **look._asdict()} for state, look in LOOKS.items()],
            "features": [_feature(feature) for feature in features.values()],
            "kernels": [_kernel(name) for name in kernels],
            "gpus": list(dict.fromkeys(cell.gpu for cell in found)),
            "cells": [_cell(cell) for cell in found],
            "rules": [_rule(code) for code in codes_of(found)],
        },
    )


def _feature(feature: Feature) -> dict[str, Any]:
    return {
        "name": feature.name,
        "title": feature.title,
        "group": feature.group,
        "about": feature.about,
        "modes": list(feature.modes),
        "changes": jsonable(feature.changes),
        "limits": jsonable(feature.policy),
    }


def _kernel(name: str) -> dict[str, Any]:
    known = releases(name)
    return {
        "name": name,
        "title": title_of(name),
        "component": component_of(name),
        "releases": [str(version) for version in known],
    }


def _rule(code: str) -> dict[str, Any]:
    page = REGISTRY.pages[code]
    about = {"code": code, "title": page.title, "when": page.when_text}
    return {**about, "evidence": page.evidence, "source": page.source}


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "feature": cell.feature.name,
        "kernel": cell.kernel,
        "gpu": cell.gpu,
        "at": str(cell.at),
        "state": cell.state,
        "since": None if cell.state in ("never", "version") else str(cell.since),
        "always": cell.always,
        "whenever": cell.whenever,
        "unlocked_at": str(cell.unlocked_at) if cell.state == "version" else None,
        "ranges": [
            {"first": str(each.first), "last": str(each.last), "state": each.state} for each in cell.ranges
        ],
        "modes": [_mode(cell, mode, spans) for mode, spans in cell.spans.items()],
    }


def _mode(cell: Cell, mode: Mode, spans: Iterable[Span]) -> dict[str, Any]:
    said = [_span(cell, span) for span in spans]
    return {"mode": mode, "command": command(cell, mode), "spans": said}


def _span(cell: Cell, span: Span) -> dict[str, Any]:
    changes = [
        {"name": made.name, "text": made.text, "bytes": made.bytes, "flops": made.flops}
        for made in span.candidate.adaptations
    ]
    return {
        "first": str(span.first),
        "last": str(span.last),
        "outcome": span.outcome,
        "codes": list(span.codes),
        "adaptations": changes,
        "evidence": evidence_words(cell, span),
    }

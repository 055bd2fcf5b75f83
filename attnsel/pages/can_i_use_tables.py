"""Cells in words: marks, sentences and tables of them, as documents and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped, to_json
from attnsel.environment import component_name
from attnsel.environment.read import Unread
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use import (
    ANSWERS,
    Cell,
    Feature,
    Mode,
    Range,
    Span,
    State,
    Stated,
    component_of,
    releases,
)
from attnsel.pages.commands import command_of, flag_name
from attnsel.report.answer import adaptation_words, unproven_words
from attnsel.report.document import (
    Block,
    Code,
    Inline,
    Item,
    Items,
    Paragraph,
    Paste,
    Ref,
    Section,
    Table,
    codes,
    joined,
)
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


def label(cell: Cell) -> str:
    """A cell in a few columns: its mark and the first release, without a last number of 0 and of a beta its
    number. ``+``: that and all later ones; ``*``: not all of them; ``≤``: none after it. No release stands
    where all are meant that run a plain call on that GPU."""
    mark = LOOKS[cell.state].mark
    if cell.state in ("never", "unknown") or (cell.state != "version" and cell.whenever):
        return mark
    version = cell.unlocked_at if cell.state == "version" else cell.since
    assert version is not None
    text = str(version)
    text = f"b{text.rpartition('0b')[2]}" if "b" in text else text.removesuffix(".0")
    if cell.state == "version":
        return f"{mark} {text}+" if version > cell.at else f"{mark} ≤{text}"
    return f"{mark} {text}{'+' if cell.always else '*'}"


def sentence(cell: Cell) -> str:
    """What holds with the release at hand, and since when."""
    name = component_name(cell.component)
    oldest, newest = cell.ranges[0].first, cell.ranges[-1].last
    known = f"{oldest} to {newest}" if oldest != newest else str(oldest)
    if cell.state == "never":
        return f"no known release of {name} runs it ({known})"
    if cell.state == "version":
        last = cell.ranges[-1]
        for_good = last.state in ANSWERS and last.first > cell.at
        where = f"from {last.first} on" if for_good else f"with {_ranges_words(cell, ANSWERS)}"
        return f"not with {name} {cell.at}, but {where}"
    text = {
        "yes": "runs", "adapts": "runs after a change of the call", "forward": "runs forward only",
        "backward": "runs in training only", "unknown": "nobody knows",
    }[cell.state]  # fmt: skip
    here = _ranges_words(cell, {cell.state_at(cell.at)})
    if cell.always and cell.since == oldest:
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


def _ranges_words(cell: Cell, states: Iterable[State]) -> str:
    return " and ".join(range_words(each) for each in cell.ranges if each.state in states)


def range_words(releases: Range | Span) -> str:
    """``9.1.0 to 9.4.0``, or the one release."""
    first, last = releases.first, releases.last
    return str(first) if first == last else f"{first} to {last}"


def span_mark(span: Span) -> str:
    """The sign of an outcome."""
    return LOOKS[_OUTCOMES[span.outcome]].mark


def cost_words(cell: Cell, mode: Mode, span: Span) -> list[str]:
    """What is changed in the call, each with what it costs on every call."""
    p = cell.feature.params(mode, cell.environment(span.last).half)
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
    line = command_of(cell.feature.asked(mode, env.half), env)
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


# ---- tables of answers, and answers with their reasons, as documents ------------------------------------


def overview(cells: Sequence[Cell], stated: Stated = ()) -> Section:
    """All features on one GPU: a row for each, a column for each kernel, with nothing but marks. ``stated``:
    the releases that were asked about."""
    kernels = tuple(dict.fromkeys(cell.kernel for cell in cells))
    marks = {(cell.feature.name, cell.kernel): LOOKS[cell.state].mark for cell in cells}
    rows: list[tuple[str, ...]] = []
    for group, members in groupby(dict.fromkeys(cell.feature for cell in cells), key=lambda each: each.group):
        rows.append((group,))
        rows += [(each.name, *(marks[each.name, kernel] for kernel in kernels)) for each in members]
    given = ", ".join(f"{component_name(component)} {version}" for component, version in stated)
    asked_of = f"{given} and the newest of the others" if stated else "the newest releases"
    title = f"What runs on {_gpu_words(cells[0])} with {asked_of}"
    head = (kernel.rpartition(".") for kernel in kernels)
    named = ((family + dot, name) if family else name for family, dot, name in head)
    return Section(title, (Table(("feature", *named), tuple(rows)), Items(_legend(cells))))


def on_every_gpu(feature: Feature, cells: Sequence[Cell]) -> Section:
    """One feature: a row for each kernel, a column for each GPU. GPUs with the same answers share one."""
    kernels = dict.fromkeys(cell.kernel for cell in cells)
    columns: dict[str, tuple[str, ...]] = {}
    for gpu in dict.fromkeys(cell.gpu for cell in cells):
        columns[gpu] = tuple(label(cell) for cell in cells if cell.gpu == gpu)
    shared = [(list(gpus), column) for column, gpus in groupby(columns, key=columns.__getitem__)]
    head = (" ".join([first, *(gpu.removeprefix("sm") for gpu in others)]) for (first, *others), _ in shared)
    rows = zip(kernels, *(column for _, column in shared), strict=True)
    items = list(_legend(cells))
    dated: dict[str, dict[str, None]] = {}  # kernels by whose releases are meant
    for cell in cells:
        if " " in label(cell):
            dated.setdefault(component_name(cell.component), {})[cell.kernel] = None
    if dated:
        named = "; ".join(f"{', '.join(kernels)}: {component}" for component, kernels in dated.items())
        plus = "from that release on; 2.6* not with every later one; ≤2.6 with none after it"
        items.append(Item(label="2.6+", text=f"{plus}. Releases of {named}"))
    why = ("Why, and all releases: ", Code(f"attnsel can-i-use {feature.name} --gpu H100"))
    table = Table(("kernel", *head), tuple(rows))
    return Section(_title(feature), (Paragraph(feature.about), table, Items(tuple(items)), Paragraph(why)))


def on_one_gpu(feature: Feature, cells: Sequence[Cell]) -> Section:
    """One feature: each kernel's releases in ranges, the rules that are named, and what was asked."""
    order = sorted(cells, key=lambda cell: cell.state not in ANSWERS)
    blocks: list[Block] = [Paragraph(feature.about), *map(_answer, order)]
    named = set(codes(tuple(blocks)))
    rules = [code for code in codes_of(cells) if code in named]
    pages = ((code, REGISTRY.pages[code]) for code in rules)
    about = tuple(Item(label=Ref(code), text=page.title, tag=page.evidence) for code, page in pages)
    blocks += [Section("Rules", (Items(about),))] if about else []
    first = order[0]
    asked = Paste(tuple(command(first, mode) for mode in first.spans))
    blocks.append(Item(text=f"Asked{f', of {first.kernel}' if len(order) > 1 else ''}:", below=(asked,)))
    return Section(f"{_title(feature)} on {_gpu_words(first)}", tuple(blocks))


def _title(feature: Feature) -> str:
    return f"{feature.title} ({feature.name}, asked for {' and '.join(feature.modes)})"


def _gpu_words(cell: Cell) -> str:
    device = cell.environment().device
    named = device.arch is None or device.name == f"sm{device.arch}"
    return device.name if named else f"{device.name} (sm{device.arch})"


def _legend(cells: Iterable[Cell]) -> tuple[Item, ...]:
    """The marks that are there, and what they mean."""
    there = {cell.state for cell in cells}
    return tuple(Item(mark=look.mark, text=look.means) for state, look in LOOKS.items() if state in there)


def _answer(cell: Cell) -> Item:
    """One kernel, with its ranges of releases, the newest first; of what no release runs the one at hand."""
    alike: dict[object, list[Mode]] = {}  # modes by what is said of them
    for mode, spans in cell.spans.items():
        changes = [tuple(made.name for made in span.candidate.adaptations) for span in spans]
        key = (*((span.first, span.outcome, span.codes) for span in spans), *changes)
        alike.setdefault(key, []).append(mode)
    said: dict[Inline, None] = {}
    for mode, *others in alike.values():
        title = f"{' and '.join((mode, *others))}: " if len(alike) > 1 and cell.state != "never" else ""
        spans = cell.spans[mode] if cell.state != "never" else (cell.span(mode),)
        for span in reversed(spans):
            words = _span_words(cell, mode, span)
            releases = f"{range_words(span)} {span_mark(span)}  " if len(spans) > 1 else ""
            if releases or words:
                said[title, releases, words] = None
    below = (Items(tuple(map(Item, said))),) if said else ()
    return Item(mark=LOOKS[cell.state].mark, label=Code(cell.kernel), text=sentence(cell), below=below)


def _span_words(cell: Cell, mode: Mode, span: Span) -> Inline:
    """The rules against it, what is changed, and of the release at hand what a yes rests on."""
    rules = joined(map(Ref, dict.fromkeys((*span.codes, *avoided(span)))))
    evidence = evidence_words(cell, span) if cell.at in span else []
    return joined(filter(None, (rules, *cost_words(cell, mode, span), *evidence)), " · ")


# ---- as JSON: docs/schemas/can-i-use-2.json -------------------------------------------------------------


def as_dict(found: Sequence[Cell]) -> dict[str, Any]:
    """Cells, with what they are about: features, kernels, and the rules that they name."""
    kernels = dict.fromkeys(cell.kernel for cell in found)
    pages = [REGISTRY.pages[code] for code in codes_of(found)]
    said = {
        "states": [{"state": state, **look._asdict()} for state, look in LOOKS.items()],
        "features": list(dict.fromkeys(cell.feature for cell in found)),
        "kernels": [
            {
                "name": name,
                "title": CANDIDATES[name].title,
                "component": component_of(name),
                "releases": releases(name),
            }
            for name in kernels
        ],
        "gpus": list(dict.fromkeys(cell.gpu for cell in found)),
        "unread": unread_of(found),
        "cells": [_cell(cell) for cell in found],
        "rules": [
            {
                "code": page.code,
                "title": page.title,
                "when": page.when_text,
                "evidence": page.evidence,
                "source": page.source,
            }
            for page in pages
        ],
    }
    return stamped("can-i-use", to_json(said))


def unread_of(found: Iterable[Cell]) -> list[Unread]:
    """What of the releases at hand is newer than anything that was read; each once."""
    machines = dict.fromkeys(cell.environment() for cell in found)
    return list(dict.fromkeys(newer for env in machines for newer in env.unread))


def _cell(cell: Cell) -> dict[str, Any]:
    return {
        "feature": cell.feature.name,
        "kernel": cell.kernel,
        "gpu": cell.gpu,
        "at": cell.at,
        "state": cell.state,
        "since": None if cell.state in ("never", "version") else cell.since,
        "always": cell.always,
        "whenever": cell.whenever,
        "unlocked_at": cell.unlocked_at if cell.state == "version" else None,
        "ranges": cell.ranges,
        "modes": [
            {"mode": mode, "command": command(cell, mode), "spans": [_span(cell, span) for span in spans]}
            for mode, spans in cell.spans.items()
        ],
    }


def _span(cell: Cell, span: Span) -> dict[str, Any]:
    changes = [
        {"name": made.name, "text": made.text, "bytes": made.bytes, "flops": made.flops}
        for made in span.candidate.adaptations
    ]
    return {
        "first": span.first,
        "last": span.last,
        "outcome": span.outcome,
        "codes": span.codes,
        "adaptations": changes,
        "evidence": evidence_words(cell, span),
    }

"""``attnsel matrix``: the answer over a grid of two fields."""

from __future__ import annotations

import csv
import gc
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, get_origin

from cyclopts import Group, Parameter
from pydantic import TypeAdapter, ValidationError

from attnsel.backends.registry import CANDIDATES
from attnsel.base.model import invalid_input
from attnsel.base.schemas import stamped
from attnsel.cli.flags import ALIASES, OUTPUT, Json, Markdown, one_form, plain_type, read_count
from attnsel.cli.output import FOUND, NO_BACKEND, in_columns, print_json, print_text, wrap
from attnsel.cli.question import As, Asked, Question, SwitchFlag, asked_of, asks, with_recipe
from attnsel.decision import Selection
from attnsel.dispatchers import Dispatch
from attnsel.environment import COMPONENTS, Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.params.options import KINDS
from attnsel.plugins import load_plugins
from attnsel.report import environment_words, params_words
from attnsel.report.markdown import escape, fenced
from attnsel.report.markdown import table as markdown_table
from attnsel.rules import REGISTRY

# --------------------------------------------------------------------------------------------------------
# One axis of a matrix: ``head_dim_qk=64,128``, ``max_seqlen_q=1024:16384:*2``, ``gpu=A100,H100``.


MACHINE = ("gpu", *COMPONENTS)
_NUMBER = "([0-9]{1,20}(?:k|K|Ki|M|Mi)?)"  # int() refuses texts of thousands of digits
_RANGE = re.compile(f"{_NUMBER}:{_NUMBER}:([+*]){_NUMBER}")
MOST_CELLS = 20_000
"""Of a grid: some 10 s on one core, and 200 MiB."""


_ALSO = {name.lstrip("-").replace("-", "_"): field for field, names in ALIASES.items() for name in names}
_ALSO |= {"head_dim": "head_dim_qk", "seqlen": "max_seqlen_q", "seq_len": "max_seqlen_q"}
"""Other names of fields. Of the last the other field follows unless it is stated."""


class Axis(NamedTuple):
    """A field and its values, each with the text a user would call it by."""

    field: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def of_machine(self) -> bool:
        return self.field in MACHINE


def read_axis(flag: str, text: str) -> Axis:
    """Raises InvalidInput naming ``flag`` for an unknown field or a value the field cannot take."""
    if not text.isprintable():
        raise InvalidInput(flag, text, "must hold no control characters")
    name, equals, values = text.partition("=")
    field = name.strip().replace("-", "_")
    field = _ALSO.get(field, field)
    fields = [*AttentionParams.model_fields, "fp8_recipe", *MACHINE]
    if not equals or not values.strip():
        raise InvalidInput(flag, text, "must be FIELD=VALUE,VALUE,… or FIELD=FIRST:LAST:+STEP (or :*FACTOR)")
    if field not in fields or field in ("tensors", "fp8_meta"):
        allowed = ", ".join(name for name in fields if name not in ("tensors", "fp8_meta"))
        raise InvalidInput(flag, text, f"there is no field {field!r}; allowed: {allowed}")
    found: dict[str, None] = {}
    for part in values.split(","):
        found |= dict.fromkeys(_spread(flag, part.strip()))
        if len(found) > MOST_CELLS:
            raise InvalidInput(flag, part, f"holds more than {MOST_CELLS} values")
    labels = tuple(found)
    return Axis(field, labels, tuple(_read_value(flag, field, label) for label in labels))


def _spread(flag: str, part: str) -> list[str]:
    """The values that one part between commas stands for: itself, or a range with both ends."""
    match = _RANGE.fullmatch(part)
    if match is None:
        if part and ":" not in part:
            return [part]
        raise InvalidInput(flag, part, "must be a value, FIRST:LAST:+STEP or FIRST:LAST:*FACTOR")
    first, last, step = (read_count(flag, match[number]) for number in (1, 2, 4))
    grows = step >= 1 if match[3] == "+" else step >= 2 and first >= 1
    if not grows or first > last:
        raise InvalidInput(flag, part, "must rise: FIRST at most LAST, a STEP of 1 or a FACTOR of 2 or more")
    values: list[str] = []
    while first <= last:
        values.append(str(first))
        if len(values) > MOST_CELLS:
            raise InvalidInput(flag, part, f"holds more than {MOST_CELLS} values")
        first = first + step if match[3] == "+" else first * step
    return values


def _read_value(flag: str, field: str, label: str) -> Any:
    """A label as the field's own type, checked as far as one field alone can be."""
    if field in MACHINE:
        return label
    if field == "fp8_recipe":
        if label not in KINDS:
            raise InvalidInput(flag, f"{field}={label}", f"must be one of {', '.join(KINDS)}")
        return label
    info = AttentionParams.model_fields[field]
    kind, optional = plain_type(info.annotation)
    if optional and label.casefold() == "none":
        return None
    if kind is int:
        try:
            return _checked(flag, field, label, read_count(flag, label))
        except InvalidInput as error:
            raise InvalidInput(flag, f"{field}={label}", error.allowed) from None
    pair = kind == tuple[int, int]
    value: Any = label.split("x") if get_origin(kind) is tuple else label
    if pair and len(value) != 2:
        raise InvalidInput(flag, f"{field}={label}", "must be two numbers such as 128x0")
    return _checked(flag, field, label, value)


def _checked(flag: str, field: str, label: str, value: Any) -> Any:
    info = AttentionParams.model_fields[field]
    checked: Any = info.annotation
    for bound in info.metadata:  # not the Field itself, whose other names belong to the model
        checked = Annotated[checked, bound]
    try:
        return TypeAdapter(checked).validate_python(value)
    except ValidationError as error:
        allowed = invalid_input(error).allowed
        raise InvalidInput(flag, f"{field}={label}", allowed) from None


_DIFFERS = "≠  attnsel runs another kernel; attnsel explain --as says which and why"
_NOTES = {
    "?": "nobody has checked",
    "+": "after an exact change of the call, which its backend makes",
    "°": "unproven on that architecture",
}


_GRID = Group("The grid", sort_key=0)


_NEEDED = (
    "a grid has two fields, such as: attnsel matrix --gpu H100 --rows head_dim_qk=64,128,256 "
    "--cols attn_mask_type=no_mask,causal"
)


class Cell(NamedTuple):
    """One answer: what is shown, whether something runs, the codes against it, and all of it as data."""

    text: str
    found: bool
    codes: tuple[str, ...]
    data: dict[str, Any]


@asks
def matrix(
    question: Question,
    *,
    rows: Annotated[str | None, Parameter(group=_GRID, help="FIELD=VALUES down the side")] = None,
    cols: Annotated[str | None, Parameter(group=_GRID, help="FIELD=VALUES along the top")] = None,
    candidate: Annotated[
        str | None,
        Parameter(group=_GRID, help="ask about this candidate instead of which one is chosen"),
    ] = None,
    as_: As = None,
    switch: SwitchFlag = None,
    csv: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False, help="print CSV")] = False,
    markdown: Markdown = False,
    json: Json = False,
) -> int:
    """The chosen backend, or one candidate's verdict, over a grid of any two fields.

    A field is one of the call's (head_dim_qk, max_seqlen_kv, dtype, …; also fp8_recipe), gpu, or a
    component (cudnn, torch, …). Values stand between commas; 64:256:+64 counts up and 1k:16k:*2
    multiplies, both ends included; window_size=128x0 is a pair. Every other flag holds for all cells.
    Combinations that contradict themselves are "invalid" cells. --as torch, te or transformers shows what
    that library would choose by itself, and ≠ where attnsel runs another kernel.

    --json prints one object: rows and cols (field, values), candidate, cells: a list per row of
    {backend, verdict, codes, adaptations, unproven} or {invalid: message}. backend is the chosen one,
    or null; the others speak of it, or of --candidate. With --as also dispatcher, and in each cell
    dispatched (the other's choice, or null) and same.

    Exit code: 0 some cell has a backend, 2 bad input or no valid cell, 3 no cell has one.
    """
    one_form(csv=csv, markdown=markdown, json=json)
    load_plugins()
    if candidate is not None and candidate not in CANDIDATES:
        raise InvalidInput("--candidate", candidate, f"allowed: {', '.join(CANDIDATES)}")
    if rows is None or cols is None:
        raise InvalidInput("--cols" if rows is not None else "--rows", None, _NEEDED)
    down, along = read_axis("--rows", rows), read_axis("--cols", cols)
    if down.field == along.field:
        raise InvalidInput("--cols", cols, f"{along.field} is the field of --rows already")
    size = len(down.values) * len(along.values)
    if size > MOST_CELLS:
        raise InvalidInput("--cols", cols, f"makes {size} cells with --rows; at most {MOST_CELLS}")
    asked = asked_of(as_, switch)
    if asked.dispatcher is not None and candidate is not None:
        raise InvalidInput("--as", as_, "cannot go with --candidate: one question at a time")
    grid = Grid(question, down, along, candidate, asked)
    with _no_collections():
        cells = list(_watched(grid.cells(), size))
    table = [cells[i : i + len(along.values)] for i in range(0, len(cells), len(along.values))]
    if grid.first_error is not None and all("invalid" in cell.data for cell in cells):
        raise grid.first_error
    if json:
        print_json(stamped("matrix", _as_dict(grid, table)), indent=None)
    elif csv:
        _print_csv(grid, table)
    else:
        _print_table(grid, table, markdown)
    return FOUND if any(cell.found for cell in cells) else NO_BACKEND


class Grid:
    """The questions of a grid, asked row by row; parameters and environments are built once each."""

    def __init__(
        self, question: Question, down: Axis, along: Axis, candidate: str | None, asked: Asked
    ) -> None:
        self.question, self.down, self.along, self.candidate = question, down, along, candidate
        self.asked = asked
        self.first_error: InvalidInput | None = None
        self.seen: list[Selection] = []  # a few, to tell what all cells have in common
        self._calls: dict[tuple[int, int], AttentionParams | InvalidInput] = {}
        self._machines: dict[tuple[int, int], Environment] = {}

    def cells(self) -> Iterator[Cell]:
        corner_rows = {0, len(self.down.values) - 1}
        corner_cols = {0, len(self.along.values) - 1}
        for row in range(len(self.down.values)):
            for col in range(len(self.along.values)):
                call = self._call(row, col)
                if isinstance(call, InvalidInput):
                    yield Cell("invalid", False, (), {"invalid": str(call)})
                    continue
                selection = self.asked.select(call, self._machine(row, col), self.question.policy)
                if len(self.seen) < 2 or (row in corner_rows and col in corner_cols):
                    self.seen.append(selection)
                yield self._cell(selection)

    def _cell(self, selection: Selection) -> Cell:
        if self.candidate is not None:
            return _judged(selection, self.candidate)
        cell = _chosen(selection)
        return cell if selection.dispatched is None else _dispatched(selection, selection.dispatched, cell)

    def _call(self, row: int, col: int) -> AttentionParams | InvalidInput:
        # An axis of the machine does not change the call: one object serves the whole row or column.
        key = (0 if self.down.of_machine else row, 0 if self.along.of_machine else col)
        call = self._calls.get(key)
        if call is None:
            fields = {
                axis.field: axis.values[place]
                for axis, place in ((self.down, row), (self.along, col))
                if not axis.of_machine
            }
            try:
                call = self.question.ask(**with_recipe(fields))
            except InvalidInput as error:
                call = error
                self.first_error = self.first_error or error
            if self.down.of_machine or self.along.of_machine:
                self._calls[key] = call
        return call

    def _machine(self, row: int, col: int) -> Environment:
        key = (row if self.down.of_machine else 0, col if self.along.of_machine else 0)
        machine = self._machines.get(key)
        if machine is None:
            parts = {
                axis.field: axis.values[place]
                for axis, place in ((self.down, row), (self.along, col))
                if axis.of_machine
            }
            machine = self._machines[key] = self.question.where(**parts)
        return machine


def _chosen(selection: Selection) -> Cell:
    """The cell that names the choice."""
    name = selection.backend
    if name is None:
        codes = tuple(dict.fromkeys(r.code for c in selection for r in c.reasons))
        return Cell("none", False, (), {"backend": None, "verdict": "refused", "codes": list(codes)})
    found = selection[name]
    return Cell(name + _marks(found), True, (), {"backend": name, **_facts(found)})


def _dispatched(selection: Selection, dispatch: Dispatch, ours: Cell) -> Cell:
    """The cell that names what another library's chooser takes."""
    theirs = dispatch.chosen
    same = (theirs.candidate if theirs is not None else None) == selection.backend
    taken = None if theirs is None else theirs.name
    data = {**ours.data, "dispatched": taken, "same": same}
    return Cell(f"{taken or 'none'}{'' if same else ' ≠'}", theirs is not None, (), data)


def _judged(selection: Selection, name: str) -> Cell:
    """The cell that says yes or no to one candidate."""
    found = selection[name]
    codes = tuple(dict.fromkeys(reason.code for reason in found.reasons))
    data = {"backend": selection.backend, **_facts(found)}
    if found.verdict == "eligible":
        return Cell("✔" + _marks(found), True, (), data)
    mark = "?" if found.verdict == "unknown" else "✖"
    more = f" +{len(codes) - 1}" if len(codes) > 1 else ""
    return Cell(f"{mark} {codes[0]}{more}", found.verdict == "unknown", codes[:1], data)


def _facts(found: Any) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "codes": [reason.code for reason in found.reasons],
        "adaptations": [adaptation.name for adaptation in found.adaptations],
        "unproven": found.unproven,
    }


def _marks(found: Any) -> str:
    marks = "?" if found.verdict == "unknown" else ""
    return marks + ("+" if found.adaptations else "") + ("°" if found.unproven else "")


def _watched(cells: Iterable[Cell], total: int) -> Iterator[Cell]:
    """``cells``, with a bar on standard error once a person has waited for a second."""
    if not sys.stderr.isatty():
        yield from cells
        return
    bar: Any = None
    began = time.monotonic()
    try:
        for done, cell in enumerate(cells):
            yield cell
            if done % 512:
                continue
            if bar is None and time.monotonic() - began > 1:
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                bar.start()
                task = bar.add_task("selecting", total=total)
            if bar is not None:
                bar.update(task, completed=done)
    finally:
        if bar is not None:
            bar.stop()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Answers hold no cycles, and the collector would walk all of them again and again (15 % of the time)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _as_dict(grid: Grid, table: list[list[Cell]]) -> dict[str, Any]:
    return {
        "rows": {"field": grid.down.field, "values": list(grid.down.labels)},
        "cols": {"field": grid.along.field, "values": list(grid.along.labels)},
        "candidate": grid.candidate,
        "dispatcher": grid.asked.dispatcher,
        "cells": [[cell.data for cell in row] for row in table],
    }


def _print_csv(grid: Grid, table: list[list[Cell]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow([f"{grid.down.field} \\ {grid.along.field}", *grid.along.labels])
    for label, row in zip(grid.down.labels, table, strict=True):
        writer.writerow([label, *(cell.text for cell in row)])


def _print_table(grid: Grid, table: list[list[Cell]], markdown: bool) -> None:
    machines = [environment_words(selection.environment) for selection in grid.seen]
    common = _in_all(machines)
    if any(len(words) > len(common) and "* assumed" in words for words in machines):
        common.append("the rest as it goes with each")
    asked = _in_all([params_words(selection.params) for selection in grid.seen])
    about = [*wrap(" · ".join(common)), *wrap(" · ".join(asked))]
    head = (f"{grid.down.field} ↓ {grid.along.field} →", *grid.along.labels)
    labelled = zip(grid.down.labels, table, strict=True)
    rows = [(label, *(cell.text for cell in row)) for label, row in labelled]
    legend = _legend(grid, [cell for row in table for cell in row])
    if markdown:
        told = markdown_table([*map(escape, head)], [[*map(escape, row)] for row in rows])
        blocks = [fenced(lines, "text") for lines in (about, legend) if lines]
        print_text("\n\n".join([blocks[0], told, *blocks[1:]]))
        return
    print_text("\n".join(about))
    in_columns(head, rows)
    print_text("\n".join(legend))


def _in_all(lists: list[list[str]]) -> list[str]:
    """The words of the first list that all have."""
    return [word for word in lists[0] if all(word in other for other in lists)]


def _legend(grid: Grid, cells: list[Cell]) -> list[str]:
    """What the codes and marks in the table mean; only those that are there."""
    shown = {cell.text for cell in cells}
    lines: list[str] = []
    for code in sorted({code for cell in cells for code in cell.codes}):
        lines += wrap(REGISTRY.pages[code].title, f"  {code}  ")
    for mark, meaning in _NOTES.items():
        if any(mark in text.split(" ")[0] for text in shown):
            lines.append(f"  {mark}  {meaning}")
    if "none" in shown:
        lines.append("  none  no candidate can run; attnsel explain says why")
    if any(text.endswith("≠") for text in shown):
        lines.append(f"  {_DIFFERS}")
    if "invalid" in shown:
        first = next(cell.data["invalid"] for cell in cells if "invalid" in cell.data)
        lines += wrap(f"contradicts itself, such as: {first}", "  invalid  ")
    if any(" +" in text for text in shown):
        lines.append("  +n  so many further reasons; --json has them all")
    return lines

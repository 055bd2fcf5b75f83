"""``attnsel can-i-use``: features over kernels, GPUs and releases; or the choice over any two fields."""

from __future__ import annotations

import csv as csv_format
import gc
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, get_origin

from cyclopts import Group, Parameter
from pydantic import TypeAdapter, ValidationError

from attnsel.backends.registry import CANDIDATES
from attnsel.base.model import invalid_input
from attnsel.base.records import json_fields, stamped, to_json
from attnsel.base.suggestions import candidate_suggestion
from attnsel.cli.flags import ALIASES, FLAGS, SHORTHANDS, plain_type, read_count
from attnsel.cli.form import OUTPUT, TEXT_AND_PAGE, PageForm, yes_or_no
from attnsel.cli.output import FOUND, NO_BACKEND, complain, watched
from attnsel.cli.question import As, Chooser, Question, SwitchFlag, asked_of, asks, with_recipe
from attnsel.decision import Selection
from attnsel.environment import COMPONENTS, Environment, describe_device
from attnsel.environment.read import Unread
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput
from attnsel.pages import can_i_use_tables
from attnsel.pages.can_i_use import ANSWERS, GPUS, Stated, all_features, cells, find
from attnsel.pages.can_i_use_tables import as_dict, on_every_gpu, on_one_gpu, overview, unread_of
from attnsel.pages.commands import WITHOUT_FLAG
from attnsel.params import AttentionParams
from attnsel.params.options import KINDS
from attnsel.plugins import load_plugins
from attnsel.report.answer import newer_items
from attnsel.report.document import Code, Document, Facts, Item, Items, Paragraph, Ref, Table
from attnsel.report.html import Page, Plane, Tile, tone
from attnsel.report.words import environment_words, params_words
from attnsel.rules import REGISTRY

_GRID = Group("A grid of two fields", sort_key=0)
_DEFAULT_GPU = "sm90"
_OF_A_GRID = "says nothing of features: it goes with --rows and --cols"
_NEEDED = (
    "a grid has two fields, such as: attnsel can-i-use --gpu H100 --rows head_dim_qk=64,128,256 "
    "--cols attn_mask_type=no_mask,causal"
)
MACHINE = ("gpu", *COMPONENTS)
_NUMBER = "([0-9]{1,20}(?:k|K|Ki|M|Mi)?)"  # int() refuses texts of thousands of digits
_RANGE = re.compile(f"{_NUMBER}:{_NUMBER}:([+*]){_NUMBER}")
MOST_CELLS = 20_000
"""Of a grid: some 10 s on one core, and 200 MiB."""

_ALSO = {name.lstrip("-").replace("-", "_"): field for field, names in ALIASES.items() for name in names}
_ALSO |= {"head_dim": "head_dim_qk", "seqlen": "max_seqlen_q", "seq_len": "max_seqlen_q"}
"""Other names of fields. Of the last the other field follows unless it is stated."""


@asks
def can_i_use(
    question: Question,
    *feature: Annotated[
        str, Parameter(help="such as softcap, paged-kv, fp8 or head-dim-256; all if left out")
    ],
    rows: Annotated[str | None, Parameter(group=_GRID, help="FIELD=VALUES down the side")] = None,
    cols: Annotated[str | None, Parameter(group=_GRID, help="FIELD=VALUES along the top")] = None,
    kernel: Annotated[
        str | None,
        Parameter(
            group=OUTPUT,
            help="only these kernels; commas between. Of a grid: one, instead of which one is chosen",
        ),
    ] = None,
    as_: As = None,
    switch: SwitchFlag = None,
    csv: Annotated[bool, yes_or_no("print a grid as CSV", group=OUTPUT)] = False,
    form: PageForm = TEXT_AND_PAGE,
) -> int:
    """Which kernels have a feature, on which GPUs, and from which release on; or what runs over a grid.

    Without a feature: all of them, a line each, on one GPU (sm90 unless --gpu names another). With one: a
    table of kernels and architectures; with --gpu each kernel's releases in ranges, and the rules against
    it. A word that begins several names stands for them all: fp8, head-dim, paged. Such as:

        attnsel can-i-use softcap --gpu H100
        attnsel can-i-use --gpu H100 --rows head_dim=64,128 --cols cudnn=8.9.7,9.5

    Every answer is the engine's own about one question, with all known releases of what decides: cuDNN,
    Triton, flash-attn, or PyTorch with what its wheel brings. What else a kernel needs is the newest. A
    stated release (--cudnn 9.1) is the one at hand.

    With --rows and --cols: the chosen backend, or the verdict of --kernel, over any two fields. A field is
    one of the call's (head_dim_qk, max_seqlen_kv, dtype, …; also fp8_recipe), gpu, or a component (cudnn,
    torch, …). Values stand between commas; 64:256:+64 counts up and 1k:16k:*2 multiplies, both ends
    included; window_size=128x0 is a pair. Every other flag holds for all cells. Combinations that contradict
    themselves are "invalid" cells. --as torch, te or transformers shows what that library would choose by
    itself, and ≠ where attnsel runs another kernel.

    --json prints one object: states, features, kernels, gpus, unread (what is newer than anything that was
    read), cells (feature, kernel, gpu, at, state, since, always, unlocked_at, ranges, modes with the command
    that asks it) and rules. Of a grid: rows and cols (field, values), kernel, dispatcher, unread, cells: a
    list per row of {backend, verdict, codes, adaptations, unproven} or {invalid: message}. backend is the
    chosen one, or null; the others speak of it, or of --kernel. With --as also, in each cell, dispatched (the
    other's choice, or null) and same.

    Exit code: 0 some kernel runs some of it, 2 bad input or no valid cell, 3 none does.
    """
    form.require_one(csv=csv)
    load_plugins()
    kernels = _kernels(kernel)
    if rows is None and cols is None:
        for flag, given in (("--as", as_), ("--switch", switch), ("--csv", csv)):
            if given:
                raise InvalidInput(flag, None, _OF_A_GRID)
        return _features(question, feature, kernels, form)
    if rows is None or cols is None:
        raise InvalidInput("--cols" if cols is None else "--rows", None, _NEEDED)
    if feature:
        raise InvalidInput("feature", feature[0], "cannot go with --rows and --cols")
    if kernel is not None and len(kernels) > 1:
        raise InvalidInput("--kernel", kernel, "must be one kernel with --rows and --cols")
    asked = asked_of(as_, switch)
    if asked.dispatcher is not None and kernel is not None:
        raise InvalidInput("--as", as_, "cannot go with --kernel: one question at a time")
    down, along = read_axis("--rows", rows), read_axis("--cols", cols)
    if down.field == along.field:
        raise InvalidInput("--cols", cols, f"{along.field} is the field of --rows already")
    size = len(down.values) * len(along.values)
    if size > MOST_CELLS:
        raise InvalidInput("--cols", cols, f"makes {size} cells with --rows; at most {MOST_CELLS}")
    grid = _grid(question, down, along, None if kernel is None else kernels[0], asked)
    if csv:
        if form.html is not None:
            raise InvalidInput("--html", str(form.html), "cannot go with --csv: one form at a time")
        for newer in grid.unread:
            complain(str(newer))
        writer = csv_format.writer(sys.stdout, lineterminator="\n")
        writer.writerow([f"{down.field} \\ {along.field}", *along.labels])
        for label, row in zip(down.labels, grid.cells, strict=True):
            writer.writerow([label, *(cell.text for cell in row)])
    else:
        form.print(
            lambda: _grid_document(grid),
            lambda: stamped("grid", to_json(grid)),
            indent=None,
            page=lambda: _grid_page(grid),
        )
    return FOUND if any(cell.found for row in grid.cells for cell in row) else NO_BACKEND


def _kernels(names: str | None) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(name.strip() for name in (names or "").split(",") if name.strip()))
    for name in wanted:
        if name not in CANDIDATES:
            meant = candidate_suggestion(name, CANDIDATES)
            said = f"no such kernel: {meant} Allowed" if meant else "no such kernel; allowed"
            raise InvalidInput("--kernel", name, f"{said}: {', '.join(CANDIDATES)}")
    return wanted or tuple(CANDIDATES)


# ---- features ------------------------------------------------------------------------------------------


def _features(question: Question, words: Sequence[str], kernels: Sequence[str], form: PageForm) -> int:
    """Features over kernels and all GPUs, or on the one that is stated."""
    gpu, stated = _stated(question)
    asked = find(words) if words else tuple(all_features().values())
    gpus = GPUS if words and gpu is None else (gpu or _DEFAULT_GPU,)
    for name in gpus:
        describe_device(name)
    total = len(asked) * len(kernels) * len(gpus)
    found = watched("asking", cells(asked, kernels, gpus, stated), total)

    newer = Items(newer_items(unread_of(found)))
    before = (newer,) if newer.items else ()

    def document() -> Document:
        if not words:
            hint = ("One of them, on every GPU: ", Code("attnsel can-i-use softcap"))
            return Document((*before, overview(found, stated), Paragraph(hint)))
        section = on_every_gpu if gpu is None else on_one_gpu
        told = (section(each, [cell for cell in found if cell.feature is each]) for each in asked)
        return Document((*before, *told))

    told = {"cells": found, "named": words, "before": before, "say": can_i_use_tables}
    form.print(document, lambda: as_dict(found), indent=None, page=lambda: Page("features", told))
    return FOUND if any(cell.state in ANSWERS for cell in found) else NO_BACKEND


def _stated(question: Question) -> tuple[str | None, Stated]:
    """The GPU and the releases that flags state. Raises InvalidInput for every other flag of a question."""
    stated = question.flags - set(MACHINE)
    others = [flag.name for flag in (*SHORTHANDS, *FLAGS) if flag.field in stated]
    lying = question.lying
    files = (("--params", question.from_file), ("--env", question.place.environment))
    others += [
        flag
        for flag, given in (*files, ("--stride", lying.strides), ("--misaligned", lying.alignments))
        if given
    ]
    if others:
        raise InvalidInput(others[0], None, _OF_A_GRID)
    gpu = question.place.changes.get("gpu")
    texts = sorted((name, text) for name, text in question.place.changes.items() if name != "gpu")
    return gpu, tuple((name, _release(name, text)) for name, text in texts)


def _release(component: str, text: str) -> Version:
    try:
        return Version.parse(text)
    except ValueError as error:
        raise InvalidInput(component, text, str(error)) from None


# ---- one axis of a grid: ``head_dim_qk=64,128``, ``max_seqlen_q=1024:16384:*2``, ``gpu=A100,H100`` ------


@json_fields("field", ("values", "labels"))
class Axis(NamedTuple):
    """A field and its values, each with the text a user would call it by."""

    field: str
    labels: tuple[str, ...]
    values: tuple[Any, ...]


def read_axis(flag: str, text: str) -> Axis:
    """Raises InvalidInput naming ``flag`` for an unknown field or a value the field cannot take."""
    if not text.isprintable():
        raise InvalidInput(flag, text, "must hold no control characters")
    name, _, values = text.partition("=")
    field = name.strip().replace("-", "_")
    field = _ALSO.get(field, field)
    fields = [*AttentionParams.model_fields, "fp8_recipe", *MACHINE]
    fields = [name for name in fields if name not in WITHOUT_FLAG]
    if not values.strip():
        raise InvalidInput(flag, text, "must be FIELD=VALUE,VALUE,… or FIELD=FIRST:LAST:+STEP (or :*FACTOR)")
    if field not in fields:
        raise InvalidInput(flag, text, f"there is no field {field!r}; allowed: {', '.join(fields)}")
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
    if field in MACHINE or (field == "fp8_recipe" and label in KINDS):
        return label
    stated = f"{field}={label}"
    if field == "fp8_recipe":
        raise InvalidInput(flag, stated, f"must be one of {', '.join(KINDS)}")
    info = AttentionParams.model_fields[field]
    kind, optional = plain_type(info.annotation)
    if optional and label.casefold() == "none":
        return None
    value: Any = label.split("x") if get_origin(kind) is tuple else label
    if kind == tuple[int, int] and len(value) != 2:
        raise InvalidInput(flag, stated, "must be two numbers such as 128x0")
    checked: Any = info.annotation
    for bound in info.metadata:  # not the Field itself, whose other names belong to the model
        checked = Annotated[checked, bound]
    try:
        return TypeAdapter(checked).validate_python(read_count(flag, label) if kind is int else value)
    except (InvalidInput, ValidationError) as error:
        wrong = invalid_input(error) if isinstance(error, ValidationError) else error
        raise InvalidInput(flag, stated, wrong.allowed) from None


# ---- a grid --------------------------------------------------------------------------------------------


class GridCell(NamedTuple):
    """One answer: what is shown, whether something runs, the codes against it, and all of it as data."""

    text: str
    found: bool
    codes: tuple[str, ...]
    data: dict[str, Any]


@json_fields(
    ("rows", "down"), ("cols", "along"), "kernel", "dispatcher",
    ("cells", lambda grid: [[cell.data for cell in row] for row in grid.cells]), "unread",
)  # fmt: skip
class Grid(NamedTuple):
    """The answers over two fields. ``unread``: what of all questions is newer than anything that was read;
    ``seen``: some selections, to tell what all cells have in common."""

    down: Axis
    along: Axis
    kernel: str | None
    dispatcher: str | None
    cells: list[list[GridCell]]
    unread: tuple[Unread, ...]
    seen: list[Selection]


def _grid(question: Question, down: Axis, along: Axis, kernel: str | None, asked: Chooser) -> Grid:
    """The questions of a grid, row by row. Raises the first error where no cell is a question."""

    # An axis of the machine does not change the call: one object serves the whole row or column.
    @lru_cache(maxsize=256)
    def call(*stated: tuple[str, Any]) -> AttentionParams | InvalidInput:
        try:
            return question.ask(**with_recipe(dict(stated)))
        except InvalidInput as error:
            return error

    @lru_cache(maxsize=256)
    def machine(*stated: tuple[str, Any]) -> Environment:
        return question.where(**dict(stated))

    width, size = len(along.values), len(down.values) * len(along.values)
    corners = {0, width - 1, size - width, size - 1}
    seen: list[Selection] = []
    wrong: list[InvalidInput] = []  # the first
    newer: dict[Unread, None] = {}

    def ask(place: int) -> GridCell:
        stated = ((down.field, down.values[place // width]), (along.field, along.values[place % width]))
        of_the_call = tuple(pair for pair in stated if pair[0] not in MACHINE)
        p = call(*of_the_call)
        if isinstance(p, InvalidInput):
            if not wrong:
                wrong.append(p)
            return GridCell("invalid", False, (), {"invalid": str(p)})
        env = machine(*(pair for pair in stated if pair[0] in MACHINE))
        p, env = question.put(p, env, **with_recipe(dict(of_the_call)))
        selection = asked.select(p, env, question.policy)
        newer.update(dict.fromkeys(selection.unread))
        if len(seen) < 2 or place in corners or all(p.dtype != one.params.dtype for one in seen):
            seen.append(selection)
        return _grid_cell(selection, kernel)

    was_on = gc.isenabled()
    gc.disable()  # answers hold no cycles, and the collector would take 15 % of the time
    try:
        cells = watched("selecting", map(ask, range(size)), size)
    finally:
        if was_on:
            gc.enable()
    if all("invalid" in cell.data for cell in cells):
        raise wrong[0]
    rows = [cells[place : place + width] for place in range(0, size, width)]
    return Grid(down, along, kernel, asked.dispatcher, rows, tuple(newer), seen)


def _grid_cell(selection: Selection, kernel: str | None) -> GridCell:
    """What is chosen, by attnsel or by the library that was asked beside it; or the verdict on ``kernel``."""
    name = selection.backend if kernel is None else kernel
    if name is None:
        against = dict.fromkeys(reason.code for candidate in selection for reason in candidate.reasons)
        cell = GridCell("none", False, (), {"backend": None, "verdict": "refused", "codes": list(against)})
    else:
        found = selection[name]
        codes = [reason.code for reason in found.reasons]
        data = {
            "backend": selection.backend,
            "verdict": found.verdict,
            "codes": codes,
            "adaptations": [adaptation.name for adaptation in found.adaptations],
            "unproven": found.unproven,
        }
        bugs = [bug.code for bug in selection.known_bugs] if kernel in (None, selection.backend) else []
        data |= {"known_bugs": bugs} if bugs else {}
        marks = ("+" if found.adaptations else "") + ("°" if found.unproven else "") + ("!" if bugs else "")
        doubt = "?" if found.verdict == "unknown" else ""
        if kernel is None:
            cell = GridCell(f"{name}{doubt}{marks}", True, (), data)
        elif found.verdict == "eligible":
            cell = GridCell(f"✔{marks}", True, (), data)
        else:
            first, *more = dict.fromkeys(codes)
            text = f"{doubt or '✖'} {first}{f' +{len(more)}' if more else ''}"
            cell = GridCell(text, bool(doubt), (first,), data)
    if selection.dispatched is None:
        return cell
    theirs = selection.dispatched.chosen
    same = (None if theirs is None else theirs.candidate) == selection.backend
    taken = None if theirs is None else theirs.name
    bugs = [bug.code or bug.text for bug in selection.dispatched.known_bugs]
    data = {**cell.data, "dispatched": taken, "same": same, **({"known_bugs": bugs} if bugs else {})}
    text = f"{taken or 'none'}{'!' if bugs else ''}{'' if same else ' ≠'}"
    shown = tuple(bug.code for bug in selection.dispatched.known_bugs if bug.code)
    return GridCell(text, theirs is not None, shown, data)


def _grid_document(grid: Grid) -> Document:
    machines = [environment_words(selection.environment) for selection in grid.seen]
    calls = [params_words(selection.params) for selection in grid.seen]
    common, asked = (
        [word for word in lists[0] if all(word in other for other in lists)] for lists in (machines, calls)
    )
    if any(len(words) > len(common) and "* assumed" in words for words in machines):
        common.append("the rest as it goes with each")
    if any("dtype" in selection.environment.assumed for selection in grid.seen):
        asked.append("in fp16 where a GPU has no bf16")
    head = (f"{grid.down.field} ↓ {grid.along.field} →", *grid.along.labels)
    labelled = zip(grid.down.labels, grid.cells, strict=True)
    table = Table(head, tuple((label, *(cell.text for cell in row)) for label, row in labelled))
    legend = _grid_legend([cell for row in grid.cells for cell in row])
    lines = [tuple(words) for words in (common, asked) if words]
    facts = Facts((*lines, *newer_items(grid.unread)))
    blocks = (facts, table, Items(legend))
    return Document(tuple(block for block in blocks if block[0]))


def _grid_page(grid: Grid) -> Page:
    """The grid as a plane, and what its signs mean."""
    down, along = grid.down, grid.along

    def tile(row: str, place: int, cell: GridCell) -> Tile:
        where = f"{down.field} {row}, {along.field} {along.labels[place]}: {cell.text}"
        name = "invalid" if "invalid" in cell.data else cell.data.get("dispatched", cell.data["backend"])
        look = ("state-yes" if cell.found else "state-never") if grid.kernel else tone(name)
        why = cell.data.get("invalid") or ", ".join(cell.data["codes"])
        return Tile(cell.text, look, (where, why), False, place)

    rows = zip(down.labels, grid.cells, strict=True)
    tiles = tuple(
        (row, tuple(tile(row, place, one) for place, one in enumerate(cells))) for row, cells in rows
    )
    title = f"{grid.kernel or 'What runs'} over {down.field} and {along.field}"
    drawn = Plane(title, (down.field, along.field), along.labels, tiles)
    return Page("grid", {"drawn": drawn, "among": _grid_document(grid).blocks})


def _grid_legend(cells: Sequence[GridCell]) -> tuple[Item, ...]:
    """What the codes and marks in the table mean; only those that are there."""
    codes = sorted({code for cell in cells for code in cell.codes})
    rules = (Item(label=Ref(code), text=REGISTRY.pages[code].title) for code in codes)
    invalid = next((cell.data["invalid"] for cell in cells if "invalid" in cell.data), None)
    texts = {cell.text for cell in cells}
    marks = "".join(text.split(" ")[0] for text in texts)
    differs = "attnsel runs another kernel; attnsel explain --as says which and why"
    notes = (
        ("?" in marks, Item(mark="?", text="nobody has checked")),
        ("+" in marks, Item(mark="+", text="after an exact change of the call, which its backend makes")),
        ("!" in marks, Item(mark="!", text="with a known bug in that call; attnsel explain says more")),
        ("°" in marks, Item(mark="°", text="unproven on that architecture")),
        ("none" in texts, Item(label="none", text="no candidate can run; attnsel explain says why")),
        (any(text.endswith("≠") for text in texts), Item(mark="≠", text=differs)),
        (invalid is not None, Item(label="invalid", text=f"contradicts itself, such as: {invalid}")),
        (
            any(" +" in text for text in texts),
            Item(mark="+n", text="so many further reasons; --json has them all"),
        ),
    )
    return (*rules, *(item for there, item in notes if there))

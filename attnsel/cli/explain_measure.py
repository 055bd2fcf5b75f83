"""``attnsel explain --measure``: the call, run on this machine by every candidate that can."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnsel.backends.cudnn.ask.libraries import Untrusted, cache_folder
from attnsel.base.records import stamped, to_json
from attnsel.cli.form import Form
from attnsel.cli.output import CANNOT_WRITE, FOUND, INTERRUPTED, NO_BACKEND, bar, complain
from attnsel.cli.question import Question
from attnsel.decision import select
from attnsel.errors import InvalidInput
from attnsel.pages.commands import flag_name
from attnsel.report.answer import worth
from attnsel.report.document import MARK, Block, Code, Document, Inline, Item, Items, Paragraph, Strong, Table
from attnsel.report.short import report_document
from attnsel.report.words import figure_record, measured_words, params_words
from attnsel.verdicts.measured import append, appendable, card_of
from attnsel.verdicts.requirements import size

if TYPE_CHECKING:
    from attnsel.runtime.measure import Measuring, Timed

_WAYS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "both"}


def explain_measured(
    question: Question, budget: float, out: Path | None, short: bool, sources: bool, form: Form
) -> int:
    """Raises InvalidInput before anything is run."""
    place = question.place
    if place.environment is not None or place.changes:
        flag = "env" if place.environment is not None else next(iter(place.changes))
        raise InvalidInput(flag_name(flag), None, "says nothing with --measure: it is about this machine")
    if not 0 < budget < math.inf:
        raise InvalidInput("--budget", budget, "must be a positive number of seconds")
    try:
        path = cache_folder() / "figures.csv" if out is None else out
    except Untrusted as error:
        raise InvalidInput("--out", None, f"must be given: {error}") from None
    appendable(path)
    params, env = question.put(question.ask(), question.where())
    selection = select(params, env, policy=question.policy)
    if env.torch is None:
        raise InvalidInput("--measure", None, "needs PyTorch, which is not installed here")
    from attnsel.runtime.measure import Measuring  # with torch

    measuring = Measuring(selection)
    with bar("measuring", math.ceil(budget), still=True) as moved:
        measuring.run(budget, moved)
    rows, failure = measuring.rows(), ""
    try:
        if rows:
            append(path, rows)
    except (OSError, InvalidInput) as error:
        why = error.allowed if isinstance(error, InvalidInput) else error.strerror or str(error)
        failure = f"{path}: {why}. No row was added and nothing in it is lost; the times are in the answer"
    file = str(path) if rows and not failure else None

    def document() -> Document:
        asked = Paragraph(f"{card_of(env)}: {' '.join(params_words(selection.params))}")
        answer = (asked,) if short else report_document(selection, sources).blocks
        published = tuple(worth(selection)) if short else ()
        blocks = [*answer, *_blocks(measuring), Items(published)]
        if file is not None:
            where = ("The rows are in ", Code(file), "; to follow them: ", Code(f"ATTNSEL_FIGURES={file}"))
            blocks.append(Paragraph(where))
        return Document(tuple(block for block in blocks if block != Items(())))

    form.print(document, lambda: selection.as_dict() | {"measured": record(measuring, file)})
    if failure:
        complain(failure)
    found = NO_BACKEND if selection.backend is None else FOUND
    return INTERRUPTED if measuring.interrupted else CANNOT_WRITE if failure else found


def record(measuring: Measuring, file: str | None) -> dict[str, Any]:
    """All of it as JSON."""
    selection = measuring.selection
    told = {
        "gpu": card_of(selection.environment),
        "interrupted": measuring.interrupted,
        "file": file,
        "candidates": [to_json(one) for one in measuring.timed],
        "published": [figure_record(one) for one in selection.figures if not one.here],
        "rows": measuring.rows(),
    }
    return stamped("measured", told)


def _blocks(measuring: Measuring) -> list[Block]:
    """What was the fastest, a line for each that was measured, and why others were not."""
    done = measuring.best_first()
    blocks: list[Block] = [Paragraph(Strong(_sentence(done, measuring)))]
    if done:
        on_cpu = done[0].peak_bytes is None
        head = ["measured here", *(_WAYS[way] for way in done[0].samples), *([] if on_cpu else ["peak"])]
        blocks.append(Table(tuple(head), tuple(map(_cells, done))))
        memory = " Peak memory is not measured on a CPU." if on_cpu else ""
        blocks.append(Paragraph(f"Medians, and half the distance between the quartiles.{memory}"))
        rates = {way: [row for row in measuring.rows() if row["direction"] == way] for way in _WAYS}
        told = (
            (_WAYS[way], measured_words(rows)) for way, rows in rates.items() if rows and rows[0]["tflops"]
        )
        blocks.append(Items(tuple(Item(words, label=way) for way, words in told)))
    left = [one for one in measuring.timed if not one.samples]
    items = (Item(f"{one.status}: {one.reason}", MARK["refused"], "–", Code(one.name)) for one in left)
    return [*blocks, Items(tuple(items))]


def _sentence(done: list[Timed], measuring: Measuring) -> str:
    stopped, chosen = "Interrupted. " if measuring.interrupted else "", measuring.selection.backend
    if not done:
        return f"{stopped}Nothing was measured."
    fastest, own = done[0], next((one for one in done if one.name == chosen), None)
    rest = f"; {chosen}, the choice, was not measured" if chosen else ""
    if own is not None:
        ratio = own.median / fastest.median
        slower = f"; {chosen}, the choice, takes {ratio:.2f} times as long"
        rest = ", and the choice" if own is fastest else slower
    return f"{stopped}Measured here, {fastest.name} is the fastest{rest}."


def _cells(one: Timed) -> tuple[Inline, ...]:
    cells: list[Inline] = [Code(one.name)]
    for low, median, high in one.quartiles.values():
        unit, factor = next(((u, f) for u, f in (("s", 1e6), ("ms", 1e3)) if median >= f), ("us", 1.0))
        cells.append(f"{median / factor:.3g} {unit} ±{50 * (high - low) / median:.0f} %")
    return (*cells, *([] if one.peak_bytes is None else [size(one.peak_bytes)]))

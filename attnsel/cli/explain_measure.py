"""``attnsel explain --measure``: the call, run on this machine by every candidate that can."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attnsel.backends.cudnn.ask.libraries import Untrusted, cache_folder
from attnsel.base.records import stamped, to_json
from attnsel.cli.form import Form
from attnsel.cli.output import CANNOT_WRITE, FOUND, INTERRUPTED, NO_BACKEND, bar, complain
from attnsel.cli.question import Question
from attnsel.decision import select
from attnsel.errors import InvalidInput
from attnsel.report.answer import worth
from attnsel.report.document import MARK, Block, Code, Document, Inline, Item, Items, Paragraph, Strong, Table
from attnsel.report.short import report_document
from attnsel.report.words import environment_words, figure_record, params_words
from attnsel.runtime.measure import Measuring, Timed
from attnsel.verdicts.measured import append, card_of, writable
from attnsel.verdicts.requirements import size

BUDGET = 30.0


def explain_measured(
    question: Question, budget: float | None, out: Path | None, short: bool, sources: bool, form: Form
) -> int:
    """Raises InvalidInput before anything is run."""
    if question.environment is not None or question.machine:
        flag = "--env" if question.environment is not None else f"--{next(iter(question.machine))}"
        raise InvalidInput(
            flag.replace("_", "-"), None, "says nothing with --measure, which is about this machine"
        )
    seconds = BUDGET if budget is None else budget
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidInput("--budget", seconds, "must be a positive number of seconds")
    path = _default() if out is None else out
    writable(path)
    params, env = question.put(question.ask(), question.where())
    selection = select(params, env, policy=question.policy)
    measuring = Measuring(selection)
    with bar("measuring", math.ceil(seconds), still=True) as moved:
        measuring.run(seconds, moved)
    rows = measuring.rows()
    failure = _written(path, rows)
    said = "" if failure else str(path) if rows else ""

    def document() -> Document:
        whole = () if short else report_document(selection, sources).blocks
        return Document((*whole, *_blocks(measuring, said, short)))

    form.print(document, lambda: selection.as_dict() | {"measured": _record(measuring, said)})
    if failure:
        complain(
            f"{path}: {failure}: the rows are not in it, and it is as it was; what was measured stands above"
        )
    if measuring.interrupted:
        return INTERRUPTED
    if failure:
        return CANNOT_WRITE
    return NO_BACKEND if selection.backend is None else FOUND


def _default() -> Path:
    try:
        return cache_folder() / "figures.csv"
    except Untrusted as error:
        raise InvalidInput("--out", None, f"must be given: {error}") from None


def _written(path: Path, rows: list[Any]) -> str:
    """Why they could not be, or ""."""
    try:
        if rows:
            append(path, [rows])
    except OSError as error:
        return f"cannot be written ({error.strerror or error})"
    except InvalidInput as error:  # another process left something else there meanwhile
        return error.allowed
    return ""


def _blocks(measuring: Measuring, path: str, short: bool) -> tuple[Block, ...]:
    selection = measuring.selection
    done = [one for one in measuring.timed if one.measured]
    blocks: list[Block] = [Paragraph(Strong(_sentence(measuring)))]
    if short:
        where = environment_words(selection.environment)
        blocks.append(Paragraph(f"{card_of(selection.environment)}, {', '.join(where[1:])}"))
        blocks.append(Paragraph(" ".join(params_words(selection.params))))
    if done:
        ways = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "both"}
        head: list[Inline] = ["measured here", *(ways[t.direction] for t in done[0].times)]
        on_gpu = any(one.peak_bytes is not None for one in done)
        blocks.append(
            Table((*head, *(["peak"] if on_gpu else [])), tuple(_row(one) for one in _best_first(done)))
        )
    left = [one for one in measuring.timed if not one.measured]
    if left:
        blocks.append(
            Items(
                tuple(
                    Item(
                        f"{one.status}: {one.reason}" if one.reason else one.status,
                        MARK["refused"],
                        "–",
                        Code(one.name),
                    )
                    for one in left
                )
            )
        )
    if done and selection.environment.device.type == "cpu":
        blocks.append(
            Paragraph(
                "Medians, and half the distance between the quartiles. Peak memory is not measured on a CPU."
            )
        )
    published = tuple(item for item in worth(selection) if item.label == "Published")
    blocks += [Items(published)] if published and short else []
    if path:
        blocks.append(Paragraph(("In ", Code(path), "; what follows it: ", Code(f"ATTNSEL_FIGURES={path}"))))
    return tuple(blocks)


def _best_first(done: list[Timed]) -> list[Timed]:
    return sorted(done, key=lambda one: one.times[-1].median_us)


def _sentence(measuring: Measuring) -> str:
    """What was the fastest, and how that agrees with the choice."""
    fastest, chosen = measuring.fastest, measuring.selection.backend
    stopped = "Interrupted. " if measuring.interrupted else ""
    if fastest is None:
        return f"{stopped}Nothing was measured."
    own = next((one for one in measuring.timed if one.name == chosen and one.measured), None)
    if own is None:
        return f"{stopped}Measured here, {fastest.name} is the fastest; {chosen} was not measured."
    if own is fastest:
        return f"{stopped}Measured here, {fastest.name} is the fastest, and it is the choice."
    ratio = own.times[-1].median_us / fastest.times[-1].median_us
    slower = f"{chosen}, the choice, takes {ratio:.2f} times as long"
    return f"{stopped}Measured here, {fastest.name} is the fastest; {slower}."


def _row(one: Timed) -> tuple[Inline, ...]:
    cells: list[Inline] = [Code(one.name)]
    for t in one.times:
        rate = f", {t.tflops:.0f} TFLOP/s" if t.tflops is not None else ""
        spread = 50 * (t.high_us - t.low_us) / t.median_us
        cells.append(f"{_time(t.median_us)} ±{spread:.0f} %{rate}")
    return (*cells, *([] if one.peak_bytes is None else [size(one.peak_bytes)]))


def _time(micro: float) -> str:
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if micro >= factor:
            return f"{micro / factor:.3g} {unit}"
    return f"{micro:.3g} us"


def _record(measuring: Measuring, path: str) -> dict[str, Any]:
    selection, fastest = measuring.selection, measuring.fastest
    published = [figure_record(one) for one in selection.figures if not one.here]
    return stamped(
        "measured",
        {
            "gpu": card_of(selection.environment),
            "fastest": None if fastest is None else fastest.name,
            "interrupted": measuring.interrupted,
            "seconds": round(measuring.seconds, 3),
            "file": path or None,
            "candidates": [to_json(one) for one in measuring.timed],
            "published": published,
            "rows": measuring.rows(),
        },
    )

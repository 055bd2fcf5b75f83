"""What every command's output shares: exit codes, widths, colours, one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

from attnsel.errors import printable, short
from attnsel.report.text import fold

FOUND = 0
BAD_INPUT = 2
NO_BACKEND = 3
CHECK_FAILED = 4
CANNOT_WRITE = 74  # EX_IOERR of sysexits.h
INTERRUPTED = 130
BROKEN_PIPE = 141

_WIDEST = 100
_NARROWEST, _LARGEST = 20, 1000  # columns that are believed

# What a mark or a code looks like on a terminal; plain text everywhere else.
_STYLES = {
    "attnsel.chosen": "bold",
    "attnsel.yes": "green",
    "attnsel.no": "red",
    "attnsel.unknown": "yellow",
    "attnsel.code": "cyan",
    "attnsel.quiet": "dim",
    "attnsel.warning": "yellow",
}
_OF_CELLS = {"✔": "green", "✖": "red", **dict.fromkeys("?◐▷◁△", "yellow")}  # by their marks
_PATTERNS = (
    r"(?m)^ +1 [✔?] (?P<chosen>\S+)",
    r"(?P<yes>✔)",
    r"(?P<no>✖)",
    r"(?<!\S)(?P<unknown>\?)(?!\S)",
    r"(?P<unknown>[◐▷◁△])",
    r"\b(?P<code>[A-Z]{2,}\d{3})\b",
    r"(?P<quiet>\[(?:library|compiler|source|documented|reported|measured|policy|runtime)\])",
    r"(?P<quiet>· placed by )",
    r"(?m)^(?P<warning>! .*)$",
)


def on_terminal() -> bool:
    """Whether a person reads standard output, or wants it to look that way."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def text_width() -> int:
    """Columns for running text: COLUMNS where it is set; else the terminal's, at most 100, beyond which
    text reads badly; 80 where there is none."""
    if os.environ.get("COLUMNS"):  # settle_width has seen to what it holds
        return max(40, min(shutil.get_terminal_size().columns, _LARGEST))
    if not sys.stdout.isatty():
        return 80
    return max(40, min(shutil.get_terminal_size().columns, _WIDEST))


def settle_width() -> None:
    """Give COLUMNS a value that text fits into: rich never ends in two columns, and stops at none."""
    columns = shutil.get_terminal_size().columns
    fit = min(max(columns, _NARROWEST), _LARGEST)
    if "COLUMNS" in os.environ or fit != columns:
        os.environ["COLUMNS"] = str(fit)


def discard_output() -> None:
    """The interpreter flushes standard output once more at exit: let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_failed() -> bool:
    """Whether an OSError came from standard output: nothing else can be written there either."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


@contextmanager
def unwound() -> Iterator[None]:
    """SIGTERM and SIGHUP leave this block as an exception, so that what it cleans up is cleaned up."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    names = ("SIGTERM", "SIGHUP")  # SIGHUP is not on Windows
    caught = [number for name in names if (number := getattr(signal, name, None)) is not None]
    try:
        before = [(number, signal.signal(number, leave)) for number in caught]
    except ValueError:  # not the main thread, which signals go to
        before = []
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print JSON, in ASCII: nothing in it can move a terminal's cursor."""
    print(json.dumps(value, indent=indent))


def print_text(text: str) -> None:
    """Print a finished text, with colours only for a person."""
    text = "\n".join(map(printable, text.split("\n")))
    if not on_terminal():
        print(text)
        return
    from rich.console import Console
    from rich.highlighter import RegexHighlighter
    from rich.theme import Theme

    class Marks(RegexHighlighter):
        base_style = "attnsel."
        highlights: ClassVar[list[str]] = list(_PATTERNS)

    console = Console(theme=Theme(_STYLES), highlight=False)
    # The text is wrapped already, and a bracket in it is a bracket.
    console.print(Marks()(text), soft_wrap=True)


def complain(message: str) -> None:
    """One line on standard error; a word that is long beyond reason is cut."""
    print(f"attnsel: {' '.join(short(word, str) for word in message.split())}", file=sys.stderr)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings of attnsel's own as lines on standard error: where they come from is no user's line."""
    with warnings.catch_warnings():
        elsewhere = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category.__module__.partition(".")[0] == "attnsel":
                complain(str(message))
            else:
                elsewhere(message, category, *where, **more)

        warnings.showwarning = show
        yield


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Called with how much is done, it moves a bar on standard error while a person waits; else nothing."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done: shown.update(task, completed=done)


def wrap(text: str, lead: str = "", indent: str | None = None) -> list[str]:
    """``text`` folded to the width; ``lead`` before the first line, ``indent`` before the others."""
    return fold(text, text_width(), lead, " " * len(lead) if indent is None else indent)


def in_columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], title: str = "") -> None:
    """A table; what does not fit side by side continues in a further table below, never folded."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = list(rows)
    console = Console(width=None if sys.stdout.isatty() else text_width(), highlight=False)
    for columns in _fitting(head, cells, console.width):
        table = Table(title=title or None, title_justify="left", title_style="", box=_box())
        for column in columns:
            table.add_column(Text(head[column]), no_wrap=True)
        for row in cells:
            shown = (row[column] for column in columns)
            table.add_row(*(Text(printable(cell), style=_OF_CELLS.get(cell[:1], "")) for cell in shown))
        console.print(table)


def _fitting(head: tuple[str, ...], rows: list[tuple[str, ...]], width: int) -> list[list[int]]:
    """Column numbers in groups that fit; every group begins with the first column, the rows' names."""
    widths = [max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)]
    groups: list[list[int]] = [[0]]
    for column in range(1, len(head)):
        last = groups[-1]
        if len(last) > 1 and 1 + sum(widths[c] for c in last) + widths[column] > width:
            groups.append([0, column])
        else:
            last.append(column)
    return groups


def _box() -> Any:
    from rich import box

    return box.SQUARE if (sys.stdout.encoding or "").lower().startswith("utf") else box.ASCII

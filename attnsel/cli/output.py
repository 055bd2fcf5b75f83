"""What every command's output shares: exit codes, widths, colours, one-line errors."""

from __future__ import annotations

import codecs
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, TypeVar

from attnsel.errors import printable, short

T = TypeVar("T")

FOUND = 0
BAD_INPUT = 2
NO_BACKEND = 3
CHECK_FAILED = 4
CANNOT_WRITE = 74  # EX_IOERR of sysexits.h
INTERRUPTED = 130
BROKEN_PIPE = 141

ENDING = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None)) is not None]
"""What asks a process to end; SIGHUP is not on Windows."""

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
_PATTERNS = (
    r"(?m)^ +1 [✔?~] (?P<chosen>\S+)",
    r"(?P<yes>✔)",
    r"(?P<no>✖)",
    r"(?<!\S)(?P<unknown>[?~])(?!\S)",
    r"(?P<unknown>[◐▷◁△])",
    r"\b(?P<code>[A-Z]{2,}\d{3})\b",
    r"(?P<quiet>\[(?:library|compiler|source|documented|reported|measured|policy|runtime)\])",
    r"(?P<quiet>· placed by )",
    r"(?m)^(?P<warning>! .*)$",
)


_IN_ASCII = {
    **dict(zip("✔✖◐▷◁△–—−─·×↓µ°’‘“”", "+x%><^-----xvu'''\"\"", strict=True)),
    **{"→": "->", "←": "<-", "≥": ">=", "≤": "<=", "≠": "!=", "±": "+-", "…": "..."},
}
_WIDER = re.compile(r"([→←≥≤≠±])(\S*) (?=  )")  # in a column, which has the room


def _alike(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_IN_ASCII.get(one, "?") for one in error.object[error.start : error.end]), error.end


codecs.register_error("attnsel", _alike)


def only_what_it_can(stream: Any) -> None:
    """A stream that is not UTF-8 shows marks that still differ, and ``?`` for what has no likeness."""
    utf = (getattr(stream, "encoding", None) or "").lower().startswith("utf")
    if not utf and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="attnsel")


def as_it_can(text: str, stream: Any) -> str:
    """A text as ``only_what_it_can`` would have it shown, for a stream that is a program's own."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "attnsel").decode(encoding)


def on_terminal() -> bool:
    """Whether a person reads standard output, or wants it to look that way."""
    return sys.stdout.isatty() or bool(os.environ.get("FORCE_COLOR"))


def text_width() -> int:
    """Columns for running text: COLUMNS where it is set; else the terminal's, at most 100, beyond which
    text reads badly; 80 where there is none. Two fewer where an arrow takes two."""
    wider = 2 * (getattr(sys.stdout, "errors", None) == "attnsel")
    if os.environ.get("COLUMNS"):  # settle_width has seen to what it holds
        return max(40, min(shutil.get_terminal_size().columns - wider, _LARGEST))
    if not sys.stdout.isatty():
        return 80 - wider
    return max(40, min(shutil.get_terminal_size().columns - wider, _WIDEST))


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

    try:
        before = [(number, signal.signal(number, leave)) for number in ENDING]
    except ValueError:  # not the main thread, which signals go to
        before = []
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def print_text(text: str) -> None:
    """Print a finished text, with colours only for a person."""
    text = "\n".join(map(printable, text.split("\n")))
    if getattr(sys.stdout, "errors", None) == "attnsel":  # where "?" is what has no likeness
        text = re.sub(r"(?<!\S)\?(?!\S)", "~", text)
        text = _WIDER.sub(lambda found: _IN_ASCII[found[1]] + found[2], text)
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
def bar(what: str, total: int, still: bool = False) -> Iterator[Callable[[float], None]]:
    """Called with how much is done, it moves a bar on standard error once a person waited for a second.

    ``still``: it is drawn in that call alone, at most four times a second: what is timed is left alone.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    shown = Progress(console=Console(stderr=True), transient=True, auto_refresh=not still)
    task = shown.add_task(what, total=total)
    due = time.monotonic() + 1

    def move(done: float) -> None:
        nonlocal due
        if time.monotonic() > due:
            shown.start()
            shown.update(task, completed=done, refresh=still)
            due += 0.25 * still

    try:
        yield move
    finally:
        shown.stop()


def watched(what: str, items: Iterable[T], total: int) -> list[T]:
    """All items, with a bar while they are made."""
    found: list[T] = []
    with bar(what, total) as move:
        for item in items:
            found.append(item)
            move(len(found))
    return found

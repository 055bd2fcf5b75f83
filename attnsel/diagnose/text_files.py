"""Text that programs wrote, line by line: whatever a file is, and whatever launchers put before its lines.

Logs and the files of ranks are read by it. Nothing is held but the line at hand: a file may have any
length.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import re
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any

from attnsel.base.rows import read_rows
from attnsel.diagnose.scrub import scrub
from attnsel.errors import InvalidInput

LONGEST_LINE = 64 << 10  # characters; what is longer is read as several lines,
_MOST_PIECES = 3  # as so many; the rest of such a line is passed over
HEAD, TAIL = 12 << 20, 24 << 20  # bytes read of both ends of a longer file; of a stream both at its head
_PATIENCE = 2.0  # seconds for the writer of a named pipe to come
_SNIFFED = 8192  # bytes by which text is told from the rest
_CONTROL = bytes(n for n in range(32) if n not in b"\t\n\r\f\b\x1b")


@contextmanager
def opened(path: Path, flag: str) -> Iterator[tuple[IO[bytes], int]]:
    """The bytes of a file or of standard input ("-"), and how many there are (0: nobody knows).

    Raises InvalidInput.
    """
    try:
        if str(path) == "-":
            if sys.stdin is None:
                raise OSError("standard input is closed")
            yield sys.stdin.buffer, 0
            return
        without_waiting = getattr(os, "O_NONBLOCK", 0)  # for the writer of a pipe
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_waiting)) as file:
            mode = os.fstat(file.fileno())
            if stat.S_ISFIFO(mode.st_mode):
                _await_writer(file.fileno())
            yield file, mode.st_size if stat.S_ISREG(mode.st_mode) else 0
    except InvalidInput:
        raise
    except (OSError, EOFError, zlib.error) as error:  # a compressed file that was cut off, or is damaged
        why = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(flag, str(path), why) from None
    except ValueError as error:  # a name with a NUL in it
        raise InvalidInput(flag, str(path), f"cannot be read: {error}") from None


def lines_of(
    file: IO[bytes],
    progress: Callable[[int], None],
    size: int = 0,
    longest: int = LONGEST_LINE,
    whole: bool = False,
) -> Iterator[str]:
    """Lines of whatever bytes: UTF-8, UTF-16 or UTF-32 with a mark (PowerShell's ``>``), gzip.

    Of a file longer than ``HEAD + TAIL`` (``size``: its bytes, 0 where nobody knows) its two ends, of a
    stream and of what is compressed as much from its beginning, unless the ``whole`` is asked for. Raises
    InvalidInput for what is no text.
    """
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore
    start = buffered.peek(4)[:4]
    raw: Any = gzip.GzipFile(fileobj=buffered) if start.startswith(b"\x1f\x8b") else buffered
    start = raw.peek(_SNIFFED)[:_SNIFFED]
    encoding = _encoding(start[:4])
    if encoding == "utf-8" and len(start.translate(None, _CONTROL)) < 0.9 * len(start):
        raise InvalidInput("--from-log", getattr(file, "name", "-"), "is no text: a log or an error is read")
    ends = size > HEAD + TAIL and raw is buffered and encoding == "utf-8" and not whole
    most = sys.maxsize if whole else HEAD if ends else HEAD + TAIL
    done, told = 0, 0
    for line in _text(raw, encoding, longest, most, sys.maxsize if whole else _MOST_PIECES):
        done += len(line)
        if done - told > 4 << 20:
            told = done
            progress(buffered.tell() if buffered.seekable() else done)
        yield line
    if not ends:
        return
    skipped = 0
    buffered.seek(HEAD)
    while (left := size - TAIL - buffered.tell()) > 0:
        skipped += buffered.read(min(left, 1 << 20)).count(b"\n")
    yield Gap(skipped)
    buffered.readline()  # the rest of a line
    yield from _text(buffered, encoding, longest, sys.maxsize, _MOST_PIECES)
    progress(size)


def _text(raw: IO[bytes], encoding: str, longest: int, most: int, most_pieces: int) -> Iterator[str]:
    text, done, pieces = io.TextIOWrapper(raw, encoding=encoding, errors="replace", newline=None), 0, 0
    try:
        while done < most and (line := text.readline(longest)):
            done += len(line)
            if pieces < most_pieces:
                yield line
            pieces = 0 if line.endswith("\n") else pieces + 1
    finally:
        text.detach()


def _encoding(start: bytes) -> str:
    if start.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "utf-32"
    if start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16"
    without_mark = len(start) == 4 and start[1] == start[3] == 0 and start[0]
    return "utf-16-le" if without_mark else "utf-8"


def _await_writer(pipe: int) -> None:
    """Wait for somebody to write into a named pipe, or for what is in ``<(command)``. Raises OSError."""
    if sys.platform == "win32":  # it was opened as it is: reading waits
        return
    import select

    ready, _, _ = select.select([pipe], [], [], _PATIENCE)
    until = time.monotonic() + _PATIENCE
    while not ready and time.monotonic() < until:
        ready, _, _ = select.select([pipe], [], [], 0.1)
    if not ready:
        raise OSError("nobody writes into this pipe")
    os.set_blocking(pipe, True)


class Gap(str):
    """Lines in the middle of a log that were not read, in their place."""

    lines: int

    def __new__(cls, lines: int) -> Gap:
        made = super().__new__(cls)
        made.lines = lines
        return made


# ---- what stands before a line ---------------------------------------------------------------------------

_ANSI = re.compile(  # also as journals and web pages write them, where the character is lost or spelled
    r"(?:\x1b|\^\[|#033|\\x1b|\\033|\u241b)\[[0-9;]*m|\[\d{1,3}(?:;\d{1,3})*m"
    r"|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])"
)
_QUOTED = re.compile(r"(?:[>|]\s)+")  # in an issue or a mail


@cache
def _prefixes() -> re.Pattern[str]:
    """The rows of ``data/prefixes.csv``: what launchers, loggers and collectors put before a line."""
    ways = (row["pattern"] for row in read_rows("attnsel.diagnose", "prefixes"))
    return re.compile(rf"\s*(?:{'|'.join(ways)})")


def shape_of(text: str) -> str:
    """A text with one figure for each number: the steps of a log print one shape over and over."""
    return re.sub(r"\d+", "0", text)


def latin(text: str) -> list[str]:
    """What stands between other scripts: a message in a sentence of Chinese has no space around it."""
    return re.findall(r"[!-~][ -~]*[!-~]", text)


@lru_cache(maxsize=4)  # a line is asked for as the one below another, and then itself
def without_prefix(line: str) -> tuple[str, str]:
    """A line without colours and prefixes, and the stream that a prefix names."""
    if "\x1b" in line or "[0m" in line:
        line = _ANSI.sub("", line)
    stream = ""
    if quoted := _QUOTED.match(line):
        line = line[quoted.end() :]
    while (prefix := _prefixes().match(line)) is not None and prefix.end() > 0:
        # The last one, which the program itself writes: a rank's number, or a process' name; no host.
        if kind := prefix.lastgroup:
            stream = f"{kind.partition('_')[0]} {scrub(prefix[kind])}".lstrip()
        line = line[prefix.end() :]
    return line, stream

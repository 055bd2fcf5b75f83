"""Which files are read: those that were named, that a pattern matches, and all in a folder."""

from __future__ import annotations

import glob
import gzip
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from attnsel.errors import InvalidInput

MOST_FILES = 100_000
_PATTERN = re.compile(r"[*?\[]")


class Source(NamedTuple):
    """One file: where it is, what it is called in the answer, its bytes, and the rank that its name says."""

    path: str
    name: str
    bytes: int
    rank: int | None


class Skipped(NamedTuple):
    """What was not read, and why."""

    name: str
    why: str


class Found(NamedTuple):
    sources: tuple[Source, ...]
    skipped: tuple[Skipped, ...]


def find_sources(given: Sequence[str]) -> Found:
    """Every file once, in the order of names. Raises InvalidInput for a name that is nothing."""
    sources: list[Source] = []
    skipped: list[Skipped] = []
    seen: set[tuple[int, int]] = set()
    for one in given:
        for path, name in _named(one):
            if len(sources) >= MOST_FILES:
                skipped.append(Skipped(name, f"beyond the first {MOST_FILES} files"))
                return Found(tuple(sources), tuple(skipped))
            found = _look(path, name)
            if isinstance(found, Skipped):
                skipped.append(found)
                continue
            source, key = found
            if key not in seen:
                seen.add(key)
                sources.append(source)
    return Found(tuple(sources), tuple(skipped))


def _named(given: str) -> Iterator[tuple[str, str]]:
    """Paths, each with what it is called. Raises InvalidInput."""
    if os.path.lexists(given):
        yield from _in_folder(given) if os.path.isdir(given) else [(given, os.path.basename(given))]
        return
    matches = sorted(glob.glob(given, recursive=True)) if _PATTERN.search(given) else []
    if not matches:
        said = "no file matches" if _PATTERN.search(given) else "there is no such file or folder"
        raise InvalidInput("FILE", given, said)
    for match in matches:
        if not os.path.isdir(match):
            yield match, os.path.basename(match)


def _in_folder(folder: str) -> Iterator[tuple[str, str]]:
    """All files below it, called by their way from it. Folders behind links are not entered."""
    refused: list[OSError] = []
    for here, folders, files in os.walk(folder, onerror=refused.append):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(here, name))]
        for name in sorted((*files, *links), key=_by_number):
            path = os.path.join(here, name)
            yield path, os.path.relpath(path, folder)
    for error in refused:
        where = str(error.filename or folder)
        yield where, os.path.relpath(where, folder)


def _by_number(name: str) -> tuple[str | int, ...]:
    """rank2 before rank10."""
    parts = re.split(r"(\d{1,18})", name)
    return tuple(int(part) if place % 2 else part for place, part in enumerate(parts))


def _look(path: str, name: str) -> tuple[Source, tuple[int, int]] | Skipped:
    try:
        if os.path.isdir(path):
            why = "a link to a folder, which is not followed" if os.path.islink(path) else _why_unread(path)
            return Skipped(name, why)
        about = os.stat(path)
    except OSError as error:
        dangling = os.path.islink(path) and not os.path.exists(path)
        return Skipped(name, "a link that leads nowhere" if dangling else error.strerror or str(error))
    if not stat.S_ISREG(about.st_mode):
        return Skipped(name, "no plain file")
    return Source(path, name, about.st_size, rank_in(path)), (about.st_dev, about.st_ino)


def _why_unread(folder: str) -> str:
    try:
        os.scandir(folder).close()
    except OSError as error:
        return error.strerror or str(error)
    return "a folder that could not be read"


# torchrun --log-dir: FOLDER/RUN/attempt_0/LOCAL_RANK/stderr.log. The number is the rank on its node alone.
_TORCHRUN = re.compile(r"attempt_\d+/(\d{1,6})/std(?:out|err)\.log(?:\.gz)?$")
_RANK = re.compile(r"rank[ _.=-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[._-](\d{1,6})(?:\.[A-Za-z]+)*$")


def rank_in(path: str) -> int | None:
    """The rank that a file's name says: rank3.jsonl, watch-rank_3.json, out.3.log; else of its folder."""
    way = Path(path).as_posix()
    parts = way.split("/")
    for pattern, text in (
        (_RANK, parts[-1]),
        (_TORCHRUN, way),
        (_LAST_NUMBER, parts[-1]),
        (_RANK, parts[-2] if len(parts) > 1 else ""),
    ):
        found = pattern.search(text)
        if found:
            return int(found[1])
    return None


# ---- The lines of one file, plain or gz, one at a time; none longer than is held -----------------------


LONGEST = 4 << 20  # bytes; a selection with every reason and way out has some 20,000
_PIECE = 1 << 16
_GZIP = b"\x1f\x8b"


class Line(NamedTuple):
    """``text`` is None for one that is longer than is read. ``whole``: it ends in a line end."""

    number: int
    text: bytes | None
    whole: bool


class Unreadable(Exception):
    """The file is none of text, or cannot be read (on)."""


class Damaged(Unreadable):
    """A gz file that ends, or breaks, in the middle."""


def lines_of(path: str, moved: Callable[[int], None]) -> Iterator[Line]:
    """Every line that is not empty. ``moved`` is called with the bytes of the file that are behind.

    Raises Unreadable in words; from a damaged gz file after the lines before the damage.
    """
    try:
        with open(path, "rb") as raw:
            start = raw.peek(_PIECE)[:_PIECE]
            packed = start.startswith(_GZIP)
            if b"\0" in start and not packed:
                raise Unreadable("no text")
            if packed:
                with gzip.GzipFile(fileobj=raw) as file:
                    yield from _lines(file, raw, moved)
            else:
                yield from _lines(raw, raw, moved)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise Damaged("a gz file that breaks off or is damaged") from None
    except OSError as error:
        raise Unreadable(error.strerror or str(error)) from None


def _lines(file: IO[bytes] | gzip.GzipFile, raw: IO[bytes], moved: Callable[[int], None]) -> Iterator[Line]:
    number = 0
    while text := file.readline(LONGEST):
        number += 1
        if number % 64 == 1:
            moved(raw.tell())
        whole = text.endswith(b"\n")
        if not whole and len(text) == LONGEST:
            yield Line(number, None, _to_its_end(file))
        elif number == 1 and text.startswith(b"\xef\xbb\xbf"):
            yield Line(number, text[3:].strip(), whole)
        elif text.strip():
            yield Line(number, text.strip(), whole)
    moved(raw.tell())


def _to_its_end(file: IO[bytes] | gzip.GzipFile) -> bool:
    """Leave the rest of a line that is too long behind; whether it has an end."""
    while piece := file.readline(_PIECE):
        if piece.endswith(b"\n"):
            return True
    return False

"""Which files are read: those that were named, that a pattern matches, and all in a folder."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

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

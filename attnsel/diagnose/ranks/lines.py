"""The files of many ranks, and what each of their lines says.

A line is of a debug file, of a watched program, or of a log that attnsel wrote into. Nothing is believed: it
may come from another version, or from anybody. What is of another type than it should be is as if it were
not there.
"""

from __future__ import annotations

import glob
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attnsel.base.records import versions
from attnsel.diagnose import text_files
from attnsel.environment import COMPONENTS
from attnsel.errors import InvalidInput, short
from attnsel.settings import VARIABLES
from attnsel.verdicts.reasons import REFUSED, WRONG_NUMBERS

NOTHING = "nothing"  # in the place of a kernel: nothing could run the call
MOST_FILES = 100_000
LONGEST = 4 << 20  # characters of a line; a selection with every reason and way out has some 20,000

# ---- which files -------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """One file: where it is, what it is called in the answer, its bytes, and the rank that its name says."""

    path: str
    name: str
    bytes: int
    rank: int | None


Skip = Callable[[str, str], None]
"""Told why something is not read, and where it is."""


def find_sources(given: Sequence[str], skip: Skip) -> list[Source]:
    """Those that are named or match a pattern, and all in a folder, each once. Raises InvalidInput."""
    sources: dict[tuple[int, int], Source] = {}
    for path, name in _paths(given, skip):
        try:
            about = os.stat(path)
        except OSError as error:
            skip(error.strerror or str(error), name)
            continue
        if stat.S_ISDIR(about.st_mode):
            skip("a link to a folder, which is not followed", name)
        elif not stat.S_ISREG(about.st_mode):
            skip("no plain file", name)
        elif len(sources) >= MOST_FILES:
            skip(f"beyond the first {MOST_FILES} files", name)
        else:
            key = about.st_dev, about.st_ino
            sources.setdefault(key, Source(path, name, about.st_size, rank_in(path)))
    return list(sources.values())


MOST_DEPTH = 64  # of folders in folders: torchrun and launchers make four


def _paths(given: Sequence[str], skip: Skip) -> Iterator[tuple[str, str]]:
    """Each with what it is called: in a folder by its way from there."""
    for one in given:
        if os.path.isdir(one):
            refused: list[OSError] = []
            for here, folders, files in os.walk(one, onerror=refused.append):
                folders.sort()
                if os.path.relpath(here, one).count(os.sep) >= MOST_DEPTH and folders:
                    skip(f"deeper than {MOST_DEPTH} folders", os.path.relpath(here, one))
                    folders.clear()
                links = [name for name in folders if os.path.islink(os.path.join(here, name))]
                for name in sorted((*files, *links)):
                    path = os.path.join(here, name)
                    yield path, os.path.relpath(path, one)
            for error in refused:
                skip(error.strerror or str(error), os.path.relpath(str(error.filename or one), one))
            continue
        matches = [one] if os.path.lexists(one) else sorted(glob.glob(one, recursive=True))
        if not matches:
            said = "no file matches" if glob.has_magic(one) else "there is no such file or folder"
            raise InvalidInput("FILE", one, said)
        yield from ((match, os.path.basename(match)) for match in matches if not os.path.isdir(match))


# torchrun --log-dir: FOLDER/RUN/attempt_0/LOCAL_RANK/stderr.log. The number is the rank on its node alone.
_TORCHRUN = re.compile(r"attempt_\d+/(\d{1,6})/std(?:out|err)\.log(?:\.gz)?$")
_RANK = re.compile(r"rank[ _.=-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"[._-](\d{1,6})(?:\.[A-Za-z]+)*$")


def rank_in(path: str) -> int | None:
    """The rank that a file's name says: rank3.jsonl, watch-rank_3.json, out.3.log; else of its folder."""
    way = Path(path).as_posix()
    folder, _, name = way.rpartition("/")
    for pattern, text in (
        (_RANK, name),
        (_TORCHRUN, way),
        (_LAST_NUMBER, name),
        (_RANK, folder.rpartition("/")[2]),
    ):
        if found := pattern.search(text):
            return int(found[1])
    return None


def lines_of(path: str, moved: Callable[[int], None]) -> Iterator[tuple[int, str, bool]]:
    """Every line that is not empty: its number, its first LONGEST characters, and whether it has an end.

    ``moved`` is called with the bytes of the file that are behind. Raises InvalidInput where the file cannot
    be read (on), and for one that is not text.
    """
    with text_files.opened(Path(path), "FILE") as (file, _):
        start = file.read(1 << 16)
        file.seek(0)
        is_text = b"\0" not in start or start.startswith(b"\x1f\x8b")
        number, whole = 0, True
        for text in text_files.lines_of(file, moved, longest=LONGEST, whole=True) if is_text else ():
            goes_on, whole = not whole, text.endswith("\n")
            number += not goes_on
            if text.strip() and not goes_on:
                yield number, text.strip(), whole or len(text) == LONGEST
    if not is_text:
        raise InvalidInput("FILE", path, "no text")


# ---- what a line says --------------------------------------------------------------------------------------


class UnreadLine(ValueError):
    """A line of ours that is broken, or of a version that is not read; the message says which."""


class Setback(NamedTuple):
    """A candidate that this rank's own run found wanting."""

    candidate: str
    code: str
    message: str


Circumstances = tuple[tuple[str, str], ...]
"""What else holds on a rank, as a reader names it: ("torch", "2.9.1"), ("ATTNSEL_DISABLE", "none")."""


class RankLine(NamedTuple):
    """Who wrote a line, and what it says of a question and of the kernel that ran for it.

    What is not known is None or empty. source: "debug", "watch" or "log". params: the question; where there
    are none, ``words`` are all there is. begins: of a watched process, whose circumstances hold for the lines
    that follow, too. ended: its exit code.
    """

    rank: int | None = None
    world_size: int = 0
    host: str = ""
    pid: int = 0
    time: str = ""
    source: str = ""
    params: dict[str, Any] | None = None
    words: str = ""
    kernel: str = ""
    setbacks: tuple[Setback, ...] = ()
    circumstances: Circumstances = ()
    begins: bool = False
    ended: int = 0


_SCHEMA = re.compile(r"attnsel\.([a-z-]{1,40})/(\d{1,6})")
_OF_RANK = re.compile(r"rank (\d{1,9})")


def read_line(text: str) -> RankLine | None:
    """None for a line that is not attnsel's. Raises UnreadLine."""
    if "attnsel" not in text and "Warning" not in text:
        return None
    text, stream = text_files.without_prefix(text)
    line = _of_json(text) if text.startswith("{") else _of_text(text)
    prefix = _OF_RANK.fullmatch(stream)
    return line._replace(rank=int(prefix[1])) if prefix and line and line.rank is None else line


def _of_json(text: str) -> RankLine | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # too deep, or a number of too many digits
        raise UnreadLine("a broken line of JSON") from None
    schema = _SCHEMA.fullmatch(_text(data, "schema"))
    if schema is None:
        return None
    kind, version = schema[1], int(schema[2])
    readers = {"debug": _of_debug, "watch-process": _of_process, "watch-site": _of_site}
    if kind not in readers or not 1 <= version <= versions()[kind]:
        raise UnreadLine(f"a line of {schema[0]}, which this version of attnsel does not read")
    return readers[kind](data)._replace(begins=kind == "watch-process")


T = TypeVar("T")


def _typed(data: dict[str, Any], key: str, kind: type[T]) -> T:
    """A value of this type; an empty one where it is of another, or absent."""
    value = data.get(key)
    return value if type(value) is kind else kind()


def _text(data: dict[str, Any], key: str, limit: int = 60) -> str:
    return short(_typed(data, key, str), str, limit)


def _objects(data: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [item for item in _typed(data, key, list) if isinstance(item, dict)]


def _of_debug(data: dict[str, Any]) -> RankLine:
    """A line of ATTNSEL_DEBUG_FORMAT=json."""
    setbacks = tuple(
        Setback(
            _text(one, "name"),
            reason["code"],
            _text(reason, "observed", 300) or _text(reason, "message", 300),
        )
        for one in _objects(data, "candidates")
        for reason in _objects(one, "reasons")
        if reason.get("code") in (REFUSED, WRONG_NUMBERS)
    )
    params, kernel = _typed(data, "params", dict), _text(data, "backend") or NOTHING
    return _of_process(data)._replace(source="debug", params=params, kernel=kernel, setbacks=setbacks)


def _of_process(data: dict[str, Any]) -> RankLine:
    """Who wrote, and in what circumstances."""
    return RankLine(
        rank=data["rank"] if type(data.get("rank")) is int else None,
        world_size=_typed(data, "world_size", int),
        host=_text(data, "host"),
        pid=_typed(data, "pid", int),
        time=_text(data, "time", 40),
        circumstances=_circumstances(data),
        ended=_typed(data, "exit_code", int),
    )


def _of_site(data: dict[str, Any]) -> RankLine:
    """A line of ``attnsel watch --out`` but the first, which is of the process."""
    return RankLine(
        source="watch",
        params=_typed(data, "params", dict) or None,
        words=f"{_text(data, 'api')} at {_text(data, 'where', 120)}",
        kernel=_text(data, "candidate") or _text(data, "forward") or NOTHING,
    )


_VARIABLE_OF = {field: variable for variable, field in VARIABLES.items()}


def _circumstances(data: dict[str, Any]) -> Circumstances:
    environment = _typed(data, "environment", dict)
    device = _typed(environment, "device", dict)
    name, arch = "GPU" if device.get("type") in ("cuda", "rocm") else "device", device.get("arch")
    values = {name: device.get("name") or device.get("type"), "architecture": f"sm{arch}" if arch else None}
    values |= {field: environment.get(field) for field in (*COMPONENTS, "platform", "torch_flash", "missing")}
    for field, value in list(_typed(data, "policy", dict).items())[:30]:
        if field == "figures" and isinstance(value, str):
            value = value.rpartition("@")[2]  # what it holds, wherever it lies
        values[_VARIABLE_OF.get(field) or f"the argument {short(field, str, 30)}"] = value
    values["attnsel"] = data.get("attnsel")
    values["tensors"] = _tensors(_typed(_typed(data, "params", dict), "tensors", dict))
    return tuple((name, _plain(value)) for name, value in values.items())


def _plain(value: Any) -> str:
    if value is None or value in ("", [], {}, False):
        return "none"
    if isinstance(value, list):
        return short(", ".join(short(one, str, 80) for one in value[:8]), str, 80)
    return short(value, str if isinstance(value, str) else repr, 80)


def _tensors(described: dict[str, Any]) -> str:
    """Strides, and addresses that are not aligned."""
    words = []
    for name in ("q", "k", "v", "mask"):
        spec = _typed(described, name, dict)
        if strides := _typed(spec, "stride", list):
            words.append(f"{name} strides {','.join(short(n, str, 20) for n in strides[:8])}")
        if 0 < (alignment := _typed(spec, "alignment", int)) < 16:
            words.append(f"{name} on {alignment} bytes")
    return "; ".join(words) or "dense"


# ---- text that attnsel writes ------------------------------------------------------------------------------

_RUNS = re.compile(
    r"(?:attnsel: |SlowPathWarning: )(?:\[rank (\d{1,9}) of (\d{1,9})\] )?(?:[^:;\[]{1,120}: )?"
    r"(?:selected \S{1,60}$|(\S{1,60}) runs[ ;\[(])"
)
_QUESTION = re.compile(r"\[([^\[\]]{1,400})\]\s*$")
_FELL_BACK = re.compile(
    r"FallbackWarning: (\S{1,60}) (refused when it ran|gave other numbers than tiled): (.{0,4000}); "
    r"the next candidate runs"
)


def _of_text(text: str) -> RankLine | None:
    if found := _FELL_BACK.search(text):
        code = WRONG_NUMBERS if found[2].startswith("gave") else REFUSED
        return RankLine(setbacks=(Setback(found[1], code, short(found[3], str, 300)),))
    if (found := _RUNS.search(text)) is None:
        return None
    line = RankLine(int(found[1]), int(found[2])) if found[1] else RankLine()
    if not found[3]:  # of ATTNSEL_DEBUG=2, whose question stands in other lines
        return line
    question = _QUESTION.search(text)
    words = short(question[1], str, 400) if question else "a question that the line does not say"
    return line._replace(source="log", words=words, kernel=found[3])

"""What is known: the libraries of ``data/libraries.csv`` with their messages, which are rows beside it.

The functions that a row names as its ``reader`` are in the module here that has the name of the row's file.
"""

from __future__ import annotations

import importlib
import re
from ast import literal_eval
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby, islice
from typing import Any

from attnsel.base.rows import read_rows
from attnsel.diagnose.logs.message import Facts, Finding, Message, Variant

_ROOM = "attnsel.diagnose.logs"
_NEAR = 150  # lines between a frame of attention and the error that ends its traceback


@dataclass(frozen=True)
class Library:
    """All messages of a library.

    ``name``: the library, as its makers write it. ``looked_for``: what is recognised, for people. ``takes``:
    of one text "all" that its messages say, or what the "first" says that fits, so that the general come
    last. ``candidates``: the kernels that it chooses among, refused where it says only that none runs.
    ``dispatcher``: its own chooser in ``attnsel/dispatchers/``, if attnsel knows it. ``usual``: fields that
    its users leave as they are, taken where nothing is said. ``ask``: how to make it say more, in a sentence.
    """

    name: str
    looked_for: str
    takes: str
    messages: tuple[Message, ...]
    candidates: tuple[str, ...]
    dispatcher: str
    usual: Facts
    ask: str

    def findings(self, text: str, among: tuple[Message, ...] | None = None) -> Iterator[Finding]:
        """All that ``text``, one entry of a log, says; ``among``: messages that it can hold, if known."""
        found = (one.find(text) for one in (self.messages if among is None else among))
        said = (one for one in found if one is not None)
        return islice(said, 1 if self.takes == "first" else None)

    def likely(self, shape: str) -> tuple[Message, ...]:
        """The messages that a text of this ``shape`` (``shape_of``) can hold."""
        return tuple(m for m in self.messages if any(shape_of(quick) in shape for quick in m.quicks))


@cache
def libraries() -> tuple[Library, ...]:
    """Every library whose messages are known. What two of them print is the first one's."""
    return tuple(
        Library(
            row["library"],
            row["looked_for"],
            row["takes"],
            tuple(
                message
                for part in row["parts"].split(" | ")
                for message in messages(row["file"], part, row["library"], row["reader"])
            ),
            tuple(row["candidates"].split()),
            row["dispatcher"],
            _facts(row["usual"]),
            row["ask"],
        )
        for row in read_rows(_ROOM, "libraries")
    )


@cache
def messages(file: str, part: str, library: str = "", reader: str = "") -> tuple[Message, ...]:
    """The rows of ``data/FILE.csv`` with this ``part``, in their order. ``reader``: of those that name none.

    The columns are fields of Finding and of Message: ``does`` is its kind, ``issue`` its link, of several
    quick texts " | " stands between, of codes and candidates a space, and ``params``, ``environment``,
    ``supposed`` and ``when`` are Python literals (dtype='fp32'; softcap=50.0). Rows of one text are its
    meanings (Variant), ``when`` says which holds. What rows share has its name in braces: ``data/texts.csv``.
    """
    rows = [row for row in read_rows(_ROOM, file) if row["part"] == part]
    meanings = groupby(rows, key=lambda row: (row["does"], row["quick"], row["pattern"]))
    return tuple(_message(file, library, reader, list(same)) for _, same in meanings)


def _message(file: str, library: str, reader: str, rows: list[dict[str, str]]) -> Message:
    row = defaultdict(str, rows[0])  # a file has the columns that its rows need
    name = row["reader"] or reader
    says = Finding(
        library,
        row["does"],  # type: ignore[arg-type]  # tests hold the column against Kind
        "",
        _facts(row["params"]),
        _facts(row["environment"]),
        _facts(row["supposed"]),
        tuple(row["candidates"].split()),
        tuple(row["codes"].split()),
        _whole(row["known"]),
        row["issue"],
        _whole(row["fix"]),
        source=row["source"],
        near=_NEAR if row["near"] == "yes" else int(row["near"] or 0),
    )
    if row["when"]:
        variants = [
            Variant(
                _whole(one["known"]), _whole(one["fix"]), tuple(one["codes"].split()), **_facts(one["when"])
            )
            for one in rows
        ]
        says = says._replace(known="", fix="", codes=(), variants=tuple(variants))
    return Message(
        says,
        tuple(row["quick"].split(" | ")) if row["quick"] else (),
        _whole(row["pattern"]),
        row["text"],
        row["more"],  # type: ignore[arg-type]  # and this one against More
        getattr(importlib.import_module(f"{__name__}.{file}"), name) if name else None,
    )


@cache
def _texts() -> dict[str, str]:
    return {row["name"]: row["text"] for row in read_rows(_ROOM, "texts")}


def _whole(cell: str) -> str:
    """With what rows share in the place of its name."""
    return re.sub(r"\{([A-Z][A-Z_0-9]+)\}", lambda name: _texts()[name[1]], cell)


def _facts(cell: str) -> dict[str, Any]:
    given = (one.partition("=") for one in cell.split("; ") if one)
    return {name: literal_eval(value) for name, _, value in given}


_DIGITS = re.compile(r"\d+")


def shape_of(text: str) -> str:
    """A text with one figure for each number: the steps of a log print one shape over and over."""
    return _DIGITS.sub("0", text)


def gate(known: Iterable[Library]) -> tuple[str, ...]:
    """A few words in lower case, one of which is in every line that any message is about."""
    left = {quick.lower() for library in known for message in library.messages for quick in message.quicks}
    inside = {quick: set(re.findall(r"[a-z]{4,}", quick)) or {quick} for quick in left}
    words: list[str] = []
    while left:
        counted = Counter(word for quick in left for word in inside[quick])
        words.append(max(counted, key=lambda word: (counted[word], word)))
        left = {quick for quick in left if words[-1] not in quick}
    return tuple(words)

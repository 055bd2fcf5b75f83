"""What people write for a name that is another one here: by its meaning first, then by its spelling.

Names of other libraries for fields, arguments, components and candidates. Looked up where a name is unknown
and an error is on its way, never before.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from inspect import signature
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows


@lru_cache(maxsize=16)
def other_names(place: str) -> dict[str, str]:
    """By a name of ours what other libraries and tools call it: the rows of ``data/meant.csv`` about a
    ``field``, an ``argument`` or a ``candidate``, or about the values of one field."""
    return {row["name"]: row["words"] for row in read_rows("attnsel.base", "meant") if row["place"] == place}


class _Said(NamedTuple):
    """A row of ``data/said.csv``: what to ``write`` for any of ``names`` where ``argument`` exists, or as the
    value of ``argument=``."""

    names: str
    argument: str
    write: str
    why: str


@lru_cache(maxsize=1)
def said() -> tuple[_Said, ...]:
    """What needs more than another name."""
    return tuple(_Said(**row) for row in read_rows("attnsel.base", "said"))


def suggestion(name: str, known: Iterable[str]) -> str:
    """What was meant by ``name`` where ``known`` exist, as the end of a sentence; empty where nothing is."""
    names = list(known)
    word = name.casefold().replace("-", "_")
    for row in said():
        if word in row.names.split() and row.argument in names:
            return f"did you mean {row.write}? {row.why}".rstrip() if row.write else row.why
    meant = near(word, names, other_names("argument"), other_names("field"))
    return "" if meant is None else f"did you mean {meant}?"


def candidate_suggestion(name: str, known: Iterable[str]) -> str:
    """``suggestion`` for the name of a candidate."""
    meant = near(name.casefold().replace("-", "_"), known, other_names("candidate"))
    return "" if meant is None else f"did you mean {meant}?"


_VALUES = re.compile(r"(?:must be one of |allowed: |must be (?='))(.+)")


def with_meant(field: str, value: object, allowed: str) -> str:
    """``allowed``, a sentence that may list values of a field, with the one that was meant by ``value``."""
    listed = _VALUES.search(allowed)
    if listed is None or not isinstance(value, str):
        return allowed
    word = value.casefold().replace("-", "_")
    for row in said():
        if word in row.names.split() and row.argument == f"{field}=":
            meant = f"did you mean {row.write}? " if row.write else ""
            return f"{allowed}; {meant}{row.why}"
    known = re.findall(r"[\w.+-]{2,}", listed[1])
    found = near(word, known, other_names(field))
    return allowed if found is None else f"{allowed}; did you mean {found}?"


def near(word: str, known: Iterable[str], *tables: dict[str, str]) -> str | None:
    """The one of ``known`` that some table says ``word`` for, or else is spelt much like it."""
    names = list(known)
    for table in tables:
        for name in names:
            if word in table.get(name, "").split():
                return name
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.7)
    return close[0] if close else None


def unknown_argument(
    function: str, name: str, known: Iterable[str], place: str = "", there: Iterable[str] = ()
) -> TypeError:
    """The error about an argument that ``function`` does not take.

    ``there``: arguments that ``place`` takes, for those who looked for them here.
    """
    there = list(there)
    meant = f"it is an argument of {place}" if name in there else suggestion(name, known)
    if not meant and (meant := suggestion(name, there)):
        meant += f" It is an argument of {place}"
    return TypeError(f"{function} got an unexpected argument {name!r}" + (f": {meant}" if meant else ""))


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function has names for."""
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "self"]

"""The conditions of another library's chooser as rows: what holds, in words, and the text of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from attnsel.environment.versions import Version


class Filter(NamedTuple):
    """A row: what takes ``kernels`` away. ``check`` gives the text of a refusal, or nothing.

    ``since`` and ``until``: the releases that have it, the last exclusive. ``lines``: where it stands.
    ``told``: what the chooser says of it. ``switch``: the one that does it, if one does.
    """

    kernels: tuple[str, ...]
    check: Callable[[Any], str]
    lines: str
    since: Version | None
    until: Version | None
    told: str
    switch: str

    def holds(self, release: Version) -> bool:
        return (self.since is None or release >= self.since) and (self.until is None or release < self.until)


Reading = Callable[[str], Callable[[Any], Any]]
"""What a word of a condition reads of a question."""


def read_filter(
    row: Mapping[str, str], named: Mapping[str, Callable[[Any], Any]], reading: Reading
) -> Filter:
    """``named``: functions that are words of conditions; a row that says nothing has one that gives its text.
    ``reading``: of every other word."""
    says, holds = row["says"], read_conditions(row["conditions"], named, reading)

    def check(a: Any) -> str:
        return says.format(a=a, p=a.p) if holds(a) else ""

    start, end = (Version.parse(row[name]) if row[name] else None for name in ("since", "until"))
    text = check if says else named[row["conditions"]]
    return Filter(tuple(row["kernels"].split()), text, row["source"], start, end, row["told"], row["switch"])


_COMPARED: dict[str, Callable[[Any, tuple[Any, ...]], bool]] = {
    "<": lambda found, than: found is not None and found < than[0],
    "<=": lambda found, than: found is not None and found <= than[0],
    ">=": lambda found, than: found is not None and found >= than[0],
    "=": lambda found, among: found in among,
    "!=": lambda found, among: found not in among,
}


def read_conditions(
    text: str, named: Mapping[str, Callable[[Any], Any]], reading: Reading
) -> Callable[[Any], bool]:
    """Whether all of them hold, with commas between."""
    each = [_condition(part, named, reading) for part in text.split(", ") if part]
    return lambda a: all(holds(a) for holds in each)


def _condition(
    text: str, named: Mapping[str, Callable[[Any], Any]], reading: Reading
) -> Callable[[Any], bool]:
    """``arch < 90``, ``dtype != bf16|fp16``, ``packed``, ``not packed``."""
    negated, words = text.startswith("not "), text.removeprefix("not ").split()
    read = named.get(words[0]) or reading(words[0])
    if len(words) == 1:
        return lambda a: bool(read(a)) != negated
    compare, values = _COMPARED[words[1]], tuple(map(_value, words[2].split("|")))
    return lambda a: compare(read(a), values)


def attribute(word: str, places: Iterable[tuple[str, type]]) -> Callable[[Any], Any]:
    """What is called so in the first of these places that has it."""
    for holder, kind in places:
        if hasattr(kind, word) or word.partition(".")[0] in getattr(kind, "model_fields", ()):
            return attrgetter(f"{holder}{word}")
    raise LookupError(f"a condition asks for {word}, which nobody knows")


def _value(text: str) -> Any:
    if text.isdecimal():
        return int(text)
    return Version.parse(text) if "." in text else text

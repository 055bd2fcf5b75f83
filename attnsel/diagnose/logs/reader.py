"""A log as entries: one line each, or the lines that belong together.

Nothing is held but the line at hand and what it goes on with, so a log may have any length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from typing import NamedTuple

from attnsel.diagnose.logs.message import More
from attnsel.diagnose.text_files import Gap, without_prefix

_MOST_MORE, _LONGEST_ENTRY = 400, 256 << 10  # lines, characters
_TYPED = str.maketrans("‘’“”\u00a0", "''\"\" ")  # quotes and spaces as word processors and web pages set them
_BOLD = re.compile(r"\*\*(?=\S)([^*]{1,400})(?<=\S)\*\*")  # as people mark what they paste
_ENV = re.compile(r"envs[/\\][^/\\\s]{1,60}(?=[/\\])")  # an environment bears any program's name
_IN_SOURCE = re.compile(
    r"[\d\s>│❱|-]*(?:raise (?=[\w.]+(?:\(|\s*$|\s+from\b))|warnings\.warn|log(?:ger|ging)?\."
    r"|TORCH_(?:CHECK|WARN|INTERNAL)|f['\"])"
)


class Entry(NamedTuple):
    """``number``: of its first line. ``stream``: which rank or container wrote it, as the log says.
    ``below``: the line that follows, if this one is long enough to be cut off there."""

    number: int
    stream: str
    text: str
    below: str = ""


def entries(lines: Iterable[str], words: tuple[str, ...], more: Callable[[str], More]) -> Iterator[Entry]:
    """What may say something, in its order: lines that have one of ``words``, which are in lower case.
    ``more`` says which lines go on behind a line."""
    open_: dict[str, _Growing] = {}
    number = 0
    for line, below in pairwise(chain(lines, ("",))):
        number += 1
        if isinstance(line, Gap):
            number += line.lines - 1
            continue
        if open_:
            text, stream = without_prefix(line.rstrip("\n"))
            growing = open_.get(stream)
            if growing is not None:
                if growing.takes(text):
                    if growing.done:
                        yield from open_.pop(stream).entries()
                    continue
                yield from open_.pop(stream).entries()
        lower = line.lower()
        for word in words:  # a loop, which is twice as fast as any() and runs for every line of a log
            if word in lower:
                break
        else:
            continue
        text, stream = without_prefix(line.rstrip("\n"))
        text = _ENV.sub("envs/env", text if text.isascii() else text.translate(_TYPED))
        text = _BOLD.sub(r"\1", text)
        if _IN_SOURCE.match(text):
            continue  # a traceback shows the source line that says it, and then what was said
        below = without_prefix(below.rstrip("\n"))[0] if 40 < len(text) < 240 else ""  # is it wrapped?
        entry, how = Entry(number, stream, text, below), more(text)
        if not how or (how == "brackets" and _depth(text) <= 0):
            yield entry
        else:
            open_[stream] = _Growing(entry, how)
    for growing in open_.values():
        yield from growing.entries()


class _Growing:
    """An entry that goes on."""

    def __init__(self, first: Entry, how: More) -> None:
        self._first, self._how = first, how
        self._texts = [first.text]
        self._depth = _depth(first.text) if how == "brackets" else 0
        self._length, self._inside = len(first.text), len(first.text) - len(first.text.lstrip())

    @property
    def done(self) -> bool:
        return self._how == "brackets" and self._depth <= 0

    def takes(self, text: str) -> bool:
        if len(self._texts) > _MOST_MORE or self._length + len(text) > _LONGEST_ENTRY:
            return False
        if self._how == "indented" and not (text[: self._inside + 1].isspace() and text.strip()):
            return False
        self._texts.append(text)
        self._length += len(text)
        if self._how == "brackets":
            self._depth += _depth(text)
        return True

    def entries(self) -> Iterator[Entry]:
        """One entry of all lines; where brackets never close, the lines that follow are others' too."""
        yield self._first._replace(text="\n".join(self._texts))
        if self._how == "brackets" and self._depth > 0:
            for distance, text in enumerate(self._texts[1:], 1):
                yield Entry(self._first.number + distance, self._first.stream, text)


def _depth(text: str) -> int:
    opened = text.count("{") + text.count("[") + text.count("(")
    return opened - text.count("}") - text.count("]") - text.count(")")

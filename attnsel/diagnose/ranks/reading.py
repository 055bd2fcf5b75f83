"""The lines of one file, plain or gz, one at a time; none longer than is held."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

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

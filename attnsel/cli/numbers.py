"""Numbers as people type them: ``8k`` for 8192, ``128_000``, a window of one number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnsel.errors import InvalidInput

if TYPE_CHECKING:
    from cyclopts import Token

IN_HELP = "Numbers: `8k`, `8K` and `8Ki` are 8192, `1M` and `1Mi` 1048576; `128_000` is 128000."

_COUNT = re.compile(r"(-?)([0-9]+(?:_[0-9]+)*)(k|K|Ki|M|Mi)?")
_GROUPED = re.compile(r"[0-9]{1,3}(,[0-9]{3})+")
_WITH_POINT = re.compile(r"([0-9]+)\.0*")
_MOST_DIGITS = 400  # far above every bound, far below what int() refuses
_SIZES = {"": 1, "k": 1 << 10, "M": 1 << 20}


def read_count(name: str, text: str) -> int:
    """A whole number. Raises InvalidInput naming ``name``, with the right spelling where one is meant."""
    found = _COUNT.fullmatch(text)
    if found is not None and len(text) <= _MOST_DIGITS:
        unit = (found[3] or "").removesuffix("i").replace("K", "k")
        return int(found[1] + found[2]) * _SIZES[unit]
    raise InvalidInput(name, text, _hint(text))


def _hint(text: str) -> str:
    if len(text) > _MOST_DIGITS:
        return "is far too large a number"
    if _GROUPED.fullmatch(text):
        return f"must be a whole number without commas: {text.replace(',', '')}"
    point = _WITH_POINT.fullmatch(text)
    if point is not None:
        return f"must be a whole number: {point[1]}"
    return "must be a whole number such as 4096, 128_000 or 8k (8192)"


def read_window(name: str, words: Sequence[str]) -> tuple[int, int]:
    """(left, right) from two numbers, also with a comma between, or one for both sides."""
    parts = [part.strip() for word in words for part in word.split(",")]
    if len(parts) not in (1, 2):
        said = " ".join(words) or None
        raise InvalidInput(name, said, "must be LEFT RIGHT, or one number for both sides")
    numbers = [read_count(name, part) for part in parts]
    return numbers[0], numbers[-1]


# ---- as cyclopts calls them ---------------------------------------------------------------------------


def count_converter(kind: Any, tokens: Sequence[Token]) -> int:
    """One word."""
    return read_count(_name(tokens), tokens[0].value)


def window_converter(kind: Any, tokens: Sequence[Token]) -> tuple[int, int]:
    """Every word behind ``--window-size``."""
    return read_window(_name(tokens), once(tokens))


def counts_converter(kind: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Every word behind a flag that takes several."""
    name = _name(tokens)
    return tuple(read_count(name, part) for word in once(tokens) for part in word.split(","))


def once(tokens: Sequence[Token]) -> list[str]:
    """The words of a flag that takes several. Raises InvalidInput where it was given twice: cyclopts would
    put the words of both behind each other."""
    words = [token.value for token in tokens]
    if sum(token.index == 0 for token in tokens) > 1:
        raise InvalidInput(_name(tokens), " ".join(words), "is given twice")
    return words


def _name(tokens: Sequence[Token]) -> str:
    return (tokens[0].keyword if tokens else None) or "a number"

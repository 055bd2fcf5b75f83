"""Plain values that come in as arguments. What is of another kind is named: never converted, never ignored.

``"no"`` is not True, and 2.5 rows are not 2: a value that Python would convert is a mistake in the caller's
program. ``error`` is the class to raise, which has InvalidInput's arguments.
"""

from __future__ import annotations

import operator
from numbers import Real
from typing import Any

from attnsel.errors import InvalidInput


def flag(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> bool:
    """True or False, also NumPy's, or 0 or 1."""
    if value is True or value is False:
        return value
    kind = type(value)
    numpy_bool = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    if numpy_bool or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise error(name, value, "must be True or False")


def number(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> float:
    """A finite float from a real number, also NumPy's or a fraction."""
    try:
        result = float(value) if isinstance(value, Real) else None
    except Exception:  # too large, or a stranger's class
        result = None
    if result is None or not -float("inf") < result < float("inf"):
        raise error(name, value, "must be a finite number")
    return result


def whole(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> int:
    """An int, also NumPy's or an integer tensor of one element; no float, however round."""
    if isinstance(value, int):
        return int(value)
    try:
        return operator.index(value)
    except Exception:
        raise error(name, value, "must be an int") from None


def text(name: str, value: Any, error: type[InvalidInput] = InvalidInput) -> str:
    """A str, of a subclass what it holds."""
    if not isinstance(value, str):
        raise error(name, value, "must be a text")
    return str.__str__(value)

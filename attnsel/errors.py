"""The errors attnsel raises on purpose. Each carries what a caller needs to act without reading text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class InvalidInput(ValueError):
    """Something that was passed in cannot be right: names the field, the value and what is allowed."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(printable(f"{field} = {short(value)}: {allowed}"))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.allowed)


class NoBackendError(RuntimeError):
    """No candidate can run this. The message is the whole report; ``selection``, an ``attnsel.Selection``,
    holds it as data."""

    def __init__(self, message: str, selection: Any) -> None:
        self.selection = selection
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.selection)


class ContextParallelError(RuntimeError):
    """Ranks that share a sequence disagree, or one of them is gone. Says which rank, and on what."""


class UnsupportedArgument(NotImplementedError):
    """An argument that attnsel knows and cannot honour yet. It is never ignored instead."""


class SuspiciousCall(ValueError):
    """Under ATTNSEL_STRICT: a call that runs, and was probably meant otherwise. ``code``: of its page."""

    def __init__(self, message: str, code: str) -> None:
        self.code = code
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code)


def printable(text: str) -> str:
    """``text`` in one line that a terminal shows as it stands: control and format characters, line ends and
    lone surrogates are written as escapes. What comes from outside goes through here before it is shown."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: Any, write: Callable[[Any], str] = repr, limit: int = 120) -> str:
    """A value in a message, printable and cut; only named where it cannot be written (too deep, too long)."""
    try:
        text = printable(write(value))
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= limit else text[: limit - 1] + "…"


def in_words(error: BaseException) -> str:
    """An error's type and text in one line, whatever its ``__str__`` does."""
    text = " ".join(short(error, str, limit=400).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class Caller(NamedTuple):
    """Who called attnsel: the ``stacklevel`` of the line, and what of attnsel it called."""

    stacklevel: int
    module: str
    function: str


# Whose lines no one who is warned can change; "" is code that torch.compile made.
_NOT_A_CALLER = frozenset({"attnsel", "torch", "transformers", ""})


def caller() -> Caller:
    """The first caller outside attnsel, torch and transformers, as the function that asks has to name it.

    (Python 3.12 has ``skip_file_prefixes`` for the first half.)
    """
    frame, level, entry = sys._getframe(1), 1, sys._getframe(1)
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _NOT_A_CALLER:
            break
        if package == "attnsel":
            entry = frame
        frame, level = frame.f_back, level + 1
    return Caller(level, str(entry.f_globals.get("__name__", "")), entry.f_code.co_name)

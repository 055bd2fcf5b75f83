"""Reads the checks out of a C++ file: each TORCH_CHECK, its line, its function, the conditions around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple


class Check(NamedTuple):
    line: int
    function: str
    macro: str  # TORCH_CHECK, CHECK_SHAPE, …
    arguments: tuple[str, ...]
    when: tuple[str, ...]  # the conditions of the ifs around it, outermost first; "!" before one: its else


_TOKEN = re.compile(
    r"(?P<check>\b(?:STD_)?TORCH_CHECK|\bCHECK_(?:DEVICE|SHAPE|CONTIGUOUS))\s*\("
    r"|\b(?P<if>if)\s*(?:constexpr\s*)?\(|\b(?P<else>else)\b|(?P<mark>[{};])"
)
# The functions that hold checks in either generation.
_FUNCTION = re.compile(r"\b((?:mha|run_mha|set_params)_\w+|run_mha\w*)\s*\(")


def checks(text: str) -> Iterator[Check]:
    """The checks of a file, but for those that only a build with FLASHATTENTION_DISABLE_… set has."""
    text = _without_comments(_without_disabled(text))
    scopes: list[str | None] = []  # what each open brace stands behind
    waiting: str | None = None  # an if whose statement has no braces
    closed: str | None = None  # the if that just ended, for its else
    function, at = "", 0
    while (token := _TOKEN.search(text, at)) is not None:
        at = token.end()
        if token["if"]:
            condition, at = _balanced(text, at)
            condition = _flat(condition)
            waiting = f"{waiting} && {condition}" if waiting else condition
        elif token["else"]:
            waiting = f"!({closed})" if closed else None
        elif token["check"]:
            arguments, at = _balanced(text, at)
            line = text.count("\n", 0, token.start()) + 1
            when = tuple(scope for scope in (*scopes, waiting) if scope)
            split = tuple(_flat(argument) for argument in _split(arguments))
            yield Check(line, function, token["check"].removeprefix("STD_"), split, when)
        elif token["mark"] == "{":
            if len(scopes) <= 1 and not waiting:  # at the top, or in a namespace
                function = _function_before(text, token.start()) or function
            scopes.append(waiting)
            waiting = None
        elif token["mark"] == "}":
            closed = scopes.pop() if scopes else None
        else:
            closed, waiting = waiting or closed, None


def _function_before(text: str, brace: int) -> str | None:
    named = _FUNCTION.search(text[max(text.rfind(mark, 0, brace) for mark in "};{") + 1 : brace])
    return named[1] if named else None


def _balanced(text: str, start: int) -> tuple[str, int]:
    """What stands between the parenthesis before ``start`` and the one that closes it; and where it ends."""
    depth, at, quoted = 1, start, False
    while depth:
        if text[at] == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return text[start : at - 1], at


def _split(arguments: str) -> Iterator[str]:
    """At the commas that lie in no bracket and no string."""
    depth, quoted, part = 0, False, ""
    for before, letter in zip(" " + arguments, arguments, strict=False):
        if letter == '"' and before != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0 and not quoted:
            yield part
            part = ""
        else:
            part += letter
    yield part


def _flat(text: str) -> str:
    return " ".join(text.split())


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)


def _without_disabled(text: str) -> str:
    """Blank what the preprocessor drops in a default build, and its own lines."""
    kept, dropping, macro = [], [], False
    for line in text.splitlines():
        word = "#" if macro else line.strip()
        macro = word.startswith("#") and line.endswith("\\")
        if word.startswith("#if"):
            dropping.append(word.startswith("#ifdef") and "DISABLE" in word)
        elif word.startswith("#else"):
            dropping[-1] = not dropping[-1]
        elif word.startswith("#endif"):
            dropping.pop()
        kept.append("" if word.startswith("#") or any(dropping) else line)
    return "\n".join(kept)

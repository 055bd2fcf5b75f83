"""Outputs recorded as lines of text beside their test, so that no change goes unnoticed.

A record says *changed*, not *wrong*. To accept what changed, and then read the diff before it is committed:

    pytest FILE --snapshot-update

Where cases are many and small, the file has the questions too, in lines ``> question``: a new one is written
there, and its answer accepted.
"""

from __future__ import annotations

import ast
import difflib
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest


class Record:
    """What a test's texts are held to."""

    def __init__(self, update: bool) -> None:
        self._update = update

    def holds(self, path: Path, lines: Iterable[str]) -> None:
        """The file has these lines."""
        now = list(lines)
        assert now
        if self._update:
            path.write_text("\n".join(now) + "\n", encoding="utf-8")
        then = path.read_text(encoding="utf-8").splitlines()
        found = list(difflib.unified_diff(then, now, lineterm="", n=0))
        assert not found, "\n".join([f"{path.name} changed; see tests/support/records.py", *found[:40]])

    def answers(self, path: Path, answer: Callable[[str], Iterable[str]]) -> None:
        """Below each ``> question`` the file has what ``answer`` says to it; ``#`` begins a remark."""
        now: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("> "):
                now += [
                    line,
                    *(f"  {line}" for said in answer(line.removeprefix("> ")) for line in said.splitlines()),
                ]
            elif line.startswith("#") or not line:
                now.append(line)
        self.holds(path, now)


def words_of(question: str) -> tuple[list[str], dict[str, str]]:
    """Its words, as a shell splits them, and ``name=value`` by name."""
    words, given = [], {}
    for word in shlex.split(question):
        name, _, value = word.partition("=")
        if name.isidentifier() and name != word:
            given[name] = value
        else:
            words.append(word)
    return words, given


def literals(given: Mapping[str, str]) -> dict[str, Any]:
    """Values that are literals of Python's as what they say; all others are texts."""
    return {name: _literal(text) for name, text in given.items()}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    return Record(bool(request.config.getoption("update_snapshots", False)))

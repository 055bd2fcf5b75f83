"""Outputs recorded as lines of text beside their test, so that no change goes unnoticed.

A record says *changed*, not *wrong*. To accept what changed, and then read the diff before it is committed:

    pytest FILE --snapshot-update
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

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


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    return Record(bool(request.config.getoption("update_snapshots", False)))

"""Tests without the ATTNSEL_ variables of whoever runs them: in new processes, and in this one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from attnsel import settings


def without_switches(*others: str) -> dict[str, str]:
    """The environment of a new process. others: what further variables that are left out begin with."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("ATTNSEL_", *others))}


@pytest.fixture
def no_switches_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """None of attnsel's variables, for a whole test; read again before and behind it."""
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings.configure()
    yield
    monkeypatch.undo()
    settings.configure()

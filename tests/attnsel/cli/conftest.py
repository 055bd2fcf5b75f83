"""What tests of the command line share."""

from __future__ import annotations

import pytest

from attnsel import settings
from attnsel.cli import main


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    """Whatever the terminal of whoever runs the tests exports."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def no_switches_from_outside(monkeypatch):
    """None of attnsel's variables, for a whole test; read again before and behind it."""
    for name in settings.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings.configure()
    yield
    monkeypatch.undo()
    settings.configure()


@pytest.fixture
def run(capsys):
    """``code, out, err = run("explain --gpu H100")``."""

    def call(line: str | list[str]) -> tuple[int, str, str]:
        code = main(line.split() if isinstance(line, str) else line)
        return (code, *capsys.readouterr())

    return call

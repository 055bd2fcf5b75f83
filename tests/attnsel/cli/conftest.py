"""What tests of the command line share."""

from __future__ import annotations

import pytest

from attnsel.cli import main


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    """Whatever the terminal of whoever runs the tests exports."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    """``code, out, err = run("explain --gpu H100")``."""

    def call(line: str | list[str]) -> tuple[int, str, str]:
        code = main(line.split() if isinstance(line, str) else line)
        return (code, *capsys.readouterr())

    return call

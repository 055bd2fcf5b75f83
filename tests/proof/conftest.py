"""What tests of the tools share."""

from __future__ import annotations

import pytest

import conformance


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal of whoever runs the tests exports."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def run(capsys):
    """``code, out, err = run("--execute --arch 80")``: conformance.py with these words."""

    def call(line: str | list[str]) -> tuple[int, str, str]:
        code = conformance.main(line.split() if isinstance(line, str) else line)
        return (code, *capsys.readouterr())

    return call

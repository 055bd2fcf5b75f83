"""What tests of the command line share."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from attnsel import AttentionParams, Environment, Policy, select
from attnsel.cli import main
from attnsel.cli.output import BAD_INPUT


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch):
    """Whatever the terminal of whoever runs the tests exports."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def run(capsys):
    """``code, out, err = run("explain --gpu H100")``."""

    def call(line: str | list[str]) -> tuple[int, str, str]:
        code = main(line.split() if isinstance(line, str) else line)
        return (code, *capsys.readouterr())

    return call


class Asked(NamedTuple):
    """What reaches the engine, and what is said beside the answer."""

    params: AttentionParams
    env: Environment
    policy: Policy
    err: str


@pytest.fixture
def asked(monkeypatch, run):
    """``asked("explain --gpu H100").params``"""

    def ask(line: str | list[str]) -> Asked:
        got = []
        with monkeypatch.context() as only:
            only.setattr(
                "attnsel.cli.question.select",
                lambda p, e, policy: got.append((p, e, policy)) or select(p, e),
            )
            code, _, err = run(line)
        assert code in (0, 3), err
        return Asked(*got[0], err)

    return ask


@pytest.fixture
def refused(run, monkeypatch):
    """Runs a command line that is a mistake, and gives its one line of complaint."""

    def call(words: list[str], stdin: str = '{"head_dim_qk": 64}') -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code, out, err = run(words)
        assert (code, out) == (BAD_INPUT, ""), err[:200]
        assert err.startswith("attnsel: ")
        assert err.count("\n") == 1
        assert err[:-1].isprintable()
        assert len(err) < 1500
        return err[len("attnsel: ") : -1]

    return call


@pytest.fixture
def written(tmp_path):
    """``written("text")``: the path of a file that holds it."""

    def write(content: str | bytes, name: str = "input.json") -> Path:
        file = tmp_path / name
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return file

    return write

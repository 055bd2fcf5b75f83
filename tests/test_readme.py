"""The README shows what the commands print today."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from attnsel.cli import main

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()
SHOWN = re.findall(r"^\$ attnsel (.+)\n((?:.+\n|\n(?!```))+?)```", README, re.MULTILINE)


def test_reports_are_shown():
    assert len(SHOWN) == 2


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[command[:30] for command, _ in SHOWN])
def test_a_report_in_the_readme_is_what_its_command_prints(command, printed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out.rstrip() == printed.rstrip()


def test_the_python_of_the_readme_says_what_it_says():
    from attnsel import AttentionParams, Environment, select

    env = Environment.describe(gpu="H100", cudnn="9.1.0")
    s = select(AttentionParams(head_dim_qk=192, head_dim_v=128, is_training=True, dtype="bf16"), env)
    assert f"s.backend                                     # {s.backend!r}" in README
    assert str([r.code for r in s["cudnn"].reasons]) in README

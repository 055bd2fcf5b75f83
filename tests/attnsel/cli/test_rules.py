"""``attnsel rules`` and ``attnsel rule CODE``: every page can be read, and its examples can be run."""

from __future__ import annotations

import io
import json
import shlex

import pytest

from attnsel.cli import main
from attnsel.pages.commands import example_commands
from attnsel.rules import REGISTRY, Rule, load_all
from attnsel.rules.codes import question
from tables import each

load_all()
PAGES = list(REGISTRY.pages.values())
RULES = list(REGISTRY.rules.values())


def too_wide(text: str) -> list[str]:
    """Lines beyond 80 columns, but for what cannot be folded: JSON for a shell, one long word."""
    return [line for line in text.splitlines() if len(line) > 80 and "echo" not in line and "/sm" not in line]


def test_every_rule_is_listed_within_80_columns(run):
    code, out, _ = run("rules")
    assert code == 0
    assert [page.code for page in PAGES if page.code not in out] == []
    assert too_wide(out) == []
    assert f"{len(PAGES)} rules." in out


@each(
    "words, keeps",
    [
        ("--candidate cudnn", lambda page: not isinstance(page, Rule) or "cudnn" in page.candidates),
        ("--family bug", lambda page: page.code.startswith("BUG")),
        ("--family CUDNN --evidence source", lambda p: (p.family, p.evidence) == ("CUDNN", "source")),
    ],
)
def test_filters(run, words, keeps):
    rows = json.loads(run(f"rules {words} --json")[1])
    assert [row["code"] for row in rows] == [page.code for page in PAGES if keeps(page)]
    assert rows


def test_nearly_every_example_is_a_command():
    silent = [page.code for page in RULES if not example_commands(page)]
    assert silent == []
    assert len([page for page in RULES if len(example_commands(page)) < 2]) <= 0.05 * len(RULES)


@pytest.mark.parametrize(
    "pages", [RULES[::6], pytest.param(RULES, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_command_of_an_example_asks_the_example(pages, monkeypatch):
    asked = []

    def catch(p, env, policy):
        asked.append((p, env))
        raise KeyboardInterrupt

    monkeypatch.setattr("attnsel.cli.question.select", catch)
    for page in pages:
        commands = example_commands(page)
        for name, command in commands.items():
            echoed, _, line = command.rpartition(" | ")
            monkeypatch.setattr("sys.stdin", io.StringIO(shlex.split(echoed)[1] if echoed else ""))
            assert main(shlex.split(line)[1:]) == 130
            p, env = question(page, page.fires_on if name == "fires_on" else page.passes)
            assert asked[-1] == (p, env)

"""Lists on the pages are complete: settings, evidence, exit codes, candidates, commands."""

from __future__ import annotations

import re

from attnsel import cli, settings
from attnsel.backends.registry import CANDIDATES
from attnsel.cli import output
from attnsel.policy import Policy
from attnsel.selection.adaptations import ADAPTERS
from attnsel.verdicts.reasons import EVIDENCE
from paths import ROOT


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def in_backticks(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)))


def row(text: str, *starts: str) -> str:
    """The rows of a table whose first cell begins so."""
    return "\n".join(line for line in text.splitlines() if line.startswith(tuple(f"| {s}" for s in starts)))


def test_every_setting_is_on_its_page():
    text = page("reference/settings.md")
    variables = {word.partition("=")[0] for word in in_backticks(text)}
    assert set(settings.VARIABLES) <= variables
    fields = set(Policy.model_fields) | set(settings.Settings.model_fields) - {"policy"}
    assert fields <= in_backticks(text)


def test_every_word_of_evidence_is_explained():
    table = row(page("explanation/evidence.md"), "<a id=")
    assert set(EVIDENCE) <= in_backticks(table)


def test_every_exit_code_and_command_is_listed():
    text = page("reference/output.md")
    codes = {output.FOUND, output.BAD_INPUT, output.NO_BACKEND, output.CHECK_FAILED}
    codes |= {output.INTERRUPTED, output.BROKEN_PIPE, output.CANNOT_WRITE}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)} == codes
    commands = {word.split()[1] for word in in_backticks(text) if word.startswith("attnsel ")}
    assert set(cli.COMMANDS) <= commands


def test_every_candidate_and_adaptation_is_listed():
    listed = in_backticks(row(page("how-to/run.md") + page("how-to/avoid-copies.md"), "`"))
    own = {name for name, record in CANDIDATES.items() if not record.plugin}
    assert own | set(ADAPTERS) <= listed

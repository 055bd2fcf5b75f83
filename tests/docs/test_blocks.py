"""Every code block of README.md and docs/ does what its page says. CONTRIBUTING.md lists their kinds."""

from __future__ import annotations

import difflib
import json

import pytest

import pages
import typed_pages
import update_docs
from pages import LANGUAGES, PAGES, PRINTED, Block
from paths import ROOT

AGAIN = "if that is right: python docs/tools/update_docs.py"


def of(page: str, language: str) -> list[Block]:
    return [block for block in pages.blocks(page) if block.language == language]


def difference(where: object, said: str, now: str) -> list[str]:
    if said == now:
        return []
    lines = difflib.unified_diff(said.splitlines(), now.splitlines(), "the page", "now", lineterm="")
    return ["\n".join([f"{where}: {AGAIN}", *lines])]


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_is_what_is_printed_and_taken(page):
    """Commands print what stands below them, lines to paste are accepted, files to copy can be parsed."""
    wrong = difference(page, text := (ROOT / page).read_text("utf-8"), update_docs.with_tables(text))
    found = pages.blocks(page)
    for place, block in enumerate(found):
        if block.language not in LANGUAGES:
            wrong.append(f"{block}: its fence must name one of {', '.join(LANGUAGES)}")
        if not (block.info in ("", PRINTED) or block.skipped or block.file):
            wrong.append(
                f"{block}: its fence must say 'printed', 'skip: reason', 'file: path', 'append: path'"
            )
        if (block.language, block.info) == ("text", PRINTED):
            above = found[place - 1]
            if above.language != "python" or above.skipped:
                wrong.append(f"{block}: no Python above it prints this")
    if page not in typed_pages.TYPED:
        for block in of(page, "console"):
            wrong += difference(block, block.text, pages.as_printed(block.text))
        for block in of(page, "sh"):
            wrong += pages.complaints(block)
    for block in of(page, "json"):
        json.loads(block.text)
    if toml := of(page, "toml"):
        tomllib = pytest.importorskip("tomllib")  # Python 3.11
        for block in toml:
            tomllib.loads(block.text)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not (b.skipped or b.file) for b in of(page, "python"))]
)
def test_the_python_of_a_page_runs_and_says_what_it_says(page):
    found = pages.blocks(page)
    wrong, missing = [], ""
    for ran in pages.run_python(page):
        if ran.error:
            wrong.append(f"{page}:{ran.line}: {ran.error}")
        for line, said, now in ran.shown:
            wrong += difference(f"{page}:{line}", said, now)
        if missing := ran.missing:
            break
        for below in pages.printed_below(found, ran.line):
            wrong += difference(below, below.text, ran.printed)
    assert not wrong, "\n".join(wrong)
    if missing:
        pytest.skip(f"the rest of it needs {missing}")

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

BLOCKS = [block for page in PAGES for block in pages.blocks(page)]
AGAIN = "what it prints has changed; if that is right: python docs/tools/update_docs.py"


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def alone(language: str) -> list[Block]:
    """The blocks that do not stand on a page that is typed from top to bottom."""
    return [block for block in of(language) if block.page not in typed_pages.TYPED]


def difference(said: str, now: str) -> str:
    lines = difflib.unified_diff(said.splitlines(), now.splitlines(), "the page", "now", lineterm="")
    return "\n".join(lines)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_of_a_kind_that_is_checked(block):
    assert block.language in LANGUAGES, f"its fence must name one of {', '.join(LANGUAGES)}"
    known = block.info in ("", PRINTED) or block.skipped or block.file
    assert known, "its fence must say 'printed', 'skip: reason', 'file: path' or 'append: path'"


@pytest.mark.parametrize("block", alone("console"), ids=str)
def test_a_command_prints_what_the_page_shows(block):
    now = pages.as_printed(block.text)
    assert now == block.text, f"{block}: {AGAIN}\n{difference(block.text, now)}"


@pytest.mark.parametrize("block", alone("sh"), ids=str)
def test_a_line_to_paste_is_accepted(block):
    assert not pages.complaints(block)


@pytest.mark.parametrize("page", dict.fromkeys(b.page for b in of("python") if not (b.skipped or b.file)))
def test_the_python_of_a_page_runs_and_says_what_it_says(page):
    found = pages.blocks(page)
    wrong, missing = [], ""
    for ran in pages.run_python(page):
        missing = ran.missing
        if ran.error:
            wrong.append(f"{page}:{ran.line}: {ran.error}")
        wrong += [
            f"{page}:{line}: says {said}, is {now}; {AGAIN}" for line, said, now in ran.shown if said != now
        ]
        if missing:
            break
        wrong += [
            f"{below}: {AGAIN}\n{difference(below.text, ran.printed)}"
            for below in pages.printed_below(found, ran.line)
            if below.text != ran.printed
        ]
    assert not wrong, "\n".join(wrong)
    if missing:
        pytest.skip(f"the rest of it needs {missing}")


@pytest.mark.parametrize("block", [*of("json"), *of("toml")], ids=str)
def test_a_file_to_copy_can_be_parsed(block):
    if block.language == "json":
        json.loads(block.text)
    else:
        pytest.importorskip("tomllib").loads(block.text)  # Python 3.11


@pytest.mark.parametrize("block", of("text"), ids=str)
def test_what_is_printed_stands_below_the_python_that_prints_it(block):
    if block.info == PRINTED:
        found = pages.blocks(block.page)
        above = found[found.index(block) - 1]
        assert above.language == "python"
        assert not above.skipped


@pytest.mark.parametrize("page", PAGES)
def test_tables_made_from_results_are_those_of_the_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    now = update_docs.with_tables(text)
    assert now == text, f"{page}: python docs/tools/update_docs.py\n{difference(text, now)}"


def test_there_is_a_page_and_a_block_of_each_kind_so_that_nothing_above_is_empty():
    assert "docs/README.md" in PAGES
    assert {block.language for block in BLOCKS} == set(LANGUAGES)


# ---- the checks find what is wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("attnsel explain --gpu H1000", "exit code 2"),
        ("attnsel explain --no-such-flag", "no-such-flag"),
        ("attnsel doctor --no-such-flag", "no-such-flag"),
        ("attnsel no-such-command", "no-such-command"),
        ("python examples/no_such_file.py", "there is no examples/no_such_file.py"),
        ("ATTNSEL_DEBUG=1 python -m attnsel rule CUDNN000X", "exit code 2"),
        ("wget something", "say why on the fence"),
    ],
)
def test_a_line_that_cannot_be_pasted_is_named(line, told):
    (complaint,) = pages.complaints(Block("page.md", 3, "sh", "", f"attnsel rules --family CP\n{line}\n"))
    assert complaint.startswith("page.md:3: ")
    assert told in complaint


def test_blocks_are_found_with_their_lines_and_their_fences():
    text = "one\n\n```sh skip: why\na\n```\n- two\n\n  ```text\n  b\n  ```\n"
    first, second = pages.blocks("page.md", text)
    assert (first.line, first.language, first.skipped, first.text) == (4, "sh", "why", "a\n")
    assert (second.line, second.language, second.skipped, second.text) == (9, "text", "", "  b\n")


def test_the_tool_writes_what_is_printed_now():
    page = "```console\n$ attnsel rules --candidate tiled --family TILED --json\nold\n```\n"
    new = update_docs.with_commands("page.md", page)
    assert "old" not in new
    assert '"code": "TILED001"' in new
    assert update_docs.with_commands("page.md", new) == new

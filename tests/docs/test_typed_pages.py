"""Pages on which the reader makes files: typed from top to bottom they do what they show."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

import pages
import typed_pages
import walk
from paths import ROOT

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="pages are typed into bash")


def wrong_in(printed: list[typed_pages.Printed]) -> list[str]:
    return [
        f"{ran.block}: exit code {ran.code}; if it is right: python docs/tools/update_docs.py\n{ran.text}"
        for ran in printed
        if (ran.block.language == "sh" and ran.code)
        or (ran.block.language == "console" and not typed_pages.agrees(ran.block.text, ran.text))
    ]


# One loads torch nine times, and tests/attnsel/diagnose/watching has what its programs show; the other
# installs what examples/plugin is, and tests/attnsel/plugins has that.
LONG = ("docs/tutorials/slow-model.md", "docs/tutorials/plugin.md")


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in typed_pages.TYPED]
)
def test_a_page_shows_what_its_reader_sees(page, tmp_path):
    found = typed_pages.read(page)
    text = "".join(block.text for block in found)
    missing = typed_pages.missing_packages(found) + typed_pages.missing_programs(found)
    if "pip install" in text and importlib.util.find_spec("setuptools") is None:
        missing.append("setuptools")
    if "$REPO" in text and not (ROOT / ".git").exists():
        missing.append("a checkout of git's")
    if missing:
        pytest.skip(f"{page} needs {', '.join(missing)}")
    printed = typed_pages.typed(page, tmp_path)
    assert not wrong_in(printed), "\n".join(wrong_in(printed))
    assert [ran.block for ran in printed] == [block for block in found if typed_pages.is_run(block)]


@pytest.mark.slow
def test_the_walk_leads_to_a_merged_rule(tmp_path):
    """docs/tutorials/rule.md from a clone on, with what takes long; left out is the reader's own alone."""
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout is none of git's")
    found = typed_pages.read(walk.PAGE)
    printed = typed_pages.walked(walk.PAGE, tmp_path)
    assert not wrong_in(printed), "\n".join(wrong_in(printed))
    due = [block for block in found if typed_pages.is_run(block, all_of_it=True)]
    assert [ran.block for ran in printed] == due
    shell = [block for block in found if block.language in ("sh", "console") and block not in due]
    assert [block.skipped.partition(" ")[0] for block in shell] == ["the", "builds", "installs"]


def test_the_times_on_the_page_are_of_the_commands_on_the_page():
    recorded = json.loads(walk.RESULT.read_text(encoding="utf-8"))["steps"]
    due = [block for block in typed_pages.read(walk.PAGE) if typed_pages.is_run(block, all_of_it=True)]
    first = [(pages.commands(block.text) or block.text.splitlines())[0] for block in due]
    assert [step["command"] for step in recorded] == first

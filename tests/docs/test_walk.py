"""A newcomer's walk, from a clone to a merged rule: each command of the page, as it stands, in 15 minutes."""

from __future__ import annotations

import json

import pytest

import typed_pages
import walk
from pages import commands
from paths import ROOT

FOUND = typed_pages.read(walk.PAGE)


@pytest.mark.slow
def test_it_leads_to_a_merged_rule_in_time(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("this checkout is none of git's")
    printed = typed_pages.walked(walk.PAGE, tmp_path)
    failed = [f"{ran.block}: exit code {ran.code}\n{ran.text}" for ran in printed if ran.code]
    wrong = [
        f"{ran.block}:\n{ran.text}"
        for ran in printed
        if ran.block.language == "console" and not typed_pages.agrees(ran.block.text, ran.text)
    ]
    assert not failed + wrong, "\n".join(failed + wrong)
    due = [str(block) for block in FOUND if typed_pages.is_run(block, all_of_it=True)]
    assert [str(ran.block) for ran in printed] == due
    assert sum(ran.seconds for ran in printed) < typed_pages.WALK


def test_no_command_is_left_out_but_the_reader_s_own():
    """What is never run: the address of a fork, a site of 600 pages, a library of 700 MB."""
    left_out = [
        block.skipped
        for block in FOUND
        if block.language in ("sh", "console") and not typed_pages.is_run(block, all_of_it=True)
    ]
    site = "builds 600 pages, and serves them until you stop it"
    assert left_out == ["the address is that of your fork", site, "installs cuDNN"]


def test_the_times_on_the_page_are_of_the_commands_on_the_page():
    recorded = json.loads(walk.RESULT.read_text(encoding="utf-8"))["steps"]
    blocks = [block for block in FOUND if typed_pages.is_run(block, all_of_it=True)]
    first = [(commands(block.text) or block.text.splitlines())[0] for block in blocks]
    assert [step["command"] for step in recorded] == first
    headings = (ROOT / walk.PAGE).read_text(encoding="utf-8").split("\n## ")
    for step in recorded:
        (below,) = [
            part for part in headings if part.startswith(tuple("123456789")) and step["step"] in part[:60]
        ]
        assert step["command"] in below
    assert sum(step["seconds"] for step in recorded) < typed_pages.WALK

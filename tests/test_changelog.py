"""The changelog: releases newest first, headings of Keep a Changelog, and commands that exist."""

from __future__ import annotations

import re

import attnsel
from attnsel.cli import COMMANDS
from paths import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.M)
KINDS_OF_CHANGE = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelog_begins_with_what_is_not_released_and_with_this_version():
    assert SECTIONS[0] == ("Unreleased", "")
    assert SECTIONS[1][0] == attnsel.__version__


def test_sections_of_the_changelog_are_releases_newest_first():
    released = [tuple(map(int, version.split("."))) for version, _ in SECTIONS[1:]]
    assert released == sorted(released, reverse=True)
    assert len(set(released)) == len(released)


def test_only_the_newest_may_wait_for_its_date():
    assert all(date for _, date in SECTIONS[2:])


def test_headings_of_the_changelog_are_those_of_keep_a_changelog():
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.M)) <= KINDS_OF_CHANGE


def test_commands_that_the_changelog_names_exist():
    named = set(re.findall(r"`attnsel ([a-z][\w-]*)", CHANGELOG))
    assert len(named) > 8
    assert named <= COMMANDS.keys()

"""The changelog: releases newest first, headings of Keep a Changelog, and commands that exist."""

from __future__ import annotations

import re

import attnsel
from paths import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.M)
KINDS_OF_CHANGE = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_releases_are_newest_first_below_what_is_not_released():
    assert SECTIONS[0] == ("Unreleased", "")
    assert SECTIONS[1][0] == attnsel.__version__
    released = [tuple(map(int, version.split("."))) for version, _ in SECTIONS[1:]]
    assert released == sorted(set(released), reverse=True)
    assert all(date for _, date in SECTIONS[2:]), "only the newest may wait for its date"
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.M)) <= KINDS_OF_CHANGE

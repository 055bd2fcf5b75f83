"""README's pictures are what the report prints and fetch nothing."""

from __future__ import annotations

import re

import pictures
from paths import ROOT
from pictures import shown


def test_a_picture_shows_what_the_report_prints_now():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path, now in pictures.pictures():
        assert path.relative_to(ROOT).as_posix() in readme
        drawn = path.read_text(encoding="utf-8")
        assert shown(drawn) == shown(now), "python docs/tools/update_docs.py"
        assert not re.findall(r"@font-face|(?:src|href)=|url\(http", drawn)

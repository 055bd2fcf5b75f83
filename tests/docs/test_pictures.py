"""README's pictures are what the report prints, in colours that can be read, and fetch nothing."""

from __future__ import annotations

import re

import pictures
from paths import ROOT
from pictures import THEMES, shown


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_picture_shows_what_the_report_prints_now_and_can_be_read():
    """Contrast of 4.5 : 1, WCAG 2.2, 1.4.3."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path, now in pictures.pictures():
        assert path.relative_to(ROOT).as_posix() in readme
        drawn = path.read_text(encoding="utf-8")
        assert shown(drawn) == shown(now), "python docs/tools/update_docs.py"
        assert not re.findall(r"@font-face|(?:src|href)=|url\(http", drawn)
        theme = THEMES[path.stem.removeprefix("report-")]
        background = luminance("#{:02x}{:02x}{:02x}".format(*theme.background_color))
        for style, text in shown(drawn):
            (colour,) = re.findall(r"fill: (#[0-9a-f]{6})", style)
            light, dark = sorted((luminance(colour), background), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text}: {colour}"

"""README's pictures are what the report prints, in colours that can be read, and fetch nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree

import pytest

import pictures
from paths import ROOT
from pictures import FOLDER, THEMES, shown

NOW = dict(pictures.pictures())


@pytest.mark.parametrize("path", NOW, ids=lambda path: path.name)
def test_a_picture_shows_what_the_report_prints_now(path):
    drawn = path.read_text(encoding="utf-8")
    assert shown(drawn) == shown(NOW[path]), "python docs/tools/update_docs.py"
    texts = "".join(text for _, text in shown(drawn))
    assert "sdpa.flash" in texts
    assert "CUDNN204" in texts


@pytest.mark.parametrize("path", NOW, ids=lambda path: path.name)
def test_a_picture_is_whole_and_fetches_nothing(path):
    drawn = path.read_text(encoding="utf-8")
    xml.etree.ElementTree.fromstring(drawn)
    assert "@font-face" not in drawn
    assert set(re.findall(r"https?://[^\s\"<]+", drawn)) <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",  # in a comment: who drew it
    }
    assert len(drawn) < 60_000


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", THEMES)
def test_every_colour_can_be_read(name):
    """4.5 : 1, WCAG 2.2, 1.4.3."""
    background = luminance("#{:02x}{:02x}{:02x}".format(*THEMES[name].background_color))
    drawn = (FOLDER / f"report-{name}.svg").read_text(encoding="utf-8")
    for style, text in shown(drawn):
        (colour,) = re.findall(r"fill: (#[0-9a-f]{6})", style)
        light, dark = sorted((luminance(colour), background), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{text}: {colour}"


def test_readme_shows_both():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in NOW:
        assert path.relative_to(ROOT).as_posix() in text

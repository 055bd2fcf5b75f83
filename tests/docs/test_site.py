"""The documentation site as it is: it builds without a warning, and its pages say what GitHub shows."""

from __future__ import annotations

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterator

import pytest

pytest.importorskip("zensical")
pytest.importorskip("selectolax")
pytest.importorskip("griffe")

from markdown_it import MarkdownIt
from selectolax.lexbor import LexborHTMLParser

from attnsel.cli import COMMANDS
from sitegen import sources
from sitegen.build import build
from sitegen.model import File

MADE = ("rules/", "can-i-use/")  # made from the code, by generators that take long
PAGES = {path: sources.site_path(path) for path in sources._checkout_pages()}


QUICK = ("reference_cli", "reference_environment", "reference_python", "reference_schemas")
SLOW = tuple(name for name in sources.generators() if name not in QUICK)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site; building it raises for a warning, a broken link, or a page that fetches from another host.

    What takes a generator long stands as a page of links' ends alone: the gate builds all of it.
    """
    made = list(sources.files(without=SLOW))
    return build([*made, *stubs(made)], tmp_path_factory.mktemp("built") / "site").folder


def stubs(made: list[File]) -> Iterator[File]:
    """A page for each that is linked and not among these, with the anchors that links lead to."""
    there = {file.path for file in made}
    anchors: dict[str, set[str]] = {}
    for file in made:
        for target in (
            re.findall(r"\]\(([^()\s:]+)\)", str(file.content)) if file.path.endswith(".md") else ()
        ):
            name, _, anchor = target.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(file.path), name))
            if name.endswith((".md", ".html")) and path not in there and path.startswith(MADE):
                anchors.setdefault(path, set()).update({anchor} - {""})
    for path, ids in anchors.items():
        yield File(path, "# Stub\n\n" + "\n\n".join(f'<a id="{id}"></a>' for id in sorted(ids)) + "\n")


def html(site, place: str) -> LexborHTMLParser:
    """The text of a page, without what the theme puts around it."""
    path = site / (place if place.endswith("index.md") else place.replace(".md", "/index.md"))
    tree = LexborHTMLParser(path.with_suffix(".html").read_text(encoding="utf-8"))
    article = tree.css_first("article")
    assert article is not None
    return LexborHTMLParser(article.html)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_reads_as_it_does_on_github(site, page):
    """Python-Markdown and CommonMark differ about lists: where they begin, and what is inside."""
    text = (sources.ROOT / page).read_text(encoding="utf-8")
    there = LexborHTMLParser(MarkdownIt("commonmark").enable("table").render(text))
    here = html(site, PAGES[page])
    for element in ("li", "pre", "table", "tr", "h1", "h2", "h3", "strong"):
        assert len(here.css(element)) == len(there.css(element)), element
    lines = [_words(code.text()) for code in there.css("pre code")]
    assert [_words(code.text()) for code in here.css("pre code")] == lines
    assert _inline_code(here) == _inline_code(there)


def _inline_code(tree: LexborHTMLParser) -> Counter[str]:
    return Counter(" ".join(code.text().split()) for code in tree.css("code") if code.parent.tag != "pre")


def _words(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def test_code_is_highlighted_and_no_fence_shows_what_tests_do_with_it(site):
    page = html(site, "how-to/ask.md")
    assert page.css("div.language-console pre span")
    for place in PAGES.values():
        page = html(site, place)
        assert "```" not in page.text(), place
        assert not [text for text in page.css("p") if "skip: " in text.text()], place


def test_the_search_finds_pages_that_are_not_in_the_navigation(site):
    """Shapes of JSON stand for rules here: neither is in the navigation."""
    found = {item["location"] for item in json.loads((site / "search.json").read_text())["items"]}
    assert "reference/schemas/selection/" in found
    nav = LexborHTMLParser((site / "index.html").read_text()).css("nav a")
    assert not [link for link in nav if "schemas/selection" in (link.attributes.get("href") or "")]


def test_every_command_can_be_searched_for_by_its_name(site):
    found = {item["title"] for item in json.loads((site / "search.json").read_text())["items"]}
    assert {f"attnsel {command}" for command in COMMANDS} <= found


def test_schemas_can_be_had_where_they_are_said_to_be(site):
    for file in (sources.DOCS / "schemas").glob("*.json"):
        assert (site / "schemas" / file.name).read_bytes() == file.read_bytes()


def test_it_follows_the_systems_colours_until_somebody_chooses(site):
    palettes = LexborHTMLParser((site / "index.html").read_text()).css("input[data-md-color-media]")
    assert [palette.attributes["data-md-color-media"] for palette in palettes] == [
        "(prefers-color-scheme)",
        "(prefers-color-scheme: light)",
        "(prefers-color-scheme: dark)",
    ]

"""The checks of the built site find each fault that they are for, and nothing on a site without one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("selectolax")

from sitegen import check as site_check
from sitegen.check import LARGEST_PAGE, check

POLICY = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'self'; img-src 'self' data:\">"
HEAD = f"<title>A page</title>{POLICY}"


def page(body: str, head: str = HEAD) -> str:
    return f"<!doctype html><html><head>{head}</head><body>{body}</body></html>"


GOOD = {
    "index.html": page(
        '<h1 id="top">Home</h1><a href="rules/">rules</a><a href="#top">up</a><img src="logo.svg">'
        '<a href="https://example.org/">away</a><a href="mailto:a@b">mail</a><link rel="canonical" href="https://h/">'
    ),
    "rules/index.html": page(
        '<a href="../#top">home</a><a href="X001/">a rule</a><a href="../a%20file.json">file</a>'
    ),
    "rules/X001/index.html": page('<h1 id="X001">X001</h1><a href=".">here</a><a href="..">all</a>'),
    "a file.json": "{}",
    "logo.svg": "<svg/>",
    "404.html": page('<a href="/">home</a>'),
    "style.css": "a { background: url(data:image/png;base64,AA==) } b { background: url('logo.svg') }",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return written(tmp_path, GOOD)


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_good_site_has_no_fault_and_its_links_to_other_hosts_are_listed(site):
    checked = check(site)
    assert checked.wrong == []
    assert checked.pages == 4
    assert checked.external == {"https://example.org/": "index.html", "mailto:a@b": "index.html"}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('<a href="nowhere/">x</a>', "nowhere/ leads nowhere"),
        ('<a href="../">x</a>', "../ leads nowhere"),
        ('<a href="/rules/">x</a>', "/rules/ leads nowhere"),
        ('<a href="rules">x</a>', "rules leads nowhere"),
        ('<a href="rules/X001/#X002">x</a>', "rules/X001/#X002 leads to no anchor"),
        ('<a href="#no">x</a>', "#no leads to no anchor"),
        ('<img src="no.png">', "no.png leads nowhere"),
        ('<img srcset="logo.svg 1x, no.png 2x">', "no.png leads nowhere"),
        ('<script src="https://cdn.example.org/a.js"></script>', "fetches https://cdn.example.org/a.js"),
        ('<script src="//cdn.example.org/a.js"></script>', "fetches //cdn.example.org/a.js"),
        ('<iframe src="http://example.org"></iframe>', "fetches http://example.org"),
        ('<p style="background: url(https://example.org/a.png)">', "fetches https://example.org/a.png"),
        ("<style>@import 'https://example.org/a.css'</style>", "fetches https://example.org/a.css"),
        ('<link rel="stylesheet" href="https://example.org/a.css">', "fetches https://example.org/a.css"),
        ('<p id="twice"></p><p id="twice"></p>', "the id 'twice' stands there 2 times"),
        ("x" * (LARGEST_PAGE + 1), "bytes long"),
    ],
)
def test_a_fault_of_a_page_is_named(site, body, told):
    whole = GOOD["index.html"].replace("</body>", f"{body}</body>")
    written(site, {"index.html": whole})
    (wrong,) = check(site).wrong
    assert wrong.startswith("index.html: ")
    assert told in wrong


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (POLICY, "has no title"),
        ("<title> </title>" + POLICY, "has no title"),
        ("<title>A page</title>", "does not forbid other hosts"),
        (HEAD.replace("default-src 'self'", "default-src *"), "does not forbid other hosts"),
    ],
)
def test_a_head_that_lacks_something_is_named(site, head, told):
    written(site, {"rules/X001/index.html": page("", head)})
    (wrong,) = check(site).wrong
    assert wrong.startswith("rules/X001/index.html: ")
    assert told in wrong


def test_a_page_that_no_page_leads_to_is_named(site):
    written(site, {"lost/index.html": page('<a href="../">home</a>')})
    assert check(site).wrong == ["lost/index.html: no page leads here"]


def test_a_style_that_fetches_from_another_host_is_named(site):
    written(site, {"style.css": "@font-face { src: url('https://fonts.example.org/a.woff2') }"})
    assert check(site).wrong == ["style.css: fetches https://fonts.example.org/a.woff2 from another host"]


def test_pictures_in_a_page_do_not_count_for_its_size(site):
    picture = f'<img src="data:image/png;base64,{"A" * LARGEST_PAGE}">'
    written(site, {"index.html": GOOD["index.html"].replace("</body>", f"{picture}</body>")})
    assert check(site).wrong == []


def test_every_element_that_fetches_is_looked_at():
    for element, names in site_check._FETCHED.items():
        for name in names:
            found = site_check.read("a.html", f'<svg><{element} {name}="https://h/x"/></svg>'.encode())
            assert found.resources == ("https://h/x",), (element, name)

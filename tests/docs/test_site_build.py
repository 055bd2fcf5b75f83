"""Building the site: whole or not at all, into a folder that is its own."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys

import pytest

pytest.importorskip("griffe", reason="pages are made with it: pip install --group docs")

import make_site
from sitegen import build as site_build
from sitegen.build import SiteError, build
from sitegen.model import File
from sitegen.sources import DOCS

SETTINGS = (DOCS / "zensical.toml").read_text(encoding="utf-8")
STYLES = re.findall(r'"assets/([\w-]+\.css)"', SETTINGS)
FILES = [
    File("index.md", "# Home\n\n[ask](how-to/ask.md) [data](data.json)\n"),
    File("how-to/ask.md", "# Ask: at length\n\n```sh\nattnsel doctor\n```\n"),
    File("data.json", b"{}\n"),
    File("assets/logo.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>"),
    *(
        File(f"assets/{name}", "")
        for name in re.findall(
            r'"assets/([\w-]+\.css)"', (DOCS / "zensical.toml").read_text(encoding="utf-8")
        )
    ),
]
built = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("zensical", "selectolax", "griffe")),
    reason="the extra docs is not installed",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A built site, not to be changed."""
    return build(FILES, tmp_path_factory.mktemp("built") / "site").folder


@built
def test_a_site_replaces_the_one_before_it_as_a_whole(tmp_path):
    output = tmp_path / "deep" / "site"
    first = build([*FILES, File("old.txt", "old")], output)
    assert (output / "old.txt").is_file()
    done = build(FILES, output)
    assert first.pages == done.pages == 3  # with 404.html
    assert done.folder == output
    assert not (output / "old.txt").exists()
    assert (output / "data.json").read_bytes() == b"{}\n"
    assert "<title>Ask - attnsel</title>" in (output / "how-to/ask/index.html").read_text()
    assert sorted(path.name for path in output.parent.iterdir()) == ["site"], "nothing is left beside it"
    assert done.bytes == sum(path.stat().st_size for path in output.rglob("*") if path.is_file())


@built
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (File("how-to/bad.md", "# Bad\n\n[x](gone.md)\n"), "page does not exist"),
        (File("how-to/bad.md", "# Bad\n\n[x](ask.md#gone)\n"), "anchor does not exist"),
        (File("how-to/bad.md", "# Bad\n\n<a href='../gone/'>x</a>\n"), "../gone/ leads nowhere"),
        (File("lost/bad.md", "# Bad\n"), "lost/bad/index.html: no page leads here"),
        (
            File("how-to/bad.md", "# Bad\n\n![x](https://h/x.png)\n"),
            "fetches https://h/x.png from another host",
        ),
    ],
)
def test_a_fault_leaves_the_site_of_before_as_it_was(tmp_path, site, fault, told):
    shutil.copytree(site, tmp_path / "site")
    before = {path: path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    with pytest.raises(SiteError) as raised:
        build([*FILES, fault], tmp_path / "site")
    assert told in str(raised.value)
    assert "Traceback" not in str(raised.value)
    after = {path: path.read_bytes() for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert after == before
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


@built
def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "thesis.md").write_text("years of work", encoding="utf-8")
    with pytest.raises(SiteError, match="holds files that are not of this site"):
        build(FILES, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.md"]


@built
def test_where_it_is_published_is_in_its_pages(tmp_path):
    build(FILES, tmp_path / "site", "https://example.org/attnsel/")
    assert (
        'href="https://example.org/attnsel/how-to/ask/"'
        in (tmp_path / "site/how-to/ask/index.html").read_text()
    )
    assert "https://example.org/attnsel/how-to/ask/" in (tmp_path / "site/sitemap.xml").read_text()


def test_what_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "zensical", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "zensical" else object())
    monkeypatch.setattr(make_site.sources, "files", lambda without: iter(FILES))
    assert make_site.main(["--output", str(tmp_path / "site")]) == 1
    assert capsys.readouterr().err == site_build.MISSING + "\n"
    assert not (tmp_path / "site").exists()


def test_a_site_is_put_back_where_the_new_one_cannot_take_its_place(tmp_path):
    output, old = tmp_path / "site", tmp_path / "old"
    output.mkdir()
    (output / "index.html").write_text("old", encoding="utf-8")
    with pytest.raises(OSError, match="gone"):
        site_build.swap(tmp_path / "gone", output, old)
    assert (output / "index.html").read_text(encoding="utf-8") == "old"

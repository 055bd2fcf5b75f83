"""From files to a site: a work folder, Zensical with warnings as errors, the checks, the swap of folders."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sitegen import llms, nav
from sitegen.model import File, address_of
from sitegen.reference_read import last_day
from sitegen.sources import DOCS, repository_address

MISSING = "the site needs Zensical and what its pages are made with: pip install -e . --group docs"
_NEEDED = ("zensical", "selectolax", "griffe")
_MARK = ".attnsel-site"  # in a folder that this program wrote, which it may replace
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class SiteError(Exception):
    """The site cannot be built, or is not as it must be. Its text is for the terminal."""


class Built(NamedTuple):
    """The site. bytes: of all its files; external: addresses of other hosts that its pages link to."""

    folder: Path
    pages: int
    bytes: int
    external: dict[str, str]


def build(files: Iterable[File], output: Path, address: str = "") -> Built:
    """Build ``files`` into ``output``, which is replaced as a whole once everything has been checked.

    address: where the site will be published, for its canonical links and its page for lost visitors.
    Raises SiteError where Zensical warns, where a check finds something, and where ``output`` is somebody
    else's folder.
    """
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise SiteError(MISSING)
    from sitegen.check import check  # takes a parser that may be missing

    if output.exists() and not (output / _MARK).is_file() and any(output.iterdir()):
        raise SiteError(f"{output} holds files that are not of this site: name another folder, or empty it")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as work:
        site = render(list(files), Path(work), address)
        checked = check(site)
        if checked.wrong:
            raise SiteError("\n".join([*checked.wrong, f"{len(checked.wrong)} found"]))
        (site / _MARK).write_text("docs/make_site.py wrote this folder, and replaces it.\n", encoding="utf-8")
        swap(site, output, Path(work) / "old")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return Built(output, checked.pages, size, checked.external)


def render(files: list[File], work: Path, address: str = "") -> Path:
    """The folder that Zensical makes of ``files``, inside ``work``. Raises SiteError with its warnings."""
    for file in files:
        place = work / "docs" / file.path
        place.parent.mkdir(parents=True, exist_ok=True)
        text = _head(file) + file.content if isinstance(file.content, str) else file.content
        place.write_bytes(text.encode() if isinstance(text, str) else text)
    shutil.copytree(DOCS / "sitegen" / "theme", work / "theme")
    settings_ = settings(files, address)
    (work / "zensical.toml").write_text(settings_, encoding="utf-8")
    (work / "docs" / llms.PATH).write_text(llms.text(files, settings_, address), encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        said = _ANSI.sub("", done.stdout) + done.stderr.partition("Traceback")[0]
        lost = "" if "--strict flag" in done.stderr else done.stderr
        raise SiteError(f"{said}{lost}".strip())
    return work / "site"


def _head(file: File) -> str:
    """What the theme is told of a page: the pages above it, which docs/sitegen/theme shows as a path."""
    if not file.trail:
        return ""
    pages = [{"title": title, "url": address_of(path)} for title, path in file.trail]
    return f"---\ntrail: {json.dumps(pages)}\n---\n"


def settings(files: list[File], address: str = "") -> str:
    """The text of zensical.toml with what depends on the files and on where they are published."""
    more = [f"nav = {nav.as_toml(nav.navigation(files))}"]
    more += [f"site_url = {json.dumps(address)}"] if address else []
    repository = repository_address()
    more += [f"repo_url = {json.dumps(repository)}"] if repository else []
    text = (DOCS / "zensical.toml").read_text(encoding="utf-8")
    text = text.replace(
        'copyright = "Apache-2.0"', f'copyright = "Apache-2.0. Releases read up to {last_day()}."'
    )
    return text.replace("[project]\n", "\n".join(["[project]", *more, ""]), 1)


def swap(new: Path, output: Path, old: Path) -> None:
    """Put ``new`` where ``output`` is. A reader sees the old site or the new one, never a mixture."""
    if output.exists():
        output.rename(old)
    try:
        new.rename(output)
    except OSError:
        if old.exists():
            old.rename(output)
        raise

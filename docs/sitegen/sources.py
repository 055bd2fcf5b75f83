"""All files of the site before it is built: what is written by hand, then what each generator makes."""

from __future__ import annotations

import multiprocessing
import os
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from sitegen import (
    can_i_use,
    markdown,
    model_pages,
    playground,
    reference_cli,
    reference_environment,
    reference_messages,
    reference_python,
    reference_read,
    reference_schemas,
    rules,
)
from sitegen.model import File

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
Generator = Callable[[], Iterator[File]]
_BY_HAND = (".md", ".json", ".svg", ".png", ".css", ".js")
_NOT_PAGES = frozenset({"sitegen", "playground"})  # folders of docs/ that a generator reads

# Pages that lie at the top of the checkout.
OF_ROOT = {
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
# What a page is made from, and the page. Pages by hand link to the first, which is there on GitHub too.
MADE_FROM = {
    "README.md": "index.md",
    "rules": "rules/index.md",
    "attnsel/cli": "reference/cli.md",
    "attnsel/__init__.py": "reference/python.md",
    "attnsel/settings.py": "reference/environment.md",
    "attnsel/diagnose/logs/data": "reference/messages.md",
    "attnsel/environment/data/read.csv": "reference/read.md",
    "docs/schemas": "reference/schemas.md",
    "docs/playground": "playground/index.html",
    "docs/sitegen/can_i_use.py": "can-i-use/index.md",
    "docs/sitegen/model_pages.py": "model-pages/index.md",
}


def files(without: Collection[str] = ()) -> Iterator[File]:
    """Every file of the site's sources, each path once. Raises ValueError where two have one path.

    without: names of ``generators`` that are left out; no page links to a playground that is.
    """
    seen: set[str] = set()
    chosen = [made for name, made in generators("playground" not in without).items() if name not in without]
    generated = [file for files in _generated(chosen) for file in files]
    paths = {file.path for file in generated}
    for file in (*by_hand(paths), *generated):
        if file.path in seen:
            raise ValueError(f"{file.path} is made twice")
        seen.add(file.path)
        if file.path.endswith(".md") and isinstance(file.content, str):
            yield file._replace(content=markdown.deep_lists(markdown.plain_fences(file.content)))
        else:
            yield file


def generators(linked: bool = True) -> dict[str, Generator]:
    """What makes pages, by name. ``linked``: whether there is a playground, to which others link."""
    return {  # what takes longest first
        "playground": playground.files,
        "can_i_use": partial(can_i_use.files, playground=linked),
        "rules": partial(rules.files, playground=linked),
        "model_pages": model_pages.files,
        "reference_cli": reference_cli.files,
        "reference_environment": reference_environment.files,
        "reference_messages": reference_messages.files,
        "reference_python": reference_python.files,
        "reference_read": reference_read.files,
        "reference_schemas": reference_schemas.files,
    }


def _generated(chosen: Sequence[Generator]) -> Iterator[list[File]]:
    """What each generator makes, in their order; side by side where processes can be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        yield from map(_made, chosen)
        return
    # One more than there are cores: the playground waits for npm and pip before it works.
    with ProcessPoolExecutor((os.cpu_count() or 1) + 1, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_made, chosen)


def _made(generator: Generator) -> list[File]:
    return list(generator())


def by_hand(generated: set[str]) -> Iterator[File]:
    """Pages and pictures of docs/, and pages at the top of the checkout, with links as the site needs them.

    ``README.md`` of a folder is its index on the site. ``generated``: paths that a link may lead to besides.
    """
    pages = {path: site_path(path) for path in _checkout_pages()}
    repository = repository_address()
    for path, place in pages.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        yield File(place, markdown.with_links(text, _Places(path, place, pages, generated, repository)))
    for file in sorted(DOCS.rglob("*")):
        lies = file.relative_to(DOCS)
        if file.suffix in _BY_HAND and file.suffix != ".md" and lies.parts[0] not in _NOT_PAGES:
            yield File(lies.as_posix(), file.read_bytes())


def _checkout_pages() -> Iterator[str]:
    for page in sorted(DOCS.rglob("*.md")):
        if page.relative_to(DOCS).parts[0] not in _NOT_PAGES:
            yield page.relative_to(ROOT).as_posix()
    yield from (name for name in OF_ROOT if (ROOT / name).is_file())


def site_path(path: str) -> str:
    """Where a page of the checkout stands on the site: ``how-to/ask.md`` of ``docs/how-to/ask.md``."""
    if path in OF_ROOT:
        return OF_ROOT[path]
    inside = path.removeprefix("docs/")
    return posixpath.join(posixpath.dirname(inside), "index.md") if inside.endswith("README.md") else inside


def repository_address() -> str:
    """Where the source can be read, from ``[project.urls]`` of pyproject.toml; "" where none is named."""
    table = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("\n[project.urls]\n")[2]
    found = re.search(r'^(?:Repository|Source)\s*=\s*"([^"]+)"', table.partition("\n[")[0], re.M | re.I)
    return found[1].rstrip("/") if found else ""


class _Places:
    """Of one page: where each of its links leads on the site."""

    def __init__(self, path: str, place: str, pages: dict[str, str], generated: set[str], repository: str):
        self.folder, self.here = posixpath.dirname(path), posixpath.dirname(place)
        self.pages, self.generated, self.repository = pages, generated, repository

    def __call__(self, target: str) -> str | None:
        name, _, part = target.partition("#")
        path = posixpath.normpath(posixpath.join(self.folder, name))
        anchor = f"#{part}" if part else ""
        if path in self.pages:
            return posixpath.relpath(self.pages[path], self.here or ".") + anchor
        inside = path.removeprefix("docs/")
        if path in MADE_FROM and (MADE_FROM[path] in self.generated or path == "README.md"):
            return posixpath.relpath(MADE_FROM[path], self.here or ".")
        if inside in self.generated or (path.startswith("docs/") and (ROOT / path).suffix in _BY_HAND):
            return posixpath.relpath(inside, self.here or ".") + anchor
        if not (ROOT / path).exists():
            return target  # Zensical says that it leads nowhere
        return f"{self.repository}/blob/main/{path}{anchor}" if self.repository else None

"""What the site is made of: files, each with its place in the folder that the generator reads."""

from __future__ import annotations

from typing import NamedTuple


class File(NamedTuple):
    """A file of the site before it is built.

    path: from the root of the site's sources, with forward slashes. A page ends in ``.md``:
    ``rules/CUDNN204.md`` becomes the address ``rules/CUDNN204/``. Anything else is copied as it is.
    content: text of a page, or text or bytes of another file.
    title: of a page that is to be in the navigation, or nothing.
    trail: of a page that is not in the navigation, the pages above it: what each is called, and its path. The
    first of them is in the navigation, or is the first page of a section.
    """

    path: str
    content: str | bytes
    title: str = ""
    trail: tuple[tuple[str, str], ...] = ()


def address_of(path: str) -> str:
    """Where a file stands on the built site, from its root: ``how-to/ask/`` of ``how-to/ask.md``."""
    name = path.removesuffix(".md")
    if name == path:
        return path.removesuffix("index.html")
    return name.removesuffix("index") if name.split("/")[-1] == "index" else f"{name}/"

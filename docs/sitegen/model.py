"""What the site is made of: files, each with its place in the folder that the generator reads."""

from __future__ import annotations

from typing import NamedTuple


class File(NamedTuple):
    """A file of the site before it is built.

    path: from the root of the site's sources, with forward slashes. A page ends in ``.md``:
    ``rules/CUDNN204.md`` becomes the address ``rules/CUDNN204/``. Anything else is copied as it is.
    content: text of a page, or text or bytes of another file.
    title: of a page that is to be in the navigation, or nothing.
    """

    path: str
    content: str | bytes
    title: str = ""

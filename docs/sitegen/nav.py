"""The navigation: one section for each kind of page, in the order in which docs/README.md lists them."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterable

from sitegen.markdown import title_of
from sitegen.model import File

# What stands in the navigation, in this order. A folder is a section with its pages; a page is itself.
SECTIONS = (
    ("Tutorials", "tutorials/"),
    ("How-to", "how-to/"),
    ("Reference", "reference/"),
    ("Explanation", "explanation/"),
    ("Rules", "rules/index.md"),
    ("Can I use it?", "can-i-use/index.md"),
    ("Three models", "model-pages/index.md"),
    ("Playground", "playground/index.html"),
    ("Project", ("contributing.md", "security.md", "changelog.md")),
)
_LISTED = re.compile(r"\]\(([^)#\s]+\.(?:md|html))")


def navigation(files: Iterable[File]) -> list[dict[str, object]]:
    """Zensical's ``nav``: of each section the pages that there are, those of docs/README.md first.

    Hundreds of rules and one page per feature stay out: index pages and the search lead to them.
    """
    pages = {file.path: file for file in files if file.path.endswith((".md", ".html"))}
    index = pages.get("index.md")
    listed = _LISTED.findall(str(index.content)) if index else []
    order = {path: place for place, path in reversed(list(enumerate(listed)))}
    nav: list[dict[str, object]] = [{"Home": "index.md"}] if index else []
    for name, where in SECTIONS:
        if isinstance(where, str) and not where.endswith("/"):
            nav += [{name: where}] if where in pages else []
            continue
        if isinstance(where, str):
            inside = [path for path in pages if path.startswith(where) and path.endswith(".md")]
            inside = [path for path in inside if posixpath.dirname(path) == where.rstrip("/")]
            inside.sort(key=lambda path: (path != f"{where}index.md", order.get(path, len(order)), path))
        else:
            inside = [path for path in where if path in pages]
        if inside:
            nav.append({name: [{label(pages[path]): path} for path in inside]})
    return nav


def label(page: File) -> str:
    """What a page is called in the navigation: its title, or its heading up to a colon."""
    return page.title or title_of(str(page.content)).partition(": ")[0] or page.path


def as_toml(nav: list[dict[str, object]]) -> str:
    """The navigation as a value in TOML. Strings of JSON are strings of TOML."""

    def value(item: object) -> str:
        if isinstance(item, str):
            return json.dumps(item, ensure_ascii=False)
        if isinstance(item, dict):
            return f"{{ {', '.join(f'{value(key)} = {value(of)}' for key, of in item.items())} }}"
        assert isinstance(item, list)
        return f"[{', '.join(map(value, item))}]"

    return value(nav)

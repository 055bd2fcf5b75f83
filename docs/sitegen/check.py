"""What must hold of the built site: links lead somewhere, pages are whole, nothing comes from elsewhere.

Zensical checks the links of Markdown. This reads what it built: navigation, raw HTML and styles as well.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from selectolax.lexbor import LexborHTMLParser, LexborNode

LARGEST_PAGE = 400_000  # bytes of HTML, without pictures
POLICIES = ("default-src 'self'", "default-src 'none'")  # one of them begins a Content-Security-Policy

# What a browser fetches by itself when it shows a page, by element.
_FETCHED = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "track": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "input": ("src",),
    "use": ("href", "xlink:href"),
    "image": ("href", "xlink:href"),
}
_NOT_FETCHED = {"canonical", "prev", "next", "alternate", "edit", "license", "author"}  # kinds of <link>
_LOST = "404.html"  # shown at any address, so its links begin at the host's root
_CSS_ADDRESS = re.compile(r"""@import\s+["']([^"']+)|url\(\s*["']?([^"')]+)""")
_PICTURE = re.compile(r"data:image/[^\"')]+")


class Page(NamedTuple):
    """A page of the built site. path: from its root; links: with their text; resources: what is fetched."""

    path: str
    size: int
    title: str
    policy: str
    ids: tuple[str, ...]
    links: tuple[str, ...]
    resources: tuple[str, ...]


class Checked(NamedTuple):
    """wrong: one line each; external: addresses of other hosts, with a page that links there."""

    pages: int
    wrong: list[str]
    external: dict[str, str]


def check(site: Path) -> Checked:
    """Read every page and style of a built site. Nothing is fetched."""
    files = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    pages = {path: read(path, (site / path).read_bytes()) for path in sorted(files) if path.endswith(".html")}
    wrong: list[str] = []
    external: dict[str, str] = {}
    for page in pages.values():
        wrong += [f"{page.path}: {fault}" for fault in faults(page)]
        if page.path == _LOST:
            continue
        for link in page.links:
            if elsewhere(link):
                external.setdefault(link, page.path)
            elif fault := broken(page.path, link, files, pages):
                wrong.append(f"{page.path}: {fault}")
        wrong += [
            f"{page.path}: {fault}"
            for resource in page.resources
            if not elsewhere(resource) and (fault := broken(page.path, resource, files, pages))
        ]
    reached = reachable(pages, files)
    wrong += [f"{path}: no page leads here" for path in pages if path not in reached and path != _LOST]
    for path in sorted(files):
        if path.endswith(".css"):
            text = (site / path).read_text(encoding="utf-8")
            wrong += [f"{path}: fetches {found} from another host" for found in fetched_by_css(text)]
    return Checked(len(pages), wrong, external)


def read(path: str, content: bytes) -> Page:
    """A page of HTML, parsed as browsers do."""
    tree = LexborHTMLParser(content)
    title = tree.css_first("head > title")
    policy = tree.css_first('meta[http-equiv="Content-Security-Policy"]')
    return Page(
        path,
        len(_PICTURE.sub("", content.decode("utf-8"))),
        title.text().strip() if title else "",
        (policy.attributes.get("content") or "") if policy else "",
        tuple(node.attributes["id"] or "" for node in tree.css("[id]")),
        tuple(node.attributes["href"] or "" for node in tree.css("a[href], area[href]")),
        tuple(_resources(tree)),
    )


def _resources(tree: LexborHTMLParser) -> Iterator[str]:
    for element, names in _FETCHED.items():
        for node in tree.css(element):
            for name in names:
                if value := node.attributes.get(name):
                    yield from _of_set(value) if name == "srcset" else (value,)
    for node in tree.css("link[href]"):
        if not set((node.attributes.get("rel") or "").lower().split()) & _NOT_FETCHED:
            yield node.attributes["href"] or ""
    for node in tree.css("style"):
        yield from _css_addresses(node.text())
    for node in tree.css("[style]"):
        yield from _css_addresses(_style(node))


def _style(node: LexborNode) -> str:
    return node.attributes.get("style") or ""


def _of_set(value: str) -> Iterator[str]:
    for part in value.split(","):
        if words := part.split():
            yield words[0]


def _css_addresses(text: str) -> Iterator[str]:
    for imported, address in _CSS_ADDRESS.findall(text):
        yield imported or address


def fetched_by_css(text: str) -> list[str]:
    """Addresses of other hosts that a style fetches from."""
    return [address for address in _css_addresses(text) if _fetched_elsewhere(address)]


def elsewhere(address: str) -> bool:
    """Whether an address leaves the site: another host, mail, or data that stands in the address itself."""
    parts = urlsplit(address)
    return bool(parts.scheme or parts.netloc)


def _fetched_elsewhere(address: str) -> bool:
    return elsewhere(address) and urlsplit(address).scheme not in ("data", "blob")


def faults(page: Page) -> Iterator[str]:
    """What is wrong with a page by itself."""
    if not page.title:
        yield "has no title"
    if page.size > LARGEST_PAGE:
        yield f"is {page.size:,} bytes long, more than {LARGEST_PAGE:,}"
    if not _closed(page.policy):
        yield f"does not forbid other hosts: its head needs a Content-Security-Policy with {POLICIES[0]}"
    for name, count in Counter(page.ids).items():
        if count > 1:
            yield f"the id {name!r} stands there {count} times"
    for resource in page.resources:
        if _fetched_elsewhere(resource):
            yield f"fetches {resource} from another host"


def _closed(policy: str) -> bool:
    """Whether a policy keeps a page to its own host, in all of its parts."""
    parts = [part.split() for part in policy.split(";") if part.strip()]
    hosts = {word for part in parts for word in part[1:] if not word.startswith("'")} - {"data:", "blob:"}
    return any(" ".join(part) in POLICIES for part in parts) and not hosts


def target(page: str, link: str, files: set[str]) -> str | None:
    """The file of the site that a link of a page leads to, or None. "" is the page itself."""
    path = unquote(urlsplit(link).path)
    if not path:
        return page
    if path.startswith("/"):
        return None  # the site may lie anywhere on its host
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    if path.endswith(("/", "/.", "/..")) or path in (".", ".."):
        place = posixpath.normpath(posixpath.join(place, "index.html"))
    return place if place in files else None


def broken(page: str, link: str, files: set[str], pages: dict[str, Page]) -> str:
    """What is wrong with a link, or ""."""
    place = target(page, link, files)
    if place is None:
        return f"{link} leads nowhere"
    anchor = unquote(urlsplit(link).fragment)
    # Of a program's page the fragment is its own affair, and a text fragment is the browser's.
    if not anchor or place not in pages or anchor.startswith(":~:") or anchor in pages[place].ids:
        return ""
    return f"{link} leads to no anchor"


def reachable(pages: dict[str, Page], files: set[str]) -> set[str]:
    """The pages that links lead to from the first one."""
    reached, open_ = {"index.html"} & set(pages), ["index.html"] if "index.html" in pages else []
    while open_:
        page = pages[open_.pop()]
        for link in page.links:
            place = None if elsewhere(link) else target(page.path, link, files)
            if place in pages and place not in reached:
                reached.add(place)
                open_.append(place)
    return reached

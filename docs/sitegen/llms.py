"""``llms.txt``: what the site has, for programs that read: a line for each page of the navigation.

Its shape is that of llmstxt.org: a heading, a quotation that says what it is, sections of links.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urljoin

from sitegen import nav
from sitegen.markdown import lines_of, title_of
from sitegen.model import File, address_of

PATH = "llms.txt"
_HOW = """\
Ask a question on a command line, with `--json` for programs: `attnsel explain --gpu H100 --head-dim 128
--training --json`. It needs no GPU and no PyTorch. `attnsel explain --from-log FILE --json` reads an error or
a log, `attnsel rule CUDNN204` prints a rule, `attnsel can-i-use softcap` says which kernels have a feature.
Addresses below are relative to this file where they name no host."""
_DATA = (
    (
        "can-i-use/matrix.json",
        "every feature, kernel and architecture as JSON (schema: schemas/can-i-use-2.json)",
    ),
    ("can-i-use/matrix.markdown", "the same as tables of Markdown"),
)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_LONGEST = 200  # characters of what is said of a page


def text(files: Iterable[File], settings: str, address: str = "") -> str:
    """The file. settings: the text of zensical.toml, which says what the site is; address: where it is."""
    pages = {file.path: file for file in files}
    said = dict(re.findall(r'^site_(name|description) = "(.*)"$', settings, re.M))
    lines = [f"# {said['name']}", "", f"> {said['description']}", "", _HOW, ""]
    for section in nav.navigation(pages.values()):
        for name, inside in section.items():
            listed = (
                [path for one in inside for path in one.values()]
                if isinstance(inside, list)
                else [str(inside)]
            )
            lines += [f"## {name}", "", *(_line(pages[path], address) for path in listed), ""]
    below = [file for file in pages.values() if len(file.trail) == 1]
    lines += ["## Lists, and single commands", "", *(_line(file, address) for file in below), ""]
    data = [f"- [{path}]({urljoin(address, path)}): {about}" for path, about in _DATA if path in pages]
    lines += ["## Data", "", *data] if data else []
    return "\n".join(lines).rstrip() + "\n"


def _line(file: File, address: str) -> str:
    place = urljoin(address, address_of(file.path)) or "./"
    said = _about(str(file.content)) if file.path.endswith(".md") else ""
    title = (
        file.title or title_of(str(file.content)) if file.path.endswith(".md") else file.path.split("/")[0]
    )
    return f"- [{title}]({place}){f': {said}' if said else ''}"


def _about(content: str) -> str:
    """The first sentence below the heading of a page, without marks."""
    words = " ".join(_first_paragraph(content))
    said = re.split(r"(?<=[.:!?]) ", _LINK.sub(r"\1", words))[0].replace("**", "").replace("*", "")
    return said if len(said) <= _LONGEST else said[:_LONGEST].rsplit(" ", 1)[0] + " …"


def _first_paragraph(content: str) -> Iterator[str]:
    begun = False
    for line in lines_of(content):
        if line.code or line.fence or line.text.startswith(("#", "|", "<", "-", "!")):
            if begun:
                return
            continue
        if line.text.strip():
            begun = True
            yield line.text.strip()
        elif begun:
            return

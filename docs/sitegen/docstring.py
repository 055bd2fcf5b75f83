"""Docstrings and help texts of attnsel as Markdown.

A docstring here is paragraphs. Arguments are explained by lines that begin with their names and a colon; code
stands in double backticks, or indented; :func:`name` refers to another object. Paths of pages become
links, as they are right from a folder of the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase

from sitegen.tables import table

_ENTRY = re.compile(r"(?P<names>[\w*]+(?:, [\w*]+)*): (?P<text>.*)")
_ROLE = re.compile(r":(?:\w+:)?\w+:`(?P<title>[^`<]+ <)?(?P<name>[^`>]+)>?`")
_CODE = re.compile(r"``(.+?)``|`([^`]+)`", re.S)
_FLAG = re.compile(r"(?<![\w`/-])(?:--[a-z][\w-]*(?![\w-])|[A-Z][A-Z0-9]*_[A-Z_]+[A-Z0-9](?:=\w+)?)")
_PAGE = re.compile(r"docs/((?:tutorials|how-to|reference|explanation)/[\w-]+)\.md")
_FILE = re.compile(r"(?<![\w/.])(?:attnsel|backends|rules|tests|benchmarks|examples)/[\w/.-]*\w")
_SPECIAL = re.compile(r"(?<!\*)\*(?!\*)|[<\\]|\[(?=[^\]]*\][(\[])|(?<!\w)_|_(?!\w)")


def rendered(text: str, names: Collection[str] = (), link: Callable[[str], str] = str) -> str:
    """A docstring without its indentation as Markdown.

    names: arguments or fields; a line that explains one of them becomes an item. link: the address of an
    object by its full name, or "" where there is none.
    """
    parts = (_paragraph(part, names, link) for part in _paragraphs(text))
    return "\n\n".join(part for part in parts if part)


def inline(text: str, link: Callable[[str], str] = str) -> str:
    """One paragraph's words: code, references, flags and settings marked, all else as it stands."""

    def marked(found: re.Match[str]) -> str:
        return f"`{found[1] or found[2]}`"

    def referred(found: re.Match[str]) -> str:
        name = found["name"].lstrip("~")
        address = link(name)
        shown = name.rsplit(".", 1)[-1] if found["name"].startswith("~") else name
        return f"[`{shown}`]({address})" if address else f"`{shown}`"

    done, last = [], 0
    for found in re.finditer(f"{_ROLE.pattern}|{_CODE.pattern}", text, re.S):
        done.append(_plain(text[last : found.start()]))
        role = _ROLE.fullmatch(found[0])
        done.append(referred(role) if role else _CODE.sub(marked, found[0]))
        last = found.end()
    return "".join([*done, _plain(text[last:])])


def _plain(text: str) -> str:
    """Words outside code: pages become links, and what Markdown would take for its own is escaped."""
    done, last = [], 0
    for found in re.finditer(f"{_PAGE.pattern}|{_FLAG.pattern}|{_FILE.pattern}", text):
        done.append(_SPECIAL.sub(r"\\\g<0>", text[last : found.start()]))
        done.append(f"[{found[1]}](../{found[1]}.md)" if found[1] else f"`{found[0]}`")
        last = found.end()
    return "".join([*done, _SPECIAL.sub(r"\\\g<0>", text[last:])])


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Lines that stand together; of code, all of it with the empty lines inside."""
    part: list[str] = []
    lines = [*text.rstrip().splitlines(), ""]
    for place, line in enumerate(lines):
        after = next((later for later in lines[place:] if later.strip()), "")
        if line.strip():
            part.append(line.rstrip())
        elif part and _is_code(part) and after.startswith("    "):
            part.append("")
        elif part:
            yield part
            part = []


def _is_code(lines: list[str]) -> bool:
    return all(line.startswith("    ") or not line for line in lines)


def _paragraph(lines: list[str], names: Collection[str], link: Callable[[str], str]) -> str:
    if _is_code(lines):
        text = "\n".join(line[4:] for line in lines)
        language = "python" if re.match(r"(>>>|from |import |@|with )", text) else "text"
        return f"```{language}\n{text}\n```"
    if lines[0].startswith("=") and len(lines) > 2:
        return _table(lines, link)
    lines[-1] = re.sub("::$", ":", lines[-1])  # what follows is code
    done: list[str] = []
    for line in lines:
        entry = _ENTRY.fullmatch(line)
        if entry and _explains(entry["names"].split(", "), names):
            shown = ", ".join(f"`{name}`" for name in entry["names"].split(", "))
            done += (
                ["", f"- {shown}: {entry['text']}"]
                if done and done[-1][:2] != "- "
                else [f"- {shown}: {entry['text']}"]
            )
        elif done:
            done[-1] += f" {line.strip()}"
        else:
            done.append(line.strip())
    return "\n".join(_marked(line, link) for line in done)


def _marked(line: str, link: Callable[[str], str]) -> str:
    names, colon, text = line.partition("`: ") if line.startswith("- `") else ("", "", line)
    return f"{names}{colon}{inline(text, link)}"


def _explains(said: list[str], names: Collection[str]) -> bool:
    return any(fnmatchcase(name, word) for word in said for name in names)


def _table(lines: list[str], link: Callable[[str], str]) -> str:
    """A simple table of reStructuredText with two columns."""
    start = lines[0].index(" ")
    rows = [(line[:start], line[start:]) for line in lines if not line.startswith("=")]
    head, *rest = [[inline(cell.strip(), link) for cell in row] for row in rows]
    return table(head, rest)

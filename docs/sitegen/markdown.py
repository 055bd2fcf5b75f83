"""Pages as they lie in the checkout, brought to what the site's generator reads.

A page is written for GitHub: its links go to files of the checkout, the word on a fence may be followed by
what tests do with the block, and lists follow CommonMark. Python-Markdown, which Zensical renders with, wants
four spaces inside a list and a blank line before it, and knows no further words on a fence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>[\w+-]*)(?P<info>.*)")
_MARKER = re.compile(r"(?P<indent> *)(?P<marker>[-*+]|\d{1,9}[.)])(?P<space> {1,4})(?=\S)")
_LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|#", re.IGNORECASE)


class Line(NamedTuple):
    """A line of a page. ``code``: it stands in a fenced block; ``fence``: it opens or closes one."""

    text: str
    code: bool = False
    fence: bool = False


def lines_of(text: str) -> Iterator[Line]:
    """The lines of a page, each with whether it is code."""
    closing = ""
    for line in text.splitlines():
        found = FENCE.fullmatch(line)
        if closing:
            ends = found is not None and found["fence"].startswith(closing) and not found["language"]
            yield Line(line, code=not ends, fence=ends)
            closing = "" if ends else closing
        elif found is not None and "`" not in found["info"]:
            closing = found["fence"]
            yield Line(line, fence=True)
        else:
            yield Line(line)


def plain_fences(text: str) -> str:
    """Fences with their language alone: ``sh`` of ``sh skip: why``."""
    return _joined(
        FENCE.sub(r"\g<indent>\g<fence>\g<language>", line.text) if line.fence else line.text
        for line in lines_of(text)
    )


def deep_lists(text: str) -> str:
    """Lists in Python-Markdown's way: four spaces for each level, and a blank line before the first item."""
    levels: list[int] = []  # where the text of each open item begins in the page
    done: list[str] = []
    shift = 0  # of a fenced block, which moves as a whole
    opened = False
    for line in lines_of(text):
        if line.code or (line.fence and opened):
            done.append(_moved(line.text, shift))
            opened = opened and not line.fence
            continue
        opened = line.fence
        if not line.text.strip():
            done.append("")
            continue
        indent = len(line.text) - len(line.text.lstrip(" "))
        lazy = levels and done[-1] and not line.fence and not _MARKER.match(line.text)
        depth = len(levels)
        while levels and indent < levels[-1] and not lazy:
            levels.pop()
        shift = 4 * len(levels) - (levels[-1] if levels else 0)
        if lazy:
            shift = max(shift, -indent)
        found = None if line.fence else _MARKER.match(line.text)
        goes_on = bool(done and done[-1]) and len(levels) == depth
        if found is not None and goes_on and found["marker"][:-1].isdigit() and found["marker"][:-1] != "1":
            # A number at the start of a line of a paragraph.
            done.append(_moved(line.text.replace(found["marker"][-1], f"\\{found['marker'][-1]}", 1), shift))
            continue
        if found is not None:
            if done and done[-1] and not _in_item(done):
                done.append("")
            marker = found["marker"].ljust(max(4, len(found["marker"]) + 1))
            done.append(" " * 4 * len(levels) + marker + line.text[found.end() :])
            levels.append(found.end())
            continue
        done.append(_moved(line.text, shift))
    return "\n".join(done) + "\n"


def with_links(text: str, place: Callable[[str], str | None]) -> str:
    """Every inline link with the target that ``place`` gives; None leaves its text alone, without a link.

    ``place`` is asked about links to files only, with what stands in the page.
    """

    def changed(found: re.Match[str]) -> str:
        target = found["target"]
        if _ELSEWHERE.match(target):
            return found[0]
        new = place(target)
        return found["text"] if new is None else f"[{found['text']}]({new})"

    def outside_code(part: str) -> str:
        spans = [span.span() for span in _CODE.finditer(part)]
        return _LINK.sub(
            lambda found: found[0] if any(a < found.start() < b for a, b in spans) else changed(found), part
        )

    done: list[str] = []
    prose: list[str] = []  # a link may go on in the next line
    for line in lines_of(text):
        if line.code or line.fence:
            done += [outside_code("\n".join(prose))] if prose else []
            prose = []
            done.append(line.text)
        else:
            prose.append(line.text)
    done += [outside_code("\n".join(prose))] if prose else []
    return "\n".join(done) + "\n"


def title_of(text: str) -> str:
    """The first heading of a page, without marks; "" where there is none."""
    for line in lines_of(text):
        if not line.code and line.text.startswith("# "):
            heading = re.sub(r"\{[^}]*\}\s*$", "", line.text[2:]).strip()
            return re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return ""


def _moved(line: str, shift: int) -> str:
    if not line.strip():
        return ""
    if shift >= 0:
        return " " * shift + line
    return line[min(-shift, len(line) - len(line.lstrip(" "))) :]


def _in_item(done: list[str]) -> bool:
    """Whether the last line belongs to the first paragraph of an item, so that a list may go on below it."""
    for line in reversed(done):
        if not line or _MARKER.match(line):
            return bool(line)
    return False


def _joined(lines: Iterator[str]) -> str:
    return "\n".join(lines) + "\n"

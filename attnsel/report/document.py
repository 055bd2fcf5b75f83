"""Lines of text that keep to a width."""

from __future__ import annotations

import textwrap

MARK = {"eligible": "✔", "unknown": "?", "refused": "✖"}


def fold(text: str, width: int, lead: str = "", indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=lead, subsequent_indent=indent, break_on_hyphens=False)


def join_items(items: list[str], width: int) -> list[str]:
    """Items joined by a dot, never broken inside one."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 3 + len(item) <= width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines

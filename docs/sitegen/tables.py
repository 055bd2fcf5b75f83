"""Tables of Markdown whose last columns may be empty."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnsel.report import markdown


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown of one line. A last column that is empty throughout is left out."""
    made = list(rows)
    width = len(head)
    while width > 1 and not any(row[width - 1] for row in made):
        width -= 1
    return markdown.table(head[:width], [row[:width] for row in made])

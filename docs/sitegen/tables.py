"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells are Markdown of one line. A last column that is empty throughout is left out."""
    made = [[cell.replace("\\|", "|").replace("|", "\\|") for cell in row] for row in rows]
    width = len(head)
    while width > 1 and not any(row[width - 1] for row in made):
        width -= 1
    lines = [list(head[:width]), ["---"] * width, *(row[:width] for row in made)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

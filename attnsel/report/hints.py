"""What is remarked on the question, before anything is said about candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.report.lines import fold

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView


def hint_lines(selection: SelectionView, width: int) -> list[str]:
    """Each hint with its code, whose page says more."""
    lines: list[str] = []
    for remark in selection.hints:
        lines += fold(f"Note: {remark.message}  [{remark.code}]", width, "", "  ")
    return lines

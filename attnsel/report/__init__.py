"""An answer as text that fits a terminal, a log and an error message alike.

First the verdict in words; then where and what was asked; the candidates in their order; the reasons against
those that cannot run, each once however many it concerns; and the ways out.

===========  ==========================================================
file         about
===========  ==========================================================
``verdict``  the answer in a sentence, and in a line for a log
``words``    the machine and the call
``hints``    what is remarked on the question
``ranked``   the candidates that run
``reasons``  why the others do not, and the known bugs
``ways``     how to get them
``assumed``  what is assumed and would change a verdict
``dispatched``  what another library's chooser takes, and the difference
``lines``    lines that keep to a width
===========  ==========================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.errors import printable
from attnsel.report.answer import (
    assumption_words,
    closing_lines,
    hint_lines,
    one_line,
    planned_only,
    ranked_lines,
    reason_lines,
    unlock_lines,
    verdict,
)
from attnsel.report.document import fold, join_items
from attnsel.report.short import difference, render_dispatched
from attnsel.report.words import environment_words, params_words, policy_words, tensor_words

if TYPE_CHECKING:
    from attnsel.selection.view import SelectionView

__all__ = [
    "difference",
    "environment_words",
    "one_line",
    "params_words",
    "render",
]


def render(selection: SelectionView, width: int = 80, sources: bool = False) -> str:
    """The whole answer."""
    if selection.dispatched is not None:
        return render_dispatched(selection, width, sources)
    lines = [*fold(verdict(selection), width), ""]
    lines += join_items(environment_words(selection.environment), width)
    where = tensor_words(selection.params) if selection.layout is None else []
    lines += join_items([*params_words(selection.params), *where], width)
    lines += [f"! {warning}" for warning in selection.environment.warnings]
    lines += [f"! planned only: {why}" for why in planned_only(selection)]
    policy = policy_words(selection)
    if policy:
        lines += join_items(["policy", *policy], width)
    lines += hint_lines(selection, width)
    if selection.layout is not None:
        lines += selection.layout.describe(width).splitlines()
    lines += ["", *ranked_lines(selection, width), *reason_lines(selection, width, sources)]
    for assumption in selection.assumptions:
        lines += fold(assumption_words(assumption), width, "  ? ", "      ")
    lines += unlock_lines(selection, width)
    lines += closing_lines(selection, width)
    return "\n".join(printable(line.rstrip()) for line in lines)

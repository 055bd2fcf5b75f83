"""An answer as a document, and what writes it: as text, as Markdown.

=================  ====================================================================
file               about
=================  ====================================================================
``document``       what a document is made of
``text``           the writer of text, for a terminal, a log and an error message alike
``markdown``       the writer of Markdown
``prose``          our own sentences taken apart, for a writer that shows names and links
``words``          the machine, the call and the policy in words
``answer``         the whole answer: its sentences, and the document made of them
``short``          the answer on one screen; another library's chooser beside it
``copy_advice``    what a copy of k and v costs, and what avoids it
=================  ====================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import stamped, to_json
from attnsel.report.answer import answer_document, one_line
from attnsel.report.short import difference, dispatched_document, short_document
from attnsel.report.text import to_text
from attnsel.report.words import environment_words, on_gpu, params_words

if TYPE_CHECKING:
    from attnsel.report.document import Document
    from attnsel.selection.view import SelectionView

__all__ = [
    "difference",
    "environment_words",
    "on_gpu",
    "one_line",
    "params_words",
    "report_document",
    "selection_record",
    "short_document",
    "to_text",
]


def report_document(selection: SelectionView, sources: bool = False) -> Document:
    """The whole answer; where another chooser was asked, its answer first.

    ``sources``: below each reason where it is written.
    """
    whole = answer_document if selection.dispatched is None else dispatched_document
    return whole(selection, sources)


def selection_record(selection: SelectionView, unlocks: bool = True) -> dict[str, Any]:
    """The whole answer as JSON."""
    out: dict[str, Any] = {
        "backend": selection.backend,
        "params": to_json(selection.params),
        "environment": to_json(selection.environment),
        "policy": to_json(selection.policy),
        "candidates": [
            {"name": one.name, "title": CANDIDATES[one.name].title, **to_json(one)}
            for one in selection.candidates
        ],
        "assumptions": to_json(selection.assumptions),
        "hints": to_json(selection.hints),
    }
    if selection.layout is not None:
        out["layout"] = to_json(selection.layout)
    if selection.dispatched is not None:
        out["dispatched"] = {**to_json(selection.dispatched), "difference": difference(selection)}
    if unlocks:
        out["unlocks"] = to_json(selection.unlocks)
    return stamped("selection", out)

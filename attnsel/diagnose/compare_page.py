"""What another machine changes, as a page: the changes with their reasons, and every question as a map."""

from __future__ import annotations

from collections.abc import Sequence

from attnsel.decision import Selection
from attnsel.diagnose.compare import (
    Answered,
    Comparison,
    Outcome,
    change_item,
    environment_facts,
    keeps_away,
    merged_words,
    outcome_of,
    outcome_words,
    verdict,
)
from attnsel.report.document import Inline
from attnsel.report.html import Fold, Map, Page, Part, Tile, kernel_tone, plain


def compare_page(found: Comparison, answers: Sequence[Sequence[Answered]], maps: Sequence[Map] = ()) -> Page:
    """``answers``: as they were compared. ``maps``: of a model, its layers in each environment."""
    changes = tuple(change_item(change, found) for change in found.changes)
    folds = tuple(Fold(item._replace(below=()), item.below, open=len(changes) < 8) for item in changes)
    sections = (
        Part("Environments", tuple(map(environment_facts, found.environments))),
        Part("Layers and phases", tuple(maps)),
        Part("What changes, and why", folds),
        Part("Every question", (question_map(found, answers),)),
    )
    title = f"{found.reference} and {', '.join(name for name, _ in found.changed)}"
    return Page(title, verdict(found), tuple(section for section in sections if section.blocks))


def question_map(found: Comparison, answers: Sequence[Sequence[Answered]]) -> Map:
    """A row for questions that are answered alike everywhere, a column for each environment."""
    alike: dict[tuple[tuple[Outcome, tuple[str, ...]], ...], list[int]] = {}
    reference = [name for name, _ in found.environments].index(found.reference)
    for question, asked in enumerate(zip(*answers, strict=True)):
        wanted = outcome_of(asked[reference].selection)
        key = tuple(_outcome_and_why(one.selection, wanted) for one in asked)
        alike.setdefault(key, []).append(question)
    rows: list[tuple[Inline, tuple[Tile, ...]]] = []
    for outcomes, questions in sorted(alike.items(), key=lambda one: len(set(one[0])) == 1):
        label = "; ".join(
            " · ".join(words) for words in merged_words(tuple(answers[0][place].words for place in questions))
        )
        tiles = []
        for (name, _), (outcome, why) in zip(found.environments, outcomes, strict=True):
            tone = "same" if outcome == outcomes[reference][0] else "changed"
            said = plain(outcome_words(outcome))
            tip = (f"{name}: {said}", *(f"against {outcomes[reference][0].kernel}: {text}" for text in why))
            tiles.append(Tile(said, f"{tone} {kernel_tone(outcome.kernel)}", tip))
        rows.append((label, tuple(tiles)))
    legend = (("same", f"as with {found.reference}"), ("changed", "otherwise"))
    head = tuple((name, 1) for name, _ in found.environments)
    return Map(f"{found.questions} questions, those alike in one row", head, tuple(rows), legend)


def _outcome_and_why(selection: Selection, wanted: Outcome) -> tuple[Outcome, tuple[str, ...]]:
    here = outcome_of(selection)
    why = keeps_away(selection, wanted) if here != wanted else ()
    return here, tuple(f"{one.code} {one.text}".strip() for one in why)

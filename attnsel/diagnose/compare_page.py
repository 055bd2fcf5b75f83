"""What another machine changes, as a page: the changes with their reasons, and every question as a map."""

from __future__ import annotations

from collections.abc import Sequence

from attnsel.diagnose.compare import (
    Answered,
    Comparison,
    change_item,
    environment_facts,
    keeps_away,
    merged_words,
    outcome_of,
    outcome_words,
    verdict,
)
from attnsel.diagnose.models.page import WORDS, layer_maps
from attnsel.diagnose.models.plan import ModelPlan
from attnsel.report.html import Page


def compare_page(
    found: Comparison, answers: Sequence[Sequence[Answered]], plans: Sequence[ModelPlan] = ()
) -> Page:
    """``answers``: as they were compared. ``plans``: of a model, in each environment.

    Questions that are answered alike everywhere are one row: their words, and for each environment what runs
    and what keeps the reference's answer away.
    """
    names = [side.name for side in found.environments]
    reference = names.index(found.reference)
    alike: dict[tuple[object, ...], list[int]] = {}
    for question, asked in enumerate(zip(*answers, strict=True)):
        wanted = outcome_of(asked[reference].selection)
        here = [(one.selection, outcome_of(one.selection)) for one in asked]
        key = tuple((what, keeps_away(one, wanted) if what != wanted else ()) for one, what in here)
        alike.setdefault(key, []).append(question)
    rows = [
        ([" · ".join(words) for words in merged_words([answers[0][one].words for one in questions])], key)
        for key, questions in sorted(alike.items(), key=lambda one: len(set(one[0])) == 1)
    ]
    named = {
        "found": found,
        "rows": rows,
        "reference": reference,
        "verdict_on": verdict,
        "environment_facts": environment_facts,
        "change_item": change_item,
        "outcome_words": outcome_words,
        "plans": [(name, plan, list(layer_maps(plan))) for name, plan in zip(names, plans, strict=False)],
    }
    return Page("compare", WORDS | named)

"""``attnsel explain``: which candidate runs, and every reason why the others do not."""

from __future__ import annotations

from attnsel.cli.flags import Json
from attnsel.cli.output import FOUND, NO_BACKEND, tell, text_width
from attnsel.cli.question import Question, asks
from attnsel.select import select


@asks
def explain(question: Question, *, json: Json = False) -> int:
    """Which attention kernel runs this call, why each of the others cannot, and how to get it.

    Without --gpu and --env it answers for this machine. ATTNSEL_BACKENDS and the other variables of a
    policy hold here too.

    --json prints one object: backend (the choice, or null), params, environment (with warnings),
    policy, candidates (best first: name, verdict, eligible, executable, plan_only, unproven, placed_by,
    adaptations, reasons) and unlocks (changes that make a refused candidate eligible).

    Exit code: 0 a backend was found, 2 bad input, 3 no backend.
    """
    selection = select(question.ask(), question.where(), policy=question.policy)
    if json:
        print(selection.to_json(indent=2))
    else:
        tell(selection.report(text_width()))
    return NO_BACKEND if selection.backend is None else FOUND

"""``attnsel explain``: which candidate runs, and every reason why the others do not."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

from cyclopts import Parameter

from attnsel.cli.flags import OUTPUT, CudnnLib, Json
from attnsel.cli.output import FOUND, NO_BACKEND, tell, text_width
from attnsel.cli.question import Question, asks
from attnsel.select import select


@asks
def explain(
    question: Question,
    *,
    ask_library: Annotated[
        bool, Parameter(group=OUTPUT, negative="", show_default=False, help="ask the real libcudnn too")
    ] = False,
    cudnn_lib: CudnnLib = None,
    json: Json = False,
) -> int:
    """Which attention kernel runs this call, why each of the others cannot, and how to get it.

    Without --gpu and --env it answers for this machine. ATTNSEL_BACKENDS and the other variables of a
    policy hold here too.

    --ask-library adds what the real libcudnn says of the same call on the same GPU, which need not be here:
    for each of its graphs whether it is supported, the engines, the workspace; and whether the rules for
    that version agree. It takes libcudnn 9.8 or newer, NVRTC and cudnn-frontend, downloads nothing, and
    remembers answers in ~/.cache/attnsel. For older cuDNN only the frontend's own checks can be heard.

    --json prints one object: backend (the choice, or null), params, environment (with warnings),
    policy, candidates (best first: name, verdict, eligible, executable, plan_only, unproven, placed_by,
    adaptations, reasons) and unlocks (smallest sets of changes that make a refused candidate eligible, as
    text, as lines to paste and as fields with their new values); with --ask-library also library (judge,
    cudnn, cudnn_frontend, supported, rules, agree, answers, notes; or missing and message).

    Exit code: 0 a backend was found, 2 bad input, 3 no backend.
    """
    selection = select(question.ask(), question.where(), policy=question.policy)
    library = None
    if ask_library or cudnn_lib is not None:
        from attnsel.cli.asking import ask

        library = ask(selection.params, selection.environment, cudnn_lib)
    if json:
        said = selection.as_dict()
        print(jsonlib.dumps(said if library is None else {**said, "library": library.as_dict()}, indent=2))
    else:
        tell(selection.report(text_width()))
        if library is not None:
            tell(library.report(text_width()))
    return NO_BACKEND if selection.backend is None else FOUND

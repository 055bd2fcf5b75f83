"""``attnsel explain --from-log``: a pasted log or error, and what is behind it."""

from __future__ import annotations

from pathlib import Path

from attnsel.cli.output import FOUND, NO_BACKEND, bar, complain, print_json, print_text, text_width
from attnsel.cli.question import Question
from attnsel.diagnose.logs.answer import explained
from attnsel.diagnose.logs.calls import gather
from attnsel.diagnose.logs.question import Stated
from attnsel.diagnose.logs.reader import lines_of, opened
from attnsel.diagnose.logs.report import nothing_known, render_markdown, render_text
from attnsel.errors import InvalidInput


def explain_log(path: Path, question: Question, *, markdown: bool, json: bool) -> int:
    """Explain every call in a log. Raises InvalidInput."""
    if question.from_file:
        raise InvalidInput("--params", None, "cannot go with --from-log: both say what the call is")
    with opened(path, "--from-log") as (file, size), bar("reading", size) as progress:
        found = gather(lines_of(file, progress))
    if not found.calls:
        complain("nothing in this log is known to attnsel; looked for:")
        for line in nothing_known():
            complain(f"  {line}")
        return NO_BACKEND
    stated = Stated(
        question.params, question.machine, question.environment, question.policy, question.lying.of
    )
    answered = explained(found, stated)
    if json:
        print_json(answered.as_dict())
    else:
        print_text(render_markdown(answered) if markdown else render_text(answered, text_width()))
    return FOUND

"""``attnsel compare``: the same questions on several machines, or the files of many ranks in one answer."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel.base.records import stamped, to_json
from attnsel.cli.flags import THE_CALL
from attnsel.cli.form import TEXT_AND_PAGE, Form, PageForm
from attnsel.cli.many import plan_there, read_model, read_questions
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, NO_BACKEND, bar, complain
from attnsel.cli.question import (
    As,
    Chooser,
    Place,
    Question,
    SwitchFlag,
    asked_of,
    asks,
    place_of,
    told_of,
)
from attnsel.diagnose.compare import Answered, Side, compare_document, compared, standard_questions
from attnsel.diagnose.models.document import call_words
from attnsel.diagnose.models.source import layers_of
from attnsel.diagnose.ranks.answer import read
from attnsel.diagnose.ranks.document import nothing_found, ranks_document
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.report.words import params_words


@asks
def compare(
    question: Question,
    *places: Annotated[str, Parameter(name="A", help="environments; or folders, files, patterns of ranks")],
    model: Annotated[
        str | None,
        Parameter(name="--model", group=THE_CALL, help="ask about a whole model, as explain --model does"),
    ] = None,
    questions: Annotated[
        Path | None,
        Parameter(
            group=THE_CALL,
            allow_leading_hyphen=True,
            help="ask what a file holds: lines of ATTNSEL_DEBUG_FORMAT=json or of attnsel watch --out, a "
            "file of ATTNSEL_REPLAY_DIR, JSON of AttentionParams or a list of them",
        ),
    ] = None,
    tp_size: Annotated[
        int | None, Parameter(group=THE_CALL, help="with --model: ranks that share its heads")
    ] = None,
    as_: As = None,
    switch: SwitchFlag = None,
    form: PageForm = TEXT_AND_PAGE,
) -> int:
    """Which answers change from one machine to another, and the codes that change them.

    An environment is a file of doctor --json, a GPU, `here`, or a description; behind a file or a GPU stands
    what is otherwise:

        attnsel compare gpu=H100,torch=2.6 gpu=H100,torch=2.15
        attnsel compare doctor.json doctor.json,torch=2.15 --model llama-3-8b
        attnsel compare A100 H100 B200 --questions logs/rank0.jsonl

    Asked are --model, --questions, the call that flags state, or 168 questions that most models ask. Flags of
    a machine hold for every environment that does not say otherwise. Of more than two the one that agrees
    with most is what the others are compared with, and an odd one out is named.

    Files of many ranks (ATTNSEL_DEBUG_FILE with ATTNSEL_DEBUG_FORMAT=json and ATTNSEL_DEBUG_RANKS=all, the
    files of attnsel watch --out, logs with attnsel's lines) are told as one answer: who differs and why, and
    what fell back.

        attnsel compare logs/

    Exit code: 0 answered, and the ranks agree; 2 bad input; 3 nothing of attnsel's was found; 4 the ranks
    differ, or a self-check failed, a call could not run, or a rank is missing, cut off or ended with an
    error.
    """
    form.require_one()
    if any(map(_of_ranks, places)):
        for flag, given in (("--model", model), ("--questions", questions), ("--as", as_)):
            if given is not None:
                raise InvalidInput(flag, str(given), "says nothing of the files of ranks")
        return compare_ranks(places, form)
    sides = [Side(_name(text), _side(text, question)) for text in places]
    if len(sides) < 2:
        complain(
            "compare needs two environments or the files of ranks: attnsel compare A100 H100, "
            "attnsel compare logs/"
        )
        return BAD_INPUT
    if model is not None and questions is not None:
        raise InvalidInput("--questions", str(questions), "says nothing with --model")
    if tp_size is not None and model is None:
        raise InvalidInput("--tp-size", None, "says nothing without --model")
    chooser = asked_of(as_, switch)
    if model is not None:
        layers, ranks = layers_of(read_model(model)), 1 if tp_size is None else tp_size
        plans = [plan_there(layers, env, question, ranks, chooser) for _, env in sides]
        answers = [
            [
                Answered((call_words(cell.call), cell.phase), cell.selection, len(cell.call.layers))
                for cell in plan.cells
                if not cell.call.by_hand  # which is the same everywhere
            ]
            for plan in plans
        ]
        if not answers[0]:
            raise InvalidInput("--model", model, "holds no softmax attention: there is nothing to compare")
    else:
        asked, plans = list(_asked(question, questions)), []
        answers = [
            [_answer(words, fields, env, question, chooser) for words, fields in asked] for _, env in sides
        ]
    found = compared(sides, answers)
    form.print(
        lambda: compare_document(found),
        lambda: stamped("compare", to_json(found)),
        page=lambda: found.page(answers, plans),
    )
    return FOUND


def _name(text: str) -> str:
    """An environment as it is called: as it was typed, but for the folder of its file."""
    first, comma, rest = text.partition(",")
    return (os.path.basename(first) or first) + comma + rest if "=" not in first else text


def _side(text: str, question: Question) -> Environment:
    """What a text says, above what the flags of a machine say."""
    place, shared = place_of(text, "ENVIRONMENT"), question.place
    both = Place(place.environment or shared.environment, {**shared.changes, **place.changes})
    return told_of(both.where, {}, text, "ENVIRONMENT")


def _asked(question: Question, file: Path | None) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Questions in words and as fields."""
    if file is None and question.params:
        yield (" ".join(params_words(question.ask())),), question.params
    elif file is None:
        yield from standard_questions()
    else:
        if question.params:
            raise InvalidInput("--questions", str(file), "goes with no flag of a call: the file says it")
        for p in read_questions(file):
            yield (
                (" ".join(params_words(p)),),
                {name: getattr(p, name) for name in AttentionParams.model_fields},
            )


def _answer(
    words: tuple[str, ...], fields: Mapping[str, Any], env: Environment, question: Question, chooser: Chooser
) -> Answered:
    """A question whose dtype nobody stated is asked in the half precision of each GPU."""
    p = question.lying.of(AttentionParams(**{"dtype": env.half, **fields}))
    return Answered(words, chooser.select(p, env, question.policy))


# ---- the files of ranks ------------------------------------------------------------------------------


_OF_A_RANK = re.compile(r'\s*\{\s*"schema":\s*"attnsel\.(debug|watch-process|watch-site)/')


def _of_ranks(text: str) -> bool:
    """Whether it names files that ranks left, and not an environment."""
    if os.path.isdir(text) or (glob.has_magic(text) and not os.path.exists(text)):
        return True
    if not os.path.isfile(text):  # a pipe is read once
        return False
    try:
        with open(text, encoding="utf-8", errors="replace") as file:
            start = file.read(1 << 12)
    except (OSError, ValueError):
        return False
    return not start.lstrip("\ufeff \r\n\t").startswith("{") or _OF_A_RANK.match(start) is not None


def compare_ranks(files: Sequence[str], form: Form) -> int:
    """The files of many ranks in one answer."""
    with bar("reading", 100) as percent:
        answer = read(files, lambda done, total: percent(100 * done // max(total, 1)))
    if answer.known or form.json:
        form.print(
            lambda: ranks_document(answer, for_issue=form.markdown),
            lambda: stamped("ranks", answer.as_dict()),
        )
    if not answer.known:
        complain(nothing_found(answer))
        return NO_BACKEND
    return FOUND if answer.agreed else CHECK_FAILED

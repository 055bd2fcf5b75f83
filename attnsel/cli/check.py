"""``attnsel check``: whether attention is still what a project's baseline says."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

from cyclopts import Parameter

from attnsel.base.records import stamped, to_json
from attnsel.cli.form import TEXT, Form, write_whole, yes_or_no
from attnsel.cli.many import read_model, read_questions
from attnsel.cli.output import CHECK_FAILED, FOUND
from attnsel.cli.question import environment_of, read_json
from attnsel.diagnose.baseline import (
    Baseline,
    Failure,
    Held,
    Limits,
    check_document,
    failures,
    held_now,
    line_finder,
    read_baseline,
    within,
    written_anew,
)
from attnsel.diagnose.models.source import layers_of
from attnsel.errors import InvalidInput, printable
from attnsel.report.words import params_words

_SEVERAL = "any number of times"


def check(
    file: Annotated[Path, Parameter(name="FILE", help="the baseline, such as attention.json")],
    /,
    *,
    update: Annotated[bool, yes_or_no("write what holds now as what is expected")] = False,
    upgrade: Annotated[
        str | None,
        Parameter(help="ask with these in every environment: torch=2.15,cudnn=9.13; --update keeps them"),
    ] = None,
    env: Annotated[
        list[str] | None,
        Parameter(negative="", help=f"with --update: an environment more, as of explain --env; {_SEVERAL}"),
    ] = None,
    model: Annotated[
        list[str] | None,
        Parameter(negative="", help=f"with --update: a model more, as of explain --model; {_SEVERAL}"),
    ] = None,
    questions: Annotated[
        Path | None, Parameter(help="with --update: the questions of a file more, as of compare --questions")
    ] = None,
    github: Annotated[bool, yes_or_no("also an annotation for each failure, for a GitHub workflow")] = False,
    junit: Annotated[Path | None, Parameter(help="also a JUnit XML file, a test for each question")] = None,
    form: Form = TEXT,
) -> int:
    """Whether every question of a baseline is still answered as it says, for CI.

    A baseline is a JSON file in your repository: environments, models or questions, limits, and the kernel
    that is expected for each (docs/how-to/check.md). It is begun, and written anew, with --update:

        attnsel check attention.json --update --model llama-3-8b --env gpu=H100,torch=2.8
        attnsel check attention.json
        attnsel check attention.json --upgrade torch=2.15

    Told is each question with another kernel, a known bug, scores or a mask of queries x keys, or more memory
    than allowed; with the codes that decided, and what helps. A question that the baseline lacks, and one
    that is not asked any more, fail too.

    Exit code: 0 all is as expected; 2 bad input, a baseline that cannot be read or asks nothing among it;
    4 something is not as expected.
    """
    form.require_one(github=github)
    for flag, given in (("--env", env), ("--model", model), ("--questions", questions)):
        if given and not update:
            raise InvalidInput(flag, None, "goes with --update, which writes it into the baseline")
    name = str(file)
    held = _begun() if update and not os.path.lexists(file) else read_json(file, "FILE")
    held = _with(held, env or (), model or (), questions, upgrade)
    baseline = read_baseline(held, name)
    now = _now(baseline, file)
    text = json.dumps(held)
    if update:
        text = written_anew(held, baseline, now)
        write_whole("FILE", file, text)
        baseline = read_baseline(json.loads(text), name)
    else:
        text = file.read_text(encoding="utf-8-sig") if file.is_file() else text
    found = failures(baseline, now, line_finder(text))
    if junit is not None:
        write_whole("--junit", junit, junit_xml(name, now, found))
    form.print(
        lambda: check_document(name, len(now), found, update),
        lambda: stamped(
            "check", {"file": name, "green": not found, "asked": len(now), "failures": to_json(found)}
        ),
    )
    if github:
        print(*github_lines(name, found), sep="\n")
    return CHECK_FAILED if found else FOUND


def _begun() -> dict[str, Any]:
    """A baseline that asks nothing yet, with its limits written out."""
    return stamped(
        "baseline", {"environments": {}, "models": {}, "questions": {}, "limits": to_json(Limits())}
    )


def _called(text: str) -> str:
    """A short name for an environment: its GPU or its file."""
    parts = dict(part.partition("=")[::2] for part in text.split(","))
    return (parts.get("gpu") or Path(text.split(",")[0]).name or text).strip()


def _with(
    held: Any, envs: Sequence[str], models: Sequence[str], questions: Path | None, upgrade: str | None
) -> Any:
    """A baseline's JSON with what flags add to it."""
    if not isinstance(held, dict):
        return held
    called = [_called(text) for text in envs]
    asked = [] if questions is None else read_questions(questions)
    more: dict[str, dict[str, Any]] = {
        "environments": {
            name if called.count(name) == 1 else text: text for name, text in zip(called, envs, strict=True)
        },
        "models": {Path(text).name: {"model": text} for text in models},
        "questions": {
            " ".join(params_words(p)): p.model_dump(mode="json", exclude_defaults=True) for p in asked
        },
    }
    held = dict(held)
    for key, parts in more.items():
        if parts and isinstance(held.get(key, {}), dict):
            held[key] = {**held.get(key, {}), **parts}
    places = held.get("environments")
    if upgrade is not None and isinstance(places, dict):
        held["environments"] = {name: _upgraded(text, upgrade) for name, text in places.items()}
    return held


def _upgraded(text: Any, upgrade: str) -> Any:
    """An environment's text with these parts in the place of those of their names."""
    if not isinstance(text, str):
        return text
    named = {part.partition("=")[0].strip() for part in upgrade.split(",")}
    kept = [
        part for part in text.split(",") if "=" not in part or part.partition("=")[0].strip() not in named
    ]
    return ",".join((*kept, upgrade))


def _now(baseline: Baseline, file: Path) -> list[Held]:
    """What holds now; files are named from the baseline's folder. Raises InvalidInput."""
    folder = file.absolute().parent
    environments = {
        name: environment_of(text, f"{file}: environments.{name}", folder)
        for name, text in baseline.environments.items()
    }
    models = {}
    for name, asked in baseline.models.items():
        there = folder / asked.model
        try:
            models[name] = layers_of(read_model(str(there) if there.exists() else asked.model))
        except InvalidInput as error:
            raise InvalidInput(f"{file}: models.{name}", error.value, error.allowed) from None
    try:
        return held_now(baseline, environments, models)
    except InvalidInput as error:
        raise within(str(file), error) from None


# ---- for a CI ----------------------------------------------------------------------------------------


def github_lines(file: str, found: Sequence[Failure]) -> list[str]:
    """A workflow command for each failure, at its line of the baseline, named from the checkout's root."""
    root = os.environ.get("GITHUB_WORKSPACE") or os.getcwd()
    path = Path(os.path.relpath(file, root)).as_posix()
    lines = []
    for one in found:
        told = f"{one.words}. {one.fix}" if one.fix else one.words
        where = f"file={_escaped(path, ':,')},line={one.line},title={_escaped('attnsel check', ':,')}"
        lines.append(f"::error {where}::{_escaped(told)}")
    return lines


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's runner reads it back (actions/toolkit, packages/core/src/command.ts)."""
    text = printable(text)
    for sign in "%\r\n" + more:
        text = text.replace(sign, f"%{ord(sign):02X}")
    return text


def junit_xml(file: str, now: Sequence[Held], found: Sequence[Failure]) -> str:
    """A suite for each environment, a test for each question, also for one that is not asked any more."""
    by_question: dict[tuple[str, str], list[Failure]] = {
        (held.environment, held.question): [] for held in now
    }
    for one in found:
        by_question.setdefault((one.environment, one.question), []).append(one)
    root = ElementTree.Element("testsuites", name="attnsel check")
    suites: dict[str, ElementTree.Element] = {}
    for (place, question), failed in by_question.items():
        suite = suites.get(place)
        if suite is None:
            suite = suites[place] = ElementTree.SubElement(root, "testsuite", name=printable(place))
        case = ElementTree.SubElement(
            suite, "testcase", name=printable(question), classname=printable(place), file=printable(file)
        )
        if failed:
            told = ElementTree.SubElement(case, "failure", message=printable(failed[0].words))
            told.text = "\n".join(printable(f"{one.words}. {one.fix}") for one in failed)
    for suite in suites.values():
        suite.set("tests", str(len(suite)))
        suite.set("failures", str(sum(case.find("failure") is not None for case in suite)))
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

"""``conformance.py --backend cudnn``: the rules against the real libcudnn."""

from __future__ import annotations

from typing import Any

from agreement import GPUS, Tally, compare, starting_points
from attnsel.base.records import stamped
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, bar, complain, print_text, unwound
from attnsel.errors import InvalidInput
from attnsel.report.words import params_words
from attnsel.verdicts.requirements import size
from disagreements import SHOWN, gpus_of, tell_disagreements, tell_outcomes
from printed import print_json, wrap
from workspaces import Workspaces


def conformance_cudnn(
    arch: str, samples: int, seed: int, cudnn_lib: str | None, build: bool, json: bool
) -> int:
    """See ``conformance.py``."""
    from attnsel.backends.cudnn.ask.client import Library
    from attnsel.backends.cudnn.ask.libraries import Missing
    from sampling import samples as draw

    if samples < 1:
        raise InvalidInput("--samples", samples, "must be at least 1")
    gpus = gpus_of(arch) or GPUS
    try:
        with unwound(), Library(cudnn_lib) as library:
            versions = library.versions()
            questions = draw(seed, samples, starting_points())
            with bar("asking libcudnn", samples * len(gpus)) as move:
                tally = compare(library, questions, gpus, lambda tally: move(tally.asked), build=build)
            notes = library.notes
    except Missing as missing:
        complain(str(missing))
        return BAD_INPUT
    about = {**versions, "stage": "check_support", "gpus": list(gpus), "seed": seed, "samples": samples}
    if json:
        found = [one.as_dict() for one in tally.disagreements]
        said = {**about, **tally.as_dict(), "disagreements": found, "notes": notes}
        print_json(stamped("conformance-cudnn", said))
    else:
        _tell(tally, about, notes)
    sizes = tally.workspaces
    too_low = sizes is not None and 100 * sizes.below > sizes.compared
    return CHECK_FAILED if tally.outcomes["false accept"] or too_low else FOUND


def _tell(tally: Tally, about: dict[str, Any], notes: list[str]) -> None:
    """The count, then the disagreements by what they have in common."""
    tell_outcomes(
        f"cuDNN {about['cudnn']} · frontend {about['cudnn_frontend']} · judged at {about['stage']}",
        about,
        tally,
        notes,
        {
            "known bug": "refused as a known bug, library accepts",
            "no answer": "no answer in time",
            "crashes": "planner crashes, all of them refusals",
        },
    )
    fp8 = tally.fp8
    wrong = f"{fp8['false accept']} false accepts, {fp8['false reject']} false rejects"
    print_text(f"  {fp8.total():>7}  of all were about FP8 attention: {wrong}")
    if tally.workspaces is not None:
        _tell_workspaces(tally.workspaces)
    tell_disagreements(tally.disagreements)


def _tell_workspaces(found: Workspaces) -> None:
    rows = (
        (found.compared, "workspaces of plans compared with the estimate"),
        (found.agree, f"agree, {found.exact} of them to the byte"),
        (found.below, "estimates too low"),
        (found.above, "estimates too high"),
        (found.not_built, "accepted, and no plan is built"),
    )
    for number, what in rows:
        print_text(f"  {number:>7}  {what}")
    for one in found.disagreements[:SHOWN]:
        planned = "no plan" if one.planned is None else size(one.planned)
        words = " ".join(params_words(one.params))
        print_text(
            "\n".join(wrap(f"{one.gpu}: {planned}, not {size(one.estimated)}: {words}", "    ", "      "))
        )

"""``conformance.py --backend flash_attn.4``: the rules against the package's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agreement import Place, Tally, counts, starting_points
from attnsel.base.records import stamped
from attnsel.cli.explain_more import by_rules, outcome
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, bar, complain, unwound
from attnsel.environment import Environment
from attnsel.environment.gpus import familiar
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from disagreements import gpus_of, tell_disagreements, tell_outcomes
from printed import print_json

if TYPE_CHECKING:
    from flash_attention_ask.client import Answer, Package

GPUS = tuple(f"sm{arch}" for arch in (75, 80, 86, 89, 90, 100, 103, 120))
_SM_COUNTS = {gpu.arch: gpu.sm_count for gpu in familiar() if gpu.sm_count is not None}
_SM_COUNT = 132  # of an architecture of which no card is known


class Said(NamedTuple):
    """The package on one question; ``traced`` if its kernels were built to hear it."""

    supported: bool | None
    words: str
    crashed: bool
    traced: bool


class Run(NamedTuple):
    """All questions of one run. ``traced``: answers for which kernels were built."""

    tally: Tally
    traced: int


def conformance_flash(
    backend: str, source: str | None, arch: str, samples: int, seed: int, trace: bool, json: bool
) -> int:
    """See ``conformance.py``."""
    from flash_attention_ask.client import Package
    from flash_attention_ask.sample import questions
    from flash_attention_ask.source import COMPONENTS, Missing, find_source

    if samples < 1:
        raise InvalidInput("--samples", samples, "must be at least 1")
    gpus = gpus_of(arch) or GPUS
    try:
        found = find_source(backend, source)
        places = [
            Place(gpu, Environment.describe(gpu, **{COMPONENTS[backend]: found.version})) for gpu in gpus
        ]
        drawn = questions(seed, samples, starting_points(backend))
        with unwound(), Package(found) as package:
            compiler = package.compiler
            with bar(f"asking {backend}", samples * len(gpus)) as move:
                run = compare(package, drawn, places, trace, lambda tally: move(tally.asked))
            notes = list(package.notes)
    except Missing as missing:
        complain(str(missing))
        return BAD_INPUT
    about = {
        "backend": backend,
        "version": str(found.version),
        "compiler": compiler,
        "gpus": list(gpus),
        "seed": seed,
        "samples": samples,
    }
    if json:
        print_json(stamped("conformance-flash", as_dict(run, about, notes)))
    else:
        _tell(run, about, notes)
    return CHECK_FAILED if run.tally.outcomes["false accept"] else FOUND


def as_dict(run: Run, about: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    tally = run.tally
    return {
        **about,
        **counts(tally.outcomes),
        "accepted_by_package": tally.accepted,
        "crashes": tally.crashes,
        "traced": run.traced,
        "disagreements": [one.as_dict() for one in tally.disagreements],
        "notes": notes,
    }


def compare(
    package: Package,
    questions: Iterable[AttentionParams],
    places: Sequence[Place],
    trace: bool = False,
    watch: Callable[[Tally], None] = lambda tally: None,
) -> Run:
    """Put every question to rules and package, on each GPU.

    Where the rules refuse what the package's checks let pass, its kernels are built too, if its compiler is
    here: many limits are met only then. ``trace`` builds those of what both accept as well. Raises Missing.
    """
    tally, traced = Tally(), 0
    for p in questions:
        for place in places:
            verdict = by_rules(p, place.env, package.source.backend)
            said = _said(package, p, place, "check")
            if said.supported and (trace or outcome(verdict, said) == "false reject") and package.compiler:
                said = _said(package, p, place, "trace")
                traced += 1
            tally.add(place.gpu, p, verdict, said)
            watch(tally)
    return Run(tally, traced)


def _said(package: Package, p: AttentionParams, place: Place, depth: str) -> Said:
    arch = place.env.arch
    assert arch is not None
    sm_count = place.env.device.sm_count or _SM_COUNTS.get(arch, _SM_COUNT)
    answer: Answer = package.ask(p, arch, sm_count, depth)
    if answer.supported:
        return Said(True, "", False, depth == "trace")
    where = f" ({answer.where})" if answer.where else ""
    return Said(answer.supported, f"{answer.stage}: {answer.words}{where}", answer.crashed, depth == "trace")


def _tell(run: Run, about: dict[str, Any], notes: list[str]) -> None:
    """The count, then the disagreements by what they have in common."""
    tally, compiler = run.tally, about["compiler"]
    how = "its checks" if compiler is None else f"its checks, and its compiler {compiler}"
    tell_outcomes(
        f"{about['backend']} {about['version']} · {how}",
        about,
        tally,
        notes,
        {
            "known bug": "refused as a known bug, package accepts",
            "no answer": "no answer that is the package's",
            "crashes": "the process died, taken for refusals",
        },
        ("for which kernels were built", run.traced),
    )
    tell_disagreements(tally.disagreements)

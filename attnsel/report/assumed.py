"""What an answer assumes where another value would change a verdict, as a question to the reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.environment import COMPONENT_NAMES

if TYPE_CHECKING:
    from attnsel.environment.versions import Version
    from attnsel.selection.assumed import Assumption


def versions_in_words(versions: tuple[Version, ...], among: tuple[Version, ...]) -> str:
    """``1.27 and 1.28``, ``1.20 to 1.26``: neighbours among ``among`` are written as a range."""
    runs: list[list[Version]] = []
    for version in sorted(versions):
        after = runs and among.index(version) == among.index(runs[-1][-1]) + 1
        if after:
            runs[-1].append(version)
        else:
            runs.append([version])
    words: list[str] = []
    for run in runs:
        ends = [f"{version.major}.{version.minor}" for version in (run[0], run[-1])]
        words += [f"{ends[0]} to {ends[1]}"] if len(run) > 2 else list(dict.fromkeys(ends))
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def assumption_words(assumption: Assumption) -> str:
    """What is refused with which version, what runs with which, and the question that decides."""
    product = COMPONENT_NAMES.get(assumption.component, assumption.component)
    every = tuple(sorted({*assumption.runs_with, *assumption.refused_with}))
    runs = versions_in_words(assumption.runs_with, every)
    refused = versions_in_words(assumption.refused_with, every)
    codes = f" ({', '.join(assumption.codes)})" if assumption.codes else ""
    first, second = f"runs with {product} {runs}", f"is refused with {refused}{codes}"
    if not assumption.runs:
        first, second = f"is refused with {product} {refused}{codes}", f"runs with {runs}"
    shown = f"{assumption.assumed.major}.{assumption.assumed.minor}"
    return f"{assumption.candidate} {first}, {second}: which do you have? {shown} is assumed"

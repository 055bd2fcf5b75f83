"""Fuzzing: cases drawn from a seed, a verdict on each, and a failure made small and written as a script.

Hypothesis draws and shrinks. A case is a dictionary of plain values, so that a script can hold it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

Case = dict[str, Any]


class Wrong(AssertionError):
    """What a case showed that must not be: a wrong number, an unnamed error, a hang."""


class Failed(AssertionError):
    """The smallest case found that is wrong, in words and as a script."""

    def __init__(self, target: Target, case: Case, wrong: Wrong) -> None:
        self.script = target.script(case)
        super().__init__(f"{target.name}: {wrong}\n\n{self.script}")


@dataclass(frozen=True)
class Target:
    """One thing that is fuzzed.

    cases: what is drawn. attempt: makes one case and returns a word for the tally ("right", "refused",
    "InvalidInput"); raises Wrong. script: a program of its own that shows the same. gate: how many cases the
    gate runs, some seconds' worth.
    """

    name: str
    cases: SearchStrategy[Case]
    attempt: Callable[[Case], str]
    script: Callable[[Case], str]
    gate: int


def standalone(modules: Sequence[ModuleType], last: str) -> str:
    """Modules that need each other and nothing else of this folder as one program, and its last line."""
    ours = tuple(f"from {module.__name__} import" for module in modules)
    lines = [line for module in modules for line in inspect.getsource(module).splitlines()]
    future = "from __future__ import annotations"
    kept = [line for line in lines if line != future and not line.startswith(ours)]
    return "\n".join((future, *kept, "", last, ""))


def target_of(name: str, cases: SearchStrategy[Case], modules: Sequence[ModuleType], gate: int) -> Target:
    """The target whose definition ``modules`` are: the last one has ``outcome(case)``, a word for the tally
    and what is wrong, if anything."""

    def attempt(case: Case) -> str:
        word, wrong = modules[-1].outcome(case)
        if wrong:
            raise Wrong(wrong)
        return str(word)

    def script(case: Case) -> str:
        return standalone(modules, f"print(outcome({case!r}))")

    return Target(name, cases, attempt, script, gate)


def fuzz(
    target: Target,
    count: int,
    number: int,
    done: Callable[[int], None] = lambda n: None,
    *,
    shrink: bool = True,
) -> Counter[str]:
    """The tally of ``count`` cases from seed ``number``. Raises Failed with the smallest wrong one,
    or the first if not to ``shrink``."""
    tally: Counter[str] = Counter()
    wrong: list[tuple[Case, Wrong]] = []

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(target.cases)
    def each(case: Case) -> None:
        try:
            word = target.attempt(case)
        except Wrong as error:
            wrong.append((case, error))
            raise
        if not wrong:  # shrinking repeats cases
            tally[word] += 1
            done(1)

    try:
        each()
    except (Wrong, Flaky) as error:
        if not wrong:
            raise
        if isinstance(error, Flaky):  # right when it came again: what was wrong then still was
            raise Failed(target, *wrong[0]) from None
        raise Failed(target, *wrong[-1]) from None  # Hypothesis runs the smallest one last
    return tally

"""Rules against the real thing over questions at random: the count, the bound, every disagreement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.cli.explain_more import Heard, Outcome, Verdict, by_library, by_rules, outcome
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY
from workspaces import Workspaces

if TYPE_CHECKING:
    from attnsel.backends.cudnn.ask.client import Library

_DERIVED = ("max_seqlen_kv", "num_gqa_groups", "head_dim_v", "window_size", "bottom_right_diagonal")
"""Fields that follow from others where they are left out: a question is only repeated with them."""

_PLAIN = {
    name: value for name, value in AttentionParams().model_dump(mode="json").items() if name not in _DERIVED
}
GPUS = ("A100", "RTX 4090", "H100", "B200", "RTX 5090")


def plainly_stated(p: AttentionParams) -> dict[str, Any]:
    """The fields by which a question can be asked again: those that differ from the defaults."""
    stated = p.model_dump(mode="json")
    return {name: value for name, value in stated.items() if name not in _PLAIN or value != _PLAIN[name]}


@dataclass(frozen=True)
class RuleMismatch:
    """One question with two answers. ``codes``: the rules that refuse; ``library``: its words, "" for yes."""

    outcome: Outcome
    gpu: str
    params: AttentionParams
    codes: tuple[str, ...]
    library: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "gpu": self.gpu,
            "codes": list(self.codes),
            "library": self.library,
            "params": plainly_stated(self.params),
        }


@dataclass
class Tally:
    """What came out so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    accepted: int = 0  # by the library
    crashes: int = 0
    disagreements: list[RuleMismatch] = field(default_factory=list)
    fp8: Counter[str] = field(default_factory=Counter)  # outcomes of the questions about FP8 attention
    workspaces: Workspaces | None = None  # None where no plans are built

    @property
    def asked(self) -> int:
        return self.outcomes.total()

    def add(self, gpu: str, p: AttentionParams, verdict: Verdict, heard: Heard) -> Outcome:
        """One question, answered by both."""
        kind = outcome(verdict, heard)
        self.outcomes[kind] += 1
        if p.fp8_attention:
            self.fp8[kind] += 1
        self.accepted += heard.supported is True
        self.crashes += heard.crashed
        if kind not in ("agree", "known bug", "unknown"):
            self.disagreements.append(RuleMismatch(kind, gpu, p, verdict.codes, heard.words))
        return kind

    def as_dict(self) -> dict[str, Any]:
        asked, *others = counts(self.outcomes).items()
        return {
            **dict([asked]),
            "accepted_by_library": self.accepted,
            "planner_crashes": self.crashes,
            **dict(others),
            "fp8": counts(self.fp8),
            "workspaces": None if self.workspaces is None else self.workspaces.as_dict(),
        }


def counts(outcomes: Counter[str]) -> dict[str, Any]:
    """How many of each outcome, and how often the wrong ones may be at 95 %."""
    asked = outcomes.total()
    return {
        "asked": asked,
        **{name.replace(" ", "_"): outcomes[name] for name in _OUTCOMES},
        "false_accept_bound_95": upper_bound(outcomes["false accept"], asked),
        "false_reject_bound_95": upper_bound(outcomes["false reject"], asked),
    }


_OUTCOMES = ("agree", "false accept", "false reject", "known bug", "unknown", "no answer")


def upper_bound(seen: int, asked: int) -> float:
    """The largest rate that ``seen`` among ``asked`` leaves believable at 95 %: Wilson's score, and the rule
    of three where nothing was seen."""
    if not asked:
        return 1.0
    if not seen:
        return min(1.0, 3.0 / asked)
    z, rate = 1.96, seen / asked
    centre = rate + z * z / (2 * asked)
    spread = z * math.sqrt(rate * (1 - rate) / asked + z * z / (4 * asked * asked))
    return min(1.0, (centre + spread) / (1 + z * z / asked))


class Place(NamedTuple):
    """One GPU that questions are about."""

    gpu: str
    env: Environment


def starting_points(candidate: str = "cudnn") -> list[dict[str, Any]]:
    """The rules' own examples, both sides of every limit, as far as they are about the call of one rank."""
    found = []
    for rule in REGISTRY.rules.values():
        if candidate not in rule.candidates:
            continue
        for example in (rule.fires_on, rule.passes):
            fields = {name: value for name, value in example.items() if name in AttentionParams.model_fields}
            if "cp_size" not in fields:
                found.append(fields)
    return found


def compare(
    library: Library,
    questions: Iterable[AttentionParams],
    gpus: Sequence[str] = GPUS,
    watch: Callable[[Tally], None] = lambda tally: None,
    rotate: bool = False,
    build: bool = False,
) -> Tally:
    """Put every question to rules and library, on each GPU, or with ``rotate`` on one after the other.

    ``build``: let the library build the plans of what both accept, and compare their workspace.

    Raises Missing when the library cannot be asked.
    """
    from attnsel.backends.cudnn.ask.libraries import device_json

    versions = library.versions()
    places = []
    for gpu in gpus:
        env = Environment.describe(gpu, **versions)
        assert env.arch is not None
        device = device_json(env.arch, env.device.name, env.device.memory, env.device.sm_count)
        places.append((gpu, env, device))
    tally = Tally(workspaces=Workspaces() if build else None)
    for number, p in enumerate(questions):
        turn = number % len(places)
        for gpu, env, device in places[turn : turn + 1] if rotate else places:
            verdict, asked = by_rules(p, env), by_library(library, p, device)
            tally.add(gpu, p, verdict, asked)
            if tally.workspaces is not None and verdict.eligible and asked.supported:
                tally.workspaces.add(gpu, p, env, by_library(library, p, device, build=True))
            watch(tally)
    return tally

"""The rules beside the real thing: one question put to both, and what to call the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

from attnsel.backends.cudnn.ask.client import Answer, Library
from attnsel.backends.cudnn.call import planned
from attnsel.backends.cudnn.graph import backward, forward
from attnsel.environment import Environment
from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams
from attnsel.selection.evaluate import findings
from attnsel.verdicts.verdict import Reason

Outcome = Literal["agree", "false accept", "false reject", "known bug", "unknown", "no answer"]

# Codes about what is installed here, which is not about what a library can do.
_NOT_THE_LIBRARY = "INSTALL"


class Heard(Protocol):
    """What the real thing said of one question."""

    @property
    def supported(self) -> bool | None: ...

    @property
    def words(self) -> str:
        """Why not, in a line; "" where it is supported."""

    @property
    def crashed(self) -> bool:
        """It died of the question."""


class Verdict(NamedTuple):
    """What the rules say of a candidate; ``reasons`` without those about what is installed."""

    eligible: bool
    reasons: tuple[Reason, ...]

    @property
    def refusing(self) -> tuple[str, ...]:
        """Codes of plain refusals: neither known bugs nor doubts."""
        return tuple(r.code for r in self.reasons if not r.unknown and not r.code.startswith("BUG"))

    @property
    def bugs(self) -> tuple[str, ...]:
        return tuple(r.code for r in self.reasons if r.code.startswith("BUG"))

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.code for r in self.reasons))


class Asked(NamedTuple):
    """The library on one question: each graph's answer, or why there is no graph to ask about."""

    answers: Mapping[str, Answer]  # forward, and backward for training
    inexpressible: str | None = None

    @property
    def supported(self) -> bool | None:
        if self.inexpressible is not None:
            return False
        said = [answer.supported for answer in self.answers.values()]
        return False if False in said else (None if None in said else True)

    @property
    def crashed(self) -> bool:
        return any(answer.crashed for answer in self.answers.values())

    @property
    def words(self) -> str:
        """Why not, in a line; "" where it is supported."""
        if self.inexpressible is not None:
            return self.inexpressible
        unsupported = [f"{name}: {a.words}" for name, a in self.answers.items() if a.supported is not True]
        return "; ".join(unsupported)


def by_rules(p: AttentionParams, env: Environment, candidate: str = "cudnn") -> Verdict:
    reasons = tuple(r for r in findings(p, env)[candidate] if not r.code.startswith(_NOT_THE_LIBRARY))
    return Verdict(not reasons, reasons)


def by_library(library: Library, p: AttentionParams, device: dict[str, Any], build: bool = False) -> Asked:
    """Both graphs of a training call, whatever the first answer is; the forward's of an inference."""
    try:
        call = planned(p)
    except UnsupportedArgument as error:
        return Asked({}, str(error))
    answers = {"forward": library.ask(forward(call), device, build=build)}
    if p.is_training:
        answers["backward"] = library.ask(backward(call), device, build=build)
    return Asked(answers)


def outcome(verdict: Verdict, asked: Heard) -> Outcome:
    """A rule that refuses where the library accepts is a false reject, unless it names a known bug."""
    if asked.supported is None:
        return "no answer"
    if verdict.refusing:
        return "false reject" if asked.supported else "agree"
    if verdict.bugs:
        return "known bug" if asked.supported else "agree"
    if verdict.reasons:
        return "unknown"
    return "agree" if asked.supported else "false accept"

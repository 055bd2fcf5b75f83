"""One feature, one kernel, one GPU: what the engine says with every known release, condensed to ranges.

Support is not monotone, so every release is asked and nothing is inferred from its neighbours. Each question
is put to the engine as ``select`` would put it, about the one candidate (attnsel/selection/inquiry.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use.feature import Feature, Mode, ask
from attnsel.pages.can_i_use.releases import Stated, component_of, environment, releases, runs_plain
from attnsel.verdicts.verdict import Candidate

Outcome = Literal["yes", "adapts", "unknown", "no"]
State = Literal["yes", "adapts", "forward", "backward", "version", "unknown", "never"]

ANSWERS: tuple[State, ...] = ("yes", "adapts", "forward", "backward")
"""States in which a kernel runs it, at least in one direction."""


def outcome_of(candidate: Candidate) -> Outcome:
    """A verdict in one word: ``adapts`` where the call is changed exactly before the kernel runs it."""
    if candidate.verdict == "refused":
        return "no"
    if candidate.verdict == "unknown":
        return "unknown"
    return "adapts" if candidate.adaptations else "yes"


class Span(NamedTuple):
    """Releases in a row with one answer: the first, the last, and what the engine said with the last."""

    first: Version
    last: Version
    candidate: Candidate

    @property
    def outcome(self) -> Outcome:
        return outcome_of(self.candidate)

    def __contains__(self, version: object) -> bool:
        return isinstance(version, Version) and self.first <= version <= self.last

    @property
    def codes(self) -> tuple[str, ...]:
        """The rules that refuse it, or do not know; each once."""
        return tuple(dict.fromkeys(reason.code for reason in self.candidate.reasons))


class Range(NamedTuple):
    """Releases in a row with which a cell has one state."""

    first: Version
    last: Version
    state: State


class Cell:
    """One answer. ``at``: the release at hand, the newest where none was stated. ``spans``: per mode that the
    feature is asked in, the releases by what the engine says with them, oldest first. ``plain``: the releases
    with which the kernel runs a plain call of these modes on this GPU."""

    def __init__(
        self,
        feature: Feature,
        kernel: str,
        gpu: str,
        at: Version,
        stated: Stated,
        spans: dict[Mode, tuple[Span, ...]],
        plain: tuple[Version, ...],
    ) -> None:
        self.feature, self.kernel, self.gpu = feature, kernel, gpu
        self.at, self.stated, self.spans, self.plain = at, stated, spans, plain
        self.component = component_of(kernel)

    def __repr__(self) -> str:
        return f"<Cell {self.feature.name} {self.kernel} {self.gpu} {self.component} {self.at}: {self.state}>"

    @cached_property
    def state(self) -> State:
        """The state with the release at hand; ``version`` where another known release runs it."""
        here = self.state_at(self.at)
        if here == "never" and any(each.state in ANSWERS for each in self.ranges):
            return "version"
        return here

    def state_at(self, version: Version) -> State:
        """The state with one release, which is ``never`` where that release does not run it."""
        return _joined({mode: self.span(mode, version).outcome for mode in self.spans})

    def span(self, mode: Mode, version: Version | None = None) -> Span:
        """What the engine says with a release, the one at hand if None."""
        wanted = self.at if version is None else version
        return next(span for span in self.spans[mode] if wanted in span)

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """All known releases by state, oldest first."""
        groups = (
            (state, list(members))
            for state, members in groupby(releases_asked(self.kernel, self.at), self.state_at)
        )
        return tuple(Range(members[0], members[-1], state) for state, members in groups)

    @cached_property
    def since(self) -> Version:
        """The first known release with the state at hand."""
        here = self.state_at(self.at)
        return next(each.first for each in self.ranges if each.state == here)

    @property
    def always(self) -> bool:
        """Whether every known release from ``since`` on has that state."""
        here = self.state_at(self.at)
        return all(each.state == here for each in self.ranges if each.first >= self.since)

    @property
    def from_the_oldest(self) -> bool:
        """Whether ``since`` is the oldest release that is known."""
        return self.since == self.ranges[0].first

    @cached_property
    def whenever(self) -> bool:
        """Whether every release with which the kernel runs a plain call on this GPU has that state."""
        here = self.state_at(self.at)
        return bool(self.plain) and all(self.state_at(version) == here for version in self.plain)

    @property
    def unlocked_at(self) -> Version | None:
        """Of a cell in state ``version``: the nearest release above that runs it, else the nearest below."""
        running = [each for each in self.ranges if each.state in ANSWERS]
        above = next((each.first for each in running if each.first > self.at), None)
        if above is not None:
            return above
        return next((each.last for each in reversed(running) if each.last < self.at), None)

    def environment(self, version: Version | None = None) -> Environment:
        """The machine that was asked about."""
        return environment(self.kernel, self.gpu, self.at if version is None else version, self.stated)


def _joined(outcomes: dict[Mode, Outcome]) -> State:
    """The state of a cell from what is said of its modes."""
    said = set(outcomes.values())
    if "unknown" in said:
        return "unknown"
    if said == {"no"}:
        return "never"
    if "no" in said:
        return "backward" if outcomes["inference"] == "no" else "forward"
    return "adapts" if "adapts" in said else "yes"


def releases_asked(kernel: str, at: Version) -> tuple[Version, ...]:
    """The known releases of what decides about a kernel, and the one at hand."""
    known = releases(kernel)
    return known if at in known else tuple(sorted({*known, at}))


def cells(
    features: Iterable[Feature], kernels: Iterable[str], gpus: Iterable[str], stated: Stated = ()
) -> Iterator[Cell]:
    """The cells of a matrix: of each kernel on each GPU all features.

    ``stated``: releases that a user has. The component that decides about a kernel is asked with all of its
    releases, and the stated one is at hand; the others are as stated.
    """
    asked = tuple(features)
    for kernel in kernels:
        for gpu in gpus:
            yield from _column(asked, kernel, gpu, stated)


def _column(features: tuple[Feature, ...], kernel: str, gpu: str, stated: Stated) -> Iterator[Cell]:
    component = component_of(kernel)
    known = releases(kernel)
    at = dict(stated).get(component) or known[-1]
    others = tuple((name, version) for name, version in stated if name != component)
    known = releases_asked(kernel, at)
    spans: dict[tuple[int, Mode], list[Span]] = {
        (place, mode): [] for place, feature in enumerate(features) for mode in feature.modes
    }
    plain: dict[Mode, list[Version]] = {"training": [], "inference": []}
    for version in known:  # one machine after the other: what the engine keeps of each is used at once
        env = environment(kernel, gpu, version, others)
        for mode, those in plain.items():
            if runs_plain(kernel, env, mode):
                those.append(version)
        for (place, mode), found in spans.items():
            feature = features[place]
            candidate = ask(feature, mode, kernel, env)
            if found and _alike(found[-1].candidate, candidate):
                found[-1] = found[-1]._replace(last=version, candidate=candidate)
            else:
                found.append(Span(version, version, candidate))
    for place, feature in enumerate(features):
        halves = {mode: tuple(spans[place, mode]) for mode in feature.modes}
        both = [version for version in known if all(version in plain[mode] for mode in feature.modes)]
        yield Cell(feature, kernel, gpu, at, others, halves, tuple(both or plain["inference"]))


def _alike(one: Candidate, other: Candidate) -> bool:
    """The same answer for the same reasons."""
    return (
        one.verdict == other.verdict
        and [reason.code for reason in one.reasons] == [reason.code for reason in other.reasons]
        and [made.text for made in one.adaptations] == [made.text for made in other.adaptations]
    )

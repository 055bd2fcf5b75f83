"""Can I use it? Features, kernels, architectures and releases in one matrix, made by asking the engine."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import groupby, product
from typing import Any, Literal, NamedTuple, cast

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import json_fields
from attnsel.base.rows import read_rows
from attnsel.base.suggestions import candidate_suggestion
from attnsel.environment import Environment, describe_device
from attnsel.environment.read import unread_release
from attnsel.environment.releases import ASSUMED, ON_ARM, runs_on, torch_builds
from attnsel.environment.versions import Version
from attnsel.environment.wheels import on_pypi
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY
from attnsel.selection.inquiry import Inquiry
from attnsel.verdicts.reasons import NO_EVIDENCE, Candidate

# --------------------------------------------------------------------------------------------------------
# What a feature is: a name, words, and what it changes in a question; and how one is asked about.


Half = Literal["bf16", "fp16"]
Mode = Literal["training", "inference"]


@json_fields("name", "title", "group", "about", "modes", "changes", ("limits", "policy"))
@dataclass(frozen=True, eq=False)
class Feature:
    """One feature.

    name: its address and its word on the command line. title: a few words. about: a sentence or two.
    changes: fields of AttentionParams that differ from the default question. also: other words for it, with
    blanks between. modes: whether a cell asks for training, for inference or for both. policy: fields of
    Policy, where the question has a limit. group: the heading that it stands under.
    """

    name: str
    title: str
    about: str
    changes: Mapping[str, Any]
    also: str = ""
    modes: tuple[Mode, ...] = ("training", "inference")
    policy: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""
    _params: dict[tuple[Mode, Half], AttentionParams] = field(default_factory=dict, repr=False)

    @cached_property
    def limits(self) -> Policy:
        """The policy of the question."""
        return Policy(**self.policy)

    def params(self, mode: Mode, half: Half = "bf16") -> AttentionParams:
        """The question. ``half``: its element type, unless the feature is one."""
        made = self._params.get((mode, half))
        if made is None:
            made = self._params[mode, half] = AttentionParams(**self.asked(mode, half))
        return made

    def asked(self, mode: Mode, half: Half = "bf16") -> dict[str, Any]:
        """The fields of the question that differ from the default one."""
        fields = dict(self.changes)
        if half != "bf16":
            fields.setdefault("dtype", half)
        if mode == "inference":
            fields["is_training"] = False
        return fields

    @property
    def words(self) -> tuple[str, ...]:
        """What it may be called: its name first."""
        return (self.name, *self.also.split())


@cache
def all_features() -> dict[str, Feature]:
    """All of them by name, in the order in which they are listed: the rows of ``data/features.csv``."""
    found = {}
    for row in read_rows("attnsel.pages.can_i_use", "features"):
        pairs = (piece.split("=", 1) for piece in row["changes"].split("; ") if piece)
        found[row["name"]] = Feature(
            name=row["name"],
            title=row["title"],
            about=row["about"],
            changes={field: _value(text) for field, text in pairs},
            also=row["also"],
            modes=(cast(Mode, row["mode"]),) if row["mode"] else ("training", "inference"),
            policy={"memory_limit": row["memory_limit"]} if row["memory_limit"] else {},
            group=row["group"],
        )
    return found


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):  # a word, such as padding_causal
        return text


def find(words: Iterable[str]) -> tuple[Feature, ...]:
    """The features that these words name, each once: a name, another word for it, or the beginning of several
    names (``fp8``, ``head-dim``, ``paged``). Raises InvalidInput, which names near ones."""
    every, found = all_features(), dict[str, Feature]()
    for word in words:
        text = word.strip().casefold().replace("_", "-").replace(" ", "-")
        named = (
            [each for name, each in every.items() if name == text]
            or [each for each in every.values() if text in each.words]
            or [each for name, each in every.items() if name.startswith(f"{text}-")]
        )
        if not named:
            called = {name: each.name for each in every.values() for name in each.words}
            near = dict.fromkeys(called[name] for name in difflib.get_close_matches(text, called))
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            if kernel := candidate_suggestion(text, CANDIDATES):
                meant = f"a kernel is asked about with --kernel: {kernel} "
            raise InvalidInput(
                "feature", word, f"there is no such feature: {meant}attnsel can-i-use lists them"
            )
        found |= {each.name: each for each in named}
    return tuple(found.values())


def ask(feature: Feature, mode: Mode, kernel: str, env: Environment) -> Candidate:
    """What the engine says of one kernel, as part of what ``select`` says of all."""
    return Inquiry(feature.params(mode, env.half), env, feature.limits, NO_EVIDENCE).judge(kernel)


# --------------------------------------------------------------------------------------------------------
# Which releases a kernel is asked with: of the one component that decides about it, all that are known.
#
# The component is the library whose kernels run, where it can be installed by itself (cuDNN, flash-attn),
# else the last of what the kernel needs (Triton, PyTorch). Everything else that it needs is the newest, or
# what the user stated. With each PyTorch come the cuDNN and Triton of its wheel.


ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 103, 120)
"""The architectures of the matrix: data center and desktop GPUs since Volta."""

GPUS = tuple(f"sm{arch}" for arch in ARCHITECTURES)

_PACKAGES = {
    "cudnn": ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    "triton": ("triton",),
    "flash_attn": ("flash-attn",),
    "flash_attn_4": ("flash-attn-4",),
}
_PLAIN = Feature("plain", "a plain call", "The default question.", {})

Stated = tuple[tuple[str, Version], ...]
"""Versions by component that a user stated, sorted."""


def component_of(kernel: str) -> str:
    """The component whose release decides what a kernel can do."""
    record = CANDIDATES[kernel]
    return record.library if record.library in record.needs else record.needs[-1]


@lru_cache(maxsize=64)
def published(component: str) -> tuple[Version, ...]:
    """The releases of a component that are known, oldest first: those of a package registry
    whose attention somebody has read, and those that are assumed of PyTorch; of what is in none, those that
    rules name."""
    if component == "torch":
        return tuple(sorted({build.torch for build in torch_builds() if build.torch <= ASSUMED}))
    if component in _PACKAGES:
        texts = (text for package in _PACKAGES[component] for text in on_pypi()[package])
        known = {Version.parse(text) for text in texts}
        return tuple(sorted(version for version in known if unread_release(component, version) is None))
    return tuple(sorted({edge for rule in REGISTRY.rules.values() for edge in rule.edges(component)}))


@lru_cache(maxsize=64)
def releases(kernel: str) -> tuple[Version, ...]:
    """The releases that a kernel is asked with: from the first that runs a plain call on some GPU."""
    known = published(component_of(kernel))
    for place, version in enumerate(known):
        if any(runs_plain(kernel, environment(kernel, gpu, version), "inference") for gpu in GPUS):
            return known[place:]
    return known


def runs_plain(kernel: str, env: Environment, mode: Mode) -> bool:
    """Whether a kernel runs a plain causal call there."""
    return ask(_PLAIN, mode, kernel, env).eligible


@lru_cache(maxsize=512)
def newest(component: str, gpu: str) -> Version | None:
    """The newest known release; of PyTorch the newest that has a wheel with code for that GPU."""
    if component == "torch":
        arch = describe_device(gpu).arch
        able = [
            build.torch for build in torch_builds() if arch is None or arch in ON_ARM or runs_on(build, arch)
        ]
        return max((torch for torch in able if torch <= ASSUMED), default=ASSUMED)
    usual: Version | None = getattr(Environment.describe(gpu), component)
    known = published(component)
    return known[-1] if known and (usual is None or component in _PACKAGES) else usual


@lru_cache(maxsize=8192)
def environment(kernel: str, gpu: str, version: Version, stated: Stated = ()) -> Environment:
    """A machine with a GPU, this release of what decides about a kernel, and of what it needs besides what is
    stated, else the newest."""
    given: dict[str, Version | None] = dict(stated)
    for component in CANDIDATES[kernel].needs:
        if component not in given:
            given[component] = newest(component, gpu)
    return Environment.describe(gpu, **{**given, component_of(kernel): version})


# --------------------------------------------------------------------------------------------------------
# One feature, one kernel, one GPU: what the engine says with every known release, condensed to ranges.
#
# Support is not monotone, so every release is asked and nothing is inferred from its neighbours. Each
# question is put to the engine as ``select`` would put it, about the one candidate
# (attnsel/selection/inquiry.py).


Outcome = Literal["yes", "adapts", "unknown", "no"]
State = Literal["yes", "adapts", "forward", "backward", "version", "unknown", "never"]

ANSWERS: tuple[State, ...] = ("yes", "adapts", "forward", "backward")
"""States in which a kernel runs it, at least in one direction."""


_OUTCOMES: dict[str, Outcome] = {"refused": "no", "unknown": "unknown"}  # by verdict


class Span(NamedTuple):
    """Releases in a row with one answer: the first, the last, and what the engine said with the last."""

    first: Version
    last: Version
    candidate: Candidate

    @property
    def outcome(self) -> Outcome:
        """In one word: ``adapts`` where the call is changed exactly before the kernel runs it."""
        changed: Outcome = "adapts" if self.candidate.adaptations else "yes"
        return _OUTCOMES.get(self.candidate.verdict, changed)

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
        outcomes = {mode: self.span(mode, version).outcome for mode in self.spans}
        said = set(outcomes.values())
        if "unknown" in said:
            return "unknown"
        if said == {"no"}:
            return "never"
        if "no" in said:
            return "backward" if outcomes["inference"] == "no" else "forward"
        return "adapts" if "adapts" in said else "yes"

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
    asked = [(feature, mode) for feature in features for mode in feature.modes]
    for kernel, gpu in product(kernels, tuple(gpus)):
        component = component_of(kernel)
        at = dict(stated).get(component) or releases(kernel)[-1]
        others = tuple((name, version) for name, version in stated if name != component)
        known = releases_asked(kernel, at)
        spans: dict[Feature, dict[Mode, list[Span]]] = {feature: {} for feature, _ in asked}
        plain: dict[Mode, set[Version]] = {"training": set(), "inference": set()}
        for version in known:  # one machine after the other: what the engine keeps of each is used at once
            env = environment(kernel, gpu, version, others)
            for mode, those in plain.items():
                those |= {version} if runs_plain(kernel, env, mode) else set()
            for feature, mode in asked:
                candidate, found = ask(feature, mode, kernel, env), spans[feature].setdefault(mode, [])
                if found and _said(found[-1].candidate) == _said(candidate):
                    found[-1] = found[-1]._replace(last=version, candidate=candidate)
                else:
                    found.append(Span(version, version, candidate))
        for feature, by_mode in spans.items():
            both = set.intersection(*(plain[mode] for mode in feature.modes)) or plain["inference"]
            halves = {mode: tuple(found) for mode, found in by_mode.items()}
            yield Cell(feature, kernel, gpu, at, others, halves, tuple(sorted(both)))


def _said(candidate: Candidate) -> tuple[object, ...]:
    """The answer and its reasons."""
    codes = tuple(reason.code for reason in candidate.reasons)
    return (candidate.verdict, codes, tuple(made.text for made in candidate.adaptations))

"""Versions that nobody stated: which value is assumed, and where an answer depends on it.

A described environment fills in what was left out. Of the values that are as likely, the one whose verdicts
most of the others share is taken; where some would change a verdict, the report says which and asks.
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, reduce
from operator import and_, or_
from types import FunctionType
from typing import Any, NamedTuple

from attnsel.backends.registry import OLDEST_TORCH
from attnsel.environment import Environment
from attnsel.environment.read import newest_read
from attnsel.environment.releases import FRONTENDS, default_build, fitting_build, torch_builds
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY, Rule
from attnsel.selection.evaluate import FoldedRules, Kind, Waivers, kind_of, split, waived_codes
from attnsel.selection.rule_index import Bits, names_in, names_read, rule_index
from attnsel.verdicts.reasons import Candidate, Page, Unknown, Violation

_COMPANIONS = ("torch", "cuda", "cudnn", "triton")
"""What one wheel of PyTorch decides together."""


class Assumption(NamedTuple):
    """A verdict that another value of what was assumed would change.

    ``assumed``: the value that was taken for ``component``. ``runs_with`` and ``refused_with``: values that
    are as likely, lowest first, by the verdict they give; ``codes``: what refuses there.
    """

    candidate: str
    component: str
    assumed: Version
    runs_with: tuple[Version, ...]
    refused_with: tuple[Version, ...]
    codes: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """The verdict with the value that was taken."""
        return self.assumed in self.runs_with


@lru_cache(maxsize=512)
def alternatives(env: Environment, component: str) -> tuple[Environment, ...]:
    """The environments that differ in one thing nobody stated and are as likely, this one among them.

    For cudnn-frontend every release that attnsel takes; for torch the releases next to the one that fits what
    was stated, each with its own companions. Empty where ``component`` was stated.
    """
    if not _is_open(env, component):
        return ()
    if component == "cudnn_frontend":
        return tuple(_with(env, cudnn_frontend=version) for version in FRONTENDS)
    stated = {
        name: version
        for name in (*_COMPANIONS, "python")
        if name not in env.assumed and (version := getattr(env, name)) is not None
    }
    near = filter(None, map(default_build, _neighbours(env.torch)))
    # What goes with what was stated; the nearest, where no build is made of just that.
    builds = (fitting_build(env.arch, {**stated, "torch": release.torch}) for release in near)
    free = [name for name in _COMPANIONS if name in env.assumed]
    others = [
        _with(env, **{name: getattr(build, name) for name in free})
        for build in builds
        if build is not None and build.torch != env.torch
    ]
    return tuple(sorted([env, *others], key=lambda other: other.torch or Version(0)))


def _is_open(env: Environment, component: str) -> bool:
    return component in env.assumed and getattr(env, component) is not None


def _with(env: Environment, **versions: Version) -> Environment:
    """The same with other versions, which stay assumed."""
    if all(getattr(env, name) == version for name, version in versions.items()):
        return env
    return env.derive(**versions)


def _neighbours(torch: Version | None) -> tuple[Version, ...]:
    """The releases of PyTorch before and after this one, or the two before the newest; none that attnsel does
    not run on, or that nobody has read."""
    newest = newest_read("torch")
    minors = sorted({b.torch[:2] for b in torch_builds() if OLDEST_TORCH <= b.torch <= newest})
    if torch is None or torch[:2] not in minors:
        return ()
    place = min(minors.index(torch[:2]), len(minors) - 2)
    near = minors[max(0, place - 1) : place + 2]
    return tuple(Version(*minor, 99) for minor in near if minor != torch[:2])


# ---- The vote: what most of the likely environments say ------------------------------------------------
# Only a rule that they do not open alike, or whose body reads a version that moves, can say one thing in one
# of them and another elsewhere. There are few of those, and of each kind of question fewer.


class _Voice(NamedTuple):
    """One of the environments, how many others are as good as it, and what contested rules say there: of
    every question of a kind, and those that are to be asked about each."""

    env: Environment
    weight: int
    said: frozenset[tuple[str, str]]
    left: FoldedRules

    def heard(self, p: AttentionParams) -> frozenset[tuple[str, str]]:
        """Every refusal that is contested: candidate and code."""
        found = self.left.findings(p, self.env)
        return self.said | _refusals(found) if found else self.said


def _refusals(found: Iterable[tuple[Page, Violation | Unknown]]) -> frozenset[tuple[str, str]]:
    return frozenset(
        (name, rule.code)
        for rule, finding in found
        if not isinstance(finding, Unknown)
        for name in rule.candidates  # type: ignore[attr-defined]
    )


def resolve_assumed(p: AttentionParams, env: Environment, waivers: Waivers) -> Environment:
    """``env`` with those of its assumed values that most others agree with, about this question.

    They are left as they are where no rule that speaks up reads them. What is stated stays, however new.
    """
    first = kind = kind_of(p, env, waivers)
    for component in ("torch", "cudnn_frontend"):
        voices: tuple[_Voice, ...] | None = kind.voices.get(component)
        if voices is None:
            voices = kind.voices[component] = _voices(kind, component)
        if voices:
            agreed = _agreed(p, kind, component, voices)
            if agreed is not kind.env:
                kind = kind_of(p, agreed, waivers)
    if kind is first:
        return env
    moved = {name: getattr(kind.env, name) for name in env.assumed if name != "dtype"}  # the call's
    return _with(env, **{name: one for name, one in moved.items() if one != getattr(first.env, name)})


def _agreed(p: AttentionParams, kind: Kind, component: str, voices: tuple[_Voice, ...]) -> Environment:
    """That of the voices which most of them agree with."""
    env = kind.env
    every = [voice.heard(p) for voice in voices]
    if every.count(every[0]) == len(every):
        return env
    heard = {voice.env: those for voice, those in zip(voices, every, strict=True)}
    said = heard[env]
    if not any(_reads(code, component, env) for _, code in said):
        found = kind.rules().findings(p, env).values()
        spoken = {reason.code for reasons in found for reason in reasons if not reason.unknown}
        if not any(_reads(code, component, env) for code in spoken):
            return env
    votes: Counter[tuple[str, str]] = Counter()
    for voice in voices:
        votes.update(dict.fromkeys(heard[voice.env], voice.weight))
    half = sum(voice.weight for voice in voices) / 2
    refused = {one for one, count in votes.items() if count > half}
    agreed = min(len(those ^ refused) for those in heard.values())
    if len(said ^ refused) > agreed:
        env = next(other for other, those in heard.items() if len(those ^ refused) == agreed)
    return env


def _voices(kind: Kind, component: str) -> tuple[_Voice, ...]:
    """Those of the likely environments that speak for all; none where they say the same of every question
    of this kind."""
    env, q = kind.env, kind.like
    groups = _alike(env, component)
    if len(groups) < 2:
        return ()
    index = rule_index()
    asked = _contested(env, component) & ~index.coded(waived_codes(kind.waivers))
    asked &= index.concerned(q.fp8_attention, q.context_parallel, q.is_training)
    voices = []
    for there, weight, opened in groups:
        said, left = split(index.rules_of(asked & opened), q, there)
        voices.append(_Voice(there, weight, _refusals(said), left))
    if not any(voice.left.rules for voice in voices) and len({voice.said for voice in voices}) == 1:
        return ()
    return tuple(voices)


@lru_cache(maxsize=512)
def _contested(env: Environment, component: str) -> Bits:
    """The rules that can say something else in another of the likely environments: not all of them open it,
    or its body reads a version that moves."""
    index, moved = rule_index(), _moved(component, env)
    opened = [alike.opened for alike in _alike(env, component)]
    anywhere, everywhere = reduce(or_, opened), reduce(and_, opened)
    names = frozenset(moved)

    def reads(rule: Rule) -> bool:
        return not (names.isdisjoint(names_read(rule.body)) or names.isdisjoint(_named(rule.body)))

    return anywhere & ~everywhere | index.passing(everywhere, moved, reads)


@lru_cache(maxsize=1024)
def _named(body: Any) -> frozenset[str]:
    """Every name in a body and in the functions that it calls. A body whose fields cannot be told from its
    code names a version all the same where it reads one."""
    functions: list[FunctionType] = []
    called = [body]
    while called:
        function = inspect.unwrap(called.pop())
        if isinstance(function, FunctionType) and function not in functions:
            functions.append(function)
            called += map(function.__globals__.get, names_in(function.__code__))
            called += [cell.cell_contents for cell in function.__closure__ or ()]
    return frozenset(name for function in functions for name in names_in(function.__code__))


class _Alike(NamedTuple):
    """One of the alternatives that answers for some, how many these are, and the rules that they open."""

    env: Environment
    weight: int
    opened: Bits


@lru_cache(maxsize=512)
def _alike(env: Environment, component: str) -> tuple[_Alike, ...]:
    """The alternatives by what rules make of their versions, the newest first."""
    if not _is_open(env, component):
        return ()
    index, groups = rule_index(), dict[Any, list[Any]]()
    if component == "cudnn_frontend":  # it moves alone: what its versions open is known without environments
        for version, opened in index.applying_by(env, component, FRONTENDS[::-1]):
            groups.setdefault(opened, []).append(version)
        return tuple(
            _Alike(
                env if env.cudnn_frontend in those else _with(env, cudnn_frontend=those[0]),
                len(those),
                opened,
            )
            for opened, those in groups.items()
        )
    every = [(n, edges("", n)) for n in _moved(component, env)]
    for other in reversed(alternatives(env, component)):
        # What is assumed to be missing is neither above an edge nor below it.
        place = [(here := getattr(other, n)) and bisect_right(found, here) for n, found in every]
        groups.setdefault(tuple(place), []).append(other)
    there = [(env if env in those else those[0], len(those)) for those in groups.values()]
    return tuple(_Alike(*one, index.applying(one[0])) for one in there)


@lru_cache(maxsize=4096)
def _reads(code: str, component: str, env: Environment) -> bool:
    """Whether a rule may say something else of another version of what was assumed."""
    rule = REGISTRY.rules.get(code)
    return rule is not None and any(True for name in _moved(component, env) for _ in rule.edges(name))


def _moved(component: str, env: Environment) -> tuple[str, ...]:
    """What changes together with a component: a wheel's own, as far as nobody stated them."""
    return tuple(n for n in _COMPANIONS if n in env.assumed) if component == "torch" else (component,)


def assumptions(
    env: Environment,
    candidates: tuple[Candidate, ...],
    judge: Callable[[str, Environment], Candidate],
) -> Iterator[Assumption]:
    """The verdicts that rest on what was assumed; ``judge`` asks about one candidate somewhere else."""
    for component in ("torch", "cudnn_frontend"):
        likely = alternatives(env, component)
        if len(likely) < 2:
            continue
        for candidate in candidates:
            if not _may_rest(candidate, likely, component):
                continue
            verdicts = [(getattr(other, component), judge(candidate.name, other)) for other in likely]
            runs = tuple(version for version, there in verdicts if there.verdict != "refused")
            refused = tuple(version for version, there in verdicts if there.verdict == "refused")
            if runs and refused:
                against = (r for _, there in verdicts for r in there.reasons if not r.unknown)
                codes = dict.fromkeys(r.code for r in against if _reads(r.code, component, env))
                assumed = getattr(env, component)
                yield Assumption(candidate.name, component, assumed, runs, refused, tuple(codes))


def _may_rest(candidate: Candidate, likely: tuple[Environment, ...], component: str) -> bool:
    """Whether another of these could give another verdict: by the versions at which its rules change."""
    if candidate.verdict == "refused":
        return all(_reads(reason.code, component, likely[0]) for reason in candidate.reasons)
    for name in _moved(component, likely[0]):
        lowest, highest = getattr(likely[0], name), getattr(likely[-1], name)
        if any(lowest < edge <= highest for edge in edges(candidate.name, name)):
            return True
    return False


@lru_cache(maxsize=256)
def edges(name: str, component: str) -> tuple[Version, ...]:
    """Versions of a component at which some rule about this candidate, or about any if it is "", changes
    its mind, lowest first."""
    rules = (rule for rule in REGISTRY.rules.values() if not name or name in rule.candidates)
    return tuple(sorted({edge for rule in rules for edge in rule.edges(component)}))

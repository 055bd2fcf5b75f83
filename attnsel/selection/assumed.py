"""Versions that nobody stated: which value is assumed, and where an answer depends on it.

A described environment fills in what was left out. Of the values that are as likely, the one whose verdicts
most of the others share is taken; where some would change a verdict, the report says which and asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from attnsel.backends.registry import OLDEST_TORCH
from attnsel.environment import Environment
from attnsel.environment.releases import FRONTENDS, default_build, fitting_build, torch_builds
from attnsel.environment.versions import Version
from attnsel.params import AttentionParams
from attnsel.rules import REGISTRY
from attnsel.selection.evaluate import Waivers, findings
from attnsel.verdicts.reasons import Candidate

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
    if component not in env.assumed or getattr(env, component) is None:
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


def _with(env: Environment, **versions: Version) -> Environment:
    """The same with other versions, which stay assumed."""
    if all(getattr(env, name) == version for name, version in versions.items()):
        return env
    return env.derive(**versions)


def _neighbours(torch: Version | None) -> tuple[Version, ...]:
    """The releases of PyTorch before and after this one, or the two before the newest; none that attnsel does
    not run on."""
    minors = sorted({build.torch[:2] for build in torch_builds() if build.torch >= OLDEST_TORCH})
    if torch is None or torch[:2] not in minors:
        return ()
    place = min(minors.index(torch[:2]), len(minors) - 2)
    near = minors[max(0, place - 1) : place + 2]
    return tuple(Version(*minor, 99) for minor in near if minor != torch[:2])


def resolve_assumed(p: AttentionParams, env: Environment, waivers: Waivers) -> Environment:
    """``env`` with those of its assumed values that most others agree with, about this question.

    They are left as they are where no rule that speaks up reads them.
    """
    for component in ("torch", "cudnn_frontend"):
        likely = alternatives(env, component)
        if len(likely) < 2:
            continue
        said = _said(p, env, waivers)
        if not any(_reads(code, component, env) for _, code in said):
            continue
        heard: dict[Environment, frozenset[tuple[str, str]]] = {}
        votes: Counter[tuple[str, str]] = Counter()
        for alike in _alike(env, component):
            heard[alike[0]] = there = said if env in alike else _said(p, alike[0], waivers)
            votes.update({one: len(alike) for one in there})
        refused = {one for one, count in votes.items() if 2 * count > len(likely)}
        agreed = min(len(those ^ refused) for those in heard.values())
        if len(said ^ refused) > agreed:
            env = next(other for other, those in heard.items() if len(those ^ refused) == agreed)
    return env


@lru_cache(maxsize=512)
def _alike(env: Environment, component: str) -> tuple[tuple[Environment, ...], ...]:
    """The alternatives by what rules make of their versions, the newest first: one answers for all of a
    group."""
    groups: dict[tuple[Any, ...], list[Environment]] = {}
    moved = _moved(component, env)
    rules = [rule for rule in REGISTRY.rules.values() if any(True for n in moved for _ in rule.edges(n))]
    for other in reversed(alternatives(env, component)):
        above = [getattr(other, n) >= edge for rule in rules for n in moved for edge in rule.edges(n)]
        opened = tuple(above) if component == "torch" else tuple(rule.applies(other) for rule in rules)
        groups.setdefault(opened, []).append(other)
    return tuple(map(tuple, groups.values()))


def _said(p: AttentionParams, env: Environment, waivers: Waivers) -> frozenset[tuple[str, str]]:
    """Every refusal: candidate and code."""
    return frozenset(
        (name, reason.code)
        for name, reasons in findings(p, env, waivers).items()
        for reason in reasons
        if not reason.unknown
    )


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


@lru_cache(maxsize=64)
def edges(name: str, component: str) -> tuple[Version, ...]:
    """Versions of a component at which some rule about this candidate changes its mind, lowest first."""
    rules = (rule for rule in REGISTRY.rules.values() if name in rule.candidates)
    return tuple(sorted({edge for rule in rules for edge in rule.edges(component)}))

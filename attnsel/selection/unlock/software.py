"""Software as one consistent set: a build of torch, and what is installed beside it.

A wheel of torch pins cuDNN and Triton to one release each, so a change of one is a change of all. What may
be tried: what torch pins anyway; another torch whose pins do; another release of one package in place of what
torch pins (an override). Where torch was stated, overriding comes before another torch; where nobody stated
it, after. Which set works is asked of the engine, by whoever walks through these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.backends.registry import OLDEST_TORCH
from attnsel.base.records import json_fields
from attnsel.environment import COMPONENTS, Environment, component_name
from attnsel.environment.read import unread_release
from attnsel.environment.releases import ASSUMED, FRONTENDS, ON_ARM, Build, build_with, runs_on, torch_builds
from attnsel.environment.versions import Version
from attnsel.environment.wheels import (
    Wheel,
    flash_attn_3_index,
    flash_attn_wheel,
    install_flash_attn,
    install_flash_attn_3,
    install_flash_attn_4,
    on_pypi,
)
from attnsel.rules import Rule
from attnsel.selection.unlock.change import Scenario, another, changed, version_number

Wanted = Mapping[str, Version]
"""By component, the nearest version that is known to help."""

PINNED = ("cudnn", "triton")  # by a wheel of torch
_BOUND_TO_TORCH = frozenset({*PINNED, "flash_attn", "flash_attn_3"})
_MOST_RELEASES = 4  # tried of one package: rules seldom go back and forth more often


class Software(NamedTuple):
    """A machine with one set. ``build`` is its torch, None where nobody knows it; ``torch_first``: it is
    installed before the rest. ``overrides`` names what is installed in place of the build's own pin."""

    env: Environment
    build: Build | None
    moved: bool  # torch, or the CUDA that it is built for, is not that of the question
    torch_first: bool
    overrides: tuple[str, ...] = ()


def software_sets(env: Environment, wanted: Wanted) -> Iterator[Software]:
    """Sets with all that is wanted, in the order in which they should be tried.

    With nothing wanted: another torch, one that has code for this GPU.
    """
    here = build_with(env.torch, env.cuda)
    usable = env.torch is not None and env.torch >= OLDEST_TORCH and has_code(env, here)
    stays = usable and bool(wanted) and not wanted.keys() & {"torch", "cuda"}
    as_is = _beside(env, wanted, here, override=False) if stays else []
    if "torch" not in env.assumed:
        yield from as_is
    instead = _beside(env, wanted, here, override=True) if stays else []
    if "torch" not in env.assumed:
        yield from instead
    # Seldom are many of these asked for, and there are as many as builds of torch: made one by one.
    moves = (each for build in _others(env, wanted, here) for each in _with_build(env, wanted, build, here))
    overriding: list[Software] = []
    compiled: list[Software] = []
    for each in chain(as_is, moves):
        if wanted.keys() & set(each.overrides):
            overriding.append(each)
        elif has_wheels(each.env, wanted):
            yield each
        else:
            compiled.append(each)
    yield from instead
    yield from overriding
    yield from compiled


def has_code(env: Environment, build: Build | None) -> bool:
    """Whether a build runs on this machine's GPU, as far as both are known: some boards have their own."""
    return build is None or env.arch is None or env.arch in ON_ARM or runs_on(build, env.arch)


def has_wheels(env: Environment, wanted: Wanted) -> bool:
    """Whether the packages of FlashAttention among what is wanted need not be compiled."""
    if "flash_attn" in wanted and not isinstance(flash_attn_wheel(env, lambda v: v == env.flash_attn), Wheel):
        return False
    return "flash_attn_3" not in wanted or flash_attn_3_index(env) is not None


# ---- another torch ----------------------------------------------------------------------------------


def _others(env: Environment, wanted: Wanted, here: Build | None) -> list[Build]:
    """The builds that could stand in for the one that is there, nearest first."""
    at = here.torch if here is not None else env.torch or ASSUMED
    cuda_stays = env.cuda is not None and "cuda" not in (*env.assumed, *wanted)

    def far(build: Build) -> tuple[object, ...]:
        steps = version_number(build.torch) - version_number(at)
        rank = 0 if env.cuda is None else _unlike(build.cuda, env.cuda)
        nearness = (steps < 0, abs(steps))
        if cuda_stays:
            return (rank, *nearness, build.index)
        if "torch" not in env.assumed:
            return (*nearness, bool(build.index), rank)
        return (bool(build.index), *nearness, rank)  # PyPI's own first

    fit = [
        build
        for build in torch_builds()
        if build != here
        and OLDEST_TORCH <= build.torch <= max(ASSUMED, at)  # what attnsel runs on
        and unread_release("torch", build.torch) is None
        and (env.arch is None or runs_on(build, env.arch))
        and (env.python is None or env.python.minor in build.pythons)
        and reaches(env, wanted, "torch", build.torch)
        and reaches(env, wanted, "cuda", build.cuda)
    ]
    return sorted(fit, key=far)


def _unlike(cuda: Version, other: Version) -> int:
    """0 for the same toolkit, 1 for one of the same major, which a driver takes too, 2 for every other."""
    return 0 if cuda[:2] == other[:2] else 1 if cuda.major == other.major else 2


def _with_build(env: Environment, wanted: Wanted, build: Build, here: Build | None) -> list[Software]:
    """A machine with this torch: with its own pins, then with a release in place of one of them.

    What was stated and is not what torch brings was put there by hand, and stays where that works.
    """
    moved = another(env, _parts({"torch": build.torch, "cuda": build.cuda, **_pins(build)}))
    choices: dict[str, list[tuple[Version, bool]]] = {}
    for name, pin in _pins(build).items():
        own = [(pin, False)] if reaches(env, wanted, name, pin) else []
        if name in wanted:
            others = _published(env, wanted, name, moved, build)
            choices[name] = own + [(version, True) for version in others if version != pin]
        else:
            by_hand: Version | None = getattr(env, name)
            choices[name] = own
            pinned = name in env.assumed or (here is not None and by_hand == _pins(here)[name])
            if by_hand is not None and not pinned and _may_stand_in(build, name, by_hand):
                choices[name] = [(by_hand, by_hand != pin), *own]
    return _combined(env, wanted, choices, Software(moved, build, moved=build != here, torch_first=True))


def _may_stand_in(build: Build, name: str, version: Version) -> bool:
    """Whether a release exists that torch would load in place of the one that it pins.

    torch raises for a cuDNN of another major, or of an older minor than it was compiled with
    (torch/backends/cudnn/__init__.py of 2.13.0, lines 33 to 60).
    """
    if name == "cudnn" and version.major != build.cudnn.major:
        return False
    if name == "cudnn" and version.minor < build.cudnn.minor:
        return False
    return version in releases(name, build.cuda)


# ---- the torch that is there ------------------------------------------------------------------------


def _beside(env: Environment, wanted: Wanted, here: Build | None, override: bool) -> list[Software]:
    """The torch that is there, and what it pins; or, with ``override``, something else in place of that."""
    if override and not wanted.keys() & set(PINNED):
        return []
    # What depends on torch comes after it, where nobody stated that it is there; so do its other pins.
    unstated = "torch" in env.assumed and wanted.keys() & _BOUND_TO_TORCH
    if here is not None and not env.detected and (override or unstated):
        found = _with_build(env, wanted, here, here)
        return [each for each in found if bool(wanted.keys() & set(each.overrides)) == override]
    choices: dict[str, list[tuple[Version, bool]]] = {}
    for name in PINNED:
        if name not in wanted:
            continue
        pin = None if here is None else _pins(here)[name]
        own = [(pin, False)] if pin is not None and reaches(env, wanted, name, pin) else []
        choices[name] = own
        if override:
            others = _published(env, wanted, name, env, here)
            choices[name] += [(version, True) for version in others if version != pin]
    found = _combined(env, wanted, choices, Software(env, here, moved=False, torch_first=False))
    return [each for each in found if bool(each.overrides) == override]


# ---- what is installed beside torch -----------------------------------------------------------------


def _combined(
    env: Environment, wanted: Wanted, choices: dict[str, list[tuple[Version, bool]]], beside: Software
) -> list[Software]:
    """Every choice of releases beside a torch, those with the fewest overrides first."""
    every = dict(choices)
    for name in sorted(wanted.keys() - {"torch", "cuda", *PINNED}):
        every[name] = [(v, False) for v in _published(env, wanted, name, beside.env, beside.build)]
    found = []
    for picked in product(*every.values()):
        chosen = {name: version for name, (version, _) in zip(every, picked, strict=True)}
        instead = tuple(name for name, (_, over) in zip(every, picked, strict=True) if over)
        found.append(beside._replace(env=another(beside.env, _parts(chosen)), overrides=instead))
    return sorted(found, key=lambda each: len(set(each.overrides) & wanted.keys()))


def _published(
    env: Environment, wanted: Wanted, name: str, at: Environment, build: Build | None
) -> list[Version]:
    """A few releases that may be installed on the machine ``at``, the most fitting first."""
    if name == "flash_attn_3":
        return [wanted[name]]  # no index lists its releases
    if name in PINNED and env.platform != "linux":
        return []  # what torch loads lies in its own wheel
    known = (each for each in releases(name, at.cuda) if unread_release(name, each) is None)
    fit = [version for version in known if reaches(env, wanted, name, version)]
    if name in PINNED and build is not None:
        fit = [version for version in fit if _may_stand_in(build, name, version)]
    if name == "cudnn_frontend":
        fit = [version for version in fit if FRONTENDS[0] <= Version(*version[:2]) <= FRONTENDS[-1]]
    if name == "flash_attn":
        wheel = flash_attn_wheel(at, lambda version: version in fit)
        return [Version.parse(wheel.release)] if isinstance(wheel, Wheel) else fit[-1:]
    current: Version | None = getattr(env, name)
    if current is None or wanted[name] < current:
        fit.reverse()  # of what is not there the newest; back no further than needed
    return fit[:_MOST_RELEASES]


def reaches(env: Environment, wanted: Wanted, name: str, version: Version) -> bool:
    """Whether a version lies on the wanted side; every version of what is not wanted does."""
    if name not in wanted:
        return True
    current: Version | None = getattr(env, name)
    if current is not None and wanted[name] < current:
        return version < current
    return version >= wanted[name]


# ---- the tables -------------------------------------------------------------------------------------


def package_of(name: str, cuda: Version | None) -> str:
    """The package on PyPI; of cuDNN one for each major CUDA."""
    if name == "cudnn":
        return f"nvidia-cudnn-cu{12 if cuda is None else cuda.major}"
    return {"cudnn_frontend": "nvidia-cudnn-frontend"}.get(name, name.replace("_", "-"))


def exact(name: str, version: Version, cuda: Version | None) -> str | None:
    """A release as its index writes it, such as 9.11.0.98; None where there is none."""
    return _builds(package_of(name, cuda)).get(version)


def releases(name: str, cuda: Version | None) -> list[Version]:
    """All of a package, oldest first."""
    return list(_builds(package_of(name, cuda)))


@lru_cache(maxsize=16)
def _builds(package: str) -> dict[Version, str]:
    """The newest build of each release."""
    return {Version.parse(text): text for text in on_pypi().get(package, ())}


def _pins(build: Build) -> dict[str, Version]:
    return {"cudnn": build.cudnn, "triton": build.triton}


def _parts(versions: Mapping[str, Version]) -> tuple[tuple[str, Version], ...]:
    return tuple(sorted(versions.items()))


# --------------------------------------------------------------------------------------------------------
# What to install for a way out: one consistent set that the engine has checked, its commands, and why.
#
# A newer torch brings other releases of cuDNN and Triton, and the candidate has to be eligible with those
# too. Releases are named exactly, and each is on its index.


if TYPE_CHECKING:
    from attnsel.verdicts.reasons import Candidate

    Judge = Callable[[str, Scenario], Candidate]

MOST_SETS = 24  # put to the engine for one way out

_INDEX = "https://download.pytorch.org/whl"
# NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
_CUDA_13_DRIVER = "CUDA 13 needs a driver from 580 on"


@json_fields("commands", "why", ("pins", lambda i: dict(i.pins)), "built_here")
class Install(NamedTuple):
    """One set of software, in the order in which it is installed.

    ``pins`` has every component that is then there as its index writes it (``9.11.0.98``), ``changes`` the
    versions that differ from the question's. ``commands`` are lines for a shell, ``why`` at most two more.
    ``built_here``: a package has no wheel for this, and is compiled.
    """

    pins: tuple[tuple[str, str], ...]
    changes: tuple[tuple[str, Version], ...]
    commands: tuple[str, ...]
    why: tuple[str, ...]
    built_here: bool = False


def resolve(base: Scenario, name: str, changes: Mapping[str, Any], judge: Judge) -> Install | None:
    """The first consistent set with these changes for which the candidate is eligible; None where no release
    fits. ``changes`` may be of other fields too, which are made first."""
    wanted: dict[str, Version] = {f: v for f, v in changes.items() if f in COMPONENTS}
    question = changed(base, {field: value for field, value in changes.items() if field not in wanted})
    for tried, software in enumerate(software_sets(question.env, wanted)):
        if tried == MOST_SETS:
            break
        if judge(name, question._replace(env=software.env)).verdict == "eligible":
            return _install(question, name, wanted, software, judge)
    return None


def needs_software(base: Scenario, changes: Mapping[str, Any]) -> bool:
    """Whether a change is one of software, or comes with one: a torch may have no code for another GPU."""
    if any(field in COMPONENTS for field in changes):
        return True
    if "gpu" not in changes:
        return False
    there = changed(base, {"gpu": changes["gpu"]}).env
    return not has_code(there, build_with(there.torch, there.cuda))


def _install(question: Scenario, name: str, wanted: Wanted, software: Software, judge: Judge) -> Install:
    env, before = software.env, question.env
    versions = {c: getattr(env, c) for c in COMPONENTS if getattr(env, c) is not None}
    flash: Wanted = {}
    if software.moved and env.flash_attn is not None:  # it is compiled for one torch
        flash = {"flash_attn": env.flash_attn}
    return Install(
        pins=tuple((c, _exactly(software, c)) for c in versions if c != "python"),
        changes=tuple((c, v) for c, v in versions.items() if v != getattr(before, c)),
        commands=tuple(_commands(before, {**wanted, **flash}, software)),
        why=tuple(_why(question, name, wanted, software, judge)),
        built_here=not has_wheels(env, {**wanted, **flash}),
    )


def _exactly(software: Software, name: str) -> str:
    """A component's release as its index writes it; of CUDA, which torch brings, the toolkit's number."""
    version, build = getattr(software.env, name), software.build
    if name == "cuda":
        return f"{version.major}.{version.minor}"
    if name == "cudnn" and build is not None and version == build.cudnn and name not in software.overrides:
        return build.pin
    return exact(name, version, software.env.cuda) or str(version)


# ---- commands ---------------------------------------------------------------------------------------


def _commands(before: Environment, wanted: Wanted, software: Software) -> Iterator[str]:
    env, build, overrides = software.env, software.build, software.overrides
    if build is not None and software.torch_first:
        yield _torch_command(before, build)
    for name in PINNED:
        if name in overrides or (name in wanted and not software.torch_first):
            flag = "--no-deps " if name in overrides else ""
            yield f"pip install {flag}'{package_of(name, env.cuda)}=={_exactly(software, name)}'"
    if "cudnn_frontend" in wanted:
        yield f"pip install 'nvidia-cudnn-frontend=={_exactly(software, 'cudnn_frontend')}'"
    if "flash_attn" in wanted:
        found = flash_attn_wheel(env, lambda version: version == env.flash_attn)
        yield install_flash_attn(found, _exactly(software, "flash_attn"))
    if "flash_attn_3" in wanted:
        yield from (line for line in install_flash_attn_3(env).splitlines() if not line.startswith("#"))
    if "flash_attn_4" in wanted:
        yield install_flash_attn_4(env, f"=={_exactly(software, 'flash_attn_4')}")


def _torch_command(before: Environment, build: Build) -> str:
    """PyPI has one build of a release, for Linux; PyTorch's own index has each under its CUDA."""
    toolkit = f"cu{build.cuda.major}{build.cuda.minor}"
    index = build.index or ("" if before.platform == "linux" else toolkit)
    # With the same release there pip would take it for installed, whatever it was built for.
    local = f"+{toolkit}" if index and before.torch == build.torch else ""
    where = f" --index-url {_INDEX}/{index}" if index else ""
    return f"pip install 'torch=={build.torch}{local}'{where}"


# ---- why --------------------------------------------------------------------------------------------


def _why(question: Scenario, name: str, wanted: Wanted, software: Software, judge: Judge) -> Iterator[str]:
    """What asks for it; then why it is this torch, or what stands in place of torch's own pin."""
    needs = [_needed(question, name, component, wanted, software, judge) for component in sorted(wanted)]
    first = "; ".join(need for need in needs if need)
    if first:
        yield first
    build, env = software.build, software.env
    how: list[str] = []
    if build is not None and software.overrides:
        pins = {"cudnn": build.pin, "triton": str(build.triton)}
        pinned = " and ".join(f"{package_of(n, build.cuda)}=={pins[n]}" for n in software.overrides)
        how.append(
            f"torch {build.torch} pins {pinned}: pip reports a conflict and goes on; "
            "uv needs override-dependencies"
        )
    elif build is not None and software.moved:
        how.append(_why_torch(question.env, wanted, build))
    cuda = question.env.cuda
    if build is not None and build.cuda.major >= 13 and cuda is not None and cuda.major < 13:
        how.append(_CUDA_13_DRIVER)
    flash = flash_attn_wheel(env, lambda version: version == env.flash_attn)
    if "flash_attn" in wanted and not isinstance(flash, Wheel):
        how.append(f"{flash}: it is compiled here, with {flash.compiler} and for hours")
    if "flash_attn_3" in wanted and not has_wheels(env, {"flash_attn_3": wanted["flash_attn_3"]}):
        how.append("no wheel is known for this torch and CUDA: it is compiled here, with nvcc from 12.3 on")
    if how:
        yield "; ".join(how)


def _needed(
    question: Scenario, name: str, component: str, wanted: Wanted, software: Software, judge: Judge
) -> str:
    """``cuDNN ≥ 9.11.0 is needed by CUDNN236``: what is said where all is there but this component."""
    old: Version | None = getattr(question.env, component)
    if old is None:
        return ""  # it is not installed: the change says so
    without = software.env.derive(**{component: old})
    against = judge(name, question._replace(env=without)).reasons
    # Beside them may stand what an adaptation answers once the rest is there.
    reads = [one for one in against if isinstance(one.rule, Rule) and [*one.rule.edges(component)]]
    asking = reads or against
    codes = dict.fromkeys(reason.code for reason in asking)
    if not codes:
        return ""
    bound = f"below {old}" if wanted[component] < old else f"≥ {wanted[component]}"
    return f"{component_name(component)} {bound} is needed by {', '.join(list(codes)[:2])}"


def _why_torch(before: Environment, wanted: Wanted, build: Build) -> str:
    """Which of the wanted the wheels of this torch bring, and whether an earlier one would have done."""
    toolkit = f"CUDA {build.cuda.major}.{build.cuda.minor}"
    flash = [name for name in ("flash_attn", "flash_attn_3") if name in wanted]
    if flash and "torch" not in wanted:
        package = component_name(flash[0])
        return f"the nearest torch that {package} has a wheel for is {build.torch} ({toolkit})"
    brings = [name for name in PINNED if name in wanted]
    pins = ", ".join(f"{component_name(name)} {getattr(build, name)}" for name in brings or PINNED)
    earlier = (b for b in torch_builds() if b.index == build.index and b.torch < build.torch)
    sooner = any(all(reaches(before, wanted, name, getattr(b, name)) for name in brings) for b in earlier)
    verb = "brings" if sooner or not brings else "is the first whose wheels bring"
    where = f" on {build.index}" if build.index and brings and not sooner else ""
    return f"torch {build.torch} {verb} {pins} ({toolkit}){where}"

"""What to install for a way out: one consistent set that the engine has checked, its commands, and why.

A newer torch brings other releases of cuDNN and Triton, and the candidate has to be eligible with those too.
Releases are named exactly, and each is on its index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.environment import COMPONENTS, Environment, component_name
from attnsel.environment.releases import BUILDS, Build, build_with
from attnsel.environment.versions import Version
from attnsel.environment.wheels import (
    Wheel,
    flash_attn_wheel,
    install_flash_attn,
    install_flash_attn_3,
    install_flash_attn_4,
)
from attnsel.rules import Rule
from attnsel.selection.unlock.change import Scenario, changed
from attnsel.selection.unlock.software import (
    PINNED,
    Software,
    Wanted,
    exact,
    has_code,
    has_wheels,
    package_of,
    reaches,
    software_sets,
)

if TYPE_CHECKING:
    from attnsel.verdicts.verdict import Candidate, Reason

    Judge = Callable[[str, Scenario], Candidate]

MOST_SETS = 24  # put to the engine for one way out

_INDEX = "https://download.pytorch.org/whl"
# NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1.
_CUDA_13_DRIVER = "CUDA 13 needs a driver from 580 on"


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

    def as_dict(self) -> dict[str, Any]:
        return {
            "commands": list(self.commands),
            "why": list(self.why),
            "pins": dict(self.pins),
            "built_here": self.built_here,
        }


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
        pins = " and ".join(f"{package_of(n, build.cuda)}=={_pin(build, n)}" for n in software.overrides)
        how.append(
            f"torch {build.torch} pins {pins}: pip reports a conflict and goes on; "
            "uv needs override-dependencies"
        )
    elif build is not None and software.moved:
        how.append(_why_torch(question.env, wanted, build))
    if build is not None and build.cuda.major >= 13 and _major(question.env.cuda) < 13:
        how.append(_CUDA_13_DRIVER)
    flash = flash_attn_wheel(env, lambda version: version == env.flash_attn)
    if "flash_attn" in wanted and not isinstance(flash, Wheel):
        how.append(f"{flash}: it is compiled here, with nvcc and for hours")
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
    asking = [reason for reason in against if _reads(reason, component)] or against
    codes = dict.fromkeys(reason.code for reason in asking)
    if not codes:
        return ""
    bound = f"below {old}" if wanted[component] < old else f"≥ {wanted[component]}"
    return f"{component_name(component)} {bound} is needed by {', '.join(list(codes)[:2])}"


def _reads(reason: Reason, component: str) -> bool:
    """Whether the rule may say something else of another version."""
    return isinstance(reason.rule, Rule) and any(True for _ in reason.rule.edges(component))


def _why_torch(before: Environment, wanted: Wanted, build: Build) -> str:
    """Which of the wanted the wheels of this torch bring, and whether an earlier one would have done."""
    toolkit = f"CUDA {build.cuda.major}.{build.cuda.minor}"
    flash = [name for name in ("flash_attn", "flash_attn_3") if name in wanted]
    if flash and "torch" not in wanted:
        package = component_name(flash[0])
        return f"the nearest torch that {package} has a wheel for is {build.torch} ({toolkit})"
    brings = [name for name in PINNED if name in wanted]
    pins = ", ".join(f"{component_name(name)} {getattr(build, name)}" for name in brings or PINNED)
    earlier = (b for b in BUILDS if b.index == build.index and b.torch < build.torch)
    sooner = any(all(reaches(before, wanted, name, getattr(b, name)) for name in brings) for b in earlier)
    verb = "brings" if sooner or not brings else "is the first whose wheels bring"
    where = f" on {build.index}" if build.index and brings and not sooner else ""
    return f"torch {build.torch} {verb} {pins} ({toolkit}){where}"


def _pin(build: Build, name: str) -> str:
    return build.pin if name == "cudnn" else str(build.triton)


def _major(cuda: Version | None) -> int:
    return 13 if cuda is None else cuda.major

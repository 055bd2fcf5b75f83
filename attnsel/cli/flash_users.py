"""What transformers and TransformerEngine would run of the FlashAttention that is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from packaging.version import InvalidVersion
from packaging.version import Version as PackageVersion

from attnsel.cli.flash_errors import reinstall
from attnsel.cli.probe import ProbedMachine
from attnsel.environment.installed import FLASH_ATTN
from attnsel.environment.wheels import install_flash_attn_3, install_flash_attn_4

_COMPONENTS = {"2": "flash_attn", "3": "flash_attn_3", "4": "flash_attn_4"}
_OLDEST_2 = "2.3.3"  # transformers 5.23, utils/import_utils.py, is_flash_attn_2_available


class Use(NamedTuple):
    """One name under which a library knows FlashAttention: what runs there, or why nothing does."""

    library: str
    name: str
    gets: str | None
    why: str
    fix: str
    breaks: bool = False  # the library fails for a package that does not load


def uses(machine: ProbedMachine) -> tuple[Use, ...]:
    """Every name of every library that is installed; none where there is no FlashAttention at all."""
    if not machine.flash.anything:
        return ()
    return (*_of_transformers(machine), *_of_te(machine))


# ---- transformers -------------------------------------------------------------------------------------


def _of_transformers(machine: ProbedMachine) -> Iterator[Use]:
    """As modeling_utils.py of 5.23 goes: the package where its metadata is right, else a Hub kernel.

    Source: _check_and_adjust_attn_implementation there, and _lazy_imports in
    modeling_flash_attention_utils.py; documented in huggingface/transformers#47345.
    """
    asked = machine.flash.transformers
    if not asked.loads:
        return
    library = f"transformers {asked.installed}"
    for number, available in asked.said["available"].items():
        name = f"flash_attention_{number}"
        component = _COMPONENTS[number]
        package = _full_name(machine, component)
        if available is None:
            yield Use(library, name, None, "this release does not know it", "pip install -U transformers")
        elif available and machine.probes[component].loads is False:
            why = f"it asks only whether {package} is listed, and that does not load"
            yield Use(library, name, None, why, reinstall(component, machine), breaks=True)
        elif available:
            yield Use(library, name, package, "it is installed", "")
        else:
            yield _without_package(machine, library, name, number)


def _without_package(machine: ProbedMachine, library: str, name: str, number: str) -> Use:
    """A Hub kernel where there is the package ``kernels``; otherwise an ImportError."""
    facts = machine.flash
    why = _why_unavailable(machine, number)
    repository = facts.transformers.said["repositories"].get(name)
    if repository is None:
        return Use(library, name, None, why, _how_to_get(machine, number))
    if facts.transformers.said["kernels"]:
        cached = "is in the cache" if repository in facts.hub else "is downloaded at first use"
        return Use(library, name, repository, f"{why}, and the Hub kernel {cached}", "")
    oldest, below = facts.transformers.said["kernels_range"]
    here = facts.packages.get("kernels")
    wanted = f"kernels>={oldest},<{below}" if oldest and below else "kernels"
    state = "is not installed" if here is None else f"{here} is not {wanted.removeprefix('kernels')}"
    return Use(library, name, None, f"{why}, and the package kernels {state}", f"pip install '{wanted}'")


def _why_unavailable(machine: ProbedMachine, number: str) -> str:
    component = _COMPONENTS[number]
    version = machine.flash.packages.get(FLASH_ATTN[component])
    if version is None:
        stranger = machine.flash.strangers.get("flash_attn_interface" if number == "3" else "flash_attn")
        note = "" if stranger is None or number == "4" else f" (a module of its name is there, of {stranger})"
        return f"{FLASH_ATTN[component]} is not installed{note}"
    if not machine.probes["torch"].said.get("cuda_available"):
        return f"torch sees no CUDA device for {FLASH_ATTN[component]} {version}"
    if number == "2" and _older(version, _OLDEST_2):
        return f"flash-attn {version} is older than {_OLDEST_2}"
    return f"it does not find the module of {FLASH_ATTN[component]} {version}"


def _how_to_get(machine: ProbedMachine, number: str) -> str:
    env = machine.environments[0]
    if number == "2":
        return reinstall("flash_attn", machine)
    commands = install_flash_attn_3(env) if number == "3" else install_flash_attn_4(env)
    return commands.splitlines()[-1]


# ---- TransformerEngine --------------------------------------------------------------------------------


def _of_te(machine: ProbedMachine) -> Iterator[Use]:
    """backends.py of 2.3 to 2.20 reads the metadata of the packages and imports those that it takes.

    An import that fails there ends ``import transformer_engine.pytorch``; only that of FlashAttention 4 is
    caught, from 2.20 on. Which GPU gets which: get_attention_backend in dot_product_attention/utils.py.
    """
    version = machine.flash.packages.get("transformer-engine")
    limits = machine.flash.te_takes
    if version is None or not limits:
        return
    arch = machine.environments[0].arch
    for number, component in _COMPONENTS.items():
        package = FLASH_ATTN[component]
        has = machine.flash.packages.get(package)
        library, name = f"TransformerEngine {version}", f"FlashAttention-{number}"
        if number not in limits["knows"]:
            yield Use(library, name, None, "this release does not know it", "")
        elif has is None:
            if number == "2":
                fix = f"pip install 'flash-attn{_te_range(limits, arch)}' --no-build-isolation"
                yield Use(library, name, None, f"{package} is not installed", fix)
        elif number == "2" and not _te_takes(limits, arch, has):
            fix = f"pip install 'flash-attn{_te_range(limits, arch)}' --no-build-isolation"
            yield Use(library, name, None, f"it takes {_te_range(limits, arch)}, and {has} is installed", fix)
        elif machine.probes[component].loads is False:
            caught = number == "4" and not _older(version, "2.20")
            why = f"{package} {has} does not load" + ("" if caught else ", and its import is not caught")
            yield Use(library, name, None, why, reinstall(component, machine), breaks=not caught)
        else:
            yield _te_on_this_gpu(
                Use(library, name, f"{package} {has}", "it is installed", ""), number, machine
            )


def _te_on_this_gpu(use: Use, number: str, machine: ProbedMachine) -> Use:
    """Rows P3 to P6 of the filters of get_attention_backend, and the order that it ends with (2.20)."""
    arch = machine.environments[0].arch
    if arch is None:
        return use
    three = FLASH_ATTN["flash_attn_3"] in machine.flash.packages
    refused = {
        "2": "it wants sm80 or newer" if arch < 80 else "",
        "3": "it is for sm90 alone" if arch != 90 else "",
        "4": "it wants sm90 or newer"
        if arch < 90
        else "FlashAttention-3 goes first"
        if arch == 90 and three
        else "",
    }[number]
    if refused:
        return use._replace(gets=None, why=f"{refused}, and this is sm{arch}")
    order = "after cuDNN's fused attention" if arch >= 90 else "before cuDNN's fused attention"
    return use._replace(why=f"on sm{arch} {order}")


def _te_takes(limits: Mapping[str, str], arch: int | None, version: str) -> bool:
    try:
        here, newest = PackageVersion(version), PackageVersion(limits["newest"])
        oldest = PackageVersion(_te_oldest(limits, arch))
    except InvalidVersion:
        return False
    if limits["newest_is_taken"] == "yes":
        return oldest <= PackageVersion(here.public) <= newest
    return oldest <= here < newest


def _te_oldest(limits: Mapping[str, str], arch: int | None) -> str:
    on_blackwell = arch is not None and arch >= 100
    return limits.get("oldest_sm100", limits["oldest"]) if on_blackwell else limits["oldest"]


def _te_range(limits: Mapping[str, str], arch: int | None) -> str:
    sign = "<=" if limits["newest_is_taken"] == "yes" else "<"
    return f">={_te_oldest(limits, arch)},{sign}{limits['newest']}"


# ---- versions -----------------------------------------------------------------------------------------


def _full_name(machine: ProbedMachine, component: str) -> str:
    name = FLASH_ATTN[component]
    return f"{name} {machine.flash.packages.get(name, '')}".rstrip()


def _older(version: str, than: str) -> bool:
    try:
        return PackageVersion(version) < PackageVersion(than)
    except InvalidVersion:
        return True

"""Why a FlashAttention package does not load: the linker's and Python's words, explained."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from attnsel.cli import findings as cuda_libraries
from attnsel.cli import probe
from attnsel.cli.findings import Finding
from attnsel.cli.probe import FlashFacts, ProbedMachine, redact
from attnsel.environment.installed import (
    FLASH_ATTN,
    built_for,
    cute_owner,
    distribution,
    module_spec,
    unmet_requirements,
)
from attnsel.environment.wheels import Wheel, flash_attn_wheel, install_flash_attn_3, install_flash_attn_4

# The modules that packages of these names bring.
_PACKAGES = {
    "cutlass": "nvidia-cutlass-dsl",
    "quack": "quack-kernels",
    "tvm_ffi": "apache-tvm-ffi",
    "cuda": "cuda-python",
}
_OWN = ("flash_attn", "flash_attn_interface", "flash_attn_3")


class Explained(NamedTuple):
    """What an import error means, and what to do about it."""

    why: str
    fix: str


def explain(component: str, machine: ProbedMachine) -> Explained:
    """What the error of a package that is installed and does not load means."""
    trouble = machine.probes[component].trouble
    again = reinstall(component, machine)
    if component == "flash_attn_4" and machine.probes["flash_attn"].loads is False:
        why = "to import flash_attn.cute is to import flash_attn, and flash-attn does not load"
        return Explained(why, reinstall("flash_attn", machine))
    if component == "flash_attn_4" and machine.flash.unmet:
        return Explained(f"it needs {', '.join(machine.flash.unmet)}", again)
    for pattern, reading in _READINGS:
        match = re.search(pattern, trouble)
        reason: str | None = None if match is None else reading(match, component, machine)
        if reason is not None:
            package = _missing_package(trouble)
            return Explained(reason, f"pip install {package}" if package else again)
    return Explained("", again)


def reinstall(component: str, machine: ProbedMachine) -> str:
    """The command that puts a package into order."""
    env, name = machine.environments[0], FLASH_ATTN[component]
    if component == "flash_attn_3":
        commands = install_flash_attn_3(env).replace("install flash", "install --force-reinstall flash")
        return " && ".join(line.removeprefix("# ") for line in commands.splitlines()).replace(": && ", ": ")
    if component == "flash_attn_4":
        command = install_flash_attn_4(env)
        deps = "" if machine.flash.unmet else "--force-reinstall --no-deps "
        return command.replace("install ", f"install {deps}", 1)
    torch = machine.probes["torch"].said
    if env.cuda is None and torch.get("cuda_build") is not None:  # a machine whose torch does not load
        env = env.replace(cuda=torch["cuda_build"])
    found = flash_attn_wheel(env, new_abi=torch.get("new_abi"))
    if isinstance(found, Wheel):
        return f"pip install --force-reinstall --no-deps {found.url}"
    # pip keeps what it built once, for whichever torch was there then.
    build = f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {name}"
    return f"{found}. {build} builds it, with nvcc and for hours; or pip uninstall {name}"


# ---- readings of an error -----------------------------------------------------------------------------


def _symbol(match: re.Match[str], component: str, machine: ProbedMachine) -> str | None:
    """A mangled name that torch's libraries do not have. ``Ss`` is std::string of the old C++ ABI."""
    name, torch = match["name"], machine.probes["torch"]
    if not re.match(r"_ZN?K?[A-Z]*(3c10|2at|5torch|5caffe2)|_ZNK?\w*?(3c10|2at)|aoti_torch", name):
        return None
    here = torch.said.get("new_abi")
    named = machine.flash.built_for if component == "flash_attn" else {}
    its = f"{FLASH_ATTN[component]} was compiled"
    if "__cxx1112basic_string" in name and here is False:
        note = ""
        if named.get("abi") == "FALSE":
            note = " (as are all wheels of 2.8 for torch 2.6, whatever their names say: flash-attention#1783)"
        return f"{its} with the new C++ ABI{note}, and torch {torch.installed} with the old one"
    if re.search(r"[EK]Ss", name) and here is True:
        return f"{its} with the old C++ ABI, and torch {torch.installed} with the new one"
    for_torch = named.get("torch")
    return f"{its} for another torch{f', {for_torch}' if for_torch else ''}: here is {torch.installed}"


def _library(match: re.Match[str], component: str, machine: ProbedMachine) -> str | None:
    torch = machine.probes["torch"]
    library, major = match["library"], match["major"]
    build = torch.said.get("cuda_build")
    if library.startswith(("libtorch", "libc10")):
        if "cuda" in library and build is None:
            return f"it needs a CUDA build of torch, and torch {torch.installed} is none"
        return f"torch {torch.installed} has no such library: it was compiled for another"
    if not library.startswith("libcu") or major is None:
        return None
    if build is None:
        return f"it was compiled for CUDA {major}, and torch {torch.installed} is not a CUDA build"
    if build.partition(".")[0] != major:
        return f"it was compiled for CUDA {major}, and torch {torch.installed} is a build for CUDA {build}"
    return f"the libraries of CUDA {major} are not where the linker looks: import torch first"


def _no_module(match: re.Match[str], component: str, machine: ProbedMachine) -> str | None:
    name = match["name"]
    if name in ("flash_attn_2_cuda", "flash_attn_3._C", "flash_attn_3_cuda"):
        return "its compiled part is missing: it was built without CUDA, or only a part of it is left"
    if name.partition(".")[0] in _OWN:
        return f"pip lists it, and its module {name} is not there"
    return f"it needs the package {_missing_package(match[0]) or name}"


def _missing_package(trouble: str) -> str | None:
    """The package of a module that is missing, where it is not FlashAttention's own."""
    match = re.search(r"No module named '(?P<name>[\w.]+)'", trouble)
    top = "" if match is None else match["name"].partition(".")[0]
    return None if not top or top.startswith("flash_attn") else _PACKAGES.get(top, top.replace("_", "-"))


_GLIBC = "its wheel was made on a newer Linux than this: it needs glibc {version}"
_NAMESPACE = "the folder flash_attn is no package: a part of flash-attn, or flash-attn-4 without it, is there"
_READINGS: tuple[tuple[str, Any], ...] = (
    (r"undefined symbol: (?P<name>\w+)", _symbol),
    (r"(?P<library>lib[\w+-]+)\.so(?:\.(?P<major>\d+))?[\d.]*: cannot open shared object", _library),
    (
        r"version [`'‘]GLIBC_(?P<version>[\d.]+)['’] not found",
        lambda match, *_: _GLIBC.format(**match.groupdict()),
    ),
    (r"No module named '(?P<name>[\w.]+)'", _no_module),
    (r"cannot import name '\w+' from 'flash_attn' \(unknown location\)", lambda *_: _NAMESPACE),
)


# ---- What there is of FlashAttention, and of cuDNN's libraries ------------------------------------------

_USERS = {"transformers": "transformers", "transformer-engine": "te"}  # what chooses among it, by --as


def examine() -> ProbedMachine:
    """All of it: the machine, what there is of FlashAttention, and cuDNN's libraries."""
    machine = probe.examine()
    cuda = cuda_libraries.look(machine.probes["torch"].said.get("cuda_build"))
    there = tuple(env.replace(missing=cuda.missing) if cuda.missing else env for env in machine.environments)
    return machine._replace(flash=look(), cuda=cuda, environments=there)


def look() -> FlashFacts:
    """Without the network, and nothing is imported."""
    found = {name: distribution(name) for name in (*FLASH_ATTN.values(), *_USERS)}
    packages = {name: there.version for name, there in found.items() if there is not None}
    facts = FlashFacts(packages=packages, strangers=_strangers(packages))
    if not facts.anything:
        return facts
    return facts._replace(
        cute=cute_owner(),
        unmet=tuple(unmet_requirements(FLASH_ATTN["flash_attn_4"])),
        built_for=built_for(FLASH_ATTN["flash_attn"]),
    )


def _strangers(packages: dict[str, str]) -> dict[str, str]:
    """Modules of FlashAttention's names without its packages, and where they come from."""
    found = {}
    of_2_or_4 = {FLASH_ATTN["flash_attn"], FLASH_ATTN["flash_attn_4"]}
    names = {"flash_attn": of_2_or_4, "flash_attn_interface": {FLASH_ATTN["flash_attn_3"]}}
    for name, owners in names.items():
        loaded = getattr(sys.modules.get(name), "__spec__", None)
        if loaded is not None and loaded.origin == "attnsel":
            found[name] = "attnsel"  # attnsel.flash_attn.install() was called in this process
            continue
        spec = None if owners & set(packages) else module_spec(name)
        if spec is not None:
            owner = importlib.metadata.packages_distributions().get(name)
            where = spec.origin or ", ".join(spec.submodule_search_locations or ())
            found[name] = ", ".join(dict.fromkeys(owner)) if owner else redact(where)
    return found


# ---- What the doctor says of it --------------------------------------------------------------------------


def find_flash(machine: ProbedMachine) -> Iterator[Finding]:
    """Packages that do not load, files of another, and who else chooses among them.

    Nothing where there is no FlashAttention: that one line stands among what is installed.
    """
    has, two, four = machine.flash.packages, FLASH_ATTN["flash_attn"], FLASH_ATTN["flash_attn_4"]
    for component, name in FLASH_ATTN.items():
        probe = machine.probes[component]
        if probe.loads is not False or (name == four and machine.flash.cute == two):
            continue  # another's flash_attn/cute is told below, with the same fix
        told = explain(component, machine)
        why = f". {told.why[0].upper()}{told.why[1:]}" if told.why else ""
        text = f"{name} {has.get(name, probe.installed)}"
        yield Finding.of("DOCTOR028", package=text, trouble=f"{probe.trouble}{why}", fix=told.fix)
    if machine.flash.cute == two:  # two packages write flash_attn/cute; the last one to be installed wins
        early, own = f"{two} {has.get(two)}", f"{four} {has.get(four)}"
        yield Finding.of("DOCTOR029", early=early, own=own, fix=reinstall("flash_attn_4", machine))
    for module, where in machine.flash.strangers.items():
        if where == "attnsel":
            yield Finding.of("DOCTOR030", module=module)
            continue
        package = FLASH_ATTN["flash_attn_3" if module == "flash_attn_interface" else "flash_attn"]
        yield Finding.of("DOCTOR031", module=module, package=package, where=where)
    for name, dispatcher in _USERS.items():
        if name in has and machine.flash.anything:
            yield Finding.of("DOCTOR032", name=name, version=has[name], dispatcher=dispatcher)

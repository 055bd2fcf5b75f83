"""Why a FlashAttention package does not load: the linker's and Python's words, explained."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import InvalidVersion
from packaging.version import Version as PackageVersion

from attnsel.cli import findings as cuda_libraries
from attnsel.cli import probe
from attnsel.cli.findings import Finding
from attnsel.cli.probe import FlashFacts, Probe, ProbedMachine, redact
from attnsel.environment.installed import (
    FLASH_ATTN,
    built_for,
    cute_owner,
    distribution,
    folders,
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
    if component == "flash_attn_4" and machine.flash.cute == FLASH_ATTN["flash_attn"]:
        return Explained("flash_attn/cute is not its own", again)  # a finding of its own says more
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


# --------------------------------------------------------------------------------------------------------
# What there is of FlashAttention beside its packages: Hub kernels, and who chooses among all of it.


_USERS = ("kernels", "transformers", "transformer-engine")

# Of transformers 5.23, modeling_flash_attention_utils.py: FLASH_ATTN_KERNEL_FALLBACK and its neighbours; and
# the name under which flash-attn3 was known before.
HUB_KERNELS = (
    "kernels-community/flash-attn",
    "kernels-community/flash-attn2",
    "kernels-community/flash-attn3",
    "kernels-community/vllm-flash-attn3",
    "kernels-community/flash-attn4",
)

# Asked of the library itself: what it accepts moves with each release.
_TRANSFORMERS = """
import json
from transformers.utils import import_utils as u
said = {"available": {}, "repositories": {}, "kernels": None, "kernels_range": None}
for number in "234":
    available = getattr(u, f"is_flash_attn_{number}_available", None)
    said["available"][number] = None if available is None else bool(available())
kernels = getattr(u, "is_kernels_available", None)
said["kernels"] = None if kernels is None else bool(kernels())
said["kernels_range"] = [getattr(u, f"KERNELS_{end}_VERSION", None) for end in ("MIN", "MAX")]
try:
    from transformers.modeling_flash_attention_utils import FLASH_ATTN_KERNEL_FALLBACK as repositories
except ImportError:
    repositories = {}
said["repositories"] = dict(repositories)
print(json.dumps(said))
"""


def examine() -> ProbedMachine:
    """All of it: the machine, what there is of FlashAttention, and cuDNN's libraries."""
    machine = probe.examine()
    cuda = cuda_libraries.look(machine.probes["torch"].said.get("cuda_build"))
    there = tuple(env.replace(missing=cuda.missing) if cuda.missing else env for env in machine.environments)
    return machine._replace(flash=look(), cuda=cuda, environments=there)


def look() -> FlashFacts:
    """Without the network; only transformers is imported, in a child process, and only where it matters."""
    found = {name: distribution(name) for name in (*FLASH_ATTN.values(), *_USERS)}
    packages = {name: there.version for name, there in found.items() if there is not None}
    facts = FlashFacts(packages=packages, strangers=_strangers(packages), hub=hub_cache())
    if not facts.anything:
        return facts
    version = packages.get("transformers")
    asked = Probe(None, None, {}) if version is None else Probe(version, *probe.run_script(_TRANSFORMERS))
    return facts._replace(
        cute=cute_owner(),
        unmet=tuple(unmet_requirements(FLASH_ATTN["flash_attn_4"])),
        built_for=built_for(FLASH_ATTN["flash_attn"]),
        transformers=asked,
        te_takes=te_takes(),
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


def hub_cache() -> tuple[str, ...]:
    """Which kernels lie in the cache of the Hugging Face Hub: where huggingface_hub and kernels put them."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    default = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or Path(home) / "hub"
    cache = Path(os.environ.get("KERNELS_CACHE") or default).expanduser()
    # kernels 0.17, _versions.py: repositories were of the type "model" before they had one of their own.
    return tuple(
        name
        for name in HUB_KERNELS
        if any((cache / f"{kind}--{name.replace('/', '--')}").is_dir() for kind in ("kernels", "models"))
    )


def te_takes() -> dict[str, str]:
    """Which releases of flash-attn the installed TransformerEngine takes, read from its source.

    Releases 2.3 to 2.20 write them in dot_product_attention/utils.py; the newest is taken up to 2.18, and is
    the first that is not from 2.20 on, which then has a method ``is_version_supported``.
    """
    for folder in folders("transformer_engine"):
        attention = folder / "pytorch" / "attention"
        for file in (
            attention / "dot_product_attention" / "utils.py",
            attention / "dot_product_attention.py",
            folder / "pytorch" / "attention.py",
        ):
            if file.is_file():
                return _limits(file.read_text(encoding="utf-8", errors="replace"))
    return {}


def _limits(source: str) -> dict[str, str]:
    names = {
        "version_required": "oldest",
        "version_required_blackwell": "oldest_sm100",
        "max_version": "newest",
    }
    pattern = r"^\s*(?:_flash_attn_)?(\w+) = (?:PkgVersion|packaging\.version\.Version)\(\"([\w.]+)\"\)"
    limits = {
        names[name]: value for name, value in re.findall(pattern, source, re.MULTILINE) if name in names
    }
    if limits:
        limits["newest_is_taken"] = "no" if "def is_version_supported" in source else "yes"
        limits["knows"] = "".join(n for n in "234" if n == "2" or f"v{n}_is_installed" in source)
    return limits


# ---- What transformers and TransformerEngine would run of the FlashAttention that is here --------------


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
        package = FLASH_ATTN[component]
        package = f"{package} {machine.flash.packages.get(package, '')}".rstrip()
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


def _older(version: str, than: str) -> bool:
    try:
        return PackageVersion(version) < PackageVersion(than)
    except InvalidVersion:
        return True


# --------------------------------------------------------------------------------------------------------
# What the doctor says of FlashAttention: packages that do not load, files of another, and who uses what.


def find_flash(machine: ProbedMachine) -> Iterator[Finding]:
    """Nothing where there is no FlashAttention: that one line stands among what is installed."""
    yield from _packages(machine)
    yield from _cute(machine)
    yield from _of_strangers(machine)
    yield from _libraries(machine)


def _packages(machine: ProbedMachine) -> Iterator[Finding]:
    for component, name in FLASH_ATTN.items():
        probe = machine.probes[component]
        if probe.loads is not False:
            continue
        version = machine.flash.packages.get(name, probe.installed)
        told = explain(component, machine)
        why = f". {told.why[0].upper()}{told.why[1:]}" if told.why else ""
        yield Finding(
            "error", f"{name} {version} is installed and does not load: {probe.trouble}{why}", told.fix
        )


def _cute(machine: ProbedMachine) -> Iterator[Finding]:
    """Two packages write flash_attn/cute; the last one to be installed wins."""
    two, four = FLASH_ATTN["flash_attn"], FLASH_ATTN["flash_attn_4"]
    if machine.flash.cute != two:
        return
    has = machine.flash.packages
    yield Finding(
        "error",
        f"flash_attn/cute is that of {two} {has.get(two)}, an early one, which was installed over that of "
        f"{four} {has.get(four)}",
        reinstall("flash_attn_4", machine),
    )


def _of_strangers(machine: ProbedMachine) -> Iterator[Finding]:
    for module, where in machine.flash.strangers.items():
        if where == "attnsel":
            yield Finding("note", f"the module {module} is attnsel's own in this process")
            continue
        package = FLASH_ATTN["flash_attn_3" if module == "flash_attn_interface" else "flash_attn"]
        yield Finding(
            "warning",
            f"there is a module {module} without the package {package}: it is of {where}. transformers and "
            "attnsel leave it alone, programs that only import it do not",
            f"remove what is left of it, or install {package}",
        )


def _libraries(machine: ProbedMachine) -> Iterator[Finding]:
    asked = machine.flash.transformers
    if asked.loads is False:
        yield Finding(
            "error",
            f"transformers {asked.installed} is installed and does not load: {asked.trouble}",
            "reinstall it: pip install --force-reinstall transformers",
        )
    for use in uses(machine):
        if use.breaks:
            yield Finding("error", f"{use.library}: {use.name} fails: {use.why}", use.fix)
        elif use.gets is None:
            yield Finding("note", f"{use.library}: {use.name} has nothing to run: {use.why}", use.fix)
        else:
            yield Finding("note", f"{use.library}: {use.name} runs {use.gets}: {use.why}")

"""What is installed, read from metadata and files. Nothing is imported: a broken package does no harm here.

A distribution is what pip lists (``flash-attn``), a module what is imported (``flash_attn``). Each may be
there without the other, and two distributions write into the folder ``flash_attn``.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.metadata
import json
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path

from packaging.version import InvalidVersion
from packaging.version import Version as PackageVersion

from attnsel.environment.versions import Version

FLASH_ATTN = {"flash_attn": "flash-attn", "flash_attn_3": "flash-attn-3", "flash_attn_4": "flash-attn-4"}
"""By component the distribution of FlashAttention 2, 3 and 4."""

_CUTE = "flash_attn/cute/interface.py"


def distribution(name: str) -> Distribution | None:
    """The first of this name on the path, as pip would list it."""
    return next(iter(importlib.metadata.distributions(name=name)), None)


def installed_version(*names: str) -> Version | None:
    """The version of the first of these distributions that has one that can be read."""
    for name in names:
        found = distribution(name)
        try:
            version = None if found is None else Version.parse(found.version)
        except (ValueError, TypeError):
            continue
        if version is not None:
            return version
    return None


def component_versions() -> dict[str, Version | None]:
    """By component the version that is installed here, as pip lists it; what is loaded may be another."""
    return {
        "torch": installed_version("torch"),
        "triton": installed_version("triton", "pytorch-triton"),
        "cudnn": installed_version("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "cudnn_frontend": installed_version("nvidia-cudnn-frontend"),
        "python": Version(*sys.version_info[:3]),
        **flash_attn_versions(),
        "transformer_engine": installed_version("transformer-engine"),
    }


def module_spec(name: str) -> ModuleSpec | None:
    """Where a top-level module comes from; of a name that attnsel.flash_attn has taken, the real one."""
    if name in sys.modules:
        loaded: ModuleSpec | None = getattr(sys.modules[name], "__spec__", None)
        if loaded is None or loaded.origin != "attnsel":
            return loaded
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, None)
        if spec is not None:
            return spec
    return None


def folders(name: str) -> list[Path]:
    """The folders of a package or a namespace."""
    spec = module_spec(name)
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


# ---- FlashAttention -----------------------------------------------------------------------------------


def flash_attn_versions() -> dict[str, Version | None]:
    """The FlashAttention packages that can be tried, by component.

    One whose module is missing, or is another's, is not. That one does not load (it was built for another
    torch, say) is not seen here: importing it takes seconds, and may end the process.
    """
    found = {name: installed_version(package) for name, package in FLASH_ATTN.items()}
    return {name: version if version and _is_there(name) else None for name, version in found.items()}


def _is_there(component: str) -> bool:
    if component == "flash_attn":
        # flash_attn/flash_attn_interface.py imports the compiled flash_attn_2_cuda by its name at the top.
        spec = module_spec("flash_attn")
        return spec is not None and spec.origin is not None and module_spec("flash_attn_2_cuda") is not None
    if component == "flash_attn_3":
        # hopper/setup.py: the module flash_attn_interface; later releases have it in flash_attn_3, too.
        return module_spec("flash_attn_interface") is not None
    there = "flash_attn.cute.interface" in sys.modules or any(
        (folder / "cute" / "interface.py").is_file() for folder in folders("flash_attn")
    )
    return there and cute_owner() != FLASH_ATTN["flash_attn"]


def cute_owner() -> str | None:
    """Whose files ``flash_attn.cute`` are, where both flash-attn and flash-attn-4 installed some.

    flash-attn 2.8.1 to 2.8.3 carry an early ``flash_attn/cute``, so the one that was installed last wins
    (NovaSky-AI/SkyRL#2132). Told by the hashes of what each installed; None where nothing is to be told.
    """
    hashes = {name: _cute_hash(name) for name in (FLASH_ATTN["flash_attn"], FLASH_ATTN["flash_attn_4"])}
    if not all(hashes.values()):
        return None
    for folder in folders("flash_attn"):
        file = folder / "cute" / "interface.py"
        if file.is_file():
            there = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
            return next((name for name, written in hashes.items() if written == there), None)
    return None


def _cute_hash(name: str) -> str | None:
    found = distribution(name)
    for file in (found.files if found is not None else None) or ():
        if file.as_posix() == _CUTE:
            return file.hash.value if file.hash is not None and file.hash.mode == "sha256" else None
    return None


def built_for(name: str) -> dict[str, str]:
    """What a wheel of flash-attn was built for, as its file was named: ``cuda``, ``torch``, ``abi``.

    A local version has it (2.8.3+cu12torch2.8cxx11abiTRUE), or the address pip took it from.
    """
    found = distribution(name)
    if found is None:
        return {}
    text = found.version
    with contextlib.suppress(ValueError, AttributeError):
        text += " " + str(json.loads(found.read_text("direct_url.json") or "{}").get("url", ""))
    match = re.search(
        r"cu(?P<cuda>\d\d)\d*torch(?P<torch>\d+\.\d+)[\d.]*cxx11abi(?P<abi>true|false)", text, re.I
    )
    return {} if match is None else {**match.groupdict(), "abi": match["abi"].upper()}


def unmet_requirements(name: str) -> list[str]:
    """What a distribution says it needs and does not find: ``nvidia-cutlass-dsl>=4.6.2 (here 4.4.0)``."""
    from packaging.requirements import InvalidRequirement, Requirement  # the longest of its modules to load

    found = distribution(name)
    unmet = []
    for line in (found.requires if found is not None else None) or ():
        try:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            other = distribution(wanted.name)
            if other is None:
                unmet.append(f"{wanted.name}{wanted.specifier} (not installed)")
            elif not wanted.specifier.contains(PackageVersion(other.version), prereleases=True):
                unmet.append(f"{wanted.name}{wanted.specifier} (here {other.version})")
        except (InvalidRequirement, InvalidVersion):
            continue
    return unmet

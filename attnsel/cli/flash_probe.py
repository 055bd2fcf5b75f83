"""What there is of FlashAttention beside its packages: Hub kernels, and who chooses among all of it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

from attnsel.cli import cuda_libraries, probe
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

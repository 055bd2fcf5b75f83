"""The packages flash-attn, flash-attn-3 and flash-attn-4 on CPU tensors: stand-ins where there is no GPU.

``package(generation, version)`` gives their modules, ``installed(generation, version)`` also puts them where
``import``, ``importlib.util.find_spec`` and ``importlib.metadata`` look. Each function has the signature that
flash_signatures.json records for that version, raises where the real checks raise (in other words), leaves
NaN in what the kernels leave unwritten, and is differentiable where the real one is. CPU tensors count as
CUDA ones of architecture ``arch``. Nothing of attnsel is used.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from emulated_flash_attn_2_public import PublicFlashAttention2
from emulated_flash_attn_3_public import PublicFlashAttention3
from emulated_flash_attn_4_public import PublicFlashAttention4

RECORD: dict[str, Any] = json.loads((Path(__file__).parent / "flash_signatures.json").read_text())
VERSIONS = {generation: tuple(releases) for generation, releases in RECORD.items()}
EMULATIONS: dict[int, Any] = {2: PublicFlashAttention2, 3: PublicFlashAttention3, 4: PublicFlashAttention4}


def distribution(generation: int, version: str) -> str:
    if version == "3.0.0b1+early":  # PACKAGE_NAME in v2.7.4.post1 hopper/setup.py:36
        return "flash-attn"
    return {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}[generation]


def signature(generation: int, version: str, function: str) -> inspect.Signature:
    recorded = RECORD[str(generation)][version]["functions"][function]["parameters"]
    return inspect.Signature([
        inspect.Parameter(
            name,
            getattr(inspect.Parameter, kind.upper()),
            default=inspect.Parameter.empty if default is None else value_of(default),
        )
        for name, default, kind in recorded
    ])  # fmt: skip


def value_of(default: str) -> Any:
    return torch.bfloat16 if default == "torch.bfloat16" else ast.literal_eval(default)


def bound(
    name: str, signature: inspect.Signature, act: Callable[..., Any], module: str
) -> Callable[..., Any]:
    """A function of exactly this signature: what it has not raises TypeError."""

    def function(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords)
        given.apply_defaults()
        return act(**given.arguments)

    function.__signature__ = signature  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    return function


def package(generation: int, version: str, arch: int = 90) -> dict[str, ModuleType]:
    """Its modules by name, parents first. ``version`` is one of ``VERSIONS[str(generation)]``."""
    recorded = RECORD[str(generation)][version]["functions"]
    emulation = EMULATIONS[generation](version, arch)
    layout = LAYOUTS[generation](version)
    home = next(name for name, holds in layout.items() if holds == "functions")
    for name in recorded:
        act = getattr(emulation, name)
        emulation.functions[name] = bound(name, signature(generation, version, name), act, home)
    public = {
        name: f for name, f in emulation.functions.items() if name in layout_public(generation, recorded)
    }
    modules: dict[str, ModuleType] = {}
    for name, holds in layout.items():
        module = modules[name] = ModuleType(name)
        module.__spec__ = ModuleSpec(
            name, Emulated(), origin="emulated", is_package=has_children(name, layout)
        )
        module.__file__ = f"/emulated/{name.replace('.', '/')}.py"
        if has_children(name, layout):
            module.__path__ = []
        functions = {"functions": emulation.functions, "public": public}.get(holds, {})
        for function, f in functions.items():
            setattr(module, function, f)
        parent, _, child = name.rpartition(".")
        if parent in modules:
            setattr(modules[parent], child, module)
    if generation == 4:  # it asks for a distribution "fa4", which there is not (flash_attn/cute/__init__.py)
        modules["flash_attn.cute"].__version__ = "0.0.0"  # type: ignore[attr-defined]
    elif generation == 2 or version == "3.0.0":  # the earlier hopper/__init__.py is not installed
        modules[next(iter(layout))].__version__ = reported(version)  # type: ignore[attr-defined]
    return modules


def has_children(name: str, layout: dict[str, str]) -> bool:
    return any(other.startswith(name + ".") for other in layout)


def layout_public(generation: int, recorded: dict[str, Any]) -> set[str]:
    """What the package's own __init__ gives: of FlashAttention 4 two functions."""
    if generation == 4:
        return {"flash_attn_func", "flash_attn_varlen_func"}
    return {name for name in recorded if name.startswith("flash_attn_")}


def reported(version: str) -> str:
    """The name without what tells two sources of one version apart here ("3.0.0b1+early")."""
    return version.split("+")[0]


def layout_of_three(version: str) -> dict[str, str]:
    if version.endswith("+early"):  # v2.7.4.post1 hopper/setup.py:516, :609
        return {"flash_attn_interface": "functions", "flash_attn_3_cuda": ""}
    if version == "3.0.0b1":  # v2.8.3 hopper/setup.py:542, :636
        return {"flash_attn_3": "", "flash_attn_3._C": "", "flash_attn_interface": "functions"}
    return {
        "flash_attn_3": "",
        "flash_attn_3._C": "",
        "flash_attn_interface": "functions",
        "flash_attn_config": "",
        "flash_attn_3.flash_attn_interface": "functions",
    }


LAYOUTS: dict[int, Callable[[str], dict[str, str]]] = {
    2: lambda version: {
        "flash_attn": "public",
        "flash_attn.flash_attn_interface": "functions",
        "flash_attn_2_cuda": "",
    },
    3: layout_of_three,
    4: lambda version: {
        "flash_attn": "",
        "flash_attn.cute": "public",
        "flash_attn.cute.interface": "functions",
    },
}
"""Each module: what is in it."""


class Emulated:
    """The loader that a spec has to name; its modules are in ``sys.modules`` before anyone asks it."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return sys.modules.get(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Distribution(importlib.metadata.Distribution):
    def __init__(self, name: str, version: str, tops: list[str]) -> None:
        self.texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": "\n".join(tops),
        }

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path("/emulated") / path


class Finder:
    """On ``sys.meta_path``, so that importlib.metadata finds the distribution."""

    def __init__(self, name: str, version: str, tops: list[str]) -> None:
        self.name, self.found = name, Distribution(name, version, tops)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        wanted = getattr(context, "name", None)
        if wanted is None or wanted.lower().replace("_", "-").replace(".", "-") == self.name:
            yield self.found


@contextlib.contextmanager
def installed(generation: int, version: str, arch: int = 90) -> Iterator[dict[str, ModuleType]]:
    """The package is there; before and after, what was there before. FlashAttention 2 and 4 share a folder:
    the second of them joins the first's module."""
    modules = package(generation, version, arch)
    tops = sorted({name.partition(".")[0] for name in modules})
    family = tuple(f"{top}." for top in tops)
    before = {name: m for name, m in sys.modules.items() if name in tops or name.startswith(family)}
    cute = getattr(before.get("flash_attn"), "cute", None)
    shared = generation == 4 and "flash_attn" in before
    if shared:
        before["flash_attn"].cute = modules["flash_attn.cute"]  # type: ignore[attr-defined]
        modules["flash_attn"] = before["flash_attn"]
    elif generation == 2 and cute is not None:
        modules["flash_attn"].cute = cute  # type: ignore[attr-defined]
    for name in before:
        if not shared and not (cute is not None and name.startswith("flash_attn.cute")):
            del sys.modules[name]
    finder = Finder(distribution(generation, version), reported(version), tops)
    sys.modules.update(modules)
    sys.meta_path.insert(0, finder)
    try:
        yield modules
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name in tops or name.startswith(family)]:
            del sys.modules[name]
        sys.modules.update(before)
        if shared and cute is None:
            del before["flash_attn"].cute
        elif shared:
            before["flash_attn"].cute = cute  # type: ignore[attr-defined]

"""Which releases a kernel is asked with: of the one component that decides about it, all that are known.

The component is the library whose kernels run, where it can be installed by itself (cuDNN, flash-attn), else
the last of what the kernel needs (Triton, PyTorch). Everything else that it needs is the newest, or what the
user stated. With each PyTorch come the cuDNN and Triton of its wheel.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment, describe_device
from attnsel.environment.published import PUBLISHED
from attnsel.environment.releases import ASSUMED, BUILDS, ON_ARM, runs_on
from attnsel.environment.versions import Version
from attnsel.pages.can_i_use.feature import Feature, Mode, ask
from attnsel.rules import REGISTRY

ARCHITECTURES = (70, 75, 80, 86, 89, 90, 100, 103, 120)
"""The architectures of the matrix: data center and desktop GPUs since Volta."""

GPUS = tuple(f"sm{arch}" for arch in ARCHITECTURES)

_PACKAGES = {
    "cudnn": ("nvidia-cudnn-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13"),
    "triton": ("triton",),
    "flash_attn": ("flash-attn",),
    "flash_attn_4": ("flash-attn-4",),
}
_PLAIN = Feature("plain", "a plain call", "The default question.", {})

Stated = tuple[tuple[str, Version], ...]
"""Versions by component that a user stated, sorted."""


def component_of(kernel: str) -> str:
    """The component whose release decides what a kernel can do."""
    record = CANDIDATES[kernel]
    return record.library if record.library in record.needs else record.needs[-1]


@lru_cache(maxsize=64)
def published(component: str) -> tuple[Version, ...]:
    """The releases of a component that are known, oldest first: those in a package registry, those of
    PyTorch whose attention somebody has read; of what is in none, those that rules name."""
    if component == "torch":
        return tuple(sorted({build.torch for build in BUILDS if build.torch <= ASSUMED}))
    if component in _PACKAGES:
        texts = (text for package in _PACKAGES[component] for text in PUBLISHED[package].split())
        return tuple(sorted({Version.parse(text) for text in texts}))
    return tuple(sorted({edge for rule in REGISTRY.rules.values() for edge in rule.edges(component)}))


@lru_cache(maxsize=64)
def releases(kernel: str) -> tuple[Version, ...]:
    """The releases that a kernel is asked with: from the first that runs a plain call on some GPU."""
    known = published(component_of(kernel))
    for place, version in enumerate(known):
        if any(runs_plain(kernel, environment(kernel, gpu, version), "inference") for gpu in GPUS):
            return known[place:]
    return known


def runs_plain(kernel: str, env: Environment, mode: Mode) -> bool:
    """Whether a kernel runs a plain causal call there."""
    return ask(_PLAIN, mode, kernel, env).eligible


@lru_cache(maxsize=512)
def newest(component: str, gpu: str) -> Version | None:
    """The newest known release; of PyTorch the newest that has a wheel with code for that GPU."""
    if component == "torch":
        arch = describe_device(gpu).arch
        able = [build.torch for build in BUILDS if arch is None or arch in ON_ARM or runs_on(build, arch)]
        return max((torch for torch in able if torch <= ASSUMED), default=ASSUMED)
    usual: Version | None = getattr(Environment.describe(gpu), component)
    known = published(component)
    return known[-1] if known and (usual is None or component in _PACKAGES) else usual


@lru_cache(maxsize=8192)
def environment(kernel: str, gpu: str, version: Version, stated: Stated = ()) -> Environment:
    """A machine with a GPU, this release of what decides about a kernel, and the newest of what it needs
    besides."""
    return Environment.describe(gpu, **versions(kernel, gpu, version, dict(stated)))


def versions(
    kernel: str, gpu: str, version: Version, stated: Mapping[str, Version]
) -> dict[str, Version | None]:
    """What is stated of that machine. ``stated`` wins over what is newest, and not over ``version``."""
    given: dict[str, Version | None] = dict(stated)
    for component in CANDIDATES[kernel].needs:
        if component not in given:
            given[component] = newest(component, gpu)
    given[component_of(kernel)] = version
    return given

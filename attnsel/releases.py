"""PyTorch's wheels: what each build brings, which GPUs it has code for, and which one was likely meant.

The rows and their sources are in :mod:`attnsel._torch_builds`. They are the CUDA wheels for Linux x86-64;
those for other machines are built for other architectures and are not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from attnsel._torch_builds import PYTHONS, ROWS
from attnsel.versions import Version


class Build(NamedTuple):
    """One build of one torch release for Linux x86-64.

    ``sass``: architectures (90 is sm90) whose machine code is in the wheel; ``ptx``: the one whose PTX is
    there, which the driver compiles for newer GPUs. ``index``: "" for PyPI's own wheel, else the name under
    ``download.pytorch.org/whl/`` that has it. ``pythons``: minor releases of Python 3. ``pin``: cuDNN as the wheel
    requires or contains it, to its last number; ``bundled``: it lies in the wheel and no package is required.
    """

    torch: Version
    cuda: Version
    cudnn: Version
    nccl: Version | None
    triton: Version
    sass: tuple[int, ...]
    ptx: int | None
    index: str
    pythons: tuple[int, ...]
    pin: str
    bundled: bool = False

    @property
    def name(self) -> str:
        """``2.13.0+cu130``, as torch writes its own version."""
        return f"{self.torch}+cu{self.cuda.major}{self.cuda.minor}"

    @property
    def cudnn_package(self) -> str:
        """``nvidia-cudnn-cu12``: the package that brings cuDNN, or that can where the wheel bundles it."""
        return f"nvidia-cudnn-cu{self.cuda.major}"


def _build(row: str) -> Build:
    torch, cuda, cudnn, nccl, triton, *archs = row.split()
    first, last = PYTHONS[torch.rpartition(".")[0]].split("-")
    read = {int(arch.removesuffix("+PTX").replace(".", "")): arch.endswith("+PTX") for arch in archs}
    toolkit = Version.parse(cuda.removeprefix("*"))
    return Build(
        torch=Version.parse(torch),
        cuda=toolkit,
        cudnn=Version.parse(cudnn.removesuffix("!")),
        nccl=None if nccl == "-" else Version.parse(nccl),
        triton=Version.parse(triton),
        sass=tuple(read),
        ptx=next((arch for arch, with_ptx in read.items() if with_ptx), None),
        index="" if cuda.startswith("*") else f"cu{toolkit.major}{toolkit.minor}",
        pythons=tuple(range(int(first), int(last) + 1)),
        pin=cudnn.removesuffix("!"),
        bundled=cudnn.endswith("!"),
    )


BUILDS: tuple[Build, ...] = tuple(map(_build, ROWS))
"""Every known build, lowest torch and CUDA first."""

NEWEST = BUILDS[-1].torch


def builds_of(torch: Version) -> tuple[Build, ...]:
    """The builds of this release, or of the newest patch below it where it is not known; () for a minor that
    nobody knows."""
    same = [build for build in BUILDS if build.torch[:2] == torch[:2]]
    patch = max((b.torch for b in same if b.torch <= torch), default=same[0].torch if same else None)
    return tuple(build for build in same if build.torch == patch)


def default_build(torch: Version) -> Build | None:
    """What ``pip install torch==…`` brings from PyPI."""
    return next((build for build in builds_of(torch) if not build.index), None)


def runs_on(build: Build, arch: int) -> bool:
    """Whether a build has code for an architecture.

    Machine code runs on its own major architecture, from its minor upwards; PTX is compiled for everything
    at or above it. Source: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    binary = any(code // 10 == arch // 10 and code <= arch for code in build.sass)
    return binary or (build.ptx is not None and build.ptx <= arch)


@lru_cache(maxsize=256)
def _fitting(arch: int | None, given: tuple[tuple[str, Version], ...]) -> Build | None:
    found = [b for b in BUILDS if all(_fits(b, name, version) for name, version in given)]
    return max(found, key=lambda b: (arch is None or runs_on(b, arch), not b.index, b.torch), default=None)


def _fits(build: Build, name: str, version: Version) -> bool:
    if name == "python":
        return version.major == 3 and version.minor in build.pythons
    return bool(getattr(build, name)[:2] == version[:2])


def fitting_build(arch: int | None, given: Mapping[str, Version | None]) -> Build | None:
    """The likeliest build for an architecture and what was stated (torch, cuda, cudnn, triton, python).

    None where no wheel has this set of versions.
    """
    asked = ("torch", "cuda", "cudnn", "triton", "python")
    stated = ((name, given.get(name)) for name in asked)
    return _fitting(arch, tuple((name, version) for name, version in stated if version is not None))

"""PyTorch's wheels: what each build brings, which GPUs it has code for, and which one was likely meant.

The CUDA wheels for Linux x86-64 are rows of ``data/torch_builds.csv``; the frontends inside
TransformerEngine's releases are rows of ``data/te_frontends.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment.gpus import WITHOUT_PYTORCH
from attnsel.environment.read import unread_release
from attnsel.environment.versions import Version

ON_ARM = frozenset({72, 87, 101, 110})
"""Boards with an ARM processor of their own (Jetson, Drive): the wheels for them are not in the table."""


class Build(NamedTuple):
    """One build of one torch release for Linux x86-64.

    ``sass``: architectures (90 is sm90) whose machine code is in the wheel; ``ptx``: the one whose PTX is
    there, which the driver compiles for newer GPUs. ``index``: "" for PyPI's own wheel, else the name under
    ``download.pytorch.org/whl/`` that has it. ``pythons``: minor releases of Python 3. ``pin``: cuDNN as the
    wheel requires it, to its last number.
    """

    torch: Version
    cuda: Version
    cudnn: Version
    nccl: Version
    triton: Version
    sass: tuple[int, ...]
    ptx: int | None
    index: str  # type: ignore[assignment]  # hides tuple.index, which no build needs
    pythons: tuple[int, ...]
    pin: str

    @property
    def name(self) -> str:
        """``2.13.0+cu130``, as torch writes its own version."""
        return f"{self.torch}+cu{self.cuda.major}{self.cuda.minor}"

    @property
    def cudnn_package(self) -> str:
        """``nvidia-cudnn-cu12``: the package that brings cuDNN."""
        return f"nvidia-cudnn-cu{self.cuda.major}"

    @property
    def python(self) -> Version:
        """The Python that is assumed with it."""
        return Version(3, 12 if 12 in self.pythons else self.pythons[-1])


def _version(text: str) -> Version:
    """Numbers and dots; a wheel's build number goes. The rows are ours: nothing else is in them."""
    return Version(*map(int, text.split(".")[:3]))


@cache
def torch_builds() -> tuple[Build, ...]:
    """Every known build, lowest torch and CUDA first."""
    return tuple(map(_build, read_rows("attnsel.environment", "torch_builds")))


def _build(row: Mapping[str, str]) -> Build:
    cuda = _version(row["cuda"])
    codes = row["code"].split()
    first, last = (_version(text).minor for text in row["pythons"].split("-"))
    return Build(
        torch=_version(row["torch"]),
        cuda=cuda,
        cudnn=_version(row["cudnn"]),
        nccl=_version(row["nccl"]),
        triton=_version(row["triton"]),
        sass=tuple(int(code.removesuffix("+")) for code in codes),
        ptx=next((int(code[:-1]) for code in codes if code.endswith("+")), None),
        index="" if row["pypi"] else f"cu{cuda.major}{cuda.minor}",
        pythons=tuple(range(first, last + 1)),
        pin=row["cudnn"],
    )


OLDEST = Version(2, 2, 0)
"""The oldest release that is known: what F.sdpa of an older one does is in no rule."""

FRONTENDS = tuple(Version(1, minor) for minor in range(20, 29))
"""The releases of cudnn-frontend that attnsel's extra `cudnn` takes (pyproject.toml): newer ones have
heavy dependencies."""

ASSUMED = Version(2, 14, 1)
"""The newest release that is assumed where nothing says which; what was read: ``newest_read("torch")``."""


def builds_of(torch: Version) -> tuple[Build, ...]:
    """The builds of this release; of an unknown patch the newest before it; () of an unknown minor."""
    same = [build for build in torch_builds() if build.torch[:2] == torch[:2]]
    patch = max((b.torch for b in same if b.torch <= torch), default=same[0].torch if same else None)
    return tuple(build for build in same if build.torch == patch)


def default_build(torch: Version) -> Build | None:
    """What ``pip install torch==…`` brings from PyPI."""
    return next((build for build in builds_of(torch) if not build.index), None)


def build_with(torch: Version | None, cuda: Version | None) -> Build | None:
    """The wheel of this torch for this CUDA; None where there is none, or nobody knows the release."""
    if torch is None or cuda is None:
        return None
    return next((build for build in builds_of(torch) if build.cuda[:2] == cuda[:2]), None)


def runs_on(build: Build, arch: int) -> bool:
    """Whether a build has code for an architecture.

    Machine code runs on its own major architecture from its minor upwards, and PTX is compiled for everything
    at or above it (CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility"). Code for one
    architecture alone (sm90a) runs nowhere else; no wheel has only that. Boards with an ARM processor run no
    code of other GPUs (torch/cuda/__init__.py, DEVICE_REQUIREMENT, 2.13).
    """
    if arch in ON_ARM:
        return arch in build.sass
    binary = any(code // 10 == arch // 10 and code <= arch for code in build.sass)
    return binary or (build.ptx is not None and build.ptx <= arch)


class NoCode(NamedTuple):
    """No build of what was stated (None: not stated) has code for the GPU. ``nearest``: those that have, the
    smallest change first; none where the GPU is too old for any."""

    torch: Version | None
    cuda: Version | None
    nearest: tuple[Build, ...]

    @property
    def field(self) -> str:
        """What is blamed: CUDA decides what can be compiled, so it comes first."""
        return "torch" if self.cuda is None else "cuda"

    def __str__(self) -> str:
        torch = "" if self.torch is None else f"torch {self.torch}"
        cuda = "" if self.cuda is None else f"CUDA {self.cuda.major}.{self.cuda.minor}"
        stated = " with ".join(part for part in (torch, cuda) if part)
        return f"no wheel of {stated or 'PyTorch 2.2 or newer'} has code"


@lru_cache(maxsize=256)
def no_code(arch: int, torch: Version | None, cuda: Version | None) -> NoCode | None:
    """Whether no wheel of this torch and CUDA has code for an architecture; None stands for any.

    None where one has, or where nobody knows: another release, no such wheel, a board that has its own.
    """
    if arch in WITHOUT_PYTORCH:
        return NoCode(None, None, ())
    if arch in ON_ARM:
        return None
    stated = torch_builds() if torch is None else builds_of(torch)
    stated = tuple(build for build in stated if cuda is None or build.cuda[:2] == cuda[:2])
    able = [build for build in torch_builds() if runs_on(build, arch)]
    if not able or not stated or any(build in able for build in stated):
        return None
    on_pypi = [build for build in able if not build.index] or able
    first, second = (
        min(builds, key=lambda build: _apart(build, torch, cuda))
        for builds in (on_pypi if torch is None else able, on_pypi)
    )
    nearest = (first,) if first == second else (first, second)
    return NoCode(torch, cuda, nearest)


def _apart(build: Build, torch: Version | None, cuda: Version | None) -> tuple[int, ...]:
    """How far a build is from what was stated: releases of torch, then of CUDA; of equals the newest."""
    torches = sorted({b.torch[:2] for b in torch_builds()})
    toolkits = sorted({b.cuda[:2] for b in torch_builds()})
    steps = 0 if torch is None else abs(torches.index(torch[:2]) - torches.index(build.torch[:2]))
    other = 0 if cuda is None else abs(toolkits.index(cuda[:2]) - toolkits.index(build.cuda[:2]))
    return steps, build.torch != torch and not steps, other, *(-number for number in build.torch[:3])


# ---- which build was meant ---------------------------------------------------------------------------


def fitting_build(arch: int | None, given: Mapping[str, Version | None]) -> Build:
    """The likeliest build for an architecture and what was stated: torch, cuda, triton, python, cudnn.

    What was stated picks the builds that fit all of it, then those that run on the GPU are left, then PyPI's
    own come before an index, and the newest first. cuDNN can be exchanged in any of them, so it gives way
    first: without a pin of that minor, PyPI's wheel with the newest pin below it.
    """
    asked = ("torch", "cuda", "triton", "python", "cudnn")
    stated = ((name, given.get(name)) for name in asked)
    return _fitting(arch, tuple((name, version) for name, version in stated if version is not None))


@lru_cache(maxsize=256)
def _fitting(arch: int | None, given: tuple[tuple[str, Version], ...]) -> Build:
    stated = dict(given)
    cudnn = stated.pop("cudnn", None)
    left = list(torch_builds())
    for name, version in stated.items():
        left = _nearest(left, name, version)
    if arch is not None:
        left = [build for build in left if runs_on(build, arch)] or left
    if cudnn is not None:
        left = _with_cudnn(left, cudnn)
    return max(_read(left), key=lambda build: (not build.index, build.torch, build.cuda))


def _nearest(builds: list[Build], name: str, version: Version) -> list[Build]:
    """Those with this minor of a component; where there is none the newest below it, else all of them."""
    if name == "python":
        return [b for b in builds if (version.major, version.minor) in {(3, n) for n in b.pythons}] or builds
    if name == "torch":
        same = [build for build in builds_of(version) if build in builds]
        if same:
            return same
    same = [build for build in builds if getattr(build, name)[:2] == version[:2]]
    if same:
        return same
    known = (build for build in builds if unread_release("torch", build.torch) is None)
    below = [build for build in known if getattr(build, name) < version]
    newest = max((getattr(build, name)[:2] for build in below), default=None)
    return [build for build in below if getattr(build, name)[:2] == newest] or builds


def _with_cudnn(builds: list[Build], cudnn: Version) -> list[Build]:
    same = [build for build in builds if build.cudnn[:2] == cudnn[:2]]
    if same:
        return same
    read = _read(builds)
    below = [build for build in read if build.cudnn < cudnn]
    below = [build for build in below if not build.index] or below
    if below:
        newest = max(build.cudnn for build in below)
        return [build for build in below if build.cudnn == newest]
    oldest = min(build.cudnn for build in read)
    return [build for build in read if build.cudnn == oldest]


def _read(builds: list[Build]) -> list[Build]:
    """Without those that nobody would assume, where others are left."""
    return [build for build in builds if build.torch <= ASSUMED] or builds


# ---- the frontend inside TransformerEngine -------------------------------------------------------------

UNBUNDLED = Version(2, 18, 0)
"""The first release that is compiled against an installed frontend."""

OLDEST_INSTALLED = Version(1, 25, 0)
"""The oldest frontend that such a release may be compiled against."""


def bundled_frontend(transformer_engine: Version) -> Version | None:
    """The frontend inside a release; None where it has none of its own, or is older than the table."""
    if transformer_engine >= UNBUNDLED:
        return None
    found = [frontend for release, frontend in _bundled() if release <= transformer_engine]
    return found[-1] if found else None


@cache
def _bundled() -> tuple[tuple[Version, Version], ...]:
    """The first release with a frontend, and that frontend; it stays until the next."""
    rows = read_rows("attnsel.environment", "te_frontends")
    return tuple((_version(row["transformer_engine"]), _version(row["frontend"])) for row in rows)

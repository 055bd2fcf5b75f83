"""PyTorch's wheels: what each build brings, which GPUs it has code for, and which one was likely meant.

The rows and their sources are in ``attnsel/environment/releases.py``: the CUDA wheels for Linux x86-64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from attnsel.environment.versions import Version

# ---- What each CUDA wheel of PyTorch for Linux x86-64 brings: a line per release and CUDA version ------
# A line: torch, CUDA ("*" is PyPI's own wheel), cuDNN, NCCL, Triton, and which of ``ARCHS`` it has code
# for. The first release is the oldest that a described machine may have. Read 2026-11-23:
#
# - PyPI's own wheels: versions from their Requires-Dist, CUDA from their torch/version.py, code from the
# list in their libtorch_python.so, which ``torch.cuda.get_arch_list()`` returns. Since 2.14 Triton is "~=".
# - PyTorch's index up to 2.5: manywheel/build_cuda.sh and common/install_cuda.sh of pytorch/builder at
# release/2.2 to release/2.5. cu118 of 2.2 and 2.3: package lists of users. - Since 2.6: pytorch's
# .github/scripts/generate_binary_build_matrix.py, RELEASE.md ("Release Compatibility Matrix", "PyTorch CUDA
# Support Matrix": pytorch#164471, #175253, #182849, #194367), build_cuda.sh at 2.8. - 2.11: RELEASE.md has
# cuDNN 9.17.1.4 and the wheels 9.19.0.56; only cu129 requires 9.17.1.4. - Code of cu128 of 2.7 and 2.10,
# and of cu126 and cu128 of 2.11: get_arch_list() as users report it (pytorch#182250); of 2.13:
# torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC. - Inferred: NCCL of cu128 of 2.7; cuDNN and NCCL of
# cu129 of 2.9 and 2.10, as cu128 of the same release; code of cu129 of 2.9, 2.10 and 2.11, as before and
# after; cuDNN and NCCL of cu130 of 2.15, as its cu132. A cu129 of 2.12 was built, and no published one was
# found.
#
# Not here: wheels for Windows, and those for aarch64. CUDA wheels for aarch64 lie on PyPI since 2.11, with
# code for 80, 90, 100, 110 and 120, and in the index since 2.5; they require the same versions.


# First to last minor release of Python 3 with a wheel on PyPI.
PYTHONS = {
    "2.2": "8-12", "2.3": "8-12", "2.4": "8-12", "2.5": "9-13", "2.6": "9-13",
    "2.7": "9-13", "2.8": "9-13", "2.9": "10-14", "2.10": "10-14", "2.11": "10-14", "2.12": "10-14",
    "2.13": "10-14", "2.14": "10-14", "2.15": "11-15",
}  # fmt: skip

# Compute capabilities with machine code; "+" is behind the one whose PTX is there too.
ARCHS = {
    "kepler-hopper": "37 50 60 70 75 80 86 90",
    "maxwell-hopper": "50 60 70 75 80 86 90",
    "volta": "70 75 80 86 90 100 120",
    "volta+": "70 75 80 86 90 100 120+",
    "turing": "75 80 86 90 100 120",
    "turing+": "75 80 86 90 100 120+",
}

ROWS = (
    "2.2.0,1,2  11.8 8.7.0.84  2.19.3 2.2.0 kepler-hopper",
    "2.2.0,1,2 *12.1 8.9.2.26  2.19.3 2.2.0 maxwell-hopper",
    "2.3.0      11.8 8.7.0.84  2.20.5 2.3.0 kepler-hopper",
    "2.3.0     *12.1 8.9.2.26  2.20.5 2.3.0 maxwell-hopper",
    "2.3.1      11.8 8.7.0.84  2.20.5 2.3.1 kepler-hopper",
    "2.3.1     *12.1 8.9.2.26  2.20.5 2.3.1 maxwell-hopper",
    "2.4.0,1    11.8 9.1.0.70  2.20.5 3.0.0 kepler-hopper",
    "2.4.0,1   *12.1 9.1.0.70  2.20.5 3.0.0 maxwell-hopper",
    "2.4.0,1    12.4 9.1.0.70  2.20.5 3.0.0 maxwell-hopper",
    "2.5.0,1    11.8 9.1.0.70  2.21.5 3.1.0 kepler-hopper",
    "2.5.0,1    12.1 9.1.0.70  2.21.5 3.1.0 maxwell-hopper",
    "2.5.0,1   *12.4 9.1.0.70  2.21.5 3.1.0 maxwell-hopper",
    "2.6.0      11.8 9.1.0.70  2.21.5 3.2.0 kepler-hopper",
    "2.6.0     *12.4 9.1.0.70  2.21.5 3.2.0 maxwell-hopper",
    "2.6.0      12.6 9.5.1.17  2.21.5 3.2.0 maxwell-hopper",
    "2.7.0      11.8 9.1.0.70  2.21.5 3.3.0 kepler-hopper",
    "2.7.0     *12.6 9.5.1.17  2.26.2 3.3.0 maxwell-hopper",
    "2.7.0      12.8 9.7.1.26  2.26.2 3.3.0 turing+",
    "2.7.1      11.8 9.1.0.70  2.21.5 3.3.1 kepler-hopper",
    "2.7.1     *12.6 9.5.1.17  2.26.2 3.3.1 maxwell-hopper",
    "2.7.1      12.8 9.7.1.26  2.26.2 3.3.1 turing+",
    "2.8.0      12.6 9.10.2.21 2.27.3 3.4.0 maxwell-hopper",
    "2.8.0     *12.8 9.10.2.21 2.27.3 3.4.0 volta",
    "2.8.0      12.9 9.10.2.21 2.27.3 3.4.0 volta+",
    "2.9.0      12.6 9.10.2.21 2.27.5 3.5.0 maxwell-hopper",
    "2.9.0     *12.8 9.10.2.21 2.27.5 3.5.0 volta",
    "2.9.0      12.9 9.10.2.21 2.27.5 3.5.0 volta+",
    "2.9.0      13.0 9.13.0.50 2.27.7 3.5.0 turing+",
    "2.9.1      12.6 9.10.2.21 2.27.5 3.5.1 maxwell-hopper",
    "2.9.1     *12.8 9.10.2.21 2.27.5 3.5.1 volta",
    "2.9.1      12.9 9.10.2.21 2.27.5 3.5.1 volta+",
    "2.9.1      13.0 9.13.0.50 2.27.7 3.5.1 turing+",
    "2.10.0     12.6 9.10.2.21 2.27.5 3.6.0 maxwell-hopper",
    "2.10.0    *12.8 9.10.2.21 2.27.5 3.6.0 volta",
    "2.10.0     12.9 9.10.2.21 2.27.5 3.6.0 volta+",
    "2.10.0     13.0 9.15.1.9  2.28.9 3.6.0 turing+",
    "2.11.0     12.6 9.10.2.21 2.28.9 3.6.0 maxwell-hopper",
    "2.11.0     12.8 9.19.0.56 2.28.9 3.6.0 turing",
    "2.11.0     12.9 9.17.1.4  2.28.9 3.6.0 turing",
    "2.11.0    *13.0 9.19.0.56 2.28.9 3.6.0 turing",
    "2.12.0     12.6 9.10.2.21 2.29.3 3.7.0 maxwell-hopper",
    "2.12.0    *13.0 9.20.0.48 2.29.7 3.7.0 turing",
    "2.12.0     13.2 9.20.0.48 2.29.7 3.7.0 turing",
    "2.12.1     12.6 9.10.2.21 2.29.3 3.7.1 maxwell-hopper",
    "2.12.1    *13.0 9.20.0.48 2.29.7 3.7.1 turing",
    "2.12.1     13.2 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0     12.6 9.10.2.21 2.29.3 3.7.1 maxwell-hopper",
    "2.13.0     12.9 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0    *13.0 9.20.0.48 2.29.7 3.7.1 turing",
    "2.13.0     13.2 9.20.0.48 2.29.7 3.7.1 turing",
    "2.14.0,1   12.6 9.10.2.21 2.29.3 3.8.0 maxwell-hopper",
    "2.14.0,1  *13.0 9.24.0.43 2.30.7 3.8.0 turing",
    "2.14.0,1   13.2 9.24.0.43 2.30.7 3.8.0 turing",
    "2.15.0     13.0 9.26.0.51 2.30.7 3.9.0 turing",
    "2.15.0    *13.2 9.26.0.51 2.30.7 3.9.0 turing",
)


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
    """Numbers and dots; a wheel's build number goes. The rows are ours, and read at every import."""
    return Version(*map(int, text.split(".")[:3]))


def _builds(row: str) -> Iterable[Build]:
    torch, cuda, cudnn, nccl, triton, archs = row.split()
    minor, _, patches = torch.rpartition(".")
    first, last = map(int, PYTHONS[minor].split("-"))
    codes = ARCHS[archs].split()
    toolkit = _version(cuda.removeprefix("*"))
    for patch in patches.split(","):
        yield Build(
            torch=_version(f"{minor}.{patch}"),
            cuda=toolkit,
            cudnn=_version(cudnn),
            nccl=_version(nccl),
            triton=_version(triton),
            sass=tuple(int(code.removesuffix("+")) for code in codes),
            ptx=next((int(code[:-1]) for code in codes if code.endswith("+")), None),
            index="" if cuda.startswith("*") else f"cu{toolkit.major}{toolkit.minor}",
            pythons=tuple(range(first, last + 1)),
            pin=cudnn,
        )


BUILDS: tuple[Build, ...] = tuple(sorted(build for row in ROWS for build in _builds(row)))
"""Every known build, lowest torch and CUDA first."""

OLDEST = BUILDS[0].torch
"""The oldest release that is known: what F.sdpa of an older one does is in no rule."""

NEWEST = BUILDS[-1].torch
"""The newest release that is known."""

FRONTENDS = tuple(Version(1, minor) for minor in range(20, 29))
"""The releases of cudnn-frontend that attnsel's extra `cudnn` takes (pyproject.toml): newer ones have
heavy dependencies."""

ASSUMED = Version(2, 14, 1)
"""The newest release that is assumed where nothing says which: the last whose attention rules/ has read."""


def builds_of(torch: Version) -> tuple[Build, ...]:
    """The builds of this release; of an unknown patch the newest before it; () of an unknown minor."""
    same = [build for build in BUILDS if build.torch[:2] == torch[:2]]
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
    smallest change first."""

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
        return f"no wheel of {' with '.join(part for part in (torch, cuda) if part)} has code"


@lru_cache(maxsize=256)
def no_code(arch: int, torch: Version | None, cuda: Version | None) -> NoCode | None:
    """Whether no wheel of this torch and CUDA has code for an architecture; None stands for any.

    None where one has, or where nobody knows: another release, no such wheel, a board that has its own.
    """
    if arch in ON_ARM:
        return None
    stated = BUILDS if torch is None else builds_of(torch)
    stated = tuple(build for build in stated if cuda is None or build.cuda[:2] == cuda[:2])
    able = [build for build in BUILDS if runs_on(build, arch)]
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
    torches = sorted({b.torch[:2] for b in BUILDS})
    toolkits = sorted({b.cuda[:2] for b in BUILDS})
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
    left = list(BUILDS)
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
    below = [build for build in builds if getattr(build, name) < version]
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


# ---- Which cudnn-frontend, in C++, is inside each release of TransformerEngine -------------------------
# Up to 2.17 it is a submodule, compiled into TransformerEngine's libraries, whatever nvidia-cudnn-frontend
# is installed beside it. Read from NVIDIA/TransformerEngine: the commit of ``3rdparty/cudnn-frontend`` at
# each tag from v1.0 to v2.17.1, and that commit's version in cudnn-frontend's CMakeLists.txt (of v2.17: the
# title of 66e8aab1b). From 2.18 on there is no submodule (8d06ed40d, #3169): it is compiled against the
# headers of the nvidia-cudnn-frontend that was installed there, 1.25.0 or newer (pyproject.toml of v2.18).


_BUNDLED: tuple[tuple[Version, Version], ...] = tuple(
    (Version.parse(release), Version.parse(frontend))
    for release, frontend in (
        line.split()
        for line in (
            "1.0   0.9.2",
            "1.2   1.0.0",
            "1.3   1.0.3",
            "1.6   1.3.0",
            "1.8   1.4.0",
            "1.9   1.5.2",
            "1.10  1.6.1",
            "1.12  1.8.0",
            "2.0   1.10.0",
            "2.2   1.11.0",
            "2.4   1.12.0",
            "2.5   1.12.1",
            "2.6   1.13.0",
            "2.7   1.14.0",
            "2.8   1.14.1",
            "2.9   1.15.0",
            "2.10  1.16.0",
            "2.11  1.16.1",
            "2.12  1.17.0",
            "2.13  1.18.0",
            "2.14  1.21.0",
            "2.15  1.22.0",
            "2.17  1.25.0",
        )
    )
)
"""The first release with a frontend, and that frontend; it stays until the next row."""

UNBUNDLED = Version(2, 18, 0)
"""The first release that is compiled against an installed frontend."""

OLDEST_INSTALLED = Version(1, 25, 0)
"""The oldest frontend that such a release may be compiled against."""


def bundled_frontend(transformer_engine: Version) -> Version | None:
    """The frontend inside a release; None where it has none of its own, or is older than the table."""
    if transformer_engine >= UNBUNDLED:
        return None
    found = [frontend for release, frontend in _BUNDLED if release <= transformer_engine]
    return found[-1] if found else None

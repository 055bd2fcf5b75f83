"""How a FlashAttention package gets onto a machine: the wheel that fits, or that there is none.

``flash-attn`` lies on PyPI as source. Its wheels lie beside the releases on GitHub, one for each torch, CUDA,
Python and C++ ABI, and its setup.py takes the one that fits where there is one. ``flash-attn-3`` is on no
registry. ``flash-attn-4`` is a pure Python wheel, so far of betas.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Version

# ---- The wheels that flash-attn's release workflow built, newest release first. Made: do not edit ------
# python tests/proof/wheel_table.py CHECKOUT
#
# Source: .github/workflows/publish.yml of Dao-AILab/flash-attention at each tag; releases as on PyPI. A
# line: release, CUDA as the file name has it, then torch:first-last minor of Python 3; all for Linux x86_64
# and both C++ ABIs. "!" marks those whose wheel for the old ABI was built with a torch of the new one, and
# does not load with the other (flash-attention#1717, #1783).


BUILT = (
    "2.8.3.post1 cu12 2.4:9-12 2.5:9-13 2.6:9-13! 2.7:9-13! 2.8:9-13!",
    "2.8.3 cu12 2.4:9-12 2.5:9-13 2.6:9-13! 2.7:9-13! 2.8:9-13!",
    "2.8.2 cu12 2.4:9-12 2.5:9-13 2.6:9-13! 2.7:9-13!",
    "2.8.1 cu12 2.4:9-12 2.5:9-13 2.6:9-13! 2.7:9-13!",
    "2.8.0.post2 cu12 2.4:9-12 2.5:9-13 2.6:9-13! 2.7:9-13!",
    "2.7.4.post1 cu12 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13 2.6:9-13",
    "2.7.3 cu11 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.3 cu12 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.2.post1 cu11 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.2.post1 cu12 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.1.post4 cu11 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.1.post4 cu12 2.1:9-11 2.2:9-12 2.3:9-12 2.4:9-12 2.5:9-13",
    "2.7.0.post2 cu11 2.1:8-11 2.2:8-12 2.3:8-12 2.4:8-12 2.5:9-12",
    "2.7.0.post2 cu12 2.1:8-11 2.2:8-12 2.3:8-12 2.4:8-12 2.5:9-12",
    "2.6.3 cu118 2.0:8-11 2.1:8-11 2.2:8-12 2.3:8-12 2.4:8-12",
    "2.6.3 cu123 2.1:8-11 2.2:8-12 2.3:8-12 2.4:8-12",
    "2.6.2 cu118 2.0:8-11 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.6.2 cu123 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.6.1 cu118 2.0:8-11 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.6.1 cu123 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.6.0.post1 cu118 2.0:8-11 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.6.0.post1 cu122 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.5.9.post1 cu118 2.0:8-11 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.5.9.post1 cu122 2.1:8-11 2.2:8-12 2.3:8-12",
    "2.5.8 cu118 2.0:8-11 2.1:8-11 2.2:8-11 2.3:8-11",
    "2.5.8 cu122 2.1:8-11 2.2:8-11 2.3:8-11",
    "2.5.7 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.7 cu122 2.1:8-11 2.2:8-11",
    "2.5.6 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.6 cu122 2.1:8-11 2.2:8-11",
    "2.5.5 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.5 cu122 2.1:8-11 2.2:8-11",
    "2.5.4 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.4 cu122 2.1:8-11 2.2:8-11",
    "2.5.3 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.3 cu122 2.1:8-11 2.2:8-11",
    "2.5.2 cu118 2.0:8-11 2.1:8-11 2.2:8-11",
    "2.5.2 cu122 2.1:8-11 2.2:8-11",
    "2.5.1.post1 cu118 2.0:8-11 2.1:8-11",
    "2.5.1.post1 cu122 2.1:8-11",
    "2.5.0 cu118 2.0:8-11 2.1:8-11",
    "2.5.0 cu122 2.1:8-11",
    "2.4.3.post1 cu118 2.0:8-11 2.1:8-11",
    "2.4.3.post1 cu122 2.1:8-11",
    "2.4.2 cu118 2.0:8-11 2.1:8-11",
    "2.4.2 cu122 2.1:8-11",
    "2.4.1 cu118 2.0:8-11 2.1:8-11",
    "2.4.1 cu122 2.1:8-11",
    "2.4.0.post1 cu118 2.0:8-11 2.1:8-11",
    "2.4.0.post1 cu122 2.1:8-11",
    "2.3.6 cu118 2.0:8-11 2.1:8-11",
    "2.3.6 cu122 2.1:8-11",
)

NEWEST_SDIST = "2.8.3.post2"
"""The newest release on PyPI, as source, when this was made."""


# setup.py of flash-attn 2.8.3, BASE_WHEEL_URL and get_wheel_url (lines 58 and 440 to 468).
_URL = "https://github.com/Dao-AILab/flash-attention/releases/download/v{release}/{file}"
_FILE = "flash_attn-{release}%2B{cuda}torch{torch}cxx11abi{abi}-cp3{python}-cp3{python}-linux_x86_64.whl"

Wanted = Callable[[Version], bool]


class Wheel(NamedTuple):
    """One file of a release; ``torch`` and ``python`` are minor releases, such as 2.8 and 3.12."""

    release: str
    cuda: str  # cu12, and cu123 in older names
    torch: tuple[int, int]
    python: tuple[int, int]
    new_abi: bool

    @property
    def cuda_major(self) -> int:
        return int(self.cuda[2:4])

    @property
    def url(self) -> str:
        torch, abi = f"{self.torch[0]}.{self.torch[1]}", str(self.new_abi).upper()
        file = _FILE.format(release=self.release, cuda=self.cuda, torch=torch, abi=abi, python=self.python[1])
        return _URL.format(release=self.release, file=file)

    @property
    def where(self) -> str:
        """What it is for: ``torch 2.8, CUDA 12, Python 3.12``."""
        return _where(self.torch, self.cuda_major, self.python)


class NoWheel(NamedTuple):
    """Nothing fits. ``nearest`` is the wheel for the most similar machine, None where nothing is similar."""

    why: str
    nearest: Wheel | None

    def __str__(self) -> str:
        return self.why if self.nearest is None else f"{self.why}; the nearest is for {self.nearest.where}"


def flash_attn_wheel(
    env: Environment, wanted: Wanted | None = None, new_abi: bool | None = None
) -> Wheel | NoWheel:
    """The newest wheel of flash-attn for this torch, CUDA and Python on Linux x86_64.

    ``wanted`` says which releases will do; ``new_abi`` how torch was compiled, where that is known.
    """
    if env.platform != "linux":
        return NoWheel(f"flash-attn has no wheels for {env.platform}, only for Linux", None)
    if env.detected and platform.machine() != "x86_64":
        return NoWheel(f"flash-attn has no wheels for {platform.machine()}, only for x86_64", None)
    if env.torch is None or env.python is None:
        return NoWheel("which wheel of flash-attn fits depends on torch, which is not installed", None)
    if env.cuda is None:
        return NoWheel("flash-attn has wheels only for CUDA builds of torch", None)
    abi = _new_abi(env) if new_abi is None else new_abi
    torch, cuda, python = env.torch[:2], env.cuda.major, env.python[:2]
    nearest: tuple[tuple[int, ...], Wheel] | None = None
    other_abi = ""
    for release, wheel, both_abis in _wheels(python):
        if wanted is not None and not wanted(release):
            continue
        if (wheel.torch, wheel.cuda_major, wheel.python) == (torch, cuda, python):
            if abi or both_abis:
                return wheel._replace(new_abi=abi)
            other_abi = ", as torch is compiled here (old C++ ABI)"
        else:
            far = _apart(wheel, torch, cuda, python)
            if nearest is None or far < nearest[0]:  # of equals the first, which is the newest
                nearest = far, wheel._replace(new_abi=wheel.torch >= (2, 7))
    why = f"no release of flash-attn has a wheel for {_where(torch, cuda, python)}{other_abi}"
    return NoWheel(why, None if nearest is None else nearest[1])


@lru_cache(maxsize=16)
def _wheels(python: tuple[int, ...]) -> tuple[tuple[Version, Wheel, bool], ...]:
    """Newest release first, for each release, CUDA and torch the wheel of the nearest Python, and whether
    there is one for the old C++ ABI too."""
    found = []
    for line in BUILT:
        release, cuda, *cells = line.split()
        for cell in cells:
            torch, _, pythons = cell.rstrip("!").partition(":")
            major, minor = torch.split(".")
            first, last = map(int, pythons.split("-"))
            there = min(max(python[1], first), last)
            wheel = Wheel(release, cuda, (int(major), int(minor)), (3, there), True)
            found.append((Version.parse(release), wheel, not cell.endswith("!")))
    return tuple(found)


def _new_abi(env: Environment) -> bool:
    """How torch was compiled: asked where it is loaded, else by its release.

    PyTorch's blog on 2.6: its build for CUDA 12.6 has the new ABI; for 2.7 all Linux builds were to have it.
    """
    loaded = sys.modules.get("torch")
    assert env.torch is not None
    if env.detected and loaded is not None and Version.parse(str(loaded.__version__))[:2] == env.torch[:2]:
        return bool(loaded._C._GLIBCXX_USE_CXX11_ABI)
    new_in = Version(12, 6) if env.torch[:2] == (2, 6) else Version(0)
    return env.torch[:2] >= (2, 6) and env.cuda is not None and env.cuda >= new_in


def _apart(wheel: Wheel, torch: tuple[int, ...], cuda: int, python: tuple[int, ...]) -> tuple[int, ...]:
    """How unlike a machine a wheel is: another Python is easier to have than another torch or CUDA."""
    return (
        abs(wheel.cuda_major - cuda),
        abs(100 * (wheel.torch[0] - torch[0]) + wheel.torch[1] - torch[1]),
        abs(wheel.python[1] - python[1]),
    )


def _where(torch: tuple[int, ...], cuda: int, python: tuple[int, ...]) -> str:
    return f"torch {torch[0]}.{torch[1]}, CUDA {cuda}, Python {python[0]}.{python[1]}"


# ---- lines to paste -----------------------------------------------------------------------------------


def install_flash_attn(found: Wheel | NoWheel, release: str) -> str:
    """A command; where no wheel fits it builds this release, with nvcc and for hours."""
    if isinstance(found, Wheel):
        return f"pip install {found.url}"
    return f"pip install {_quoted('flash-attn', f'=={release}')} --no-build-isolation"


def flash_attn_3_index(env: Environment) -> str | None:
    """The name under download.pytorch.org/whl/ that has FlashAttention 3 for this torch and CUDA.

    It has wheels for CUDA 12.6, 12.8 and 13.0 and torch from 2.9 on (NVIDIA-NeMo/RL#2148);
    hopper/setup.py (2026-08, line 650) makes them independent of torch's release from there on.
    """
    if env.cuda is None or env.torch is None or env.torch < Version(2, 9) or env.platform != "linux":
        return None
    of_12 = "cu128" if env.cuda >= Version(12, 8) else "cu126"
    return {12: of_12, 13: "cu130"}.get(env.cuda.major)


def install_flash_attn_3(env: Environment) -> str:
    """From PyTorch's index where that has it; elsewhere from the folder hopper/ of the repository."""
    index = flash_attn_3_index(env)
    if index is not None:
        return f"pip install flash-attn-3 --index-url https://download.pytorch.org/whl/{index}"
    return (
        "# No wheel is known for this torch and CUDA. This builds it, with nvcc from CUDA 12.3 on:\n"
        "git clone --recursive https://github.com/Dao-AILab/flash-attention\n"
        "cd flash-attention/hopper && python setup.py install"
    )


def install_flash_attn_4(env: Environment, bounds: str = "") -> str:
    """Its README's command; --pre because there are betas only, which pip takes by themselves where one is
    named. Its wheels want Python 3.10 or newer."""
    extra = "[cu13]" if env.cuda is not None and env.cuda.major >= 13 else ""
    pre = "" if bounds.startswith("==") else "--pre "
    return f"pip install {pre}{_quoted(f'flash-attn-4{extra}', bounds)}"


def _quoted(package: str, bounds: str) -> str:
    return f"'{package}{bounds}'" if bounds or "[" in package else package


# ---- Which builds of a package PyPI has for Linux x86_64, oldest first. Made: do not edit --------------
# python tests/proof/package_index.py
#
# Source: `pip index versions --pre PACKAGE` on 2026-11-23; development builds are left out.


PUBLISHED: dict[str, str] = {
    "nvidia-cudnn-cu11": (
        "8.5.0.96 8.6.0.163 8.7.0.84 8.8.0.121 8.8.1.3 8.9.0.131 8.9.1.23 8.9.2.26 8.9.4.25 8.9.5.30 "
        "8.9.6.50 9.0.0.312 9.1.0.70 9.1.1.17 9.2.0.82 9.2.1.18 9.3.0.75 9.4.0.58 9.5.0.50 9.5.1.17 "
        "9.6.0.74 9.7.0.66 9.7.1.26 9.8.0.87 9.9.0.52 9.10.0.56 9.10.1.4 9.10.2.21"
    ),
    "nvidia-cudnn-cu12": (
        "8.8.0.121 8.8.1.3 8.9.0.131 8.9.1.23 8.9.2.26 8.9.4.25 8.9.5.30 8.9.6.50 8.9.7.29 9.0.0.312 "
        "9.1.0.70 9.1.1.17 9.2.0.82 9.2.1.18 9.3.0.75 9.4.0.58 9.5.0.50 9.5.1.17 9.6.0.74 9.7.0.66 "
        "9.7.1.26 9.8.0.87 9.9.0.52 9.10.0.56 9.10.1.4 9.10.2.21 9.11.0.98 9.11.1.4 9.12.0.46 9.13.0.50 "
        "9.13.1.26 9.14.0.64 9.15.0.57 9.15.1.9 9.16.0.29 9.17.0.29 9.17.1.4 9.18.0.77 9.18.1.3 9.19.0.56 "
        "9.20.0.48 9.21.0.82 9.21.1.3 9.22.0.52 9.23.0.39 9.23.1.3 9.23.2.1 9.24.0.43 9.24.1.1 9.25.1.1 "
        "9.26.0.51 9.26.1.1 9.27.0.42 9.28.0.42"
    ),
    "nvidia-cudnn-cu13": (
        "9.12.0.46 9.13.0.50 9.13.1.26 9.14.0.64 9.15.0.57 9.15.1.9 9.16.0.29 9.17.0.29 9.17.1.4 "
        "9.18.0.77 9.18.1.3 9.19.0.56 9.19.1.2 9.20.0.48 9.21.0.82 9.21.1.3 9.22.0.52 9.23.0.39 9.23.1.3 "
        "9.23.2.1 9.24.0.43 9.24.1.1 9.25.1.1 9.26.0.51 9.26.1.1 9.27.0.42 9.28.0.42 9.28.1.4"
    ),
    "nvidia-cudnn-frontend": (
        "1.3.0 1.4.0 1.5.0 1.5.1 1.5.2 1.6.0 1.6.1 1.7.0 1.8.0 1.9.0 1.10.0 1.11.0 1.12.0 1.13.0 1.14.0 "
        "1.14.1 1.15.0 1.16.0 1.17.0 1.18.0 1.19.0 1.19.1 1.20.0 1.21.0 1.22.0 1.22.1 1.23.0 1.24.0 "
        "1.24.1 1.25.0 1.26.0 1.27.0 1.28.0 1.29.0 1.29.1 1.30.0 1.31.0 1.32.0"
    ),
    "triton": (
        "2.0.0 2.1.0 2.2.0 2.3.0 2.3.1 3.0.0 3.1.0 3.2.0 3.3.0 3.3.1 3.4.0 3.5.0 3.5.1 3.6.0 3.7.0 3.7.1 "
        "3.8.0 3.9.0"
    ),
    "flash-attn": (
        "1.0.0 1.0.1 1.0.2 1.0.3.post0 1.0.4 1.0.5 1.0.6 1.0.7 1.0.8 1.0.9 2.0.0.post1 2.0.1 2.0.2 2.0.3 "
        "2.0.4 2.0.5 2.0.6 2.0.6.post2 2.0.7 2.0.8 2.0.9 2.1.0 2.1.1 2.1.2.post3 2.2.0 2.2.1 2.2.2 "
        "2.2.3.post2 2.2.4 2.2.4.post1 2.2.5 2.3.0 2.3.1.post1 2.3.2 2.3.3 2.3.4 2.3.5 2.3.6 2.4.0.post1 "
        "2.4.1 2.4.2 2.4.3.post1 2.5.0 2.5.1.post1 2.5.2 2.5.3 2.5.4 2.5.5 2.5.6 2.5.7 2.5.8 2.5.9.post1 "
        "2.6.0.post1 2.6.1 2.6.2 2.6.3 2.7.0.post2 2.7.1.post4 2.7.2.post1 2.7.3 2.7.4.post1 2.8.0.post2 "
        "2.8.1 2.8.2 2.8.3 2.8.3.post1 2.8.3.post2"
    ),
    "flash-attn-4": (
        "4.0.0b3 4.0.0b4 4.0.0b5 4.0.0b7 4.0.0b8 4.0.0b9 4.0.0b10 4.0.0b11 4.0.0b12 4.0.0b13 4.0.0b14 "
        "4.0.0b15 4.0.0b16 4.0.0b17 4.0.0b18 4.0.0b19 4.0.0b20 4.0.0b21 4.0.0b22 4.0.0b23 4.0.0b24 "
        "4.0.0b25 4.0.0b26 4.0.0b27 4.0.0b28 4.0.0b29 4.0.0b30 4.0.0b31 4.0.0b32 4.0.0b33 4.0.0b34 "
        "4.0.0b35 4.0.0b36"
    ),
}

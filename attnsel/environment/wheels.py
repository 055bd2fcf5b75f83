"""How a FlashAttention package gets onto a machine: the wheel that fits, or that there is none.

``flash-attn`` lies on PyPI as source. Its wheels lie beside the releases on GitHub, one for each torch, CUDA,
Python and C++ ABI, and its setup.py takes the one that fits where there is one. ``flash-attn-3`` is on no
registry. ``flash-attn-4`` is a pure Python wheel, so far of betas.

The wheels are rows of ``data/flash_attn_wheels.csv``, what PyPI has rows of ``data/pypi.csv``.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from attnsel.base.rows import read_rows
from attnsel.environment import Environment
from attnsel.environment.versions import Version, component_name, versions_of

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


COMPOSABLE_KERNEL = ("gfx90a", "gfx942", "gfx950")
"""AMD's GPUs that setup.py of flash-attn 2.8.3 compiles for (line 135); others have its Triton back end."""


class NoWheel(NamedTuple):
    """Nothing fits. ``nearest`` is the wheel for the most similar machine, None where nothing is similar.
    ``compiler``: what compiles it there; ``settings``: what stands before the command that does."""

    why: str
    nearest: Wheel | None
    compiler: str = "nvcc"
    settings: str = ""

    def __str__(self) -> str:
        return self.why if self.nearest is None else f"{self.why}; the nearest is for {self.nearest.where}"


def flash_attn_wheel(
    env: Environment, wanted: Wanted | None = None, new_abi: bool | None = None
) -> Wheel | NoWheel:
    """The newest wheel of flash-attn for this torch, CUDA and Python on Linux x86_64.

    ``wanted`` says which releases will do; ``new_abi`` how torch was compiled, where that is known.
    """
    if env.device.type == "rocm":
        by_ck = any(gfx in env.device.name for gfx in COMPOSABLE_KERNEL)
        settings = "" if by_ck else "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE "
        return NoWheel("flash-attn has no wheels for ROCm", None, "hipcc", settings)
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
    for row in read_rows("attnsel.environment", "flash_attn_wheels"):
        major, minor = map(int, row["torch"].split("."))
        first, last = (int(text.removeprefix("3.")) for text in row["pythons"].split("-"))
        there = min(max(python[1], first), last)
        wheel = Wheel(row["release"], row["cuda"], (major, minor), (3, there), True)
        found.append((Version.parse(row["release"]), wheel, row["old_abi"] == "yes"))
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


def unlike(facts: Mapping[str, Any]) -> str:
    """What a compiled package of a log is for, where that is not what is there: by a symbol that it asks for
    (``symbol_torch``: which torch has it) and by the name of its wheel (``built_torch``, ``built_cuda``)."""
    here = {name: str(facts.get(name) or "").partition("+")[0] for name in ("torch", "cuda", "python")}
    built = {name: str(facts.get(f"built_{name}") or "") for name in here}
    built["python"] = re.sub(r"^3(\d)", r"3.\1", built["python"])
    apart = [n for n in here if here[n] and built[n] and not f"{here[n]}.".startswith(f"{built[n]}.")]
    told = []
    if releases := facts.get("symbol_torch"):
        having, torch = versions_of("torch", releases), here["torch"]
        other = torch and Version.parse(torch) in having
        found = f", and torch here is {torch}" + ", which has it: another one is imported" * bool(other)
        told.append(f"torch has that symbol in {having}" + found * bool(torch))
    if apart:
        for_, there = (" and ".join(f"{component_name(n)} {of[n]}" for n in apart) for of in (built, here))
        told.append(f"the wheel in the log is for {for_}, and here is {there}")
    return "; ".join(told)


# ---- lines to paste -----------------------------------------------------------------------------------


def install_flash_attn(found: Wheel | NoWheel, release: str) -> str:
    """A command; where no wheel fits it builds this release, with a compiler and for hours."""
    if isinstance(found, Wheel):
        return f"pip install {found.url}"
    return f"{found.settings}pip install {_quoted('flash-attn', f'=={release}')} --no-build-isolation"


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


# ---- what PyPI has -------------------------------------------------------------------------------------


@cache
def on_pypi() -> dict[str, tuple[str, ...]]:
    """By package which builds of it PyPI has for Linux x86_64, oldest first."""
    found: dict[str, list[str]] = {}
    for row in read_rows("attnsel.environment", "pypi"):
        found.setdefault(row["package"], []).append(row["version"])
    return {package: tuple(versions) for package, versions in found.items()}

"""Where libcudnn and NVRTC are, and stand-ins that the C compiler makes where something is not there."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from attnsel.environment.gpus import ARCHITECTURES, Gpu, catalogue

# ---- A GPU as cuDNN describes one: the JSON that its device-property descriptor reads ------------------
# The format is undocumented; what 9.8 to 9.28 ask for was read from their error messages. Unknown keys are
# ignored and missing ones refused, so one superset serves all of them.


class _Arch(NamedTuple):
    threads_per_sm: int
    blocks_per_sm: int
    like: str  # the catalogue's card that stands in where a bare architecture is asked about


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
_ARCHS: dict[int, _Arch] = {
    70: _Arch(2048, 32, "V100"),
    72: _Arch(2048, 32, "V100"),
    75: _Arch(1024, 16, "T4"),
    80: _Arch(2048, 32, "A100"),
    86: _Arch(1536, 16, "A10"),
    87: _Arch(1536, 16, "Orin"),
    89: _Arch(1536, 24, "RTX 4090"),
    90: _Arch(2048, 32, "H100"),
    100: _Arch(2048, 32, "B200"),
    103: _Arch(2048, 32, "B300"),
    110: _Arch(1536, 24, "Thor"),
    120: _Arch(1536, 24, "RTX 5090"),
    121: _Arch(1536, 24, "GB10"),
}


class _Board(NamedTuple):
    clock_mhz: int
    memory_mhz: int
    bus_bits: int
    l2_mib: int


# NVIDIA's data sheets and architecture white papers (boost clock, memory clock and bus, L2). Of these only
# the architecture, the SM count and the shared memory were seen to change an answer.
_BOARDS: dict[str, _Board] = {
    "V100": _Board(1530, 877, 4096, 6),
    "T4": _Board(1590, 5001, 256, 4),
    "A100": _Board(1410, 1593, 5120, 40),
    "A10": _Board(1695, 6251, 384, 6),
    "RTX 3090": _Board(1695, 9751, 384, 6),
    "L4": _Board(2040, 6251, 192, 48),
    "L40S": _Board(2520, 9001, 384, 96),
    "RTX 4090": _Board(2520, 10501, 384, 72),
    "H100": _Board(1980, 2619, 5120, 50),
    "H200": _Board(1980, 3201, 6144, 50),
    "B200": _Board(1965, 3996, 8192, 126),
    "B300": _Board(1920, 3996, 8192, 126),
    "RTX 5090": _Board(2407, 14001, 512, 96),
    "GB10": _Board(2418, 4266, 256, 24),
    "Orin": _Board(1300, 3200, 256, 4),
    "Thor": _Board(1575, 4266, 256, 32),
}
# Boards of Jetson that stand in: under these names the catalogue has an architecture alone.
_JETSON = {"Orin": Gpu("Orin", 87, 32, 16), "Thor": Gpu("Thor", 110, 128, 20)}


def device_json(
    arch: int, name: str = "", memory: int | None = None, sm_count: int | None = None
) -> dict[str, Any]:
    """What cuDNN's descriptor reads for this architecture (90 is sm90); known cards by name.

    Raises ValueError for an architecture that nothing is known about.
    """
    if arch not in _ARCHS:
        raise ValueError(f"nothing is known about sm{arch}; allowed: {', '.join(f'sm{a}' for a in _ARCHS)}")
    limits = _ARCHS[arch]
    like = _JETSON.get(limits.like) or catalogue()[_key(limits.like)]
    card = catalogue().get(_key(name))
    if card is None or card.arch != arch:
        card = like
    board = _BOARDS.get(card.name, _BOARDS[limits.like])
    return {
        "deviceName": f"NVIDIA {name or limits.like}",
        "deviceVer": 10 * arch,
        "driverVer": 13000,
        "cudaDeviceId": 0,
        "pciDeviceId": 0,
        "isTccDriver": 0,
        "supportCoopLaunch": 1,
        "multiProcessorCount": sm_count or card.sm_count or like.sm_count,
        "smCountOrigin": 0,
        "warpSize": 32,
        "maxGridSize": [2**31 - 1, 65535, 65535],
        "maxBlockSize": [1024, 1024, 64],
        "maxThreadsPerBlock": 1024,
        "maxThreadsPerSM": limits.threads_per_sm,
        "maxCtasPerSM": limits.blocks_per_sm,
        "regsPerBlock": 65536,
        "maxRegistersPerSM": 65536,
        "maxSharedMemoryPerBlock": 49152,
        "maxSharedMemoryPerBlockOptin": ARCHITECTURES[arch].shared_memory,
        "oversizedSharedMemoryPerBlock": 0,
        "reservedSharedMemoryPerBlock": 1024 if arch >= 80 else 0,
        "totalGlobalMem": memory or (card.memory_gib or like.memory_gib or 0) << 30,
        "smClockRateKHz": 1000 * board.clock_mhz,
        "memClockRateKHz": 1000 * board.memory_mhz,
        "memoryBusWidth": board.bus_bits,
        "l2CacheSize": board.l2_mib << 20,
    }


def _key(name: str) -> str:
    return name.casefold().replace(" ", "")


# --------------------------------------------------------------------------------------------------------
# The folder where answers and compiled stand-ins are kept, and whether what lies in it can be trusted.
#
# A library found there is loaded into a process, so it must be nobody else's: the folder belongs to this
# user, mode 0700, and none of the folders above it lets another user put one in its place (as OpenSSH asks
# of ``~/.ssh``, and as ``sticky`` /tmp ensures). Where that does not hold, a temporary folder serves,
# nothing is remembered, and a note says how to mend it. Windows keeps a user's folders apart by itself.


_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(Exception):
    """A folder that is not used; the message says why, and how to mend it."""


def cache_folder() -> Path:
    """XDG_CACHE_HOME/attnsel, ~/.cache/attnsel without it. Raises Untrusted where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, "attnsel")
    try:
        return Path.home() / ".cache" / "attnsel"
    except RuntimeError:  # no HOME, and a user id that no list of users has
        raise Untrusted("there is no home folder: set HOME, or XDG_CACHE_HOME") from None


def private(folder: Path) -> Path:
    """``folder``, made where it is not there, and only this user's. Raises Untrusted, or OSError."""
    try:
        folder.mkdir(mode=_PRIVATE, parents=True)
    except FileExistsError:
        if not folder.is_dir():
            raise
    if hasattr(os, "geteuid"):
        _check(folder, os.geteuid())
        folder.chmod(_PRIVATE)  # as another umask, or an earlier attnsel, did not leave it
    return folder


def _check(folder: Path, me: int) -> None:
    for place in _up(folder.absolute()):
        found = place.lstat()
        own = place == folder.absolute()
        owners = {me} if own else {me, 0}
        if found.st_uid not in owners:
            raise Untrusted(f"{place} belongs to user {found.st_uid}, and you are {me}: {_MEND}")
        shared = not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS_WRITE
        if shared and (own or not found.st_mode & stat.S_ISVTX):
            mode = stat.S_IMODE(found.st_mode)
            raise Untrusted(
                f"other users can write to {place} (mode {mode:04o}): "
                + (f"see what lies in it, then rm -r it or chmod 700 {place}" if own else _MEND)
            )


_MEND = "set XDG_CACHE_HOME to a folder that only you can write to"


def _up(folder: Path) -> Iterator[Path]:
    """A folder and those above it: as it was named, and as links lead to it."""
    yield from dict.fromkeys((folder, *folder.parents, *folder.resolve().parents, folder.resolve()))


LIBCUDNN = "libcudnn.so.9"
_STILL = "the rules answer without it"


class Missing(RuntimeError):
    """Something is not here that the question needs. The message is one sentence for people; ``what`` is
    the thing: platform, cudnn, frontend, nvrtc, compiler, device."""

    def __init__(self, what: str, message: str) -> None:
        self.what = what
        super().__init__(message)

    def __reduce__(self) -> tuple[type[Missing], tuple[str, str]]:
        return type(self), (self.what, str(self))


def find_cudnn(wanted: str | None) -> str:
    """The path of libcudnn: in ``wanted`` (a file, or a folder of it), else this environment's.

    A bare file name means: wherever the system's loader finds it. Raises Missing.
    """
    if platform.system() != "Linux":
        raise Missing(
            "platform", f"libcudnn can be asked on Linux only, not on {platform.system()}; {_STILL}"
        )
    if wanted is not None:
        path = Path(os.path.expanduser(wanted))
        for place in (path, path / LIBCUDNN, path / "lib" / LIBCUDNN, path / "nvidia/cudnn/lib" / LIBCUDNN):
            if os.path.isfile(place):  # False too where the name is longer than a name can be
                return str(place.resolve())
        raise Missing("cudnn", f"there is no {LIBCUDNN} at {wanted}; {_STILL}")
    return next(_installed("nvidia/cudnn/lib", LIBCUDNN), LIBCUDNN)


def no_cudnn(trouble: object) -> Missing:
    return Missing(
        "cudnn",
        f"libcudnn does not load ({trouble}): pip install --no-deps nvidia-cudnn-cu12 "
        f"nvidia-cuda-nvrtc-cu12, or name one with --cudnn-lib; {_STILL}",
    )


def find_nvrtc(cudnn: str) -> list[str]:
    """NVRTC's libraries beside this libcudnn, else this environment's, else the loader's names."""
    places = ("nvidia/cuda_nvrtc/lib", "nvidia/cu13/lib", "nvidia/cu12/lib")
    beside = Path(cudnn).parents[3:4] if os.path.isabs(cudnn) and len(Path(cudnn).parents) > 3 else ()
    for root in (*map(str, beside), *sys.path):
        for place in places:
            found = sorted(Path(root or ".", place).glob("libnvrtc*.so*"))
            if found:
                return [str(path.resolve()) for path in found if ".alt." not in path.name]
    return ["libnvrtc.so.12", "libnvrtc.so.13"]


def no_nvrtc(trouble: object) -> Missing:
    return Missing(
        "nvrtc",
        f"NVRTC does not load ({trouble}), and libcudnn plans attention with it: pip install --no-deps "
        f"nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for cuDNN of CUDA 13); {_STILL}",
    )


def _installed(folder: str, name: str) -> Iterator[str]:
    for root in sys.path:
        path = Path(root or ".", folder, name)
        if path.is_file():
            yield str(path.resolve())


def stand_in(source: str, soname: str, cache: Path | None) -> tuple[str, str]:
    """The path of a stand-in library compiled from ``source`` beside this file, and a note or "".

    Compiled once into ``cache``, and again where the file there is not what was compiled. Without one, or
    where it cannot be written, into a folder that goes with the process. Several processes may do so at once:
    each makes its own file and moves it into place. Raises Missing.
    """
    code = Path(__file__).with_name(source).read_bytes()
    digest = hashlib.sha256(code + platform.machine().encode()).hexdigest()[:16]
    note = ""
    if cache is not None:
        try:
            return str(_kept(source, soname, private(cache) / f"{Path(source).stem}-{digest}")), note
        except (OSError, Untrusted) as error:
            why = getattr(error, "strerror", None) or error
            note = f"the cache folder {cache} is not used ({why}): a temporary one is, nothing is remembered"
    scratch = tempfile.mkdtemp(prefix="attnsel-")
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    made = Path(scratch, soname)
    _compile(source, soname, made)
    return str(made), note


def _kept(source: str, soname: str, folder: Path) -> Path:
    """The library of this name in ``folder``, as it was compiled: what is cut short or changed is not loaded.

    Its folder is named by its digest: a file beside it could not be put in place together with it.
    """
    private(folder)
    for made in sorted(folder.glob(f"{_A_DIGEST}/{soname}")):  # not what others are compiling
        if made.parent.name == _digest(made):
            return made
    scratch = Path(tempfile.mkdtemp(dir=folder))
    try:
        fresh = scratch / soname
        _compile(source, soname, fresh)
        place = private(folder / _digest(fresh))
        os.replace(fresh, place / soname)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return place / soname


_A_DIGEST = "[0-9a-f]" * 32


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _compile(source: str, soname: str, target: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise Missing(
            "compiler",
            "there is no NVIDIA driver here, and no C compiler (cc, gcc, clang) on PATH to make a stand-in "
            f"for it; {_STILL}",
        )
    code = str(Path(__file__).with_name(source))
    command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{soname}", "-o", str(target), code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=120, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing("compiler", f"{compiler} does not work: {error}; {_STILL}") from None
    if done.returncode:
        words = " ".join(done.stderr.split())[-300:]
        raise Missing("compiler", f"{compiler} cannot compile {source}: {words}; {_STILL}")

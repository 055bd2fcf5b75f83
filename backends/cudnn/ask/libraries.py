"""Where libcudnn and NVRTC are, and stand-ins that the C compiler makes where something is not there."""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attnsel.backends.cudnn.ask.folder import Untrusted, private

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
        path = Path(wanted).expanduser()
        for place in (path, path / LIBCUDNN, path / "lib" / LIBCUDNN, path / "nvidia/cudnn/lib" / LIBCUDNN):
            if place.is_file():
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

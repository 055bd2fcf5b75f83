"""FlashAttention's file of checks, compiled without CUDA: ``flash_api.cpp`` as it stands in a user's folder.

FlashAttention 2 and 3 check a call in one C++ file, which picks a kernel template and launches it. That file
is compiled unchanged against the headers in ``stubs/``: the device answers as described, a tensor of device
``meta`` counts as one on the GPU, and each template that ``flash.h`` declares gets a body that notes which
one was picked.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from attnsel.backends.cudnn.ask.libraries import Untrusted, cache_folder, private

_STUBS = Path(__file__).with_name("stubs")
_STABLE_SINCE = (2, 9)  # hopper/setup.py, "target_version", flash-attention 0251105a
_STABLE_TARGET = "0x0209000000000000"  # the same file, TORCH_TARGET_VERSION
_SECONDS = 540


class NoLibrary(RuntimeError):
    """The checks cannot be compiled or found here. The message is one sentence for people."""


@dataclass(frozen=True)
class Source:
    """Where the checks of one release are, in a checkout or an unpacked source distribution."""

    generation: Literal[2, 3]
    version: str
    api: Path  # flash_api.cpp, or hopper's flash_api_stable.cpp
    header: Path  # flash.h, which declares the kernels
    python: Path  # the folder to import the package from

    @property
    def stable_abi(self) -> bool:
        return self.api.stem.endswith("_stable")

    @property
    def module(self) -> str:
        """The name under which the package's Python imports the compiled file."""
        return "flash_attn_2_cuda" if self.generation == 2 else "flash_attn_3._C"

    def files(self) -> list[Path]:
        """What the compiler may read of this release."""
        folders = {self.api.parent, self.header.parent}
        return [self.api, *sorted(file for folder in folders for file in folder.glob("*.h"))]


def find_source(folder: Path, generation: Literal[2, 3]) -> Source:
    """The release that lies in ``folder``. Raises NoLibrary."""
    if generation == 2:
        python, api, header = folder, "csrc/flash_attn/flash_api.cpp", "csrc/flash_attn/src/flash.h"
        about = folder / "flash_attn" / "__init__.py"
    else:
        python = folder if (folder / "flash_api.cpp").is_file() else folder / "hopper"
        api, header, about = "flash_api.cpp", "flash.h", python / "__init__.py"
        if (python / "flash_api_stable.cpp").is_file() and _torch_version() >= _STABLE_SINCE:
            api = "flash_api_stable.cpp"
    interface = python / ("flash_attn" if generation == 2 else "") / "flash_attn_interface.py"
    for file in (python / api, python / header, about, interface):
        if not file.is_file():
            raise NoLibrary(f"there is no FlashAttention {generation} source in {folder}: {file} is missing")
    # Before 2.8.0 hopper/ built a module of another name, with another interface.
    if generation == 3 and "flash_attn_3._C" not in interface.read_text(encoding="utf-8"):
        raise NoLibrary(f"{python} is from before FlashAttention 3 was the package flash_attn_3")
    found = re.search(r'^__version__ = "([^"]+)"', about.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise NoLibrary(f"{about} does not say its version")
    python = python.resolve()
    return Source(generation, found[1], python / api, python / header, python)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# A declaration in flash.h: template<typename T, int Headdim> void run_mha_fwd_(Flash_fwd_params &params, …);
_KERNEL = re.compile(
    r"^(?:template\s*<(?P<template>[^<>]*)>\s*)?void\s+(?P<name>\w+)\s*\((?P<arguments>[^()]*)\)\s*;",
    re.MULTILINE,
)


def kernel_bodies(flash_h: str) -> str:
    """C++ that defines each kernel launcher declared in ``flash.h`` as a note that it was called."""
    bodies = []
    for kernel in _KERNEL.finditer(flash_h):
        lines = [f'attnsel::Launch launch("{kernel["name"]}");']
        for parameter in filter(None, (kernel["template"] or "").split(",")):
            kind, name = parameter.split()
            note = f'type<{name}>("{name}")' if kind == "typename" else f'number("{name}", {name})'
            lines.append(f"launch.{note};")
        for argument in kernel["arguments"].split(","):
            kind, *_, name = argument.split()
            if kind in ("int", "bool"):
                lines.append(f'launch.number("{name}", {name});')
        lines.append("launch.params(params);")
        template = f"template <{kernel['template']}>\n" if kernel["template"] else ""
        body = "\n  ".join(lines)
        bodies.append(f"{template}void {kernel['name']}({kernel['arguments']}) {{\n  {body}\n}}\n")
    if not bodies:
        raise NoLibrary("flash.h declares no kernel launcher that could be recorded")
    text = "\n".join(bodies)
    return f"namespace FLASH_NAMESPACE {{\n{text}}}\n" if "namespace FLASH_NAMESPACE" in flash_h else text


def unit(source: Source) -> str:
    """The C++ file that is compiled: the source's own between what it needs ahead and what it calls."""
    ahead, behind = "", ""
    if source.stable_abi:
        ahead = f"#define ATTNSEL_STABLE_ABI\n#define TORCH_TARGET_VERSION {_STABLE_TARGET}\n"
        behind = (
            'extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t, void** stream) {\n'
            "  *stream = nullptr;\n  return AOTI_TORCH_SUCCESS;\n}\n"
        )
    kernels = kernel_bodies(source.header.read_text(encoding="utf-8"))
    return f'{ahead}#include "prelude.h"\n#include {json.dumps(str(source.api))}\n{kernels}{behind}'


def build(source: Source, cache: Path | None = None) -> Path:
    """The compiled library, from ``cache`` or compiled into it (default: attnsel's own). Raises NoLibrary."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise NoLibrary("there is no C++ compiler (g++, c++, clang++) on PATH for flash_api.cpp")
    name = source.module.rpartition(".")[2] + ".so"
    try:
        folder = private(cache or cache_folder())
        kept: Path = private(folder / f"flash-attention-{_key(source, compiler)}")
        if (kept / name).is_file():
            return kept / name
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            made = _compile(source, compiler, Path(scratch), name)
            made.replace(kept / name)
    except (OSError, Untrusted) as error:
        raise NoLibrary(f"the checks of FlashAttention cannot be compiled and kept: {error}") from None
    return kept / name


def _key(source: Source, compiler: str) -> str:
    """A digest of all that the library is made of."""
    digest = hashlib.sha256()
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60)
    for word in (torch.__version__, sysconfig.get_config_var("SOABI"), told.stdout, unit(source)):
        digest.update(f"{word}\0".encode())
    for file in (*source.files(), *sorted(file for file in _STUBS.rglob("*") if file.is_file())):
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def _compile(source: Source, compiler: str, scratch: Path, name: str) -> Path:
    (scratch / "unit.cpp").write_text(unit(source), encoding="utf-8")
    package = Path(torch.__file__).parent
    include = [
        _STUBS,  # ahead of torch's
        source.api.parent,
        source.header.parent,
        package / "include",
        package / "include/torch/csrc/api/include",
        sysconfig.get_paths()["include"],
    ]
    # Without optimisation: a call takes microseconds either way, and compiling half the time.
    command = [compiler, "-std=c++20", "-O0", "-w", "-fPIC", "-shared"]
    command += [f"-I{folder}" for folder in include]
    command += [f"-DTORCH_EXTENSION_NAME={Path(name).stem}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [str(scratch / "unit.cpp"), str(_STUBS / "support.cpp"), "-o", str(scratch / name)]
    libraries = package / "lib"
    command += [
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-ltorch_python",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise NoLibrary(f"{compiler} took more than {_SECONDS} s over {source.api}") from None
    if done.returncode:
        wrong = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr[-300:]]
        raise NoLibrary(f"{compiler} cannot compile {source.api} {source.version}: {wrong[0]}")
    return scratch / name


class Library:
    """A compiled file of checks, in this process: the device it sees, and what the last call came to."""

    def __init__(self, path: Path) -> None:
        self._c = ctypes.CDLL(str(path))
        for function in (self._c.attnsel_launches, self._c.attnsel_where):
            function.restype = ctypes.c_char_p
        self._c.attnsel_give_meta_tensors_addresses()

    def describe(self, arch: int, sm_count: int) -> None:
        """The current device: ``arch`` 89 is compute capability 8.9."""
        if self._c.attnsel_describe(*divmod(arch, 10), sm_count):
            raise ValueError(f"no more devices can be described to this process (sm{arch}, {sm_count} SMs)")

    def forget(self) -> None:
        self._c.attnsel_forget()

    def launches(self) -> list[dict[str, Any]]:
        """The kernels that were picked since ``forget``: template arguments and parameters by their names."""
        return [json.loads(line) for line in self._c.attnsel_launches().decode().splitlines()]

    def where(self) -> str:
        """The path and line of the TORCH_CHECK that failed, or "" """
        return str(self._c.attnsel_where().decode())

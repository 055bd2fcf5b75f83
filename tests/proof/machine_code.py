"""What a compiled launch needs, read from its machine code.

Triton's wheels carry ptxas, cuobjdump and nvdisasm; no driver is involved. ``STACK`` of cuobjdump is 0
exactly when no register is spilled.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from aot import build
from attnsel.backends.triton.launch import Launch
from attnsel.environment.gpus import ARCHITECTURES
from sass import LoopMix, hottest, loops_of

_MATRIX = re.compile(r"\b(?:HMMA|IMMA|HGMMA|QGMMA|UTCHMMA|UTCQMMA|OMMA|QMMA|DMMA)[.\w]*")
_LOCAL = re.compile(r"\b(?:STL|LDL)\b")
# "ptxas info    : (C7515) Potential Performance Loss: ..."; what it calls info has no number.
_WARNING = re.compile(r"^ptxas\S* +\w+ *: *(.*\(C\d+\).*)$|^ptxas\S* +warning *: *(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What one kernel needs on one architecture."""

    registers: int  # per thread
    stack: int  # bytes per thread; not 0: registers are spilled
    spills: int  # local loads and stores in the machine code
    shared_memory: int  # bytes per block
    shared_memory_limit: int
    matrix_instructions: tuple[str, ...]
    seconds: float
    warps: int  # of a program, with those that warp specialisation adds
    specialised: bool  # warps hand registers over to one another
    warnings: tuple[str, ...] = ()  # of ptxas: C7515 and its kin
    loops: tuple[LoopMix, ...] = ()  # the innermost ones that multiply matrices

    @property
    def loop(self) -> LoopMix | None:
        return hottest(list(self.loops))

    @property
    def fits(self) -> bool:
        return self.shared_memory <= self.shared_memory_limit

    @property
    def clean(self) -> bool:
        return self.fits and not self.stack and not self.spills


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """What ``launch`` needs when ``build`` has compiled it for ``arch``."""
    start = time.perf_counter()
    made = build(launch, arch)
    seconds = time.perf_counter() - start
    read = _read(made.asm["cubin"], made.metadata, ARCHITECTURES[arch].shared_memory, seconds)
    return replace(read, warnings=warnings_in(ptxas_log(made.asm["ptx"], launch, arch)))


def warnings_in(log: str) -> tuple[str, ...]:
    """What ptxas warns of, each once; how many registers it used and the like are none."""
    return tuple(dict.fromkeys((found[1] or found[2]).strip() for found in _WARNING.finditer(log)))


def ptxas_log(ptx: str, launch: Launch, arch: int) -> str:
    """What ``ptxas -v`` says of it, with the flags that Triton gives. Triton keeps no log of its own run."""
    if not hasattr(triton, "knobs"):  # before 3.4 it cannot be told to print one
        return _plain_ptxas(ptx, arch)
    backend = make_backend(GPUTarget("cuda", arch, 32))
    options = backend.parse_options(dict(launch.block.options))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), triton.knobs.nvidia.scope():
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, options, arch)
    return printed.getvalue()


def _plain_ptxas(ptx: str, arch: int) -> str:
    own = "ptxas-blackwell" if arch >= 100 and (_binaries() / "ptxas-blackwell").exists() else "ptxas"
    target = f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        return _tool(own, "-v", "-lineinfo", target, file.name, "-o", os.devnull, errors=True)


def _read(cubin: bytes, metadata: Any, limit: int, seconds: float) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        code = _tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resource usage: {usage.strip()[:200]}")
    return Compiled(
        registers=int(found[1]),
        stack=int(found[2]),
        spills=len(_LOCAL.findall(code)),
        shared_memory=metadata.shared,
        shared_memory_limit=limit,
        matrix_instructions=tuple(sorted(set(_MATRIX.findall(code)))),
        seconds=seconds,
        warps=metadata.num_warps,
        specialised="USETMAXREG" in code,
        loops=tuple(loops_of(code)),
    )


@cache
def _binaries() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def _tool(name: str, *arguments: str, errors: bool = False) -> str:
    """What it prints; with ``errors``, or where it fails, what it complains of as well."""
    done = subprocess.run([str(_binaries() / name), *arguments], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode or errors else done.stdout

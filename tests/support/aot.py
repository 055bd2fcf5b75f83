"""Compile a launch for a GPU that is not there, and read from the machine code what it needs.

Triton's wheels carry ptxas, cuobjdump and nvdisasm; no driver is involved. ``STACK`` of cuobjdump is 0
exactly when no register is spilled.
"""

from __future__ import annotations

import contextlib
import inspect
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
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from attnsel.backends.triton import turing
from attnsel.backends.triton.launch import Launch
from attnsel.environment.gpus import ARCHITECTURES
from sass import LoopMix, hottest, loops_of

_POINTERS = {
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "int32": "*i32",
    "int64": "*i64",
    "uint8": "*u8",
}
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


def build(launch: Launch, arch: int) -> Any:
    """Compile what ``launch`` would run, for ``arch`` such as 90, specialised as a launch would be.

    Raises what Triton raises when it cannot compile.
    """
    source = _source(launch)
    hook = turing.tensor_cores() if arch == turing.ARCH else contextlib.nullcontext()
    with hook:
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.block.options)


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


def _source(launch: Launch) -> ASTSource:
    signature, constants, attributes = _specialised(launch)
    if "constexprs" in inspect.signature(ASTSource).parameters:
        return ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    # Triton 3.2 names its constants, leaves them out of the signature and has a class for the hints.
    from triton.backends.compiler import AttrsDescriptor

    names = list(signature)
    return ASTSource(
        launch.kernel,
        {name: kind for name, kind in signature.items() if kind != "constexpr"},
        constants={names[position]: value for (position,), value in constants.items()},
        attrs=AttrsDescriptor.from_hints({position: 16 for (position,) in attributes}),
    )


def _specialised(launch: Launch) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[Any, Any]]:
    """Signature, constants and divisibility hints of a launch, as Triton's own binder makes them."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for position, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        plain = parameter.do_not_specialize
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[str(value.dtype).removeprefix("torch.")]
            attributes[(position,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (type(value) is int and value == 1 and not plain):
            signature[parameter.name] = "constexpr"
            constants[(position,)] = value
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not plain:
                attributes[(position,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


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

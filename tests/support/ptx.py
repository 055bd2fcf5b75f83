"""Run a launch of ours as PTX for an older architecture: the CUDA driver compiles it for the GPU at hand.

Only ctypes and libcuda, so that nothing of Triton's own launcher decides what is loaded. A kernel compiled by
Triton takes its arguments in signature order without constants, then pointers to global and to profiling
scratch memory (both from 3.5 on, one before; null where the compiler asks for none).
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from aot import build
from attnsel.backends.triton.launch import Launch

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ERROR_LOG, _ERROR_LOG_BYTES = 5, 6  # CU_JIT_ERROR_LOG_BUFFER and its size
_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that every kernel may have

# Triton's type of an argument -> PTX's parameter and what holds it on the host.
_TYPES: dict[str, tuple[str, Any]] = {
    "i32": ("u32", ctypes.c_int32),
    "i64": ("u64", ctypes.c_int64),
    "fp32": ("f32", ctypes.c_float),
}
_POINTER = ("u64", ctypes.c_void_p)


@dataclass(frozen=True)
class Program:
    """A compiled launch: what the driver needs, and each passed argument by name and Triton's type."""

    entry: str
    ptx: str
    threads: int
    shared_memory: int
    arguments: tuple[tuple[str, str], ...]


def program(launch: Launch, arch: int) -> Program:
    """Compile ``launch`` for ``arch``. Raises RuntimeError where its kernel wants scratch memory."""
    made = build(launch, arch)
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(made.metadata, name, 0):
            raise RuntimeError(f"{launch.name} wants {name}: {getattr(made.metadata, name)}")
    return Program(
        entry=made.metadata.name,
        ptx=made.asm["ptx"],
        threads=32 * made.metadata.num_warps,
        shared_memory=made.metadata.shared,
        arguments=tuple((n, t) for n, t in made.src.signature.items() if t != "constexpr"),
    )


def parameters(compiled: Program) -> list[str]:
    """Types of the entry's parameters as PTX declares them: u64, u32, f32."""
    head = re.search(rf"\.entry {compiled.entry}\((.*?)\)", compiled.ptx, re.DOTALL)
    assert head is not None
    return re.findall(r"\.param \.(\w+)", head[1])


def pack(compiled: Program, args: dict[str, Any]) -> list[Any]:
    """Host values in the order of the parameters.

    Raises ValueError where their number or types differ from the parameters'.
    """
    kinds, values = [], []
    for name, kind in compiled.arguments:
        parameter, holder = _POINTER if kind.startswith("*") else _TYPES[kind]
        value = args[name]
        if isinstance(value, Tensor):
            value = value.data_ptr()
            if value % 16:
                raise ValueError(f"{name} is compiled for addresses that are multiples of 16")
        kinds.append(parameter)
        values.append(holder(value))
    declared = parameters(compiled)
    scratch = declared[len(kinds) :]
    if declared[: len(kinds)] != kinds or scratch not in (["u64"], ["u64", "u64"], []):
        raise ValueError(f"{compiled.entry} declares {declared}, its arguments are {kinds}")
    return values + [ctypes.c_void_p(None) for _ in scratch]


def run(launch: Launch, arch: int, stream: int) -> None:
    """Compile for ``arch``, load on the current CUDA device and launch on ``stream``; does not wait.

    Raises RuntimeError with the driver's words.
    """
    if not launch.programs:
        return
    compiled = program(launch, arch)
    values = pack(compiled, launch.args)
    function = _load(compiled)
    cuda = _libcuda()
    if compiled.shared_memory > _WITHOUT_ASKING:
        _check(cuda.cuFuncSetAttribute(function, _DYNAMIC_SHARED_MEMORY, compiled.shared_memory))
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    _check(
        cuda.cuLaunchKernel(
            function,
            launch.programs, 1, 1,
            compiled.threads, 1, 1,
            compiled.shared_memory,
            ctypes.c_void_p(stream),
            pointers,
            None,
        )
    )  # fmt: skip


@cache
def _load(compiled: Program) -> ctypes.c_void_p:
    """The entry as a function of the current context; the module stays loaded."""
    cuda, module, function = _libcuda(), ctypes.c_void_p(), ctypes.c_void_p()
    log = ctypes.create_string_buffer(4096)
    options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_BYTES)
    values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
    code = cuda.cuModuleLoadDataEx(ctypes.byref(module), compiled.ptx.encode(), 2, options, values)
    _check(code, log.value.decode(errors="replace"))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, compiled.entry.encode()))
    return function


@cache
def _libcuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int, log: str = "") -> None:
    if code:
        words = ctypes.c_char_p()
        _libcuda().cuGetErrorString(code, ctypes.byref(words))
        raise RuntimeError(f"CUDA driver error {code}: {(words.value or b'').decode()} {log}".strip())

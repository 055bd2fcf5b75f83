"""Execute a launch of ours on CPU tensors: compiled by Triton for an architecture, run as PTX."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aot import build
from attnsel.backends.triton import run as _run
from attnsel.backends.triton.launch import Launch
from ptx_interpreter.faults import Fault, Faults, Unsupported
from ptx_interpreter.global_memory import GlobalMemory
from ptx_interpreter.machine import MOST_STEPS, Machine
from ptx_interpreter.parse import parse
from ptx_interpreter.translate import Program, translate, unsupported

_LANES = 4096  # threads that are executed together; more need more memory, and are no faster
# Triton's type of an argument -> the PTX parameter's. Pointers are 64 bits.
_TYPES = {"i32": "u32", "i64": "u64", "fp32": "f32"}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A launch as PTX, and the arguments it takes by name and Triton's type."""

    ptx: str
    shared_memory: int  # bytes of a block
    scratch: int  # bytes of global memory that each block has to itself, for tensor maps
    arguments: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Executed:
    """One launch: what it cost, and its faults."""

    kernel: str
    blocks: int
    instructions: int  # that warps executed
    seconds: float  # of executing
    compiling: float  # seconds in Triton and in the translator
    faults: list[Fault] = field(default_factory=list)
    steps: int = 0  # basic blocks, of the blocks that took most
    visited: frozenset[int] = frozenset()  # numbers of basic blocks that were run


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Raises what Triton raises, and Unsupported where the kernel wants to be profiled."""
    made = build(launch, arch)
    if getattr(made.metadata, "profile_scratch_size", 0):
        raise Unsupported(["profile_scratch_size", *unsupported(parse(made.asm["ptx"]))])
    arguments = tuple((name, kind) for name, kind in made.src.signature.items() if kind != "constexpr")
    scratch = getattr(made.metadata, "global_scratch_size", 0)
    return Compiled(made.asm["ptx"], made.metadata.shared, scratch, arguments)


@lru_cache(maxsize=256)
def program_of(ptx: str) -> Program:
    return translate(parse(ptx))


def execute(
    launch: Launch,
    arch: int,
    change: Callable[[str], str] | None = None,
    watch: Callable[[Program], Program] | None = None,
) -> Executed:
    """Run ``launch`` on its CPU tensors. ``change`` may alter the PTX first, to plant a fault; ``watch`` the
    program made of it, to look on.

    Raises Unsupported, with opcodes, for PTX that is not executed.
    """
    start = time.perf_counter()
    compiled = compile_launch(launch, arch)
    program = program_of(compiled.ptx if change is None else change(compiled.ptx))
    if watch is not None:
        program = watch(program)
    compiling = time.perf_counter() - start
    done = carry_out(launch, compiled, program)
    done.compiling = compiling
    return done


def carry_out(launch: Launch, compiled: Compiled, program: Program, most_steps: int = MOST_STEPS) -> Executed:
    """Run a translation of a compiled launch, at most so many basic blocks of it."""
    start = time.perf_counter()
    memory = GlobalMemory()
    values, tensors = _arguments(compiled, program, launch, memory)
    faults = Faults(program.kernel)
    instructions = steps = 0
    visited: set[int] = set()
    together = max(1, _LANES // program.kernel.threads)
    with np.errstate(all="ignore"):
        for begin in range(0, launch.programs, together):
            blocks = range(begin, min(begin + together, launch.programs))
            machine = Machine(
                program, memory, values, compiled.shared_memory, blocks, launch.programs, faults
            )
            machine.run(most_steps)
            instructions += machine.instructions
            steps = max(steps, machine.steps)
            visited |= machine.visited
    for region, t in tensors:
        if memory.written[region]:
            bytes_of(t).copy_(torch.from_numpy(memory.contents(region)))
    seconds = time.perf_counter() - start
    return Executed(
        launch.name, launch.programs, instructions, seconds, 0.0, list(faults), steps, frozenset(visited)
    )


def _arguments(
    compiled: Compiled, program: Program, launch: Launch, memory: GlobalMemory
) -> tuple[list[int], list[tuple[int, Tensor]]]:
    """The parameters' bits in order, and the region of each tensor.

    After our arguments Triton declares pointers to scratch memory: the first for every block of the launch,
    the second for profiling. Raises ValueError where the parameters are not the arguments'.
    """
    kinds, values, tensors = [], [], []
    for name, kind in compiled.arguments:
        value = launch.args[name]
        kinds.append("u64" if kind.startswith("*") else _TYPES[kind])
        if isinstance(value, Tensor):
            values.append(_region(memory, name, value))
            tensors.append((len(memory.starts) - 1, value))
        elif kind == "fp32":
            values.append(int(np.float32(value).view(np.uint32)))
        else:
            values.append(int(value))
    declared = [kind for kind, _ in program.kernel.parameters]
    scratch = declared[len(kinds) :]
    if declared[: len(kinds)] != kinds or scratch not in ([], ["u64"], ["u64", "u64"]):
        raise ValueError(f"{program.kernel.name} declares {declared}, its arguments are {kinds}")
    pointers = [0] * len(scratch)
    if compiled.scratch:
        garbage = np.full(compiled.scratch * launch.programs, 0xA5, np.uint8)
        pointers[0] = memory.add("global scratch", garbage, np.ones_like(garbage))
    memory.freeze()
    return values + pointers, tensors


def _region(memory: GlobalMemory, name: str, t: Tensor) -> int:
    """A tensor's bytes; only those of its elements are valid, whatever lies between its rows."""
    if t.data_ptr() % 16:
        raise ValueError(f"{name} is compiled for addresses that are multiples of 16")
    data = bytes_of(t)
    covered = torch.zeros(data.numel() // t.element_size(), dtype=torch.uint8)
    if t.numel():
        covered.as_strided(t.shape, t.stride()).fill_(1)
    return memory.add(name, data.numpy(), np.repeat(covered.numpy(), t.element_size()), t.data_ptr())


def bytes_of(t: Tensor) -> Tensor:
    """The bytes from a tensor's first element to its last."""
    extent = 0
    if t.numel():
        extent = 1 + sum((size - 1) * step for size, step in zip(t.shape, t.stride(), strict=True))
    return t.detach().as_strided((extent,), (1,)).view(torch.uint8)


@contextlib.contextmanager
def executed_on(
    arch: int,
    done: list[Executed],
    change: Callable[[str, str], str] | None = None,
) -> Iterator[None]:
    """``run.forward`` and ``run.backward`` of CPU tensors, as on a GPU of ``arch``, executed here.

    Each launch is added to ``done``. ``change(name of the launch, PTX)`` may alter what is executed.
    """

    def carry_out(launch: Launch) -> None:
        altered = None if change is None else (lambda text: change(launch.name, text))
        done.append(execute(launch, arch, altered))

    with launches_given_to(carry_out, arch):
        yield


@contextlib.contextmanager
def launches_given_to(carry_out: Callable[[Launch], None], arch: int) -> Iterator[None]:
    """What would be launched on a GPU of ``arch`` is given to a function instead, in its order.

    Not for threads: what runs launches is replaced.
    """
    before = _run._arch, _run._run, _run._processors

    def give(launch: Launch, device: torch.device, _: int | None) -> None:
        if launch.programs:
            carry_out(launch)

    replaced: Any = _run
    replaced._arch = lambda q: arch
    replaced._run = give
    replaced._processors = lambda device: 0
    try:
        yield
    finally:
        replaced._arch, replaced._run, replaced._processors = before

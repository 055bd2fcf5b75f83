#!/usr/bin/env python3
"""What is claimed against the real thing: a compiler, libcudnn or a package.

python tests/proof/conformance.py --help
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

from attnsel.cli.flags import CudnnLib
from attnsel.cli.form import Json
from attnsel.cli.output import BAD_INPUT, INTERRUPTED, complain, plain_warnings, settle_width
from attnsel.cli.suggest import in_words
from attnsel.errors import InvalidInput

_FLASH = ("flash_attn.2", "flash_attn.3", "flash_attn.4")
_NUMBER = re.compile(r"[0-9]{1,3}")


def conformance(
    *,
    backend: str = "triton",
    arch: Annotated[str, Parameter(help="architectures, e.g. 75,80,90; all shipped ones if left out")] = "",
    head_dim: Annotated[str, Parameter(help="head dimensions, e.g. 64,128 or 192x128; all if left out")] = "",
    kernel: Annotated[str, Parameter(help="triton: kernels, e.g. forward,dq; all if left out")] = "",
    feature: Annotated[str, Parameter(help="triton: calls, e.g. full,packed; all shipped if left out")] = "",
    dtype: Annotated[str, Parameter(help="triton: bf16, fp16 or fp32; bf16,fp16 if left out")] = "",
    loops: Annotated[
        bool, Parameter(negative="", help="triton: the instructions of the hottest loop")
    ] = False,
    compare: Annotated[str, Parameter(help="triton: a file that --json wrote; exit code 4 if slower")] = "",
    jobs: Annotated[int, Parameter(help="processes that compile; one per core if left out")] = 0,
    samples: Annotated[
        int, Parameter(help="cudnn, flash_attn.*: questions at random, each for every GPU")
    ] = 200,
    seed: Annotated[int, Parameter(help="cudnn, flash_attn.*: another seed, other questions")] = 0,
    source: Annotated[
        str | None,
        Parameter(help="flash_attn.*: a folder that holds the package; the installed one if left out"),
    ] = None,
    trace: Annotated[
        bool, Parameter(negative="", help="flash_attn.4: build the kernels of what both accept, seconds each")
    ] = False,
    cudnn_lib: CudnnLib = None,
    workspace: Annotated[
        bool, Parameter(negative="", help="cudnn: build the plans too, and compare their workspace")
    ] = False,
    execute: Annotated[bool, Parameter(negative="", help="triton: run the kernels' PTX on the CPU")] = False,
    case: Annotated[str, Parameter(help="with --execute: only cases with these words, by commas")] = "",
    quick: Annotated[bool, Parameter(negative="", help="with --execute: the representative part")] = False,
    json: Json = False,
) -> int:
    """Compile every shipped Triton configuration ahead of time, with no GPU, and read what came out.

    With --backend cudnn: put random questions to the rules and to the real libcudnn, and tell where they
    differ (--arch then defaults to 80,89,90,100,120). A false accept is a rule that is missing. --workspace
    has it build the plans of what both accept, half a second each, and compares their workspace with the
    estimate by which a call is held to fit the GPU: off by more than 1 MiB and 1 % is counted.

    With --backend flash_attn.2, flash_attn.3 or flash_attn.4: the same with a release of FlashAttention's own
    package, whose code runs on tensors without memory, up to where it would compile or launch a kernel
    (--arch then defaults to 75,80,86,89,90,100,103,120). Where the rules refuse and its checks do not, the
    kernels of flash_attn.4 are built too, if their compiler (nvidia-cutlass-dsl, quack-kernels) is installed.

    With --execute: run the kernels' PTX on the CPU instead, over a grid of calls, compare with float64, and
    search for faults that a GPU does not report: accesses outside of tensors, races, data used before it is
    there. --arch then defaults to all but 100; about ten seconds a case, half of them compiling. --quick
    takes a few cases that reach every kernel and most features, with fewer calls: minutes for all.

    Registers, spills, shared memory against the architecture's limit, warnings of ptxas, the matrix
    instructions in the machine code, and the instructions of the loop around them. Takes one to three seconds
    per kernel; the whole table is some thousand kernels. With --compare, what became slower or spills.

    --json prints {"kernels": [{kernel, arch, head_dim_qk, head_dim_v, dtype, feature, block, warps, stages,
    registers, spills, shared_memory, shared_memory_limit, matrix_instructions, seconds, error, specialised,
    rows, warnings, loop: {instructions, matrix, waits, ...}, loops, faults, ok}]} and with --compare
    {"changes": [{kernel, worse, words}]}; with --backend cudnn {cudnn, cudnn_frontend, stage, gpus, seed,
    samples, asked, the count of each outcome, bounds at 95 %, workspaces (null, or {compared, agree, exact,
    below, above, not_built, largest, disagreements: [{gpu, params, planned, estimated}]}), disagreements:
    [{outcome, gpu, codes, library, params}], notes}; with --backend flash_attn.* {backend, version, compiler,
    gpus, seed, samples, asked, the count of each outcome, bounds at 95 %, accepted_by_package, crashes,
    traced, disagreements, notes}; with --execute
    {date, triton, architectures: {sm: {calls, kernels, blocks, instructions, seconds, compiling,
    largest_error, faults, not_executed, opcodes_not_covered}}, cases: [{case, arch, dtype, ..., faults:
    [{kind, kernel, source, line, instruction, block, thread, detail, threads}], ok}]}.

    Exit code: 0 all compile, fit, spill nothing, are not serialised and use the tensor cores, or no false
    accept and at most 1 % of the estimates too low; 2 bad input, or something is missing; 4 some do not, one
    is slower than in the file compared with, a false accept, estimates too low, a fault or a wrong number.
    """
    if backend == "cudnn":
        from conformance_cudnn import conformance_cudnn

        return conformance_cudnn(arch, samples, seed, cudnn_lib, workspace, json)
    if backend in _FLASH:
        from conformance_flash import conformance_flash

        return conformance_flash(backend, source, arch, samples, seed, trace, json)
    if backend != "triton":
        raise InvalidInput("--backend", backend, f"allowed: triton, cudnn, {', '.join(_FLASH)}")
    try:
        import gate
        from attnsel.backends.triton.blocks import ARCHS
    except ImportError as error:
        complain(f"{error}; planning (attnsel explain, matrix) works without it")
        return BAD_INPUT
    if jobs < 0:
        raise InvalidInput("--jobs", jobs, "must be positive, or 0 for one per core")
    if execute:
        from conformance_executed import DEFAULT, conformance_executed

        chosen_archs = _numbers("--arch", arch, ARCHS) or DEFAULT
        return conformance_executed(chosen_archs, case, quick, jobs or _cores(), json)
    if case or quick:
        raise InvalidInput("--case" if case else "--quick", case or quick, "needs --execute")
    from conformance_compiled import conformance_compiled

    chosen: dict[str, Any] = {}
    if head_dim:
        chosen["head_dims"] = _head_dims(head_dim)
    if kernel:
        chosen["kernels"] = _names("--kernel", kernel, gate.EVERY_KERNEL)
    if feature:
        chosen["features"] = _names("--feature", feature, gate.EVERY_FEATURE)
    if dtype:
        chosen["dtypes"] = _names("--dtype", dtype, ("bf16", "fp16", "fp32"))
    wanted = gate.configurations(_numbers("--arch", arch, ARCHS) or ARCHS, **chosen)
    return conformance_compiled(wanted, jobs or _cores(), compare, loops, json)


def _cores() -> int:
    """Those that this process may use, where the system says so; else those that there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _names(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if word not in allowed:
            raise InvalidInput(flag, word, f"allowed: {', '.join(allowed)}")
    return words


def _numbers(flag: str, text: str, allowed: tuple[int, ...]) -> tuple[int, ...]:
    words = [word.strip().removeprefix("sm") for word in text.split(",") if word.strip()]
    for word in words:
        if word not in map(str, allowed):
            raise InvalidInput(flag, word, f"allowed: {', '.join(map(str, allowed))}")
    return tuple(map(int, words))


def _head_dims(text: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for word in text.split(","):
        numbers = word.strip().split("x")
        if len(numbers) > 2 or not all(_NUMBER.fullmatch(n) and 0 < int(n) <= 576 for n in numbers):
            raise InvalidInput("--head-dim", word, "must be a number up to 576, or two as in 192x128")
        pairs.append((int(numbers[0]), int(numbers[-1])))
    return tuple(pairs)


def main(argv: Sequence[str] | None = None) -> int:
    """Its exit code; never a traceback for what a user typed."""
    words = list(sys.argv[1:] if argv is None else argv)
    app = App(name="conformance", help_format="markdown", suppress_keyboard_interrupt=False)
    app.default(conformance)
    settle_width()
    try:
        with plain_warnings():
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (CycloptsError, InvalidInput) as error:
        complain(in_words(error, words, ()))
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())

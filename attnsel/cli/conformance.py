"""``attnsel conformance``: what is claimed against the real thing, Triton's compiler or libcudnn."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any

from cyclopts import Parameter

from attnsel._schemas import stamped
from attnsel.cli.flags import CudnnLib, Json
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, bar, complain, print_json, print_text
from attnsel.errors import InvalidInput

_NUMBER = re.compile(r"[0-9]{1,3}")


def conformance(
    *,
    backend: str = "triton",
    arch: Annotated[str, Parameter(help="architectures, e.g. 75,80,90; all shipped ones if left out")] = "",
    head_dim: Annotated[str, Parameter(help="head dimensions, e.g. 64,128 or 192x128; all if left out")] = "",
    jobs: Annotated[int, Parameter(help="processes that compile; one per core if left out")] = 0,
    samples: Annotated[int, Parameter(help="cudnn: questions at random, each for every GPU")] = 200,
    seed: Annotated[int, Parameter(help="cudnn: another seed, other questions")] = 0,
    cudnn_lib: CudnnLib = None,
    execute: Annotated[bool, Parameter(negative="", help="triton: run the kernels' PTX on the CPU")] = False,
    case: Annotated[str, Parameter(help="with --execute: only cases with these words, by commas")] = "",
    quick: Annotated[bool, Parameter(negative="", help="with --execute: the representative part")] = False,
    json: Json = False,
) -> int:
    """Compile every shipped Triton configuration ahead of time, with no GPU, and read what came out.

    With --backend cudnn: put random questions to the rules and to the real libcudnn, and tell where they
    differ (--arch then defaults to 80,89,90,100,120). A false accept is a rule that is missing.

    With --execute: run the kernels' PTX on the CPU instead, over a grid of calls, compare with float64, and
    search for faults that a GPU does not report: accesses outside of tensors, races, data used before it is
    there. --arch then defaults to all but 100; about ten seconds a case, half of them compiling. --quick
    takes a few cases that reach every kernel and most features, with fewer calls: minutes for all.

    Registers, spills, shared memory against the architecture's limit, and the matrix instructions in the
    machine code. Takes about a second per kernel; the whole table is some hundred kernels.

    --json prints {"kernels": [{kernel, arch, head_dim_qk, head_dim_v, dtype, feature, block, warps, stages,
    registers, spills, shared_memory, shared_memory_limit, matrix_instructions, seconds, error, specialised,
    ok}]}; with --backend cudnn {cudnn, cudnn_frontend, stage, gpus, seed, samples, asked, the count of each
    outcome, bounds at 95 %, disagreements: [{outcome, gpu, codes, library, params}], notes}; with --execute
    {date, triton, architectures: {sm: {calls, kernels, blocks, instructions, seconds, compiling,
    largest_error, faults, not_executed, opcodes_not_covered}}, cases: [{case, arch, dtype, ..., faults:
    [{kind, kernel, source, line, instruction, block, thread, detail, threads}], ok}]}.

    Exit code: 0 all compile, fit, spill nothing and use the tensor cores, or no false accept; 2 bad input,
    or something is missing; 4 some do not, a false accept, a fault or a wrong number.
    """
    if backend == "cudnn":
        from attnsel.cli.conformance_cudnn import conformance_cudnn

        return conformance_cudnn(arch, samples, seed, cudnn_lib, json)
    if backend != "triton":
        raise InvalidInput("--backend", backend, "allowed: triton, cudnn")
    try:
        from attnsel.backends.triton import gate
        from attnsel.backends.triton.blocks import ARCHS
    except ImportError as error:
        complain(f"{error}; planning (attnsel explain, matrix) works without it")
        return BAD_INPUT
    if jobs < 0:
        raise InvalidInput("--jobs", jobs, "must be positive, or 0 for one per core")
    if execute:
        from attnsel.cli.conformance_executed import DEFAULT, conformance_executed

        chosen_archs = _numbers("--arch", arch, ARCHS) or DEFAULT
        return conformance_executed(chosen_archs, case, quick, jobs or len(os.sched_getaffinity(0)), json)
    if case or quick:
        raise InvalidInput("--case" if case else "--quick", case or quick, "needs --execute")
    archs = _numbers("--arch", arch, ARCHS) or ARCHS
    chosen: dict[str, Any] = {}
    if head_dim:
        chosen["head_dims"] = _head_dims(head_dim)
    wanted = gate.configurations(archs, **chosen)
    with bar("compiling", len(wanted)) as move:
        reports = gate.reports(wanted, lambda done, *_: move(done), jobs or len(os.sched_getaffinity(0)))
    if json:
        kernels = [report.as_json() for report in reports]
        print_json(stamped("conformance", {"kernels": kernels}), indent=None)
    else:
        _print(reports)
    return FOUND if all(report.ok for report in reports) else CHECK_FAILED


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


def _print(reports: list[Any]) -> None:
    """One line per kernel, 80 columns, then what is wrong in words."""
    line = "{:>3} {:18} {:>7} {:5} {:6} {:>7} {:>2} {:>2} {:>4} {:>6} {:>8} {}"
    print_text(
        line.format("sm", "kernel", "d", "dtype", "mask", "tile", "w", "s", "regs", "spills", "smem KiB", "")
    )
    for r in reports:
        tile = "-" if r.block is None else f"{r.block[0]}x{r.block[1]}"
        used = f"{r.shared_memory // 1024}/{r.shared_memory_limit // 1024}"
        dims = f"{r.head_dim_qk}/{r.head_dim_v}"
        found = (tile, r.warps, r.stages, r.registers, r.spills, used, "✔" if r.ok else "✖")
        print_text(line.format(r.arch, r.kernel, dims, r.dtype, r.feature, *found))
    bad = [r for r in reports if not r.ok]
    print_text(
        f"{len(reports) - len(bad)} of {len(reports)} compile, fit, do not spill and use the tensor cores"
    )
    for r in bad:
        why = r.error or "spills, does not fit or has no matrix instruction"
        print_text(f"  sm{r.arch} {r.kernel} {r.head_dim_qk}/{r.head_dim_v} {r.dtype} {r.feature}: {why}")

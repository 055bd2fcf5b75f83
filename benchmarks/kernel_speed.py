"""What attention kernels deliver on this GPU: TFLOP/s forward and backward, GB/s in decode.

    python benchmarks/kernel_speed.py                     # every case; minutes
    python benchmarks/kernel_speed.py --quick             # the cases with a target, once
    python benchmarks/kernel_speed.py --device cpu        # without a GPU: whether this program runs

Every kernel that attnsel runs is called through its backend, in turn with the others; one that gives a wrong
result is reported as wrong and not timed. README.md beside this file says how to read the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from clocks import Clock, CudaClock, HostClock, copy_rate, describe, file_name, state
from kernel_cases import FULL, KINDS, QUICK, REHEARSAL, TARGETS, Call, Case, Grid, cases
from measure import ROOT, number, progress, record, write
from rich.console import Console
from rich.table import Table

try:
    import torch
except ModuleNotFoundError:
    sys.exit("benchmarks/kernel_speed.py needs torch: pip install torch")

from attnsel import Environment, Policy, select
from attnsel.backends.registry import CANDIDATES
from attnsel.runtime.kernels import CannotPrepare, Kernel, kernel_of

BASELINE = "sdpa.flash"
NO_CUDA = (
    "kernel_speed.py: no CUDA device here, so there is nothing to measure. "
    "--device cpu runs the program on Triton's interpreter, without measuring."
)


class Column(NamedTuple):
    """A kernel as the table shows it."""

    name: str
    candidate: str  # whose rules decide
    kernel: Kernel


@dataclass(frozen=True)
class Row:
    """A kernel in a case. ``status``: measured, or with a ``reason`` wrong, refused, out of memory, failed.

    ``ms`` is a median with its quartiles, ``rate`` in ``unit`` follows from it. ``ratio`` is the median,
    sample by sample, of the baseline's time over this kernel's: above 1 it is faster.
    """

    kind: str
    dtype: str
    head_dim: int
    causal: bool
    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int
    name: str
    status: str
    unit: str
    reason: str = ""
    ms: float | None = None
    ms_low: float | None = None
    ms_high: float | None = None
    samples: int = 0
    rate: float | None = None
    host_us: float | None = None
    ratio: float | None = None
    target: float | None = None

    @property
    def case(self) -> Case:
        return Case(*[getattr(self, field) for field in Case._fields])

    @property
    def within(self) -> bool | None:
        return None if self.target is None or self.ratio is None else self.ratio >= self.target

    def as_dict(self) -> dict[str, Any]:
        rounded = {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in asdict(self).items()}
        return {**rounded, "within": self.within}


def columns(names: Sequence[str] = ()) -> list[Column]:
    """What attnsel has code for and is meant to be fast; ``names`` narrows."""
    found = []
    for name, info in CANDIDATES.items():
        if info.last_resort or (names and name not in names):
            continue
        try:
            kernel = kernel_of(name)
        except CannotPrepare as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found.append(Column(name, name, kernel))
    return found


def is_own(column: Column) -> bool:
    """Whether attnsel wrote its kernels, and has to prove them."""
    record = CANDIDATES[column.candidate]
    return not (record.trusted or record.library or record.plugin)


# ---- measuring --------------------------------------------------------------------------------------


def measure(
    case: Case, wanted: Sequence[Column], device: torch.device, clock: Clock, count: int
) -> list[Row]:
    """A row per column: asked of the rules, checked, then timed in turn with the others."""
    rows: dict[str, Row] = {}
    works: dict[str, Any] = {}

    def put(column: Column, status: str, reason: str = "") -> None:
        ours = is_own(column)
        target = case.target if ours else None
        rows[column.name] = Row(
            *case, name=column.name, status=status, unit=case.unit, reason=reason, target=target
        )

    try:
        call = Call.of(case, device)
        call.wanted  # noqa: B018  # held from here on: the kernels are compared with it
    except torch.OutOfMemoryError as error:
        for column in wanted:
            put(column, "out of memory", f"the reference: {_first_line(error)}")
        return list(rows.values())
    environment = Environment.detect(device)
    lost = ""
    for column in wanted:
        if lost:
            put(column, "failed", f"not tried: {lost}")
            continue
        chosen = select(case.params, environment, policy=Policy(backend=column.candidate))[column.candidate]
        if chosen.verdict == "refused":
            put(column, "refused", "; ".join(f"{r.code} {r.message}" for r in chosen.reasons))
            continue
        if chosen.adaptations:  # what is timed is the kernel alone
            put(column, "refused", f"only after {', '.join(one.name for one in chosen.adaptations)}")
            continue
        try:
            complaint = call.complaint(column.kernel)
            put(column, "wrong" if complaint else "measured", complaint)
            if not complaint:
                works[column.name] = _work(call, column.kernel)
        except torch.OutOfMemoryError as error:
            put(column, "out of memory", _first_line(error))
        except Exception as error:  # a kernel's or a compiler's, of whatever type
            put(column, "failed", _first_line(error))
            lost = device_lost(device) and f"the device was lost to {column.name}"
    if lost:
        for name in works:
            rows[name] = replace(rows[name], status="failed", reason=f"right, but not timed: {lost}")
    elif works:
        _time(case, rows, works, clock, count)
    return list(rows.values())


def _work(call: Call, kernel: Kernel) -> Any:
    """What is timed: for the backward, with the forward done before."""
    if call.case.kind != "backward":
        return lambda: kernel.forward(call.spec, call.inputs)
    result = kernel.forward(call.spec, call.inputs)
    return lambda: kernel.backward(call.spec, call.inputs, result, call.dout)


def _time(case: Case, rows: dict[str, Row], works: dict[str, Any], clock: Clock, count: int) -> None:
    """Put figures into the rows of ``works``."""
    try:
        for work in works.values():
            for _ in range(2):
                work()
        samples = dict(zip(works, clock.rounds(list(works.values()), count), strict=True))
        host = {name: clock.host(work) for name, work in works.items()}
    except Exception as error:
        # One after the other they ran; what fails now is the machine's, and no figure would be comparable.
        status = "out of memory" if isinstance(error, torch.OutOfMemoryError) else "failed"
        for name in works:
            rows[name] = replace(rows[name], status=status, reason=f"timed together: {_first_line(error)}")
        return
    for name in works:
        low, median, high = _quartiles(samples[name])
        ratio = None
        if BASELINE in works and name != BASELINE:
            pairs = zip(samples[BASELINE], samples[name], strict=True)
            ratio = statistics.median(base / own for base, own in pairs)
        rows[name] = replace(
            rows[name],
            ms=median,
            ms_low=low,
            ms_high=high,
            samples=len(samples[name]),
            rate=case.rate(median),
            host_us=host[name],
            ratio=ratio,
        )


def _quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, median, high


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]


def device_lost(device: torch.device) -> str:
    """After a kernel that faulted nothing runs in this process: why, in the driver's words, or empty."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return _first_line(error)
    return ""


# ---- compiling --------------------------------------------------------------------------------------


def compile_ahead(words: Sequence[str], until: float) -> None:
    """This program several times over, each for a part of the cases: Triton's cache then has every kernel.

    One process compiles one kernel at a time, and the table takes minutes of that. What is not there in time
    is compiled when it is needed.
    """
    parts = max(1, min(12, (os.cpu_count() or 1) - 2))
    command = [sys.executable, __file__, *words]
    workers = [
        subprocess.Popen(
            [*command, "--compile", f"{n}/{parts}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for n in range(parts)
    ]
    try:
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(max(0.0, until - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def compile_cases(planned: Iterable[Case], wanted: Sequence[Column], device: torch.device) -> None:
    """Call our own kernels once in each case. A failure here is reported when the case is measured."""
    own = [column for column in wanted if is_own(column)]
    for case in planned:
        for column in own:
            with contextlib.suppress(Exception):
                _work(Call.of(case, device), column.kernel)()


# ---- telling ----------------------------------------------------------------------------------------


def show(rows: Sequence[Row], console: Console) -> None:
    """A table per kind and type, the reasons of what has no figure, and the targets beside the ratios."""
    names = list(dict.fromkeys(row.name for row in rows))
    groups = dict.fromkeys((row.kind, row.dtype) for row in rows)
    for kind, dtype in sorted(groups, key=lambda group: KINDS.index(group[0])):
        chosen = [row for row in rows if (row.kind, row.dtype) == (kind, dtype)]
        console.print(f"\n[bold]{kind} {dtype}, {chosen[0].unit}[/] (× over {BASELINE})", highlight=False)
        console.print(_table(kind, chosen, names))
    reasons = dict.fromkeys((row.name, row.status, row.reason) for row in rows if row.reason)
    for name, status, reason in reasons:
        console.print(f"{name} {status}: {reason}", highlight=False, markup=False)
    if any(row.target is not None for row in rows):
        title = f"Targets over {BASELINE}[/] (set for Hopper), medians over lengths and types"
        console.print(f"\n[bold]{title}", highlight=False)
        console.print(_targets(rows))


def _table(kind: str, rows: Sequence[Row], names: Sequence[str]) -> Table:
    table = Table(header_style="dim", padding=(0, 1, 0, 0), box=None)
    for name in ("d", "mask", "b", "s" if kind != "decode" else "kv"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in names:
        table.add_column(name.removeprefix("sdpa."), justify="right")
    by_case: dict[Case, dict[str, Row]] = {}
    for row in rows:
        by_case.setdefault(row.case, {})[row.name] = row
    for case in sorted(by_case):
        mask = "causal" if case.causal else "full"
        cells = [_cell(by_case[case].get(name)) for name in names]
        table.add_row(str(case.head_dim), mask, str(case.batch), str(case.seqlen_kv), *cells)
    return table


def _cell(row: Row | None) -> str:
    if row is None or row.rate is None:
        colour = {"wrong": "red", "failed": "red"}.get(row.status, "dim") if row else "dim"
        return f"[{colour}]{row.status if row else ''}[/]"
    rate = number(row.rate)
    return f"{rate} {row.ratio:4.2f}×" if row.ratio is not None else rate


def _targets(rows: Iterable[Row]) -> Table:
    table = Table(header_style="dim", padding=(0, 1, 0, 0), box=None)
    for name in ("what", "kernel", "target", "median", "range", "cases", "met"):
        table.add_column(name, justify="left" if name in ("what", "kernel") else "right", no_wrap=True)
    held = [row for row in rows if row.target is not None]
    for kind, d, causal in TARGETS:
        mask = {None: "", True: " causal", False: " full"}[causal]
        for name in dict.fromkeys(row.name for row in held):
            ratios = [
                row.ratio
                for row in held
                if (row.kind, row.head_dim, row.name) == (kind, d, name)
                and causal in (None, row.causal)
                and row.ratio is not None
            ]
            target = TARGETS[kind, d, causal]
            cells = ["", "", "0", ""]
            if ratios:
                median = statistics.median(ratios)
                met = "[green]yes[/]" if median >= target else "[red]no[/]"
                span = f"{min(ratios):.2f} – {max(ratios):.2f}"
                cells = [f"{median:.2f}", span, str(len(ratios)), met]
            table.add_row(f"{kind} d{d}{mask}", name, f"≥ {target:.1f}", *cells)
    return table


def default_path(device: dict[str, Any]) -> Path:
    return ROOT / "benchmarks" / "results" / f"kernels-{file_name(device['name'])}.json"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few cases and samples")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: rehearse on the interpreter at tiny shapes; nothing is measured",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: benchmarks/results/kernels-GPU.json"
    )
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this; may be repeated")
    parser.add_argument("--kernel", action="append", metavar="NAME", help=f"only this beside {BASELINE}")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no case after this time")
    parser.add_argument("--part", action="store_true", help="of another's record: do not say where it lies")
    parser.add_argument("--compile", metavar="I/N", help="time nothing: compile every Nth case from the Ith")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 2
    start = time.monotonic()
    device = torch.device(options.device)
    rehearsed = device.type == "cpu"
    grid = REHEARSAL if rehearsed else QUICK if options.quick else FULL
    names = [*options.kernel, BASELINE] if options.kernel else []
    unknown = sorted(set(names) - CANDIDATES.keys())
    if unknown:
        parser.error(f"--kernel {', '.join(unknown)}: not a candidate; there are {', '.join(CANDIDATES)}")
    wanted = columns(names)
    if options.compile:
        part, parts = map(int, options.compile.split("/"))
        compile_cases(cases(grid, tuple(options.kind or KINDS))[part::parts], wanted, device)
        return 0
    if not rehearsed:
        most = 180.0 if options.budget is None else 0.4 * options.budget
        compile_ahead(sys.argv[1:] if words is None else words, until=start + most)
    return _run(options, grid, device, wanted, start)


def _run(options: Any, grid: Grid, device: torch.device, wanted: list[Column], start: float) -> int:
    rehearsed = device.type == "cpu"
    described = describe(device)
    path = options.json or (None if rehearsed else default_path(described))
    clock: Clock = HostClock() if rehearsed else CudaClock(device)
    before = state()
    ceiling = None if rehearsed else round(copy_rate(device), 1)
    planned = cases(grid, tuple(options.kind or KINDS))
    rows: list[Row] = []

    def keep(stopped: str | None) -> None:
        if path is not None:
            facts = {
                "measurement": not rehearsed,
                "quick": options.quick,
                "device": described,
                "copy_gb_per_s": ceiling,
                "clocks_before": before,
                "clocks_now": state(),
                "cases": {"planned": len(planned), "done": len({row.case for row in rows})},
                "stopped": stopped,
            }
            write(path, record("kernels", rows, **facts))

    stopped = None
    try:
        for case in progress(planned):
            if options.budget is not None and time.monotonic() - start > options.budget:
                stopped = f"the time given ({options.budget:.0f} s) is used up"
                break
            rows += measure(case, wanted, device, clock, grid.samples)
            stopped = device_lost(device) or None
            keep(stopped or "under way")
            if stopped:
                break
    except KeyboardInterrupt:
        stopped = "interrupted"
    keep(stopped)
    # A pipe has no width of its own; 80 columns fit everywhere.
    console = Console() if Console().is_terminal else Console(width=80)
    show(rows, console)
    if rehearsed:
        console.print("A rehearsal on the interpreter: these figures measure nothing.")
    if stopped:
        console.print(f"Stopped before the end: {stopped}.")
    if path is not None and not options.part:
        console.print(f"Written to {path}", soft_wrap=True)
    return 130 if stopped == "interrupted" else 0


if __name__ == "__main__":
    sys.exit(main())

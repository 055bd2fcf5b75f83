"""What ``attnsel prove`` does: the tests of tests/gpu, then the kernel benchmark, into one JSON file.

Tests run in several processes; one that a test ends, or stalls, is begun again behind that test. What failed
runs a second time, alone in a process of its own, and the record keeps both outcomes. The file is written
anew all the while: a run that is cut short keeps what it had.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import needed
from measure import ROOT, record, write
from proven import WHOLE, as_source, counts, proven_by
from shards import Shard, start

from attnsel import __version__
from attnsel.cli.output import BAD_INPUT, CHECK_FAILED, FOUND, INTERRUPTED, complain

TESTS_SHARE, AGAIN_SHARE = 0.6, 0.1  # of the budget at most; what is left is the benchmark's
OUTCOMES = ("passed", "failed", "skipped", "unfinished")
GIB_PER_SHARD = 2.0  # a CUDA context, the compiled kernels of a process, and the largest test's tensors
_OF_THE_WHOLE = ("benchmark", "date", "commit", "modified", "machine", "versions", "device")


@dataclass(frozen=True)
class Options:
    """What the flags of ``attnsel prove`` say. ``out`` None: gpu-NAME.json in the current folder."""

    device: str = "cuda"
    out: Path | None = None
    budget: float = 540.0
    only: str = ""
    jobs: int = 0
    kernels: tuple[str, ...] = ()  # flags of kernel_speed.py
    tests: Sequence[str] = tuple(WHOLE)


def shards_for(processors: int, gib: float | None) -> int:
    """How many processes: one a core but two, twelve at most, and no more than the card's memory holds."""
    by_memory = 12 if gib is None else int(gib / GIB_PER_SHARD)
    return max(1, min(12, processors - 2, by_memory))


def run(options: Options) -> int:
    """The exit code. Ctrl-C, and a scheduler's SIGTERM, end what was started and leave the file readable."""
    import torch
    from clocks import describe, file_name

    if options.device == "cuda" and not torch.cuda.is_available():
        complain("no CUDA device here; --device cpu rehearses on Triton's interpreter")
        return BAD_INPUT
    begun = time.monotonic()
    described = describe(torch.device(options.device))
    if not options.jobs:
        many = shards_for(os.cpu_count() or 1, described.get("memory_gib"))
        options = replace(options, jobs=many if options.device == "cuda" else 1)
    path = (options.out or Path(f"gpu-{file_name(described['name'])}.json")).absolute()
    told = Report(path, described)
    for words in needed.shortcomings():
        print(f"note: {words}")
    print(
        f"attnsel {__version__} on {described['name']}, {options.budget:.0f} s at most, into {path}",
        flush=True,
    )
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        told.tests = run_tests(options, told, begun)
        if not told.tests["rows"]:
            told.end("no test was found")
            return BAD_INPUT
        code = run_benchmark(options, told, begun + options.budget)
    except KeyboardInterrupt:
        told.end("interrupted")
        print(f"\ninterrupted; what was done until then is in {path}", flush=True)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    complete = told.tests["complete"] and not code
    told.end("complete" if complete else "not complete")
    conclude(told)
    return FOUND if complete and not told.tests["summary"]["failed"] else CHECK_FAILED


@dataclass
class Report:
    """The file: what is known of the run, its tests and the benchmark. ``state`` says how it ended."""

    path: Path
    device: dict[str, Any]
    tests: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    state: str = "under way"

    def __post_init__(self) -> None:
        from sources import digest

        self.facts = record("gpu", [], attnsel=__version__, sources=digest(), device=self.device)
        self.facts["versions"] |= libraries()
        del self.facts["rows"]

    def as_dict(self) -> dict[str, Any]:
        return {**self.facts, "state": self.state, "tests": self.tests, "kernels": self.kernels}

    def keep(self) -> None:
        write(self.path, self.as_dict())

    def end(self, state: str) -> None:
        self.state = state
        self.keep()


def libraries() -> dict[str, str | None]:
    """Versions of what runs on the device."""
    import torch
    from measure import version_of

    cudnn = torch.backends.cudnn.version()
    return {
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        **{package: version_of(package) for package in ("nvidia-cudnn-frontend", "numpy", "pytest")},
    }


# ---- the tests --------------------------------------------------------------------------------------


def run_tests(options: Options, told: Report, begun: float) -> dict[str, Any]:
    """The record of the tests, in the file all the while; then once more those that failed."""
    until = begun + TESTS_SHARE * options.budget
    with tempfile.TemporaryDirectory() as folder, _ended_at_last() as shards:
        shards += [Shard(f"{n}/{options.jobs}", options, Path(folder)) for n in range(options.jobs)]
        again: list[Shard] = []

        def keep() -> dict[str, Any]:
            told.tests = tests_record(options, shards[: options.jobs], again, time.monotonic() - begun)
            told.keep()
            return told.tests

        try:
            _tend(shards, until, lambda: _progress(keep(), begun, options.budget))
            last = until + AGAIN_SHARE * options.budget
            for number, test in enumerate(_to_run_again(keep())):
                if time.monotonic() > last:
                    break
                again.append(Shard(f"again-{number}", options, Path(folder), test))
                shards.append(again[-1])
                print(f"once more, by itself: {test}", flush=True)
                _tend(again[-1:], last, keep)
        finally:
            for shard in shards:
                shard.end()
            keep()
        if not (told.tests["rows"] and told.tests["collected"]):
            _say_what_is_missing(options, shards)
    return told.tests


@contextmanager
def _ended_at_last() -> Iterator[list[Shard]]:
    shards: list[Shard] = []
    try:
        yield shards
    finally:
        for shard in shards:
            shard.close()


def _tend(shards: Sequence[Shard], until: float, tell: Callable[[], Any]) -> None:
    said = time.monotonic()
    while time.monotonic() < until:
        busy = [shard.tend() for shard in shards]
        if not any(busy):
            break
        time.sleep(0.3)
        if time.monotonic() - said > 5:
            said = time.monotonic()
            tell()
    for shard in shards:
        shard.end()


def tests_record(
    options: Options, shards: Sequence[Shard], again: Sequence[Shard], seconds: float
) -> dict[str, Any]:
    """What is known of the tests by now. ``collected``: that all of them are among the rows."""
    found = {name: outcome for shard in shards for name, outcome in shard.outcomes().items()}
    for shard in again:
        found |= {name: found[name].then(second) for name, second in shard.outcomes().items() if second.begun}
    rows = sorted(found.values(), key=lambda outcome: outcome.test)
    counted = {kind: sum(row.outcome == kind for row in rows) for kind in OUTCOMES}
    flakes = [row.test for row in rows if row.flake]
    return {
        "selected": [*options.tests, *([f"--only {options.only}"] if options.only else [])],
        "collected": all(shard.collected() for shard in shards),
        "complete": bool(rows) and not counted["unfinished"],
        "seconds": round(seconds, 1),
        "summary": {**counted, "flakes": len(flakes)},
        "flakes": flakes,
        "rows": [row.as_dict() for row in rows],
    }


def _to_run_again(tests: dict[str, Any]) -> list[str]:
    """Failed ones, and those that ended or stalled their process; not those that were never begun."""
    return [row["test"] for row in tests["rows"] if row["outcomes"][-1:] in (["failed"], ["unfinished"])]


def _progress(tests: dict[str, Any], begun: float, budget: float) -> None:
    counted = dict(tests["summary"])
    left = counted.pop("unfinished")
    words = ", ".join(f"{number} {kind}" for kind, number in counted.items() if number)
    state = f"{words or 'none'} so far, {left} to run" if tests["collected"] else "being collected"
    print(f"{time.monotonic() - begun:4.0f} of {budget:.0f} s: tests: {state}", flush=True)


def _say_what_is_missing(options: Options, shards: Sequence[Shard]) -> None:
    if options.only and all(shard.collected() for shard in shards):
        complain(f"--only: no test has any of {options.only!r} in its name")
        return
    logs = "\n".join(shard.said()[-2000:] for shard in shards)
    print(logs, file=sys.stderr)
    complain("not all tests were found; what pytest said of it is above")


# ---- the benchmark ----------------------------------------------------------------------------------


def run_benchmark(options: Options, told: Report, until: float) -> int:
    """kernel_speed.py, ended when the time is over; what it measured goes into the file as it comes."""
    seconds = max(0.0, until - time.monotonic())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.json"
        command = [sys.executable, str(ROOT / "benchmarks" / "kernel_speed.py"), "--device", options.device]
        command += ["--part", "--json", str(path), "--budget", f"{0.9 * seconds:.0f}", *options.kernels]
        process = start(command, None)

        def keep() -> None:
            if path.exists():
                kernels = json.loads(path.read_text(encoding="utf-8"))
                if kernels["cases"]["done"] != told.kernels.get("cases", {}).get("done"):
                    print("kernels: {done} of {planned} cases".format(**kernels["cases"]), flush=True)
                told.kernels = {key: kernels[key] for key in kernels if key not in _OF_THE_WHOLE}
                told.keep()

        try:
            while process.poll() is None and time.monotonic() < until + 15:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                keep()
            return _finish(process)
        except KeyboardInterrupt:
            _finish(process)
            raise
        finally:
            _kill(process)
            keep()


def _finish(process: subprocess.Popen[Any]) -> int:
    """Its own last words, if it can still say them."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.wait(10)
    _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# ---- what came of it --------------------------------------------------------------------------------


def conclude(told: Report) -> None:
    """What failed, what was a flake, and what the file proves."""
    tests = told.tests
    for row in tests["rows"]:
        if row["outcome"] in ("failed", "unfinished"):
            print(
                f"{row['outcome']} {row['test']}: {(row['message'].strip().splitlines() or [''])[-1][:160]}"
            )
    for test in tests["flakes"]:
        print(f"flake: it failed, and passed when it ran again: {test}")
    words = ", ".join(f"{number} {kind}" for kind, number in tests["summary"].items() if number)
    print(f"tests: {words}{'' if tests['complete'] else ', not complete'}")
    found = told.as_dict()
    proofs = proven_by([found], known=lambda digest: True)
    for (candidate, target), proven in sorted(proofs.items()):
        print(f"{candidate} on {target} is proven in these features, a line for `proven` in its record")
        print(f"(backends/{candidate.split('.')[0]}/candidate.py):\n  {as_source(proven)}")
    if not counts(found, known=lambda digest: True):
        print(f"It proves nothing: {why_not(found)}.")
    print(f"Written to {told.path}" + (": commit it in benchmarks/results/." if proofs else ""), flush=True)


def why_not(found: dict[str, Any]) -> str:
    if found["device"]["type"] != "cuda":
        return "this was a rehearsal without a GPU"
    if found["tests"]["selected"] != WHOLE:
        return "only a part of the tests was to run"
    if not found["tests"]["collected"]:
        return "not all tests were found"
    return "the sources of this checkout differ from its commit"

"""Everything there is to know from a GPU, in one command: the tests of tests/gpu, then the benchmarks.

    python benchmarks/gpu.py                        # into benchmarks/results/, nine minutes at most
    python benchmarks/gpu.py --out DIR --budget 300
    python benchmarks/gpu.py --device cpu --out DIR # without a GPU: rehearse it on Triton's interpreter

Results are written as they come: gpu-tests-NAME.json and kernels-NAME.json. Exit code 0: every test passed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needed

needed.stop_where_something_is_missing()

from measure import ROOT, git, record, write  # noqa: E402
from record_tests import read  # noqa: E402

TESTS = ["tests/gpu"]
STALLED_S = 150  # no test takes as long, its kernels' compilation included
TESTS_SHARE = 0.6  # of the budget at most; what is left is the benchmarks'
_GRID = re.compile(r"tests/gpu/test_(\w+)_features\.py::test_every_feature\[")
OUTCOMES = ("passed", "failed", "skipped", "unfinished")


@dataclass(frozen=True)
class Outcome:
    """One test: passed, failed, skipped or unfinished (never begun, or it ended or stalled its process)."""

    test: str
    outcome: str
    seconds: float = 0.0
    message: str = ""

    def as_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


class Shard:
    """One pytest process over a part of the tests, begun anew behind a test that ended it."""

    def __init__(self, number: int, of: int, options: Any, folder: Path) -> None:
        self.file = folder / f"shard-{number}.jsonl"
        self.command = [
            *(sys.executable, "-m", "pytest", "-p", "record_tests", "-p", "no:cacheprovider"),
            *("--record", str(self.file), "--shard", f"{number}/{of}", f"--gpu-device={options.device}"),
            *("--no-header", *options.tests),
        ]
        self.log = (folder / f"shard-{number}.log").open("a")
        self.process: subprocess.Popen[Any] | None = None
        self.seen, self.changed = 0, time.monotonic()
        self.starts = 0

    def tend(self) -> bool:
        """Begin, watch or begin again. False: nothing is left to do."""
        size = self.file.stat().st_size if self.file.exists() else 0
        if size != self.seen:
            self.seen, self.changed = size, time.monotonic()
        if self.process is not None and self.process.poll() is None:
            if time.monotonic() - self.changed > STALLED_S:
                self.end()
            return True
        if self.process is not None and (not self.left() or self.starts > 20 or self.process.returncode == 5):
            return False
        if self.process is not None and not self.file.exists():
            return False  # it does not even collect
        self.starts += 1
        self.changed = time.monotonic()
        self.process = _start(self.command, self.log)
        return True

    def left(self) -> set[str]:
        lines = read(self.file)
        planned = {test for line in lines for test in line.get("planned", ())}
        return planned - {line["test"] for line in lines if "test" in line}

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def outcomes(self) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        for line in read(self.file):
            for test in line.get("planned", ()):
                found.setdefault(test, Outcome(test, "unfinished"))
            if "test" in line:
                found[line["test"]] = Outcome(**line)
        return found


def _start(command: Sequence[str], log: Any) -> subprocess.Popen[Any]:
    """A child in a group of its own, that finds attnsel in this checkout, installed or not."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def proves(recorded: dict[str, Any]) -> set[tuple[str, int]]:
    """(candidate, arch) pairs that a record of a test run shows running: what a record's ``proven`` may name.

    The whole suite ran to its end, on a GPU, from a commit, and every test of the candidate passed or was
    skipped for a reason of the rules or the device; the feature grid is among the passed.
    """
    device = recorded.get("device", {})
    whole = recorded.get("benchmark") == "gpu-tests" and recorded["complete"] and recorded["tests"] == TESTS
    from_a_commit = bool(recorded.get("commit")) and not recorded.get("modified")
    if not whole or not from_a_commit or device.get("type") != "cuda":
        return set()
    proven = set()
    for name in {found[1] for row in recorded["rows"] if (found := _GRID.match(row["test"]))}:
        held = [row for row in recorded["rows"] if row["test"].startswith(f"tests/gpu/test_{name}_")]
        grid = [row for row in held if _GRID.match(row["test"])]
        clean = all(row["outcome"] in ("passed", "skipped") for row in held)
        if clean and any(row["outcome"] == "passed" for row in grid):
            proven.add((name, device["arch"]))
    return proven


def run_tests(options: Any, described: dict[str, Any], path: Path, until: float) -> dict[str, Any]:
    """The record of the tests, on disk all the while."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, _shards(options, Path(folder)) as shards:

        def keep(ended: bool) -> dict[str, Any]:
            found = {name: outcome for shard in shards for name, outcome in shard.outcomes().items()}
            rows = sorted(found.values(), key=lambda outcome: outcome.test)
            counts = {kind: sum(row.outcome == kind for row in rows) for kind in OUTCOMES}
            recorded = record(
                "gpu-tests",
                rows,
                device=described,
                tests=options.tests,
                complete=ended and bool(rows) and not counts["unfinished"],
                seconds=round(time.monotonic() - begun, 1),
                summary=counts,
            )
            if options.commit:
                recorded["commit"] = options.commit
            write(path, recorded)
            return recorded

        said = 0.0
        try:
            while time.monotonic() < until:
                busy = [shard.tend() for shard in shards]
                if not any(busy):
                    break
                time.sleep(0.5)
                if time.monotonic() - said > 10:
                    said = time.monotonic()
                    _say(f"tests: {keep(ended=False)['summary']}")
        finally:
            for shard in shards:
                shard.end()
            recorded = keep(ended=True)
        if not recorded["rows"]:
            logs = sorted(Path(folder).glob("*.log"))
            _say("no test was collected:\n" + "\n".join(log.read_text()[-2000:] for log in logs))
        return recorded


@contextmanager
def _shards(options: Any, folder: Path) -> Iterator[list[Shard]]:
    shards = [Shard(n, options.shards, options, folder) for n in range(options.shards)]
    try:
        yield shards
    finally:
        for shard in shards:
            shard.end()
            shard.log.close()


def run_benchmark(options: Any, path: Path, until: float) -> int:
    """kernel_speed.py, ended when the time is over; what it measured is on disk by then."""
    seconds = max(0.0, until - time.monotonic())
    command = [sys.executable, "benchmarks/kernel_speed.py", "--device", options.device, "--json", str(path)]
    process = _start([*command, "--budget", f"{0.9 * seconds:.0f}", *options.kernels.split()], None)
    try:
        return process.wait(seconds + 15)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(process.pid, signal.SIGINT)
        try:
            return process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


GIB_PER_SHARD = 2.0  # a CUDA context, the compiled kernels of a process, and the largest test's tensors


def shards_for(processors: int, gib: float | None) -> int:
    """How many processes: one a core but two, twelve at most, and no more than the card's memory holds."""
    by_memory = 12 if gib is None else int(gib / GIB_PER_SHARD)
    return max(1, min(12, processors - 2, by_memory))


def _say(words: str) -> None:
    print(words, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="in all (default 540)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: rehearse")
    parser.add_argument("--shards", type=int, help="pytest processes side by side (compiling takes the time)")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="TEST", help="instead of tests/gpu")
    parser.add_argument(
        "--kernels", default="", metavar="FLAGS", help='for kernel_speed.py, such as "--quick"'
    )
    parser.add_argument("--commit", help="what this is a copy of, where git cannot tell")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    try:
        import torch
        from clocks import describe, file_name
    except ModuleNotFoundError:
        parser.error("torch is needed: pip install 'attnsel[torch]'")

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu.py: no CUDA device here. --device cpu rehearses on Triton's interpreter.", file=sys.stderr)
        return 2
    described = describe(torch.device(options.device))
    if options.shards is None:
        many = shards_for(os.cpu_count() or 1, described.get("memory_gib"))
        options.shards = many if options.device == "cuda" else 1
    for words in needed.shortcomings(options.commit or git("rev-parse", "HEAD")):
        _say(f"note: {words}")
    name = file_name(described["name"])
    tested = run_tests(
        options, described, options.out / f"gpu-tests-{name}.json", begun + TESTS_SHARE * options.budget
    )
    code = run_benchmark(options, options.out / f"kernels-{name}.json", begun + options.budget)
    for row in tested["rows"]:
        if row["outcome"] in ("failed", "unfinished"):
            _say(f"{row['outcome']} {row['test']}: {(row['message'].strip().splitlines() or [''])[-1][:160]}")
    _say(f"tests: {tested['summary']}{'' if tested['complete'] else ', not complete'}")
    for candidate, arch in sorted(proves(tested)):
        where = f"backends/{candidate.split('.')[0]}/candidate.py"
        _say(f'{candidate} is proven on sm{arch}: commit the file and add "sm{arch}" to proven in {where}')
    passed = tested["complete"] and not tested["summary"]["failed"]
    return 0 if passed and code == 0 else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""How much do the tests notice? Mutants drawn at random, one at a time, against the default tier.

    python tests/proof/mutants.py --draw                # the list alone
    python tests/proof/mutants.py --out mutants.json    # draws, runs, and keeps what is done: under an hour

A mutant is one small change of the product: another operator, another constant, a statement that is gone,
two arguments the other way round. The seed is the hash of the last commit, so nobody chooses. Half of them
lie in the rooms where a wrong number or a broken program would come from (``HALF``). Kernels in Triton's
language are left out: they have judges of their own (tests/proof/ptx_interpreter, benchmarks).

The unchanged product comes first: all tests must pass, and coverage notes which of them run which line
(``--out`` with the suffix .coverage). Each mutant then meets, until one fails: the tests that mirror its
file; the tests of the net (tests/net) that run its lines; all others that do. ``killed_by`` says which of the
three noticed; the first and the last judge, the net compares with what was. What the net kills, the others
may notice too: ``--without-the-net`` asks them. For lines that run on import the tests that run any line of
the file are asked, where there are none all. A test that reaches the line otherwise, in a child it starts, is
asked only where it mirrors: what is reported may be less than what the tests notice, never more.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue
from typing import Any

from coverage import CoverageData
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("attnsel", "rules", "backends")
HALF = ("attnsel/runtime/", "backends/", "attnsel/diagnose/watching/", "attnsel/diagnose/logs/")
KERNELS = ("forward.py", "backward.py", "tile.py")
COMPARED: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
SECONDS = 2400  # more than all tests take in one process; what hangs for so long is noticed too
NET = "tests/net"
MIRRORED, IN_NET, OTHERS = "mirrored tests", "the net", "all other tests"


@dataclass(frozen=True)
class Mutant:
    """``new`` in place of the text from ``start`` to ``end`` (line from 1, column in bytes of UTF-8)."""

    file: str
    kind: str
    start: tuple[int, int]
    end: tuple[int, int]
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]} {self.kind}: {self.old} → {self.new}"

    @property
    def old(self) -> str:
        return self._cut()[1].strip()

    def _cut(self) -> tuple[str, str, str]:
        lines = (ROOT / self.file).read_bytes().splitlines(keepends=True)
        first = sum(map(len, lines[: self.start[0] - 1])) + self.start[1]
        last = sum(map(len, lines[: self.end[0] - 1])) + self.end[1]
        whole = b"".join(lines)
        return whole[:first].decode(), whole[first:last].decode(), whole[last:].decode()

    def applied(self) -> str:
        """The text of the whole file with this change."""
        before, _, after = self._cut()
        return before + self.new + after


# ---- where a change can be made ----------------------------------------------------------------------


def sites(path: Path) -> Iterator[Mutant]:
    text = path.read_text(encoding="utf-8")
    file = path.relative_to(ROOT).as_posix()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]

    def mutant(kind: str, at: Any, new: str, until: Any = None) -> Mutant:
        last = until or at
        return Mutant(file, kind, (at.lineno, at.col_offset), (last.end_lineno, last.end_col_offset), new)

    def written(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    for node in ast.walk(tree):
        if _says_nothing(node):
            continue
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
                new = f"{written(left)} {COMPARED[type(op)]} {written(right)}"
                yield mutant("operator", node, new)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in COMPUTED:
                yield mutant("operator", node, f"{written(left)} {COMPUTED[type(op)]} {written(right)}")
            case ast.BoolOp(op=op, values=values):
                word = " or " if isinstance(op, ast.And) else " and "
                yield mutant("operator", node, "(" + word.join(f"({written(v)})" for v in values) + ")")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield mutant("operator", node, f"({written(operand)})")
            case ast.Constant(value=bool() as value):
                yield mutant("constant", node, str(not value))
            case ast.Constant(value=int() as value):
                yield mutant("constant", node, str(value + 1))
            case ast.Constant(value=str() as value) if value and _is_read(node):
                yield mutant("constant", node, repr(value + "x"))
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
                yield mutant("statement", node, "pass")
            case ast.If(orelse=[], test=test):
                yield mutant("statement", test, "False")
            case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
                if written(first) != written(second) and not isinstance(second, ast.Starred):
                    yield mutant("arguments", first, f"{written(second)}, {written(first)}", second)


def _says_nothing(node: ast.AST) -> bool:
    """Types, and what is imported for them alone."""
    while (parent := getattr(node, "parent", None)) is not None:
        if isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.unparse(parent.test):
            return True
        of_type = (getattr(parent, name, None) for name in ("annotation", "returns"))
        if any(node is one for one in of_type) or (
            isinstance(parent, ast.Assign) and "Literal[" in ast.unparse(parent)
        ):
            return True
        node = parent
    return False


def _is_read(node: ast.Constant) -> bool:
    """A text that a program compares, looks up or names something by; no docstring and no sentence."""
    parent = getattr(node, "parent", None)
    sentence = " " in str(node.value) or isinstance(parent, ast.JoinedStr | ast.Expr | ast.FormattedValue)
    return not sentence


def draw(count: int, seed: str) -> list[Mutant]:
    """``count`` of all, half of them in HALF."""
    found: dict[bool, list[Mutant]] = {True: [], False: []}
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.parent.name == "triton" and path.name in KERNELS:
                continue
            for one in sites(path):
                found[one.file.startswith(HALF)].append(one)
    random_of = random.Random(seed)
    chosen: list[Mutant] = []
    for inside, share in ((True, count // 2), (False, count - count // 2)):
        pool = sorted(found[inside], key=lambda one: (one.file, one.start, one.kind, one.new))
        random_of.shuffle(pool)
        legal = (one for one in pool if _is_legal(one))
        chosen += [one for one, _ in zip(legal, range(share), strict=False)]
    return chosen


def _is_legal(one: Mutant) -> bool:
    try:
        ast.parse(one.applied())
    except SyntaxError:
        return False
    return True


# ---- who notices -------------------------------------------------------------------------------------


def mirrored(file: str) -> list[str]:
    """The tests that stand where the file does, or as near to it as there are any."""
    path = Path("tests", file)
    for near in (path.parent / f"test_{path.stem}.py", *path.parents):
        if (ROOT / near).exists() and near not in (
            Path("tests"),
            Path("tests/attnsel"),
            Path("tests/backends"),
        ):
            return [near.as_posix()]
    return []


class Reach:
    """Which of the tests in ``copy`` run a line, as coverage saw it while the unchanged product passed."""

    def __init__(self, record: Path, copy: Path) -> None:
        listed = asked(copy, "--collect-only").stdout.splitlines()
        self._there = {line for line in listed if "::" in line}
        self._data = CoverageData(str(record))
        self._data.read()
        self._files = {Path(file).as_posix(): file for file in self._data.measured_files()}

    def tests(self, one: Mutant) -> set[str]:
        """Their node ids; empty where no test runs it by itself, which says nothing."""
        known = next((name for path, name in self._files.items() if path.endswith("/tree/" + one.file)), None)
        if known is None:
            return set()
        by_line = self._data.contexts_by_lineno(known)
        lines = range(one.start[0], one.end[0] + 1)
        contexts = {context for line in lines for context in by_line.get(line, ()) if context}
        contexts = contexts or {context for found in by_line.values() for context in found if context}
        return {context.rpartition("|")[0] for context in contexts} & self._there


def copied(to: Path) -> Path:
    left_out = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, to, ignore=left_out)
    return to


def asked(copy: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """pytest in that copy. Copies share a path of the same length and last part, so that records fit all."""
    run = [sys.executable, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        run,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), **settings},
        capture_output=True,
        text=True,
        timeout=None if settings else SECONDS,
    )


def reach_of_the_unchanged(record: Path, jobs: int, work: Path) -> Reach:
    copy = copied(work / "unchanged" / "tree")
    if not record.exists():
        words = ["-n", str(jobs), "--dist", "loadfile", "--cov", "--cov-report=", "--cov-context=test"]
        partial = record.with_suffix(".partial")
        told = asked(copy, *words, COVERAGE_FILE=str(partial.resolve()))
        if told.returncode:
            sys.exit(f"the unchanged product fails: {told.stdout[-3000:]}{told.stderr[-3000:]}")
        partial.rename(record)
    return Reach(record, copy)


def first_failure(copy: Path, tests: list[str], *words: str) -> str | None:
    """The test that fails first, or None. ``tests``: files, folders or node ids."""
    if not tests:
        return None
    listed = copy / "asked.txt"
    listed.write_text("\n".join(tests), encoding="utf-8")
    try:
        told = asked(copy, "-x", "-q", *words, f"@{listed}")
    except subprocess.TimeoutExpired:
        return "ran out of time"
    if told.returncode in (0, 5):
        return None
    if told.returncode == 4 and "ERROR: not found" in told.stderr:
        sys.exit(f"pytest was asked wrongly: {told.stderr[-2000:]}")
    said = told.stdout.strip().splitlines()
    failed = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    return (failed or said[-1:] or ["pytest fails"])[0]


def judged(one: Mutant, copy: Path, reach: Reach, asked_of: tuple[str, ...]) -> dict[str, Any]:
    """What notices the change: the first of ``asked_of``, keys of ``tests``, in their order."""
    path = copy / one.file
    kept = path.read_text(encoding="utf-8")
    path.write_text(one.applied(), encoding="utf-8")
    near = mirrored(one.file)
    running = sorted(reach.tests(one))
    everything = ["tests", f"--ignore={NET}", *(f"--ignore={name}" for name in near)]
    tests = {
        MIRRORED: near,
        IN_NET: [name for name in running if name.startswith(NET)] if running else [NET],
        OTHERS: [name for name in running if not name.startswith((NET, *near))] if running else everything,
    }
    try:
        for who in asked_of:
            failure = first_failure(copy, tests[who])
            if failure is not None:
                return {**asdict(one), "killed_by": who, "failure": failure}
    finally:
        path.write_text(kept, encoding="utf-8")
    return {**asdict(one), "killed_by": None, "failure": None}


def summary(results: list[dict[str, Any]]) -> str:
    killed = [result for result in results if result["killed_by"]]
    judges = [result for result in killed if result["killed_by"] != IN_NET or result.get("judge")]
    lines = [f"{len(killed)} of {len(results)} killed, {len(judges)} by the judges without the net"]
    survivors = (result for result in results if not result["killed_by"])
    lines += [
        f"  survives: {result['file']}:{result['start'][0]} {result['kind']} → {result['new']}"
        for result in survivors
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", help="the hash of the last commit if left out")
    parser.add_argument("--draw", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument(
        "--out", type=Path, help="mutants.json if left out; one that is there is gone on with"
    )
    parser.add_argument(
        "--without-the-net", action="store_true", help="ask the judges about what the net alone killed"
    )
    chosen = parser.parse_args()
    out: Path = chosen.out or Path("mutants.json")
    record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    head = ["git", "rev-parse", "HEAD"]
    last = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    seed = chosen.seed or record.get("seed", last)
    mutants = draw(chosen.count, seed)
    if chosen.draw:
        print("\n".join([f"seed {seed}", *map(str, mutants)]))
        return 0
    record = record or {"seed": seed, "mutants": [None] * len(mutants)}
    if record["seed"] != seed:
        parser.error(f"{out} is of seed {record['seed']}")

    def is_left(done: dict[str, Any] | None) -> bool:
        if chosen.without_the_net:
            return done is not None and done["killed_by"] == IN_NET and "judge" not in done
        return done is None

    left = [number for number, done in enumerate(record["mutants"]) if is_left(done)]
    with tempfile.TemporaryDirectory() as name, Progress(disable=not sys.stderr.isatty()) as progress:
        work = Path(name)
        bar = progress.add_task("the unchanged product", total=None)
        reach = reach_of_the_unchanged(out.with_suffix(".coverage"), chosen.jobs, work)
        progress.update(bar, description="mutants", total=len(mutants), completed=len(mutants) - len(left))
        copies: Queue[Path] = Queue()
        for job in range(chosen.jobs):
            copies.put(copied(work / f"copy{job}" / "tree"))

        def judge(number: int) -> None:
            copy = copies.get()
            if chosen.without_the_net:
                noticed = judged(mutants[number], copy, reach, (OTHERS,))
                record["mutants"][number]["judge"] = noticed["failure"]
            else:
                record["mutants"][number] = judged(mutants[number], copy, reach, (MIRRORED, IN_NET, OTHERS))
            copies.put(copy)
            text = json.dumps(record, indent=1, ensure_ascii=False)
            out.write_text(text + "\n", encoding="utf-8")
            progress.advance(bar)

        with ThreadPoolExecutor(chosen.jobs) as pool:
            list(pool.map(judge, left))
    print(summary(record["mutants"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

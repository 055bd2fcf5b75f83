"""How much do the tests notice? Mutants drawn at random, one at a time, against the default tier.

    python tests/proof/mutants.py --draw                # the list alone
    python tests/proof/mutants.py --out mutants.json    # draws, runs, and keeps what is done: minutes each

A mutant is one small change of the product: another operator, another constant, a statement that is gone,
two arguments the other way round. The seed is the hash of the last commit, so nobody chooses. Half of them
lie in the rooms where a wrong number or a broken program would come from (``HALF``). Kernels in Triton's
language are left out: they have judges of their own (tests/proof/ptx_interpreter, benchmarks).

Each runs in a copy of the checkout: first the tests that mirror its file, then all others, then the net
(tests/net), each until something fails. ``killed_by`` says which of the three noticed: the first two judge.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("attnsel", "rules", "backends")
HALF = ("attnsel/runtime/", "backends/", "attnsel/diagnose/watching/", "attnsel/diagnose/logs/")
KERNELS = ("forward.py", "forward_descriptor.py", "backward.py", "decode.py", "tile.py")
COMPARED: dict[type, str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
COMPUTED: dict[type, str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
SECONDS = 900  # a mutant that makes a test hang is noticed too


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


def first_failure(copy: Path, jobs: int, *words: str) -> str | None:
    """The test that fails first, or None."""
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *words]
    run += ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
    settings = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        told = subprocess.run(run, cwd=copy, env=settings, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "ran out of time"
    if told.returncode in (0, 5):
        return None
    failed = [line for line in told.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (
        failed[0]
        if failed
        else told.stdout.strip().splitlines()[-1]
        if told.stdout.strip()
        else "pytest fails"
    )


def judged(one: Mutant, copy: Path, jobs: int) -> dict[str, Any]:
    """What notices the change, in the order in which they are asked."""
    path = copy / one.file
    kept = path.read_text(encoding="utf-8")
    path.write_text(one.applied(), encoding="utf-8")
    net = "tests/net"
    near = mirrored(one.file)
    try:
        asked = [("mirrored tests", near)] if near else []
        asked += [("all other tests", ["tests", f"--ignore={net}", *(f"--ignore={name}" for name in near)])]
        asked += [("the net", [net])]
        for who, words in asked:
            failure = first_failure(copy, jobs, *words)
            if failure is not None:
                return {**asdict(one), "killed_by": who, "failure": failure}
    finally:
        path.write_text(kept, encoding="utf-8")
    return {**asdict(one), "killed_by": None, "failure": None}


def summary(results: list[dict[str, Any]]) -> str:
    killed = [result for result in results if result["killed_by"]]
    judges = [result for result in killed if result["killed_by"] != "the net"]
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
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of pytest-xdist")
    parser.add_argument("--out", type=Path, help="a JSON file; one that is there is gone on with")
    chosen = parser.parse_args()
    last = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    seed = chosen.seed or last.stdout.strip()
    mutants = draw(chosen.count, seed)
    if chosen.draw:
        print("\n".join([f"seed {seed}", *map(str, mutants)]))
        return 0
    record: dict[str, Any] = {"seed": seed, "mutants": []}
    if chosen.out and chosen.out.exists():
        record = json.loads(chosen.out.read_text(encoding="utf-8"))
        if record["seed"] != seed:
            parser.error(f"{chosen.out} is of seed {record['seed']}")
    with tempfile.TemporaryDirectory() as work, Progress(disable=not sys.stderr.isatty()) as progress:
        copy = Path(work, "tree")
        left_out = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, copy, ignore=left_out)
        bar = progress.add_task("mutants", total=len(mutants), completed=len(record["mutants"]))
        for one in mutants[len(record["mutants"]) :]:
            record["mutants"].append(judged(one, copy, chosen.jobs))
            if chosen.out:
                chosen.out.write_text(
                    json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
                )
            progress.advance(bar)
    print(summary(record["mutants"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

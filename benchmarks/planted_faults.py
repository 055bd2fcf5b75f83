"""How many faults planted in our kernels' PTX are found by executing it on a CPU: counts, not times.

    python benchmarks/planted_faults.py --jobs 2                        # less than half an hour of one core
    python benchmarks/planted_faults.py --arch 80 --case window,packed --every 1 --each 20 --seed 1
    python benchmarks/planted_faults.py --jobs 2 --json benchmarks/results/triton-planted-faults.json

A part is a case of ``tests/proof/conformance.py --execute`` on an architecture, which has one of ``--every``
cases, the next architecture others. Its calls are executed once, then each kernel of it gets ``--each``
faults, one at a time, of as many kinds as it has places for (``tests/proof/ptx_interpreter/planted.py``). A
fault is found by *numbers* where any bit of a result or buffer differs from the kernel as it is, by *memory*
where the executor reports something; *outside the bound* are those whose results err more than ``--execute``
allows. What nothing finds is *equivalent*, with a reason, or a *hole* (``survivors.py``). A run that is cut
short goes on where it stopped: parts that are done are kept beside the file, under its name and ``.parts``.

Exit code: 0, or 1 where less than 97 % of those that are not equivalent are found.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("proof", "support")
    ]

import triton

import pool
from attnsel.cli.output import bar
from ptx_interpreter.cases import Wanted, wanted_cases
from ptx_interpreter.planted import Part, Verdict, examined
from ptx_interpreter.survivors import explained, ours, read

ARCHS = (75, 80, 90, 120)
WANTED = 0.97
OUTCOMES = ("both", "numbers", "memory", "equivalent", "hole")


def parts(archs: tuple[int, ...], words: tuple[str, ...], every: int, each: int, seed: int) -> list[Part]:
    """A case is taken at its first dtype; of ``every`` cases one architecture has one."""
    made = []
    for turn, arch in enumerate(archs):
        first: dict[str, Wanted] = {}
        for wanted in wanted_cases((arch,), words):
            first.setdefault(wanted[0].name, wanted)
        made += [
            Part(wanted, each, seed) for k, wanted in enumerate(first.values()) if (k + turn) % every == 0
        ]
    return made


def record_of(part: Part) -> dict[str, Any]:
    """Of one part: what became of each fault, and its survivors in full."""
    found, survivors, refused = [], [], []
    for kernel, verdict, of_survivor in examined(part):
        fault = verdict.fault
        if verdict.refused:
            refused.append(f"{kernel} line {fault.line}, {fault.kind}: {verdict.refused}")
            continue
        why = None
        if of_survivor is not None:
            why = explained(of_survivor, verdict)
            survivors.append(_survivor(part, kernel, verdict, why))
        found.append([kernel, fault.kind, _outcome(verdict), verdict.bound])
    return {
        "part": part.name,
        "faults": found,
        "survivors": survivors,
        "not_executed": refused,
    }


def _outcome(verdict: Verdict) -> str:
    if verdict.found:
        return "both" if verdict.numbers and verdict.memory else "numbers" if verdict.numbers else "memory"
    return "survives"


def _survivor(part: Part, kernel: str, verdict: Verdict, why: str | None) -> dict[str, Any]:
    fault = verdict.fault
    return {
        "part": part.name,
        "kernel": kernel,
        "kind": fault.kind,
        "line": fault.line,
        "source": fault.source,
        "ours": ours(fault.source),
        "before": _short(fault.before),
        "after": _short(fault.after),
        "differs": verdict.differs,
        "why": why,
    }


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:197]}..."


def read_again(part: dict[str, Any]) -> dict[str, Any]:
    """With the reasons that were read by hand, and survivors as equivalent or as holes."""
    asked = ("kernel", "kind", "differs", "ours", "before")
    survivors = [
        one | {"why": one["why"] or read(*(one[name] for name in asked))} for one in part["survivors"]
    ]
    reasons = iter(survivors)  # in the order of the faults
    faults = []
    for kernel, kind, outcome, outside in part["faults"]:
        if outcome == "survives":
            outcome = "equivalent" if next(reasons)["why"] else "hole"
        faults.append([kernel, kind, outcome, outside])
    return part | {"faults": faults, "survivors": survivors}


def summed(of_parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all, by kind, by architecture and by kernel."""
    total: Counter[str] = Counter()
    tables: dict[str, dict[str, Counter[str]]] = {"kinds": {}, "architectures": {}, "kernels": {}}
    for part in of_parts:
        architecture = part["part"].split()[0]
        for kernel, kind, outcome, outside in part["faults"]:
            rows = (("kinds", kind), ("architectures", architecture), ("kernels", kernel))
            for counts in (total, *(tables[table].setdefault(row, Counter()) for table, row in rows)):
                counts.update({"planted": 1, outcome: 1, "outside_bound": int(outside)})
    made: dict[str, Any] = {**_counts(total), "found_of_not_equivalent": round(share(total), 4)}
    for table, rows_of in tables.items():
        made[table] = {name: _counts(rows_of[name]) for name in sorted(rows_of)}
    return made


def _counts(counts: Counter[str]) -> dict[str, int]:
    return {name: counts[name] for name in ("planted", *OUTCOMES, "outside_bound")}


def share(counts: Counter[str]) -> float:
    """Of those that are not equivalent, how many are found."""
    found = counts["both"] + counts["numbers"] + counts["memory"]
    return found / max(1, found + counts["hole"])


def run(wanted: list[Part], jobs: int, kept: Path | None) -> list[dict[str, Any]]:
    """All parts in their order; those that ``kept`` holds are not done again."""
    done = {}
    if kept is not None and kept.exists():
        done = {part["part"]: part for part in map(json.loads, kept.read_text().splitlines())}
    left = [part for part in wanted if part.name not in done]
    with bar("planting", len(wanted)) as move:
        move(len(wanted) - len(left))

        def ended(part: Part, error: RuntimeError) -> dict[str, Any]:
            raise RuntimeError(f"{part.name}: {error}")

        def keep(count: int, part: dict[str, Any]) -> None:
            done[part["part"]] = part
            move(len(wanted) - len(left) + count)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(part) + "\n")

        pool.collect(record_of, left, jobs, ended, keep)
    return [done[part.name] for part in wanted]


def lines(record: dict[str, Any]) -> str:
    """The record as JSON, a part and a survivor to a line."""
    short = {name: value for name, value in record.items() if name not in ("parts", "survivors")}
    lists = (
        f'"{name}": [\n' + ",\n".join(map(json.dumps, record[name])) + "\n]"
        for name in ("parts", "survivors")
    )
    return json.dumps(short, indent=1)[:-2] + ",\n" + ",\n".join(lists) + "\n}\n"


def show(record: dict[str, Any]) -> None:
    line = "{:30} {:>7} {:>6} {:>8} {:>7} {:>11} {:>5}"
    print(line.format("", "planted", "both", "numbers", "memory", "equivalent", "hole"))
    for table in ("kinds", "architectures", "kernels"):
        for name, counts in record[table].items():
            print(line.format(name, *(counts[field] for field in ("planted", *OUTCOMES))))
    print(line.format("all", *(record[field] for field in ("planted", *OUTCOMES))))
    print(f"found of those that are not equivalent: {100 * record['found_of_not_equivalent']:.2f} %")
    for one in record["survivors"]:
        if not one["why"]:
            print(
                f"  hole: {one['part']}, {one['kernel']} line {one['line']}, {one['kind']}: {one['before']}"
            )
            print(f"    of {one['source']}: {one['ours']}")
    for told in record["not_executed"]:
        print(f"  not executed: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)))
    parser.add_argument("--case", default="", help="only cases with these words, by commas")
    parser.add_argument("--every", type=int, default=4, help="of so many cases one is taken")
    parser.add_argument("--each", type=int, default=4, help="faults of one kernel of a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="write the record to this file")
    options = parser.parse_args()
    words = tuple(word.strip() for word in options.case.split(",") if word.strip())
    wanted = parts(tuple(map(int, options.arch.split(","))), words, options.every, options.each, options.seed)
    kept = options.json and options.json.with_suffix(".parts")
    of_parts = [read_again(part) for part in run(wanted, options.jobs, kept)]
    record = {
        "date": date.today().isoformat(),
        "triton": triton.__version__,
        "seed": options.seed,
        "each": options.each,
        **summed(of_parts),
        "not_executed": [f"{part['part']}: {told}" for part in of_parts for told in part["not_executed"]],
        "parts": [{name: part[name] for name in ("part", "faults")} for part in of_parts],
        "survivors": [one for part in of_parts for one in part["survivors"]],
    }
    show(record)
    if options.json:
        options.json.write_text(lines(record))
        kept.unlink()
    return int(record["found_of_not_equivalent"] < WANTED)


if __name__ == "__main__":
    sys.exit(main())

"""Fuzz for as long as one likes, with seeds that nobody has used.

    python tests/fuzz/run.py                                  # every target, some minutes
    python tests/fuzz/run.py numbers --count 100000 --jobs 2
    python tests/fuzz/run.py numbers --seed 7                 # the same cases again

Exit code 1 and a script for the first wrong case of each target; --json prints tallies for a record.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path

from rich.progress import Progress

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("support", "proof")]

from harness import Failed, fuzz
from targets import TARGETS


def part(one: tuple[str, int, int]) -> tuple[str, Counter[str], str]:
    """One target's tally from one seed, and how it failed."""
    name, count, seed = one
    try:
        return name, fuzz(TARGETS[name], count, seed), ""
    except Failed as failed:
        return name, Counter(), str(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS)
    )
    parser.add_argument("--count", type=int, help="cases of each target (20 times the gate's)")
    parser.add_argument(
        "--seed", type=int, default=secrets.randbelow(2**31), help="printed where none is given"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_args()
    names = chosen.targets or list(TARGETS)

    # Many small parts: a bar that moves, and no process that a thousand cases made slow.
    parts = []
    for name in names:
        count = chosen.count or 20 * TARGETS[name].gate
        size = max(1, min(2000, count // (4 * chosen.jobs)))
        parts += [
            (name, min(size, count - at), chosen.seed + i) for i, at in enumerate(range(0, count, size))
        ]
    tallies: dict[str, Counter[str]] = {name: Counter() for name in names}
    failures: dict[str, str] = {}
    began = time.monotonic()
    quiet = chosen.json or not sys.stderr.isatty()
    with (
        Progress(disable=quiet) as progress,
        # Not ProcessPoolExecutor: with max_tasks_per_child it hangs in Python 3.11 (cpython#115634).
        get_context("spawn").Pool(chosen.jobs, maxtasksperchild=8) as pool,
    ):
        bars = {
            name: progress.add_task(name, total=sum(n for m, n, _ in parts if m == name)) for name in names
        }
        for name, tally, failure in pool.imap_unordered(part, parts):
            tallies[name] += tally
            if failure:
                failures.setdefault(name, failure)
            progress.update(bars[name], advance=tally.total())
    seconds = round(time.monotonic() - began, 1)
    if chosen.json:
        told = {name: dict(tally.most_common()) for name, tally in tallies.items()}
        record = {"seed": chosen.seed, "seconds": seconds, "cases": told, "failures": failures}
        print(json.dumps(record, indent=2))
        return 1 if failures else 0
    for name, tally in tallies.items():
        words = ", ".join(f"{count} {word}" for word, count in tally.most_common())
        print(f"{name}: {tally.total()} cases ({words}), {'FAILED' if name in failures else 'none wrong'}")
    print(f"seed {chosen.seed}, {seconds:g} s", *failures.values(), sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

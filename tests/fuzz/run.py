"""Fuzz for as long as one likes, with seeds that nobody has used.

    python tests/fuzz/run.py                                  # every target, some minutes
    python tests/fuzz/run.py numbers --count 100000 --jobs 2
    python tests/fuzz/run.py numbers --seed 7                 # the same cases again

Exit code 1 and a script for the first wrong case of each target.
"""

from __future__ import annotations

import argparse
import secrets
import sys
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add, drawn = parser.add_argument, secrets.randbelow(2**31)
    add("targets", nargs="*", choices=[[], *TARGETS], metavar="TARGET", help=", ".join(TARGETS))
    add("--count", type=int, help="cases of each target (20 times the gate's)")
    add("--seed", type=int, default=drawn, help="printed where none is given")
    add("--jobs", type=int, default=1, help="processes")
    chosen = parser.parse_args()
    names = chosen.targets or list(TARGETS)

    # Many small parts: a bar that moves, and no process that a thousand cases made slow.
    parts = []
    for name in names:
        count = chosen.count or 20 * TARGETS[name].gate
        size = max(1, min(2000, count // (4 * chosen.jobs)))
        starts = enumerate(range(0, count, size))
        parts += [(name, min(size, count - start), chosen.seed + i) for i, start in starts]
    tallies: dict[str, Counter[str]] = {name: Counter() for name in names}
    failures: dict[str, str] = {}
    with (
        Progress(disable=not sys.stderr.isatty()) as progress,
        # Not ProcessPoolExecutor: with max_tasks_per_child it hangs in Python 3.11 (cpython#115634).
        get_context("spawn").Pool(chosen.jobs, maxtasksperchild=8) as pool,
    ):
        totals = {name: sum(count for other, count, _ in parts if other == name) for name in names}
        bars = {name: progress.add_task(name, total=totals[name]) for name in names}
        for name, tally, failure in pool.imap_unordered(part, parts):
            tallies[name] += tally
            if failure:
                failures.setdefault(name, failure)
            progress.update(bars[name], advance=tally.total())
    for name, tally in tallies.items():
        words = ", ".join(f"{count} {word}" for word, count in tally.most_common())
        print(f"{name}: {tally.total()} cases ({words}), {'FAILED' if name in failures else 'none wrong'}")
    print(f"seed {chosen.seed}", *failures.values(), sep="\n\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

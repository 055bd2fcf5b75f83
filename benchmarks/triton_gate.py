"""The whole table of Triton kernels, compiled with no GPU and written down: results/triton-gate.json.

    python benchmarks/triton_gate.py                    # every architecture: about an hour on two cores
    python benchmarks/triton_gate.py --arch 75,90       # these anew, the others as they are in the file
    python benchmarks/triton_gate.py --arch 90 --kernel dkdv

Prints what changed against the file before it is replaced. A test holds some kernels to it, so that one that
became slower or spills is either repaired, or shows here.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("proof", "support")
    ]

import triton

import gate
from attnsel.backends.triton.blocks import ARCHS
from gate_changes import changes, name_in_words

TABLE = Path(__file__).parent / "results" / "triton-gate.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arch", default=",".join(map(str, ARCHS)), help="e.g. 75,90; all if left out")
    parser.add_argument("--kernel", default=",".join(gate.KERNELS), help="e.g. forward,dq; all if left out")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--table", type=Path, default=TABLE, help="another file than the committed one")
    options = parser.parse_args()
    archs = [int(word) for word in options.arch.split(",")]
    before = json.loads(options.table.read_text(encoding="utf-8")) if options.table.exists() else {}
    kernels = options.kernel.split(",")
    if unknown := set(kernels) - set(gate.KERNELS):
        parser.error(f"--kernel is {', '.join(sorted(unknown))}; allowed: {', '.join(gate.KERNELS)}")
    some = set(archs) < set(ARCHS) or set(kernels) < set(gate.KERNELS)
    if some and before.get("triton") not in (None, triton.__version__):
        parser.error(f"the file is of Triton {before['triton']}, here is {triton.__version__}: compile all")

    def watch(done: int, total: int, report: gate.KernelReport) -> None:
        print(f"\r  {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    wanted = gate.configurations(archs, kernels=kernels)
    made = [report.as_json() for report in gate.reports(wanted, watch, options.jobs)]
    kept = [
        kernel
        for kernel in before.get("kernels", [])
        if kernel["arch"] not in archs or kernel["kernel"] not in kernels
    ]
    table = sorted(kept + made, key=lambda kernel: kernel["arch"])
    for change in changes(made, before.get("kernels", [])):
        print(f"{'worse' if change.worse else '     '} {change.kernel}: {'; '.join(change.words)}")
    for kernel in made:
        if not kernel["ok"]:
            print(f"fault {name_in_words(kernel)}: {'; '.join(kernel['faults'])}")
    print(f"{sum(kernel['ok'] for kernel in table)} of {len(table)} without a fault")
    options.table.write_text(_lines(table), encoding="utf-8")


def _lines(kernels: list[dict[str, Any]]) -> str:
    """A kernel per line, so that a change shows as one."""
    head = json.dumps({"triton": triton.__version__, "date": date.today().isoformat()})[:-1]
    body = ",\n".join(json.dumps(kernel, separators=(",", ":")) for kernel in kernels)
    return f'{head}, "kernels": [\n{body}\n]}}\n'


if __name__ == "__main__":
    main()

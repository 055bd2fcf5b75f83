"""What each release of Triton makes of attnsel's kernels, with no GPU: registers, spills, shared memory.

    python benchmarks/triton_versions.py 3.6.0 3.7.1 --json benchmarks/results/triton-versions.json

Each release is unpacked by pip into a folder of its own, in front of this environment's Triton, and compiles
a part of the table: every pass at head_dim 64 and 128 and the forward at 256, for every architecture. Results
are merged into the file by release, so releases can be added one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("proof", "support")
    ]

RELEASES = ("3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
ROOT = Path(__file__).parents[1]
WANTED = (
    *((d, kernel, "causal") for d in (64, 128) for kernel in ("forward", "rows", "dkdv", "dq")),
    *((d, kernel, "full") for d in (64, 128) for kernel in ("forward", "dkdv")),
    *((d, "dbias", "bias") for d in (64, 128)),
    (256, "forward", "causal"),
)
FIELDS = ("registers", "spills", "shared_memory", "matrix_instructions")


def compile_here(jobs: int) -> dict[str, Any]:
    """With the Triton that imports here: what it made, by kernel, architecture, head dims and feature."""
    import gate
    from attnsel.backends.triton.blocks import ARCHS

    wanted = [
        gate.Configuration(kernel, arch, d, d, "fp16" if arch == 75 else "bf16", feature)
        for arch in ARCHS
        if arch != 89  # the same machine code as for 86
        for d, kernel, feature in WANTED
    ]

    def watch(done: int, total: int, report: gate.KernelReport) -> None:
        print(f"\r  {done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    reports = gate.reports(wanted, watch, jobs)
    kernels = [
        {
            "kernel": f"{r.kernel} sm{r.arch} d{r.head_dim_qk} {r.feature}",
            "tile": [*(r.block or ()), r.warps, r.stages],
            **{name: getattr(r, name) for name in FIELDS},
            # What follows names files of this machine.
            "error": r.error and r.error.split("\n\nRepro")[0],
            "ok": r.ok,
        }
        for r in reports
    ]
    return {"ok": sum(r.ok for r in reports), "total": len(reports), "kernels": kernels}


@contextlib.contextmanager
def unpacked(release: str, package: str = "triton", *, alone: bool = True) -> Iterator[dict[str, str]]:
    """The variables of a process that sees this release, and a compilation cache of its own.

    ``alone``: without what the package depends on, which is then this environment's.
    """
    with tempfile.TemporaryDirectory(prefix=f"{package}-{release}-") as folder:
        print(f"{package} {release}", file=sys.stderr, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", folder]
        pip += ["--no-deps"] if alone else ["--no-cache-dir"]  # torch and its libraries are gigabytes
        subprocess.run([*pip, f"{package}=={release}"], check=True)
        seen = [folder, str(ROOT), os.environ.get("PYTHONPATH", "")]
        yield os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, seen)),
            "TRITON_CACHE_DIR": f"{folder}/cache",
        }


def compile_with(release: str, jobs: int) -> dict[str, Any]:
    """The same in a fresh process that sees this release."""
    with unpacked(release) as environment:
        command = [sys.executable, __file__, "--here", "--jobs", str(jobs)]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def merge(path: Path, release: str, made: dict[str, Any], rows: str) -> None:
    """Put a release's results into the file, a line for each of its ``rows``."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    merged = {name: known.get(name) for name in sorted({*known, release})} | {release: made}
    text = ",\n".join(f"{json.dumps(name)}: {_lines(merged[name], rows)}" for name in merged)
    path.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--json", type=Path, help="merge the results into this file")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--here", action="store_true", help="the installed Triton only, JSON to stdout")
    options = parser.parse_args()
    if options.here:
        print(json.dumps(compile_here(options.jobs)))
        return
    for release in options.releases:
        made = compile_with(release, options.jobs)
        print(f"  {made['ok']} of {made['total']} compile, fit, do not spill and use the tensor cores")
        for kernel in made["kernels"]:
            if not kernel["ok"]:
                print(f"    {kernel['kernel']}: {kernel['error'] or kernel}")
        if options.json:
            merge(options.json, release, made, "kernels")


def _lines(made: dict[str, Any], rows: str) -> str:
    """A row per line, so that a change shows as one."""
    head = json.dumps({name: value for name, value in made.items() if name != rows})[:-1]
    return head + f', "{rows}": [\n' + ",\n".join(map(json.dumps, made[rows])) + "\n]}"


if __name__ == "__main__":
    main()

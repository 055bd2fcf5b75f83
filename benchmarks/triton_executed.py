"""What each release of Triton makes of attnsel's kernels, executed: ``tests/proof/conformance.py --execute``.

    python benchmarks/triton_executed.py 3.6.0 3.7.1 --json benchmarks/results/triton-executed-versions.json

Each release is unpacked by pip into a folder of its own, in front of this environment's Triton, compiles the
grid of calls for sm75 and sm80, and its PTX is executed on the CPU: some three minutes each. Results are
merged into the file by release. Exit code 1 where a call is wrong, faulty or not executed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from triton_versions import RELEASES, merge, unpacked

CONFORMANCE = Path(__file__).resolve().parents[1] / "tests" / "proof" / "conformance.py"
ARCHS = "75,80"
DROPPED = ("compiling", "seconds")  # times are those of one machine


def execute_with(release: str, archs: str, jobs: int) -> dict[str, Any]:
    """What the command prints in a fresh process that sees this release.

    Raises RuntimeError with its last words where it ends without an answer, or where another Triton answers.
    """
    command = [sys.executable, str(CONFORMANCE), "--execute", "--arch", archs, "--json"]
    with unpacked(release) as environment:
        done = subprocess.run(
            [*command, "--jobs", str(jobs)], env=environment, stdout=subprocess.PIPE, check=False, text=True
        )
    if not done.stdout:
        raise RuntimeError(f"Triton {release}: exit code {done.returncode}, and no answer")
    made: dict[str, Any] = json.loads(done.stdout)
    if made["triton"] != release:
        raise RuntimeError(f"Triton {made['triton']} answered, asked was {release}")
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("releases", nargs="*", default=RELEASES)
    parser.add_argument("--arch", default=ARCHS, help=f"by commas ({ARCHS})")
    parser.add_argument("--json", type=Path, help="merge the results into this file")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    wrong = 0
    for release in options.releases:
        made = execute_with(release, options.arch, options.jobs)
        for name, one in made["architectures"].items():
            print(f"  {name}: {one}")
        wrong += sum(not case["ok"] for case in made["cases"])
        if options.json:
            merge(options.json, release, _kept(made), "cases")
    return int(wrong > 0)


def _kept(made: dict[str, Any]) -> dict[str, Any]:
    """What is committed: the answer without its times."""
    cases = [{key: value for key, value in case.items() if key not in DROPPED} for case in made["cases"]]
    summaries = {
        name: {key: value for key, value in one.items() if key not in DROPPED}
        for name, one in made["architectures"].items()
    }
    return {"date": made["date"], "architectures": summaries, "cases": cases}


if __name__ == "__main__":
    sys.exit(main())

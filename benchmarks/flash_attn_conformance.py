"""The rules about FlashAttention against its own code, over random questions, with no GPU.

    python benchmarks/flash_attn_conformance.py flash_attn.2=CHECKOUT... flash_attn.4=UNPACKED_WHEEL...
                                                [--samples 625] [--seed 0] [--trace] [--results FILE]

Each folder is one release (``tests/proof/conformance.py --help``, "--source"); each question goes to all
eight architectures, so that 625 are 5,000. ``--trace`` builds FlashAttention 4's kernels, where its compiler
is installed: seconds for each question instead of milliseconds.

Adds to benchmarks/results/flash-attn-conformance.json: one entry per candidate, release and depth ("checks",
"built"), with counts, bounds at 95 % and the disagreements, those alike counted, with one example. Exit code
4 when there is a false accept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFORMANCE = Path(__file__).resolve().parents[1] / "tests" / "proof" / "conformance.py"
RESULTS = Path(__file__).resolve().parent / "results" / "flash-attn-conformance.json"
_SAME = ("backend", "version", "depth")


def measure(backend: str, source: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One release's entry. Raises SystemExit with what the command said, where it could not be asked."""
    command = [sys.executable, str(CONFORMANCE), "--json", "--backend", backend]
    command += ["--source", source, "--samples", str(arguments.samples), "--seed", str(arguments.seed)]
    done = subprocess.run(
        command + ["--trace"] * arguments.trace, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, 4):
        raise SystemExit(done.returncode)
    said: dict[str, Any] = json.loads(done.stdout)
    said["depth"] = "built" if arguments.trace else "checks"
    said["disagreements"] = grouped(said["disagreements"])
    return said


def grouped(disagreements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those alike as one, with their number."""
    groups: dict[str, dict[str, Any]] = {}
    for one in disagreements:
        alike = json.dumps([one["outcome"], one["codes"], one.get("library", "")])
        groups.setdefault(alike, {"count": 0, **one})["count"] += 1
    return sorted(groups.values(), key=lambda group: -group["count"])


def keep(entry: dict[str, Any], results: Path) -> None:
    """Put an entry in the place of an older one of the same release."""
    held = json.loads(results.read_text()) if results.exists() else []
    held = [old for old in held if any(old.get(name) != entry.get(name) for name in _SAME)]
    held = sorted([*held, entry], key=lambda one: [str(one.get(name)) for name in _SAME])
    results.write_text(json.dumps(held, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("sources", nargs="+", metavar="BACKEND=FOLDER")
    parser.add_argument("--samples", type=int, default=625)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    wrong = 0
    for text in arguments.sources:
        backend, _, source = text.partition("=")
        entry = measure(backend, source, arguments)
        keep(entry, arguments.results)
        wrong += entry["false_accept"]
        print(f"{backend} {source}: {entry['asked']} asked, {entry['false_accept']} false accepts")
    return 4 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

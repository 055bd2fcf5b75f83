"""The cuDNN rules against real libcudnns, over random questions, with no GPU.

    python benchmarks/cudnn_conformance.py FOLDER... [--frontend SITE_PACKAGES] [--samples 5000]
                                           [--seed 0] [--turns] [--fp8 0.2] [--results FILE]

FOLDER holds a libcudnn, as ``pip install --no-deps --target FOLDER nvidia-cudnn-cu12==9.13.0.50
nvidia-cuda-nvrtc-cu12`` leaves it; every folder is one version. ``--frontend`` is a site-packages folder
with cudnn-frontend; this environment's if left out. Each question goes to all of five GPUs, with ``--turns``
to one after the other. ``--fp8`` is the share of questions about FP8 attention.

Adds to benchmarks/results/cudnn-conformance.json: one entry per pair of versions, with counts (those of FP8
once more by themselves), bounds at 95 % (Wilson; rule of three for zero) and every disagreement. Exit code 4
when there is a false accept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[1:1] = [
        str(Path(__file__).resolve().parents[1] / "tests" / name) for name in ("proof", "support")
    ]

from agreement import GPUS, Tally, compare, starting_points
from attnsel.backends.cudnn.ask.client import Library
from sampling import FP8_SHARE, samples

RESULTS = Path(__file__).resolve().parent / "results" / "cudnn-conformance.json"


def measure(folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One library's entry."""
    began = time.monotonic()

    def watch(tally: Tally) -> None:
        if tally.asked % 500 == 0:
            rate = tally.asked / (time.monotonic() - began)
            print(f"  {tally.asked} asked, {rate:.0f}/s, {dict(tally.outcomes)}", file=sys.stderr)

    with Library(folder, frontend=arguments.frontend, remember=False) as library:
        versions = library.versions()
        print(versions, file=sys.stderr)
        questions = samples(arguments.seed, arguments.samples, starting_points(), arguments.fp8)
        tally = compare(library, questions, watch=watch, rotate=arguments.turns)
    return {
        **versions,
        "fp8_share": arguments.fp8,
        "stage": "check_support",
        "gpus": list(GPUS),
        "every_gpu": not arguments.turns,
        "configurations": arguments.samples,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        **tally.as_dict(),
        "disagreements": [one.as_dict() for one in tally.disagreements],
    }


def keep(entry: dict[str, Any], results: Path) -> None:
    """Put an entry in the place of an older one of the same versions."""
    held = json.loads(results.read_text()) if results.exists() else []
    same = ("cudnn", "cudnn_frontend")
    held = [old for old in held if any(old[name] != entry[name] for name in same)]
    held = sorted([*held, entry], key=lambda one: [_number(one[name]) for name in same])
    results.write_text(json.dumps(held, indent=1) + "\n")


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--frontend")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", action="store_true")
    parser.add_argument("--fp8", type=float, default=FP8_SHARE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    wrong = 0
    for folder in arguments.folders:
        entry = measure(folder, arguments)
        keep(entry, arguments.results)
        wrong += entry["false_accept"]
    return 4 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

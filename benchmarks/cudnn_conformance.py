"""The cuDNN rules against real libcudnns, over random questions, with no GPU.

    python benchmarks/cudnn_conformance.py FOLDER... [--frontend SITE_PACKAGES] [--samples 5000]
                                           [--seed 0] [--each] [--fp8]

FOLDER holds a libcudnn, as ``pip install --no-deps --target FOLDER nvidia-cudnn-cu12==9.13.0.50
nvidia-cuda-nvrtc-cu12`` leaves it; every folder is one version. ``--frontend`` is a site-packages folder
with cudnn-frontend; this environment's if left out. Each question goes to one of five GPUs in turn, with
``--each`` to all of them. ``--fp8`` asks about FP8 attention instead.

Adds to benchmarks/results/cudnn-conformance.json: one entry per pair of versions, with counts, bounds at
95 % (Wilson; rule of three for zero) and every disagreement. Exit code 4 when there is a false accept.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from attnsel.backends.cudnn.ask.client import Library
from attnsel.backends.cudnn.ask.sample import samples
from attnsel.cli.agreement import GPUS, Tally, compare, starting_points

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
        questions = samples(arguments.seed, arguments.samples, starting_points(arguments.fp8), arguments.fp8)
        tally = compare(library, questions, watch=watch, rotate=not arguments.each)
    return {
        **versions,
        "fp8": arguments.fp8,
        "stage": "check_support",
        "gpus": list(GPUS),
        "every_gpu": arguments.each,
        "configurations": arguments.samples,
        "seed": arguments.seed,
        "seconds": round(time.monotonic() - began),
        **tally.as_dict(),
        "disagreements": [one.as_dict() for one in tally.disagreements],
    }


def keep(entry: dict[str, Any]) -> None:
    """Put an entry in the place of an older one of the same versions."""
    held = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    same = ("cudnn", "cudnn_frontend", "fp8")
    held = [old for old in held if any(old[name] != entry[name] for name in same)]
    held = sorted([*held, entry], key=lambda one: [_number(one[name]) for name in same[:2]])
    RESULTS.write_text(json.dumps(held, indent=1) + "\n")


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--frontend")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", action="store_true")
    parser.add_argument("--fp8", action="store_true")
    arguments = parser.parse_args()
    wrong = 0
    for folder in arguments.folders:
        entry = measure(folder, arguments)
        keep(entry)
        wrong += entry["false_accept"]
    return 4 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

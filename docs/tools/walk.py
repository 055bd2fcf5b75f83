"""A newcomer's walk: every command of docs/tutorials/rule.md in a new clone and a new environment, timed.

    python docs/tools/walk.py            # type it and print how long each step took
    python docs/tools/walk.py --record   # and write benchmarks/results/rule-walk.json, for the page

tests/docs/test_typed_pages.py does the same. The clone is of this checkout as it lies here; packages come
from pip's index.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # these pages are about this checkout
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[1:1] = [str(_ROOT), str(_ROOT / "tests/support")]

import typed_pages
from pages import commands
from paths import ROOT
from typed_pages import Printed

PAGE = "docs/tutorials/rule.md"
RESULT = ROOT / "benchmarks/results/rule-walk.json"


def steps(printed: list[Printed]) -> list[dict[str, object]]:
    """Each block under the heading that it stands below: step, first command, seconds."""
    lines = (ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    found = []
    for ran in printed:
        above = [line for line in lines[: ran.block.line] if line.startswith("## ")]
        console = ran.block.language == "console"
        typed = commands(ran.block.text) if console else ran.block.text.splitlines()
        found.append(
            {
                "step": above[-1].partition(". ")[2],
                "command": typed[0],
                "more": len(typed) - 1,
                "seconds": round(ran.seconds, 1),
            }
        )
    return found


def record(printed: list[Printed]) -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": {"cores": os.cpu_count(), "system": platform.system()},
        "python": platform.python_version(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "steps": steps(printed),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        printed = typed_pages.walked(PAGE, Path(work))
        failed = any(ran.code for ran in printed)
        for ran in printed:
            print(f"{ran.seconds:7.1f} s  exit {ran.code}  {ran.block.text.strip().splitlines()[0]}")
            print(ran.text if ran.code else "", end="", flush=True)
        if asked.record and not failed:
            RESULT.write_text(json.dumps(record(printed), indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The playground in a real browser: what it loads, when it is up, and whether it answers as the command does.

    python benchmarks/playground.py                                            # 1,000 questions, some minutes
    python benchmarks/playground.py --count 50 --json FILE

It needs a Chromium and `pip install -e . --group browser`. Sizes are exact; seconds are medians over fresh
browsers without a cache, from a server of this machine. The questions are drawn from a seed, right ones and
wrong ones. JSON, standard error and exit code of each are compared byte for byte, of every tenth the report
and Markdown too.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import importlib.metadata
import itertools
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT / "docs")]

from sources import digest  # noqa: E402

import axe  # noqa: E402
import playground_browser as browser  # noqa: E402
import playground_questions  # noqa: E402
from sitegen import playground  # noqa: E402
from sitegen.playground import bundle  # noqa: E402

SEED = 20
STARTS = 5
THEMES = ("light", "dark")
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="questions")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "playground.json")
    asked = parser.parse_args()
    if browser.why_not():
        print(browser.why_not(), file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        browser.write(Path(folder))
        built = round(time.monotonic() - began, 1)
        with browser.served(Path(folder)) as address, browser.chromium() as chromium:
            told = {
                "date": datetime.date.today().isoformat(),
                "machine": f"{platform.system()} {platform.machine()}",
                "versions": _versions(chromium),
                "attnsel": digest(),
                "bytes": _bytes(Path(folder) / browser.FOLDER / "playground"),
                "seconds": {"build": built, **_seconds(chromium, address)},
                "axe": _axe(chromium, address),
                "questions": _questions(chromium, address, asked.count),
            }
    asked.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=2))
    return 0 if not told["questions"]["different"] and not any(told["axe"].values()) else 1  # type: ignore[attr-defined]


def _versions(chromium: Any) -> dict[str, str]:
    package = json.loads((bundle.HERE / "package.json").read_text(encoding="utf-8"))
    pins = (bundle.HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wheels = dict(line.split()[0].split("==") for line in pins if "==" in line)
    return {
        "chromium": chromium.version,
        "playwright": importlib.metadata.version("playwright"),
        **package["dependencies"],
        **package["devDependencies"],
        **wheels,
    }


def _bytes(folder: Path) -> dict[str, Any]:
    """Of each file as it is stored, and as a server sends it that compresses; the sum that a visit loads."""
    files = {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }
    sizes = {n: {"stored": len(c), "gzip": min(len(c), len(gzip.compress(c, 9)))} for n, c in files.items()}
    first = [size for name, size in sizes.items() if "rest.zip" not in name]
    return {"visit": {kind: sum(size[kind] for size in first) for kind in ("stored", "gzip")}, "files": sizes}


def _seconds(chromium: Any, address: str) -> dict[str, float]:
    shown, up, asked = [], [], []
    for _ in range(STARTS):
        watched = browser.Watched(chromium)
        began = time.monotonic()
        watched.page.goto(address)
        watched.page.wait_for_selector("#panel-report h3")
        shown.append(time.monotonic() - began)
        watched.page.wait_for_selector(browser.UP, timeout=browser.MOST)
        up.append(time.monotonic() - began)
        browser.go(watched.page, "gpu=H100")
        for gpu in ("A100", "B200", "T4"):
            began = time.monotonic()
            browser.go(watched.page, f"gpu={gpu}&head-dim=64")
            asked.append(time.monotonic() - began)
        watched.close()
    names = ("first answer shown", "python up", "a question")
    return {
        name: round(statistics.median(all_), 2) for name, all_ in zip(names, (shown, up, asked), strict=True)
    }


def _axe(chromium: Any, address: str) -> dict[str, list[tuple[str, str, str]]]:
    found = {}
    for theme, (size, (width, height)) in itertools.product(THEMES, SIZES.items()):
        options = {"viewport": {"width": width, "height": height}, "color_scheme": theme, "bypass_csp": True}
        watched = browser.Watched(chromium, **options)
        browser.go(watched.open(address), playground.FIRST)
        found[f"{theme} {size}"] = axe.violations(watched.page)
        watched.close()
    return found


def _questions(chromium: Any, address: str, count: int) -> dict[str, Any]:
    watched = browser.Watched(chromium, viewport={"width": 1280, "height": 900})
    began = time.monotonic()
    drawn = itertools.islice(playground_questions.questions(SEED), count)
    codes, different = browser.differing(watched.open(address), drawn)
    watched.close()
    return {
        "seed": SEED,
        "count": count,
        "exit codes": {str(code): number for code, number in sorted(codes.items())},
        "different": different,
        "seconds": round(time.monotonic() - began),
        "hosts": sorted(watched.hosts),
        "console": watched.problems,
    }


if __name__ == "__main__":
    sys.exit(main())

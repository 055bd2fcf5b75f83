"""The pytest processes of ``attnsel prove``, each with a part of the tests or with one that runs again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from measure import ROOT
from record_tests import read

STALLED_S = 150  # no test takes as long, its kernels' compilation included
_MOST_STARTS = 20
# Of pytest's own: what pyproject.toml says in a checkout, and an installed package has no file for.
_PYTEST = (
    *("-p", "record_tests", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(ROOT)),
    *("--import-mode=importlib", "--strict-markers", "--no-header", "-o", "faulthandler_timeout=120"),
    *("-W", "error::pytest.PytestUnraisableExceptionWarning"),
)


@dataclass(frozen=True)
class Outcome:
    """One test: passed, failed, skipped or unfinished (never begun, or it ended or stalled its process).

    ``outcomes``: of each time that it was begun; ``shows``: the candidate and the features that it is about.
    """

    test: str
    outcome: str
    seconds: float = 0.0
    message: str = ""
    outcomes: tuple[str, ...] = ()
    shows: dict[str, Any] | None = None

    @property
    def begun(self) -> bool:
        return bool(self.outcomes)

    @property
    def flake(self) -> bool:
        return self.outcome == "passed" and len(self.outcomes) > 1

    def then(self, second: Outcome) -> Outcome:
        """With what came of it when it ran again: passed if it then did; the message stays the first one."""
        both = (*self.outcomes, *second.outcomes)
        outcome = next((each for each in ("passed", "failed") if second.outcome == each), self.outcome)
        return replace(self, outcome=outcome, outcomes=both, message=self.message or second.message)

    def as_dict(self) -> dict[str, Any]:
        shows = self.shows or {"candidate": None, "features": [], "also": []}
        return {
            "test": self.test,
            "outcome": self.outcome,
            "outcomes": list(self.outcomes),
            "seconds": self.seconds,
            "message": self.message,
            **shows,
        }


class Shard:
    """One pytest process over a part of the tests, begun anew behind a test that ended it; or one test."""

    def __init__(self, name: str, options: Any, folder: Path, test: str = "") -> None:
        self.file = folder / f"{name.replace('/', '-of-')}.jsonl"
        self.command = [
            *(sys.executable, "-m", "pytest", *_PYTEST, "--record", str(self.file)),
            *(("--again", test) if test else ("--shard", name, "--only", options.only)),
            *(f"--gpu-device={options.device}", *options.tests),
        ]
        self.log_file = self.file.with_suffix(".log")
        self.log = self.log_file.open("a")
        self.process: subprocess.Popen[Any] | None = None
        self.most_starts = 1 if test else _MOST_STARTS
        self.seen, self.changed = 0, time.monotonic()
        self.starts = 0

    def tend(self) -> bool:
        """Begin, watch or begin again. False: nothing is left to do."""
        size = self.file.stat().st_size if self.file.exists() else 0
        if size != self.seen:
            self.seen, self.changed = size, time.monotonic()
        if self.process is not None and self.process.poll() is None:
            if time.monotonic() - self.changed > STALLED_S:
                self.end()
            return True
        if self.process is not None:
            nothing_more = not self.left() or self.starts >= self.most_starts or self.process.returncode == 5
            if nothing_more or not self.collected():
                return False
        self.starts += 1
        self.changed = time.monotonic()
        self.process = start(self.command, self.log)
        return True

    def collected(self) -> bool:
        """Whether it got as far as to know all of its tests."""
        return any(not line["errors"] for line in read(self.file) if "planned" in line)

    def left(self) -> set[str]:
        lines = read(self.file)
        planned = {test for line in lines for test in line.get("planned", ())}
        return planned - {line["test"] for line in lines if "test" in line}

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.end()
        self.log.close()

    def said(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def outcomes(self) -> dict[str, Outcome]:
        found: dict[str, Outcome] = {}
        for line in read(self.file):
            for test, shows in line.get("planned", {}).items():
                found.setdefault(test, Outcome(test, "unfinished", shows=shows))
            if "test" in line:
                test = line["test"]
                found[test] = Outcome(**line, outcomes=(line["outcome"],), shows=found[test].shows)
        return found


def start(command: Sequence[str], log: Any) -> subprocess.Popen[Any]:
    """A child in a group of its own that finds the suite, and attnsel where it is not installed; what the
    caller's environment says to pytest and to attnsel does not reach it."""
    paths = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    if (ROOT / "attnsel").is_dir():
        paths.insert(0, str(ROOT))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ATTNSEL_", "PYTEST_"))}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,
    )

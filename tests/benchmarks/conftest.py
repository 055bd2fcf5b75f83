"""benchmarks/ is a folder of programs, not a package: its modules are found as its programs find them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run() -> Run:
    """A program of this checkout, started as from a shell."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)

    return start

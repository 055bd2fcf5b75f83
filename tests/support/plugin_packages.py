"""Plug-ins as an installer would leave them, and processes in which they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT
from switches import without_switches

PLANNING = """
from attnsel.plugins import CandidateRecord, Registry, rule

def plugin(**changes):
    given = dict(name="acme", title="t", family="ACME", kernel="acme_kernel", takes={"cpu", "fp32"})
    return CandidateRecord(**{**given, **changes})

"""


def by_hand(folder: Path, name: str, planning: str, kernel: str = "") -> Path:
    """A package with one entry point, as an installer would leave it."""
    (folder / f"{name}_planning.py").write_text(PLANNING + planning)
    (folder / f"{name}_kernel.py").write_text(kernel)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnsel.backends]\n{name} = {name}_planning:PLUGIN\n")
    return folder


def python(code: str, *folders: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process in which these folders hold installed packages."""
    clean = without_switches()
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": path, **environ},
        timeout=300,
    )

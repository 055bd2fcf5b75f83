"""Plug-ins as an installer would leave them, and processes in which they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


def python(code: str, *folders: Path, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process in which these folders hold installed packages."""
    clean = without_switches()
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    return subprocess.run(
        [sys.executable, "-c", code],
        input=stdin,
        capture_output=True,
        text=True,
        env={**clean, "PYTHONPATH": path, **environ},
        timeout=300,
    )


COMMANDS = """
import io, json, sys
from attnsel.cli import main
found = {}
for words in json.loads(sys.stdin.read()):
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    code = main(words.split())
    sys.stdout.flush(), sys.stderr.flush()
    found[words] = [code, *(stream.buffer.getvalue().decode() for stream in (sys.stdout, sys.stderr))]
assert "torch" not in sys.modules
sys.__stdout__.write(json.dumps(found))
"""


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        return json.loads(self.stdout)


def answers(commands: Iterable[str], *folders: Path, first: str = "", **environ: str) -> dict[str, Answer]:
    """What commands say, by their words, in one new process. ``first``: code that it runs first."""
    done = python(first + COMMANDS, *folders, stdin=json.dumps(list(commands)), **environ)
    assert done.returncode == 0, done.stderr
    return {words: Answer(*told) for words, told in json.loads(done.stdout).items()}

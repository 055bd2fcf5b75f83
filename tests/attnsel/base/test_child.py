"""Processes that attnsel starts import nothing from the folder they are started in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attnsel.base import processes as _child

PLANTED = (
    "json.py",
    "sys.py",
    "torch.py",
    "cudnn.py",
    "triton.py",
    "attnsel.py",
    "runpy.py",
    "flash_attn.py",
)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder whose modules say that they were run."""
    for name in PLANTED:
        (tmp_path / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\n")
    return tmp_path


@pytest.mark.parametrize("safe", [False, *([True] if sys.version_info >= (3, 11) else [])])
def test_the_current_folder_is_not_on_the_path(
    trap: Path, monkeypatch: pytest.MonkeyPatch, safe: bool
) -> None:
    monkeypatch.setattr(_child, "_SAFE_PATH", safe)
    code = "import json, sys, attnsel\nprint(json.dumps([sys.argv[1:], attnsel.__file__]))"
    done = subprocess.run(_child.python(code, "one"), cwd=trap, capture_output=True, text=True, check=True)
    assert done.stdout.startswith('[["one"]')
    assert str(trap) not in done.stdout
    assert not (trap / "ran").exists()


def test_commands_run_nothing_that_lies_there(trap: Path) -> None:
    # -P for the command itself, as an installed script has it; its children are what is looked at.
    code = "import sys; sys.path[:] = [p for p in sys.path if p]; import attnsel.cli; attnsel.cli.main()"
    command = [sys.executable, "-c", code, "explain", "--gpu", "H100", "--ask-library"]
    subprocess.run(command, cwd=trap, capture_output=True, text=True, check=False)
    assert not (trap / "ran").exists()

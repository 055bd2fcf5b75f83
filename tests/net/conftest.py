"""What the tests of the net share: snapshot files of words, and a machine that is the same everywhere."""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from syrupy.location import PyTestLocation
from syrupy.types import SnapshotIndex

import attnsel

# All that stays of the environment variables: what a process needs to run at all, and what pytest counts on.
_KEPT = ("PATH", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "PYTEST", "COV", "PYTHON")


class _Words(SingleFileSnapshotExtension):
    """A text file for each output: ``words/NAME.txt`` beside ``test_words.py``."""

    _write_mode = WriteMode.TEXT
    file_extension = "txt"

    @classmethod
    def dirname(cls, *, test_location: PyTestLocation) -> str:
        path = Path(test_location.filepath)
        return str(path.parent / path.stem.removeprefix("test_"))

    @classmethod
    def get_snapshot_name(cls, *, test_location: PyTestLocation, index: SnapshotIndex = 0) -> str:
        return str(index)


@pytest.fixture
def says(snapshot: SnapshotAssertion) -> Callable[[str, str], None]:
    """``says("explain_h100", text)``: the text is what the snapshot file of that name holds."""
    words = snapshot.use_extension(_Words)

    def check(name: str, text: str) -> None:
        assert text == words(name=name)

    return check


@pytest.fixture
def same_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The machine that is the same everywhere: 80 columns, Linux on x86_64, no torch, no terminal, an empty
    home, no wishes in environment variables. Given is the current folder, which is empty."""
    for name in list(os.environ):
        if not name.upper().startswith(_KEPT):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys, "argv", ["attnsel"])  # which usage lines begin with
    monkeypatch.setattr(sys, "path", [*sys.path])  # of which ``attnsel watch -m`` changes the first
    # What another test told torch is no matter of a described machine's; and planning needs no torch.
    monkeypatch.setitem(sys.modules, "torch", None)
    said: dict[str, Any] = {
        "system": "Linux",
        "machine": "x86_64",
        "node": "node0",
        "python_version": "3.12.3",
    }
    for function, answer in said.items():
        monkeypatch.setattr(platform, function, lambda answer=answer: answer)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    attnsel.configure()
    yield folder
    monkeypatch.undo()
    attnsel.configure()

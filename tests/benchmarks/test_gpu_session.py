"""The GPU session's own logic: tests are recorded one by one, and no fault of one takes the rest along."""

from __future__ import annotations

import json
import re
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu
import needed
import pytest

from paths import ROOT


@pytest.mark.slow
def test_a_test_that_hangs_is_ended_and_the_rest_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--gpu-device')\n")
    tests = tmp_path / "test_it.py"
    tests.write_text("import time\ndef test_a(): time.sleep(600)\ndef test_b(): pass\n")
    monkeypatch.setattr(gpu, "STALLED_S", 8)
    shard = gpu.Shard(0, 1, SimpleNamespace(device="cpu", tests=[str(tests)]), tmp_path)
    try:
        while shard.tend():
            time.sleep(0.1)
    finally:
        shard.end()
        shard.log.close()
    outcomes = {test.rpartition("::")[2]: held.outcome for test, held in shard.outcomes().items()}
    assert outcomes == {"test_a": "unfinished", "test_b": "passed"}


def test_what_is_missing_is_said_with_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = needed.find_spec
    monkeypatch.setattr(
        needed, "find_spec", lambda name: None if name in ("hypothesis", "rich", "cudnn") else there(name)
    )
    with pytest.raises(SystemExit) as ended:
        needed.stop_where_something_is_missing()
    assert ended.value.code == 2
    assert "pip install hypothesis rich" in capsys.readouterr().err
    cudnn, commit = needed.shortcomings(None)
    assert cudnn.startswith("nvidia-cudnn-frontend is not installed: nothing of the cudnn candidate")
    assert "--commit" in commit
    assert needed.shortcomings("0" * 40) == [cudnn]


def test_everything_that_is_imported_is_asked_for() -> None:
    """By the tests, what they share and the benchmarks: of other packages than torch and Triton."""
    folders = ("tests/gpu", "tests/support", "benchmarks")
    text = "\n".join(path.read_text() for folder in folders for path in sorted((ROOT / folder).glob("*.py")))
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    third_party = {name for name in imported if name in metadata.packages_distributions()}
    optional = {"torch", "triton", "attnsel", "numpy", "transformers", "functorch"}
    assert third_party - optional <= set(needed.NEEDED) | {"cudnn"}


@pytest.mark.parametrize(
    ("processors", "gib", "shards"),
    [(16, 139.8, 12), (16, 14.6, 7), (8, 79.2, 6), (2, 14.6, 1), (64, 1.0, 1), (16, None, 12)],
)
def test_no_more_processes_than_the_card_has_memory_for(
    processors: int, gib: float | None, shards: int
) -> None:
    assert gpu.shards_for(processors, gib) == shards


def test_the_session_records_what_ran_and_goes_on_behind_a_crash(tmp_path: Path, run: Any) -> None:
    tests = tmp_path / "test_it.py"
    tests.write_text(
        "import os, pytest\n"
        "def test_a(): pass\n"
        "def test_b(): os._exit(3)\n"
        "def test_c(): assert 1 == 2, 'told'\n"
        "def test_d(): pytest.skip('not here')\n"
    )
    words = ["--device", "cpu", "--out", tmp_path, "--kernels", "--kind decode --kernel sdpa.flash"]
    done = run("benchmarks/gpu.py", *words, "--budget", "120", "--tests", tests, "tests/gpu/conftest.py")
    assert done.returncode == 1
    recorded = json.loads((tmp_path / "gpu-tests-interpreter.json").read_text(encoding="utf-8"))
    outcomes = {row["test"].rpartition("::")[2]: row for row in recorded["rows"]}
    assert {name: row["outcome"] for name, row in outcomes.items()} == {
        "test_a": "passed",
        "test_b": "unfinished",
        "test_c": "failed",
        "test_d": "skipped",
    }
    assert "told" in outcomes["test_c"]["message"]
    assert outcomes["test_d"]["message"] == "not here"
    assert recorded["summary"] == {"passed": 1, "failed": 1, "skipped": 1, "unfinished": 1}
    assert recorded["complete"] is False
    assert json.loads((tmp_path / "kernels-interpreter.json").read_text())["measurement"] is False

"""The GPU session: tests are recorded one by one, no fault of one takes the rest along, what failed
runs once more, and however it ends there is one file that can be read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_session
import pytest
from gpu_session import Options

from paths import ROOT

CONFTEST = "def pytest_addoption(parser): parser.addoption('--gpu-device')\n"
QUICK = ("--kind", "decode", "--kernel", "sdpa.flash")


@pytest.fixture
def suite(tmp_path: Path) -> Any:
    """A suite of one file, instead of tests/gpu."""

    def make(text: str, **options: Any) -> Options:
        folder = tmp_path / "suite"
        folder.mkdir()
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_it.py").write_text(text)
        out = tmp_path / "gpu.json"
        return Options(
            **{"device": "cpu", "out": out, "jobs": 1, "kernels": QUICK, "tests": [str(folder)], **options}
        )

    return make


def run_alone(options: Options) -> dict[str, Any]:
    """The record of the tests, without the benchmark."""
    assert options.out is not None
    told = gpu_session.Report(options.out, {"type": "cpu", "name": "interpreter", "arch": None})
    return gpu_session.run_tests(options, told, time.monotonic())


FLAKY = """
import os, pathlib, pytest
HERE = pathlib.Path(__file__).parent
def second_time(name):
    mark = HERE / name
    met = mark.exists()
    mark.touch()
    return met
def test_fails_once(): assert second_time("a"), "told"
def test_ends_its_process_once(): second_time("b") or os._exit(3)
def test_fails_twice(): assert second_time("c") is None, "told"
def test_ends_its_process(): os._exit(3)
def test_passes(): pass
def test_is_skipped(): pytest.skip("not here")
"""


@pytest.mark.slow
def test_what_fails_runs_once_more_by_itself_and_both_outcomes_are_kept(suite: Any, capsys: Any) -> None:
    options = suite(FLAKY)
    recorded = run_alone(options)
    kept = json.loads(options.out.read_text(encoding="utf-8"))["tests"]["rows"]
    rows = {row["test"].rpartition("::")[2]: row for row in kept}
    assert {test: (row["outcome"], row["outcomes"]) for test, row in rows.items()} == {
        "test_fails_once": ("passed", ["failed", "passed"]),
        "test_ends_its_process_once": ("passed", ["unfinished", "passed"]),
        "test_fails_twice": ("failed", ["failed", "failed"]),
        "test_ends_its_process": ("unfinished", ["unfinished", "unfinished"]),
        "test_passes": ("passed", ["passed"]),
        "test_is_skipped": ("skipped", ["skipped"]),
    }
    assert recorded["summary"] == {"passed": 3, "failed": 1, "skipped": 1, "unfinished": 1, "flakes": 2}
    assert [test.rpartition("::")[2] for test in recorded["flakes"]] == [
        "test_ends_its_process_once",
        "test_fails_once",
    ]
    assert "told" in rows["test_fails_once"]["message"], "why it failed the first time"
    assert rows["test_is_skipped"]["message"] == "not here"
    assert recorded["collected"]
    assert not recorded["complete"]
    assert "once more, by itself: " in capsys.readouterr().out


HANGS = "import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\n"
INTERRUPTED = """
import sys
sys.path[:0] = {paths!r}
import gpu_session
sys.exit(gpu_session.run(gpu_session.Options(**{options!r})))
"""


def test_an_interrupt_ends_the_children_and_leaves_a_file_that_can_be_read(suite: Any) -> None:
    options = suite(HANGS + "open(__file__ + '.pid', 'w').write(str(__import__('os').getpid()))\n")
    assert options.out is not None
    paths = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "support")]
    given = {**options.__dict__, "out": None, "budget": 300.0}
    code = INTERRUPTED.format(paths=paths, options=given)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=options.out.parent, start_new_session=True)
    path = options.out.parent / "gpu-interpreter.json"
    try:
        wait_for(lambda: path.exists() and '"passed": 1' in path.read_text(encoding="utf-8"))
        process.send_signal(signal.SIGTERM)  # as a scheduler, and as Ctrl-C
        assert process.wait(60) == 130
    finally:
        process.kill()
    recorded = json.loads(path.read_text(encoding="utf-8"))
    assert recorded["state"] == "interrupted"
    assert recorded["tests"]["summary"]["passed"] == 1
    assert not recorded["tests"]["complete"]
    child = int(Path(options.tests[0], "test_it.py.pid").read_text())
    wait_for(lambda: not running(child))


def wait_for(happened: Any) -> None:
    until = time.monotonic() + 240
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.2)


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_more_processes_than_the_card_has_memory_for() -> None:
    shards = {(16, 139.8): 12, (16, 14.6): 7, (2, 14.6): 1, (64, 1.0): 1, (16, None): 12}
    assert {asked: gpu_session.shards_for(*asked) for asked in shards} == shards


def test_one_command_leaves_one_file_of_tests_and_benchmark(run: Any, tmp_path: Path) -> None:
    """As typed in a checkout; ``attnsel prove`` is the same."""
    out = tmp_path / "one.json"
    words = ["--device", "cpu", "--out", out, "--only", "impossible,chooser", "--budget", "200"]
    done = run("benchmarks/gpu.py", *words, "--kind", "decode", "--kernel", "sdpa.flash")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]
    recorded = json.loads(out.read_text(encoding="utf-8"))
    assert (recorded["benchmark"], recorded["state"]) == ("gpu", "complete")
    assert recorded["tests"]["summary"]["passed"] >= 4
    assert recorded["kernels"]["measurement"] is False
    assert recorded["kernels"]["rows"]
    assert {"attnsel", "commit", "modified", "sources", "device", "date", "versions"} <= recorded.keys()
    assert recorded["versions"]["torch"]
    assert "It proves nothing: this was a rehearsal without a GPU." in done.stdout
    assert not re.search(re.escape(str(ROOT)), json.dumps(recorded)), "nothing about whose machine it was"

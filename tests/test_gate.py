"""The gate and the workflows run what pages say, no folder hides another, README stays a landing page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from paths import ROOT

EXTRACTOR = ".ci/readme_commands.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def extracted(root, number) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / EXTRACTOR), str(number)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """README and .ci alone, to be changed."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    return tmp_path


def test_the_two_commands_are_found_as_they_stand():
    first, second = (extracted(ROOT, number) for number in (1, 2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert f"```sh skip: .ci/run pastes it\n{first.stdout}```" in README
    assert f"```sh skip: .ci/run pastes it\n{second.stdout}```" in README
    assert "examples/first_call.py" in first.stdout
    assert len(README.splitlines()) <= 150, "a landing page"
    assert "pytest" in second.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_gate_pastes_the_commands_of_readme_and_tests_nothing_twice(copy):
    changed = README.replace("python examples/first_call.py", "python examples/first_call.py # one")
    changed = changed.replace("--dist loadfile", "--dist loadgroup")
    (copy / "README.md").write_text(changed, encoding="utf-8")
    shown = subprocess.run(
        ["bash", str(copy / ".ci/run"), "--dry-run"], capture_output=True, text=True, encoding="utf-8"
    )
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert "tree$ pip install -e '.[tested]' && python examples/first_call.py # one" in lines
    suite = "tree$ pip install -e '.[test]' && pytest -n auto --dist loadgroup -m \"not slow\""
    assert lines.count(suite) == 1, "the whole suite runs once"
    planned, _, rest = shown.stdout.partition("== README's first command")
    assert 'find_spec("torch") is None' in planned.replace("\\", "")
    once = (".ci/planner", ".ci/workflows", "make_site.py", "ruff check", "--samples 50", "--workspace")
    assert [planned.count(word) for word in once] == [1] * len(once)
    assert [rest.count(word) for word in (".ci/types", "--execute", "first_call.py")] == [1, 1, 1]
    named = re.findall(r"pytest tests/(\S+)", rest)
    assert [*named] == ["backends/cudnn/test_gpu_cases.py"], "it skips where nothing names a libcudnn"
    assert re.search(r"^ +\d+s  README's second command", rest, re.M), "the time of each step"


CI = sorted(path for path in (ROOT / ".ci").iterdir() if path.is_file() and path.suffix != ".py")


def test_what_the_scripts_name_exists_and_they_stop_at_an_error():
    for path in CI:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n"), path
        assert "\nset -euo pipefail\n" in text, path
        assert os.access(path, os.X_OK), path
        named = re.findall(r"(?<![\w/])(?:tests/)?((?:\w+/)*test_\w+\.py)\b", text)
        assert not [name for name in named if not (ROOT / "tests" / name).is_file()], path


def test_every_python_and_system_that_is_claimed_is_tested():
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    planner = (ROOT / ".github/workflows/tests.yml").read_text("utf-8").partition("\n  planner:")[2]
    matrix = planner.partition("\n    steps:")[0]
    assert re.findall(r"3\.\d+", re.search(r"python: (\[.*\])", matrix)[1]) == claimed
    assert re.search(r'requires-python = ">=([\d.]+)"', PROJECT)[1] == claimed[0]
    for system, word in (("macos", "MacOS"), ("windows", "Windows")):
        assert re.search(rf'"Operating System :: .*{word}"', PROJECT)
        pythons = re.findall(rf'os: {system}-latest, python: "([\d.]+)"', matrix)
        assert pythons == [claimed[0], claimed[-1]]

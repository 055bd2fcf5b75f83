"""A skip that nobody expects fails the run; one that is known does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import known_skips

CONFTEST = """
import known_skips
def pytest_configure(config):
    known_skips.watch(config)
"""


BODY = """
import pytest
def test_a(): pytest.skip("not exact here, and refused")
def test_b(): pytest.importorskip("no_such_library")
def test_c(): pytest.skip("no Chromium is installed here")
"""


def test_the_run_fails_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(BODY)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('today', allow_module_level=True)")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n1",
        ".",
    ]  # as workers tell it
    clean = os.environ | {"PYTHONPATH": str(Path(known_skips.__file__).parent)}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    told = done.stdout.partition("skips that are not known")[2]
    for words in ("test_a: not exact here", "test_b: could not import 'no_such", "test_module.py: today"):
        assert words in told
    assert "no Chromium is installed here" not in told


def test_what_is_missing_may_be_missed_and_what_is_here_may_not() -> None:
    assert not known_skips.is_known("tests/x.py", "could not import 'pytest': No module named 'pytest'")
    for module in ("torch", "triton"):
        told = f"could not import '{module}': No module named '{module}'"
        assert known_skips.is_known("tests/x.py", told) != known_skips.found(module)
    assert known_skips.is_known("/a/tests/gpu/test_sdpa.py", "SDPA103: whatever a GPU refuses")
    assert not known_skips.is_known("tests/attnsel/gpu/test_sdpa.py", "SDPA103: whatever a GPU refuses")
    for one in known_skips.KNOWN:
        assert isinstance(one.here(), bool), one.reason
        assert not re.fullmatch(one.reason, "anything"), one.reason

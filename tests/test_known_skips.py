"""A skip that nobody expects fails the run; one that is known does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import known_skips

PLUGIN = Path(known_skips.__file__).parent
CONFTEST = """
import known_skips
def pytest_configure(config):
    known_skips.watch(config)
"""


def ran(folder: Path, body: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(f"import pytest\n{body}\n")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PLUGIN)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "options", "named"),
    [
        ("def test_a(): pytest.skip('not exact here, and refused')", (), "test_a: not exact here"),
        ("def test_a(): pytest.skip('not exact here, and refused')", ("-n1",), "test_a: not exact here"),
        ("pytest.skip('nothing today', allow_module_level=True)", ("-n1",), "test_it.py: nothing today"),
        ("pytest.importorskip('no_such_library')", (), "could not import 'no_such_library'"),
        ("def test_a(): pytest.skip('the sources have changes')", (), ""),
    ],
)
def test_the_run_fails_and_names_it(tmp_path: Path, body: str, options: tuple[str, ...], named: str) -> None:
    done = ran(tmp_path, body + "\ndef test_of_another_thing(): pass", *options)
    assert ("skips that are not known" in done.stdout) == bool(named), done.stdout + done.stderr
    assert named in done.stdout
    assert (done.returncode != 0) == bool(named)


def test_what_is_missing_may_be_missed_and_what_is_here_may_not() -> None:
    assert not known_skips.is_known("tests/x.py", "could not import 'pytest': No module named 'pytest'")
    for module in ("torch", "triton"):
        said = f"could not import '{module}': No module named '{module}'"
        assert known_skips.is_known("tests/x.py", said) != known_skips.found(module)
    assert known_skips.is_known("/a/tests/gpu/test_sdpa.py", "SDPA103: whatever a GPU refuses")
    assert not known_skips.is_known("tests/attnsel/gpu/test_sdpa.py", "SDPA103: whatever a GPU refuses")


def test_every_row_is_a_pattern_with_a_reason() -> None:
    for one in known_skips.KNOWN:
        re.compile(one.reason)
        assert isinstance(one.here(), bool), one.reason
        assert not re.fullmatch(one.reason, "anything"), one.reason

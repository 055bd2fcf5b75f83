"""The run of the CUDA matrix on other releases of torch: what is counted, and what its record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_versions  # noqa: E402 - a program of benchmarks/, of tests that torch must be there for

from paths import ROOT  # noqa: E402

RECORD = ROOT / "benchmarks/results/torch-versions.json"


def test_tests_are_counted_as_pytest_reports_them(tmp_path: Path, run: Any) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_a(): pass\n"
        "def test_b(): assert 0\n"
        "def test_c(): pytest.skip('not here')\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError\n"
        "def test_d(broken): pass\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.xml"
    run("-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", tmp_path)
    assert torch_versions.counts(report) == (
        {"passed": 1, "failed": 2, "skipped": 1},
        ["test_b", "test_d"],
    )


def test_the_record_holds_every_release_and_no_failure() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert set(record) == set(torch_versions.RELEASES)
    for release, made in record.items():
        assert made["build"].partition("+")[0] == release
        assert made["passed"] > 500
        assert (made["failed"], made["skipped"]) == (0, 0)
        assert len(made["schemas"]) >= len(torch_versions.OPS)

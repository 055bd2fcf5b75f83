"""An architecture is proven by a committed result of the GPU suite, and by nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu import proves

from attnsel.candidates import CANDIDATES
from paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
GRID = "tests/gpu/test_triton_features.py::test_every_feature[plain-torch.float16]"
OTHER = "tests/gpu/test_triton_modes.py::test_packed_calls"


def run_of(**changed: Any) -> dict[str, Any]:
    """A record of a run that proves Triton on sm90, but for what is changed."""
    return {
        "benchmark": "gpu-tests",
        "device": {"type": "cuda", "arch": 90},
        "tests": ["tests/gpu"],
        "complete": True,
        "commit": "0" * 40,
        "modified": False,
        "rows": [row(GRID), row(OTHER, "skipped")],
    } | changed


def row(test: str, outcome: str = "passed") -> dict[str, Any]:
    return {"test": test, "outcome": outcome, "seconds": 0.1, "message": ""}


def test_proven_is_what_committed_results_show() -> None:
    shown: set[tuple[str, int]] = set()
    for path in RESULTS.glob("gpu-tests-*.json"):
        shown |= proves(json.loads(path.read_text(encoding="utf-8")))
    stated = {
        (name, int(target.removeprefix("sm")))
        for name, record in CANDIDATES.items()
        if not record.trusted and not record.plugin
        for target in record.proven
        if target.startswith("sm")
    }
    assert shown == stated


def test_a_whole_run_that_passed_proves_its_own_architecture_alone() -> None:
    assert proves(run_of()) == {("triton", 90)}
    assert proves(run_of(device={"type": "cuda", "arch": 86})) == {("triton", 86)}


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": [row(GRID), row(OTHER, "failed")]},
        {"rows": [row(GRID), row(OTHER, "unfinished")]},
        {"rows": [row(GRID, "skipped"), row(OTHER)]},
        {"rows": []},
        {"complete": False},
        {"tests": [OTHER]},
        {"commit": None},
        {"modified": True},
        {"device": {"type": "cpu", "arch": None}},
        {"benchmark": "kernels"},
    ],
    ids=str,
)
def test_anything_less_proves_nothing(changed: dict[str, Any]) -> None:
    assert proves(run_of(**changed)) == set()


def test_a_failure_elsewhere_is_not_held_against_the_kernels() -> None:
    failed = row("tests/gpu/test_sdpa.py::test_what_cannot_run_says_why[cudnn]", "failed")
    assert proves(run_of(rows=[row(GRID), failed])) == {("triton", 90)}

"""What committed results show: proven by the GPU suite, executed off-GPU by the executor, by nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gpu import proves

from attnsel.candidates import CANDIDATES
from attnsel.candidates.record import Executed
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


def shown_executed(cases: list[dict[str, Any]]) -> Executed:
    """Of a record of ``attnsel conformance --execute``: where every call of the grid is right and faultless.

    The kernels with descriptors are no part of it: no call takes them unless they are named.
    """
    of_arch: dict[int, list[dict[str, Any]]] = {}
    for case in cases:
        if not case["case"].startswith(("descriptors", "persistent")):
            of_arch.setdefault(case["arch"], []).append(case)
    whole = {arch: of_it for arch, of_it in of_arch.items() if all(case["ok"] for case in of_it)}
    dtypes = [{case["dtype"] for case in of_it} for arch, of_it in whole.items() if arch != 75]  # fp16 alone
    widest = [max(max(case["head_dims"]) for case in of_it) for of_it in whole.values()]
    targets = frozenset(f"sm{arch}" for arch in whole)
    return Executed(targets, frozenset(set.intersection(*dtypes) if dtypes else ()), min(widest, default=0))


def test_executed_is_what_the_committed_record_shows() -> None:
    record = json.loads((RESULTS / "triton-executed.json").read_text(encoding="utf-8"))
    stated = {name: each.executed for name, each in CANDIDATES.items() if each.executed is not None}
    assert stated == {"triton": shown_executed(record["cases"])}


def executed_call(arch: int, **changed: Any) -> dict[str, Any]:
    return {"case": "full", "arch": arch, "dtype": "bf16", "head_dims": [64, 128], "ok": True} | changed


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ([], Executed(frozenset({"sm80", "sm90"}), frozenset({"bf16"}), 128)),
        ([executed_call(90, ok=False)], Executed(frozenset({"sm80"}), frozenset({"bf16"}), 128)),
        ([executed_call(90, dtype="fp32")], Executed(frozenset({"sm80", "sm90"}), frozenset({"bf16"}), 128)),
        ([executed_call(90, head_dims=[256, 64])],
         Executed(frozenset({"sm80", "sm90"}), frozenset({"bf16"}), 128)),
        ([executed_call(90, case="descriptors, causal", ok=False)],
         Executed(frozenset({"sm80", "sm90"}), frozenset({"bf16"}), 128)),
    ],
    ids=["two", "one call failed", "a dtype on one", "a width on one", "kernels that are off"],
)  # fmt: skip
def test_one_call_that_failed_and_what_was_tried_on_one_architecture_count_for_nothing(
    more: list[dict[str, Any]], shown: Executed
) -> None:
    assert shown_executed([executed_call(80), executed_call(90), *more]) == shown


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

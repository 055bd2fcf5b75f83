"""The committed record of a full run says what docs/evidence.md says of it."""

from __future__ import annotations

import json
import re

from paths import ROOT

RECORD = json.loads((ROOT / "benchmarks/results/triton-executed.json").read_text())
EXECUTED = [case for case in RECORD["cases"] if not case["unsupported"]]


def test_no_executed_call_failed() -> None:
    assert [case for case in EXECUTED if not case["ok"]] == []
    assert all(0 < max(case["errors"].values()) <= 1 for case in EXECUTED)
    assert not any(case["faults"] for case in RECORD["cases"])


def test_the_architectures_are_the_sums_of_their_cases() -> None:
    for name, figures in RECORD["architectures"].items():
        of_it = [case for case in RECORD["cases"] if f"sm{case['arch']}" == name]
        assert figures["calls"] == len(of_it)
        for field in ("blocks", "instructions"):
            assert figures[field] == sum(case[field] for case in of_it)
        assert figures["not_executed"] == sum(bool(case["unsupported"]) for case in of_it)
        assert figures["opcodes_not_covered"] == sorted({op for case in of_it for op in case["unsupported"]})


def test_the_page_has_the_records_figures() -> None:
    page = " ".join((ROOT / "docs/evidence.md").read_text().split())
    found = re.search(
        r"With Triton ([\d.]+), on ([sm\d, and]+): (\d+) calls, no fault, and errors of at most ([\d.]+)",
        page,
    )
    assert found is not None
    assert found[1] == RECORD["triton"]
    on = {int(arch) for arch in re.findall(r"sm(\d+)", found[2])}
    assert on == {case["arch"] for case in EXECUTED if case["arch"] != 100}
    calls = [case for case in EXECUTED if case["arch"] in on]
    assert int(found[3]) == len(calls)
    assert float(found[4]) >= max(e for case in calls for e in case["errors"].values())

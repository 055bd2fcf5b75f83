"""The committed records of full runs say what docs/explanation/evidence.md says of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from paths import ROOT

RECORD = json.loads((ROOT / "benchmarks/results/triton-executed.json").read_text())
VERSIONS = json.loads((ROOT / "benchmarks/results/triton-executed-versions.json").read_text())
EXECUTED = [case for case in RECORD["cases"] if not case["unsupported"]]


def test_no_executed_call_failed() -> None:
    assert [case for case in EXECUTED if not case["ok"]] == []
    assert all(0 < max(case["errors"].values()) <= 1 for case in EXECUTED)
    assert not any(case["faults"] for case in RECORD["cases"])


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.9.0"])
def test_no_call_failed_with_other_releases_of_triton(release: str) -> None:
    cases = VERSIONS[release]["cases"]
    assert {case["arch"] for case in cases} == {75, 80}
    assert [case for case in cases if not case["ok"] or case["faults"] or case["unsupported"]] == []
    assert all(0 < max(case["errors"].values()) <= 1 for case in cases)


def test_each_release_made_code_of_its_own() -> None:
    """That the release asked for was the one that compiled."""
    counts = {
        release: [figures["instructions"] for figures in made["architectures"].values()]
        for release, made in VERSIONS.items()
    }
    assert len({tuple(each) for each in counts.values()}) == len(counts)


@pytest.mark.parametrize("record", [RECORD, *VERSIONS.values()], ids=["whole", *VERSIONS])
def test_the_architectures_are_the_sums_of_their_cases(record: dict[str, Any]) -> None:
    for name, figures in record["architectures"].items():
        of_it = [case for case in record["cases"] if f"sm{case['arch']}" == name]
        assert figures["calls"] == len(of_it)
        for field in ("blocks", "instructions"):
            assert figures[field] == sum(case[field] for case in of_it)
        assert figures["not_executed"] == sum(bool(case["unsupported"]) for case in of_it)
        assert figures["opcodes_not_covered"] == sorted({op for case in of_it for op in case["unsupported"]})


def test_the_page_has_the_records_figures() -> None:
    page = " ".join((ROOT / "docs/explanation/evidence.md").read_text().split())
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


def test_the_page_has_the_releases_figures() -> None:
    page = " ".join((ROOT / "docs/explanation/evidence.md").read_text().split())
    found = re.search(r"(\d+) calls each on sm75 and sm80 with Triton ([\d., and]+\d): no fault", page)
    assert found is not None
    assert re.findall(r"\d+\.\d+\.\d+", found[2]) == list(VERSIONS)
    assert {len(made["cases"]) for made in VERSIONS.values()} == {int(found[1])}

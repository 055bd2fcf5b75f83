"""The committed record of planted faults adds up, and says what docs/explanation/evidence.md says of it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter

import pytest

from paths import ROOT

RECORD = json.loads((ROOT / "benchmarks/results/triton-planted-faults.json").read_text())
FAULTS = [(part["part"], *fault) for part in RECORD["parts"] for fault in part["faults"]]
OUTCOMES = ("both", "numbers", "memory", "equivalent", "hole")


def counted(of: Counter[str]) -> dict[str, int]:
    return {name: of[name] for name in ("planted", *OUTCOMES, "outside_bound")}


@pytest.mark.parametrize(
    ("table", "place"), [("kinds", 2), ("kernels", 1), ("architectures", 0)], ids=lambda value: str(value)
)
def test_the_tables_are_the_sums_of_the_faults(table: str, place: int) -> None:
    sums: dict[str, Counter[str]] = {}
    for fault in FAULTS:
        name = fault[0].split()[0] if table == "architectures" else fault[place]
        sums.setdefault(name, Counter()).update({"planted": 1, fault[3]: 1, "outside_bound": int(fault[4])})
    assert RECORD[table] == {name: counted(of) for name, of in sums.items()}
    for name in ("planted", *OUTCOMES, "outside_bound"):
        assert RECORD[name] == sum(of[name] for of in sums.values())


def test_every_fault_has_one_outcome() -> None:
    assert {outcome for _, _, _, outcome, _ in FAULTS} <= set(OUTCOMES)
    assert RECORD["planted"] == len(FAULTS) == sum(RECORD[outcome] for outcome in OUTCOMES)
    # A result leaves the bound only where a bit of it differs.
    assert all(outcome in ("both", "numbers") for _, _, _, outcome, outside in FAULTS if outside)


def test_enough_faults_of_every_kind_kernel_and_architecture_are_planted_and_found() -> None:
    assert RECORD["planted"] >= 400
    assert len(RECORD["kinds"]) == 12
    assert set(RECORD["kernels"]) == {"forward", "decode", "merge", "rows", "dkdv", "dq", "dbias"}
    assert {"sm75", "sm80", "sm90", "sm120"} <= set(RECORD["architectures"])
    found = RECORD["both"] + RECORD["numbers"] + RECORD["memory"]
    assert RECORD["found_of_not_equivalent"] == round(found / (found + RECORD["hole"]), 4) >= 0.97
    assert RECORD["not_executed"] == []


def test_every_survivor_is_listed_and_explained() -> None:
    survivors = Counter((one["part"], one["kernel"], one["kind"]) for one in RECORD["survivors"])
    assert survivors == Counter(
        (part, kernel, kind) for part, kernel, kind, outcome, _ in FAULTS if outcome in ("equivalent", "hole")
    )
    assert sum(one["why"] is None for one in RECORD["survivors"]) == RECORD["hole"]
    assert all(len(one["why"]) > 20 for one in RECORD["survivors"] if one["why"] is not None)
    assert all({"line", "source", "before", "after"} <= one.keys() for one in RECORD["survivors"])


def test_what_was_read_by_hand_explains_something() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from ptx_interpreter.survivors import READ

    said = {one["why"] for one in RECORD["survivors"]}
    assert [entry for entry in READ if entry[-1] not in said] == []


def test_the_page_has_the_records_figures() -> None:
    page = " ".join((ROOT / "docs/explanation/evidence.md").read_text().split())
    figures = re.search(
        r"Of ([\d,]+) faults planted in the kernels of ([sm\d, and]+), (\d+) were found by the numbers, "
        r"(\d+) by what is watched, (\d+) by both; (\d+) change nothing",
        page,
    )
    assert figures is not None
    assert int(figures[1].replace(",", "")) == RECORD["planted"]
    assert set(re.findall(r"sm\d+", figures[2])) == set(RECORD["architectures"])
    assert [int(each) for each in figures.groups()[2:]] == [
        RECORD[name] for name in ("numbers", "memory", "both", "equivalent")
    ]
    share = re.search(r"([\d.]+) % of those that change something", page)
    assert share is not None
    assert float(share[1]) == round(100 * RECORD["found_of_not_equivalent"], 1)

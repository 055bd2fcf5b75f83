"""Budgets: what counts as missed, what the gate's log tells, that a record is whole. Never a figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import budgets
import pytest
from budgets import MISSED, Figure, told_rows

from paths import ROOT


def figure(median: float, bound: str = "at most", missing: str = "") -> Figure:
    return Figure("g", "w", "µs", median, 0, 0, 1, budget=10.0, noise=1.0, bound=bound, missing=missing)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (figure(10.5), 0),
        (figure(11.5), MISSED),
        (figure(9.5, "at least"), 0),
        (figure(8.5, "at least"), MISSED),
        (figure(99.0, missing="torch is not installed"), 0),
    ],
)
def test_a_budget_that_is_missed_by_more_than_its_noise_ends_with_4(
    row: Figure, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "sections", lambda *given: [("s", "s", lambda: [row])])
    monkeypatch.setattr("sys.argv", ["budgets.py"])
    assert budgets.main() == code
    monkeypatch.setattr("sys.argv", ["budgets.py", "--quick"])
    assert budgets.main() == 0, "whether it runs, not how fast"


def test_the_gate_tells_its_times(tmp_path: Path) -> None:
    log = tmp_path / "gate.log"
    log.write_text("== done: 960s\n   12s  lint\n  282s  README's second command: the default tier\n")
    _, tests, gate = told_rows(log)
    assert [(row.median, row.within) for row in (tests, gate)] == [(4.7, True), (16.0, False)]
    assert not gate.missed, "by less than its noise"
    assert all(row.missing for row in told_rows(None))
    assert "step \"README's second command" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_every_budget_of_the_record_is_measured_or_says_why_not(run, tmp_path: Path) -> None:
    record = json.loads((ROOT / "benchmarks/results/budgets.json").read_text(encoding="utf-8"))
    assert not record["quick"]
    assert all(row["samples"] or row["missing"] for row in record["rows"])
    made = tmp_path / "quick.json"
    done = run("benchmarks/budgets.py", "--quick", "--only", "decision,gate", "--json", made)
    assert done.returncode == 0, done.stderr
    rows = json.loads(made.read_text(encoding="utf-8"))["rows"]
    assert all(row["missing"] or row["multiple"] for row in rows)
    named = {(row["group"], row["what"], row["budget"]) for row in rows}
    assert named <= {(row["group"], row["what"], row["budget"]) for row in record["rows"]}


def test_a_peer_is_loaded_from_its_file_with_stand_ins_and_others_say_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # a test before may have put sys.path back
    import peers

    path = tmp_path / "vllm/v1/attention/selector.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "import vllm.envs as envs\nfrom vllm.unknown import Type, function\n"
        "get_attn_backend = lambda *a, **k: (envs.VLLM_BATCH_INVARIANT, Type[int], function.__name__)\n"
    )
    before = set(sys.modules)
    try:
        peer = peers.vllm_peer(peers.Source(tmp_path, "0.1"))
        assert peer.hit is not None
        assert peer.hit() == (False, int, "function")
        cost, other = peers.costs([peer, peers.mslk_peer(None)], turns=2)
    finally:
        for name in set(sys.modules) - before:
            del sys.modules[name]
    assert (cost.version, cost.miss) == ("0.1", None)
    assert cost.hit is not None
    assert (other.hit, other.how[:17]) == (None, "not callable here")

"""The model of context parallelism says that it is simulated, and closes what rules close."""

from __future__ import annotations

import json

from paths import ROOT

RECORD = "context-parallel-simulated.json"


def test_the_model_says_what_it_is(run, tmp_path):
    done = run("benchmarks/context_parallel.py", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / RECORD).read_text())
    assert said["simulated"] is True
    assert said["measurement"] is False
    rows = said["rows"]
    assert all(row["simulated"] for row in rows)
    assert {row["ranks"] for row in rows} == {8, 16, 32, 64, 128, 256, 512, 1024}
    closed = {row["ranks"] for row in rows if row["exchange"] == "a2a" and row["total_ms"] is None}
    assert closed == {128, 256, 512, 1024}  # 64 heads
    for row in rows:
        if row["total_ms"] is None:
            assert row["why"] == "CP004"
        else:
            assert 0 < row["efficiency"] < 1.05
            assert row["total_ms"] >= row["computes_ms"]

    kept = json.loads((ROOT / "benchmarks" / "results" / RECORD).read_text())
    assert kept["rows"] == rows, "run python benchmarks/context_parallel.py again"

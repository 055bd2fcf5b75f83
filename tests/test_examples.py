"""The examples and the benchmark run as their pages say. Figures are looked at for shape, never for speed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from paths import ROOT

TRAIN = "examples/train_char_gpt.py"


def run(script: str, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """A script in a fresh process that finds this checkout; one thread, because tests share the machine."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ATTNSEL_")}
    environ |= {"PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, str(ROOT / script), *map(str, arguments)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, encoding="utf-8", timeout=300)


def losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text)]


def test_the_first_call_is_computed_right_and_explained():
    pytest.importorskip("torch")
    done = run("examples/first_call.py")
    assert done.returncode == 0, done.stderr
    first, second, *report = done.stdout.splitlines()
    (backend,) = re.findall(r"forward and backward: (\S+) ran$", first)
    difference = re.fullmatch(r"out \[2, 256, 512\]; largest difference from float64: (\S+)", second)
    assert difference is not None
    assert float(difference[1]) < 1e-5
    assert any(line.split()[:3] == ["1", "✔", backend] for line in report)


def test_the_question_from_python_is_answered_with_reasons_and_ways_out():
    done = run("examples/explain_from_python.py")
    assert done.returncode == 0, done.stderr
    assert "CUDNN204: head_dim_qk is 192, needs at most 128" in done.stdout
    assert "upgrade cuDNN to ≥ 9.5.0: sdpa.flash → cudnn" in done.stdout
    assert "sdpa.flash pads head_dim_v 128 → 192: 64 MiB on every call" in done.stdout
    assert "adapt='never': sdpa.flash → sdpa.efficient" in done.stdout
    assert re.search(r"^RTX 4090, cuDNN", done.stdout, re.MULTILINE)


def test_training_names_what_runs_reports_it_and_learns():
    pytest.importorskip("torch")
    done = run(TRAIN, "--steps", 30, "--every", 5, "--length", 20, ATTNSEL_DEBUG="2")
    assert done.returncode == 0, done.stderr
    backend = re.search(r"attention runs on (\S+)", done.stdout)
    assert backend is not None
    assert f"layer 1: selected {backend[1]}" in done.stderr
    fell = losses(done.stdout)
    assert len(fell) == 6
    assert fell[-1] < fell[0] - 0.5
    assert done.stdout.rstrip("\n").partition("\n\nIn the morning ")[2]


def test_training_runs_on_the_backend_that_is_asked_for():
    pytest.importorskip("torch")
    done = run(TRAIN, "--steps", 4, "--batch", 2, "--every", 1, "--length", 1, "--backend", "tiled")
    assert done.returncode == 0, done.stderr
    assert "attention runs on tiled" in done.stdout


def test_training_gives_the_reasons_when_it_cannot():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("sdpa.efficient runs on a GPU")
    done = run(TRAIN, "--steps", 1, "--backend", "sdpa.efficient")
    assert done.returncode != 0
    assert "SDPA200" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_for_flash_attn_runs_and_a_t4_is_explained():
    pytest.importorskip("torch")
    done = run("examples/flash_attn_on_turing.py")
    assert done.returncode == 0, done.stderr
    differences = [float(found) for found in re.findall(r"each sequence alone: (\S+)", done.stdout)]
    assert len(differences) == 2
    assert max(differences) < 5e-3
    planned = done.stdout.partition("what a T4 would run")[2]
    for what in ("flash_attn_varlen_func, training", "flash_attn_with_kvcache, one token"):
        assert re.search(rf"^{what}: (sdpa\.efficient|triton)$", planned, re.MULTILINE), planned
    assert planned.count("cannot: SDPA103") == 4, "FlashAttention itself, by either op, and why not"


def test_overhead_measures_every_budget_and_records_no_one(tmp_path):
    pytest.importorskip("torch")
    file = tmp_path / "overhead.json"
    done = run("benchmarks/overhead.py", "--quick", "--json", file)
    assert done.returncode == 0, done.stderr
    check_record(json.loads(file.read_text(encoding="utf-8")), quick=True)
    assert "What choosing costs" in done.stdout


@pytest.mark.parametrize(
    "path", sorted((ROOT / "benchmarks/results").glob("overhead-*.json")), ids=lambda p: p.stem
)
def test_recorded_results_have_the_shape_of_new_ones(path):
    check_record(json.loads(path.read_text(encoding="utf-8")), quick=False)


def check_record(recorded: dict, quick: bool) -> None:
    assert recorded["benchmark"] == "overhead"
    assert recorded["quick"] is quick
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", recorded["date"])
    assert recorded["versions"]["python"]
    assert set(recorded["machine"]) == {"cpu", "cores", "system", "load_average_1min"}
    assert not re.search(r"/(home|root|work|tmp|Users)/", json.dumps(recorded))
    rows = recorded["rows"]
    for row in rows:
        assert row["samples"] >= 1
        assert row["low"] <= row["median"] <= row["high"]
        assert row["unit"] in ("µs", "/s", "s", "×")
        assert (row["within"] is None) == (row["budget"] is None)
        if row["budget"] is not None:
            good = (
                row["median"] <= row["budget"]
                if row["bound"] == "at most"
                else row["median"] >= row["budget"]
            )
            assert row["within"] is good
    budgeted = {row["group"] for row in rows if row["budget"] is not None}
    assert len(budgeted) == 9
    tiled = [row for row in rows if row["what"].startswith("tiled")]
    assert tiled
    assert all(row["within"] for row in tiled), "bytes do not depend on the clock: tiled holds no S×S tensor"


def test_a_sequence_over_two_processes_trains_as_over_one():
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("no Gloo")
    script, size = "examples/long_context.py", ("--steps", 6, "--length", 64)
    alone = run(script, *size)
    assert alone.returncode == 0, alone.stderr
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = [sys.executable, *launcher, str(ROOT / script), *map(str, size)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert both.returncode == 0, both.stderr
    assert "processes: 2; every step of attention runs on sdpa.flash" in both.stdout
    assert losses(both.stdout) == pytest.approx(losses(alone.stdout), abs=2e-4)
    assert "logits of the whole sequences [2, 64, 32]" in both.stdout
    assert len(losses(both.stdout)) == 3

"""``conformance.py`` of compiled kernels: what is printed, the exit code; of reports made up here."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

import conformance
import gate
from gate import KernelReport
from sass import LoopMix

MIX = LoopMix(
    instructions=587, matrix=16, waits=1, mufu=66, local=0, shared=0, memory=16, barriers=9, shuffles=8,
    control=8, uniform=56, fp=366, integer=41, multiply_adds=524288, matrix_per_wait=16.0,
)  # fmt: skip
GOOD = KernelReport(
    "forward", 90, 128, 128, "bf16", "causal", (128, 128), 8, 2, 255, 0, 163840, 232448, ("HGMMA",), 0.5,
    loop=MIX, loops=(587, 940),
)  # fmt: skip
SERIALISED = dataclasses.replace(
    GOOD,
    feature="full",
    loop=dataclasses.replace(MIX, waits=16, matrix_per_wait=1.0),
    warnings=("(C7515) Potential Performance Loss",),
)


@pytest.fixture
def found(monkeypatch):
    def set_to(*reports: KernelReport) -> None:
        monkeypatch.setattr(gate, "reports", lambda wanted, progress, jobs: list(reports))

    return set_to


def test_a_row_per_kernel(run, found):
    found(GOOD, dataclasses.replace(GOOD, kernel="decode", feature="paged-256"))
    code, out, _ = run("")
    assert code == 0
    lines = out.split("\n")
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == (
        "90 forward 128/128 bf16 causal 128x128 8 2 255 0 160/227 587 ✔".split()  # noqa: SIM905
    )
    assert lines[2].split()[1] == "decode"
    assert "2 of 2 compile" in lines[3]


def test_the_loop_in_full(run, found):
    found(GOOD)
    _, out, _ = run("--loops")
    words = " ".join(out.split())
    assert "587: 16 matrix, 1 waits, 66 mufu, 366 fp, 41 integer, 56 uniform, 16 memory" in words
    assert "8 control; 16.0 matrix per wait; other loops 940" in words


def test_what_is_serialised_fails_in_words(run, found):
    found(GOOD, SERIALISED)
    code, out, _ = run("")
    assert code == 4
    words = " ".join(out.split())
    assert "1 of 2 compile" in words
    assert (
        "✖ sm90 forward 128/128 bf16 full: serialised, 1.0 matrix instructions per wait; "
        "ptxas: (C7515) Potential Performance Loss"
    ) in words


@pytest.mark.parametrize(
    ("loop", "code", "words"),
    [
        (587, 0, "0 worse, 0 otherwise changed"),
        (400, 4, "1 worse, 0 otherwise changed ✖ sm90 forward 128/128 bf16 causal: loop 400 → 587 instr"),
        (800, 0, "0 worse, 1 otherwise changed · sm90 forward 128/128 bf16 causal: loop 800 → 587 instr"),
    ],
)
def test_a_longer_loop_than_before_gives_exit_code_4(run, found, tmp_path, loop, code, words):
    before = tmp_path / "before.json"
    kernel = dataclasses.replace(GOOD, loop=dataclasses.replace(MIX, instructions=loop)).as_json()
    before.write_text(json.dumps({"kernels": [kernel]}), encoding="utf-8")
    found(GOOD)
    assert run(["--compare", str(before), "--json"])[0] == code
    got, out, _ = run(["--compare", str(before)])
    assert got == code
    assert words in " ".join(out.split())


def test_json_can_be_compared_with_later(run, found, tmp_path):
    found(GOOD, SERIALISED)
    code, out, _ = run("--json")
    assert code == 4
    said = json.loads(out)
    assert "changes" not in said
    assert said["kernels"][0]["loop"]["matrix_per_wait"] == 16.0
    assert [kernel["ok"] for kernel in said["kernels"]] == [True, False]
    assert said["kernels"][1]["faults"][1] == "ptxas: (C7515) Potential Performance Loss"
    before = tmp_path / "before.json"
    before.write_text(out, encoding="utf-8")
    code, out, _ = run(["--compare", str(before), "--json"])
    assert (code, json.loads(out)["changes"]) == (4, [])


def test_kernels_features_and_types_are_chosen(run, monkeypatch):
    chosen = []
    monkeypatch.setattr(gate, "reports", lambda wanted, progress, jobs: chosen.extend(wanted) or [])
    run("--arch 75,90 --head-dim 64 --kernel dq,forward --feature packed --dtype fp16")
    assert [(c.arch, c.kernel, c.feature, c.dtype) for c in chosen] == [
        (arch, kernel, "packed", "fp16") for arch in (75, 90) for kernel in ("dq", "forward")
    ]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[1, 2]",
        '{"kernels": 3}',
        '{"kernels": [3]}',
        '{"kernels": [{"kernel": "dq", "arch": 90}]}',
        '{"kernels": [{"ok": 1, "error": null, "spills": 0, "registers": 1, "loop": {"instructions": 0}}]}',
        "[" * 100_000,
    ],
)
def test_a_file_that_is_no_table_is_refused_before_compiling(run, monkeypatch, tmp_path, content):
    monkeypatch.setattr(gate, "reports", lambda *_: pytest.fail("compiled"))
    before = tmp_path / "before.json"
    before.write_text(content, encoding="utf-8")
    code, out, err = run(["--compare", str(before)])
    assert (code, out) == (2, "")
    assert "must be a file that conformance.py --json wrote" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"--arch {'9' * 5000}", "allowed: 75, 80"),
        ("--arch ٩٠", "allowed: 75, 80"),
        (f"--head-dim {'9' * 5000}", "must be a number up to 576"),
        ("--kernel backward", "allowed: forward, dkdv"),
        ("--feature causal,nonsense", "nonsense"),
        ("--dtype fp8", "allowed: bf16, fp16, fp32"),
        ("--compare no-such-file", "must be a file that conformance.py --json wrote"),
        ("--compare pyproject.toml", "must be a file that conformance.py --json wrote"),
    ],
)
def test_bad_input(run, found, line, words):
    found(GOOD)
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_cores_are_counted_where_the_system_says_nothing_of_this_process(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS, Windows
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert conformance._cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert conformance._cores() == 1

"""``conformance.py --execute``: what is printed, and the exit code, of reports made up here."""

from __future__ import annotations

import importlib.util
import json

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

from ptx_interpreter import cases
from ptx_interpreter.cases import CaseReport
from ptx_interpreter.faults import RACE, Fault

FAULT = Fault(
    RACE, "dq_kernel", "backward.py:7", 99, "st.shared.b32 [%r1], %r2", 3, 64, "writes shared 0x40", 8
)
GOOD = CaseReport("full", 80, "bf16", (64, 64), ["forward"], 4, 12_345, 2.0, 1.5, {"out": 0.1234})
RACED = CaseReport("full", 80, "fp16", (64, 64), ["dq"], 4, 100, 1.0, 0.5, {"dq": 0.5}, [FAULT])
WRONG = CaseReport("mask", 80, "bf16", (64, 64), ["forward"], 4, 100, 1.0, 0.5, {"out": float("inf")})
MISSING = CaseReport("full", 100, "bf16", (128, 128), unsupported=("mbarrier.init.b64",))


@pytest.fixture
def found(monkeypatch):
    def set_to(*reports: CaseReport) -> None:
        monkeypatch.setattr(cases, "reports", lambda wanted, progress, jobs: list(reports))

    return set_to


def test_a_row_per_case_and_a_line_per_architecture(run, found):
    found(GOOD, MISSING)
    code, out, _ = run("--execute")
    assert code == 0
    lines = out.split("\n")
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["80", "full", "64/64", "bf16", "4", "12.3k", "0.12", "0", "✔"]
    assert "not executed: mbarrier.init.b64" in out
    assert "sm80: 1 calls, 4 blocks, 12.3k instructions, error 0.12, 0 faults, 2 s\n" in out


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (RACED, "race: dq_kernel at backward.py:7, block 3 thread 64: writes shared 0x40"),
        (WRONG, "out errs inf times what is allowed"),
        (CaseReport("full", 80, "bf16", (64, 64), refused="CompilationError: no"), "✖ CompilationError: no"),
    ],
    ids=["fault", "number", "refused"],
)
def test_what_fails_is_told_and_gives_exit_code_4(run, found, report, words):
    found(GOOD, report)
    code, out, _ = run("--execute")
    assert code == 4
    assert words in " ".join(out.split())


def test_json(run, found):
    found(GOOD, RACED, WRONG, MISSING)
    code, out, _ = run("--execute --json")
    assert code == 4
    said = json.loads(out)
    assert said["architectures"]["sm80"] == {
        "calls": 3, "kernels": 3, "blocks": 12, "instructions": 12_545, "seconds": 4.0, "compiling": 2.5,
        "largest_error": 1e9, "faults": 1, "not_executed": 0, "opcodes_not_covered": [],
    }  # fmt: skip
    assert said["architectures"]["sm100"]["opcodes_not_covered"] == ["mbarrier.init.b64"]
    assert said["cases"][1]["faults"][0]["source"] == "backward.py:7"
    assert said["cases"][2]["errors"] == {"out": None}
    assert [case["ok"] for case in said["cases"]] == [True, False, False, False]


def test_cases_are_chosen_by_words(run, monkeypatch):
    chosen = []
    monkeypatch.setattr(cases, "reports", lambda wanted, progress, jobs: chosen.extend(wanted) or [])
    run("--execute --arch 75,80 --case pages,576")
    assert [(case.name, arch, dtype) for case, arch, dtype in chosen] == [
        (name, arch, dtype)
        for arch, dtype in ((75, "fp16"), (80, "bf16"))
        for name in (
            "decode, pages of 16", "pages of 256", "head_dims 576 and 512", "decode, head_dims 576 and 512",
            "decode, pages of 64, window, softcap, sinks",
        )
    ]  # fmt: skip


def test_quick_takes_the_representative_cases_once_and_with_few_calls(run, monkeypatch):
    chosen = []
    monkeypatch.setattr(cases, "reports", lambda wanted, progress, jobs: chosen.extend(wanted) or [])
    run("--execute --quick --arch 80")
    assert [case.name for case, _, _ in chosen] == [case.name for case in cases.CASES if case.quick]
    assert all(len(case.also) <= 2 for case, _, _ in chosen)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--execute --quick --case sinks", "part of a case's name"),
        ("--quick", "needs --execute"),
        ("--execute --case nonsense", "part of a case's name"),
        ("--case full", "--execute"),
    ],
)
def test_bad_input(run, line, words):
    code, out, err = run(line)
    assert (code, out) == (2, "")
    assert words in err

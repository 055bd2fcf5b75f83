"""The program that writes the table of kernels: what it keeps, and what it prints."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from typing import Any

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

import triton_gate

import gate
from gate import KernelReport

GOOD = KernelReport(
    "forward", 90, 64, 64, "bf16", "full", (128, 64), 4, 2, 128, 0, 1, 2, ("HGMMA",), 0.5
)  # fmt: skip


@pytest.fixture
def write(tmp_path, monkeypatch, capsys):
    """The table after a run of ``--arch`` whose reports are given, and what it printed."""
    table = tmp_path / "table.json"

    def run(arch: str, *reports: KernelReport, kernel: str = "") -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(gate, "reports", lambda wanted, progress, jobs: list(reports))
        chosen = ["--kernel", kernel] if kernel else []
        monkeypatch.setattr(sys, "argv", ["triton_gate.py", "--arch", arch, *chosen, "--table", str(table)])
        triton_gate.main()
        return json.loads(table.read_text(encoding="utf-8")), capsys.readouterr().out

    return run


def test_other_architectures_are_kept_and_changes_printed(write):
    write("75,80,86,89,90,100,120", GOOD, dataclasses.replace(GOOD, arch=120))
    said, out = write("90", dataclasses.replace(GOOD, spills=3))
    assert [(kernel["arch"], kernel["spills"]) for kernel in said["kernels"]] == [(90, 3), (120, 0)]
    assert out.splitlines() == [
        "worse sm90 forward 64/64 bf16 full: 3 spills; spills 0 → 3",
        "fault sm90 forward 64/64 bf16 full: 3 spills",
        "1 of 2 without a fault",
    ]

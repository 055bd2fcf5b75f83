"""The record of the CUDA matrix on other releases of torch is of all of them, without a failure."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

import torch_versions

from paths import ROOT


def test_the_record_holds_every_release_and_no_failure() -> None:
    path = ROOT / "benchmarks/results/torch-versions.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    assert set(record) == set(torch_versions.RELEASES)
    for release, made in record.items():
        assert made["build"].partition("+")[0] == release
        assert made["passed"] > 500
        assert (made["failed"], made["skipped"]) == (0, 0)
        assert len(made["schemas"]) >= len(torch_versions.OPS)

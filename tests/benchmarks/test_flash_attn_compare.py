"""The comparison beside flash_attn, or plain PyTorch: its record, and that it notices wrong numbers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flash_attn_compare  # noqa: E402 - a program of benchmarks/, which torch must be there for

from attnsel import flash_attn  # noqa: E402

QUICK = ["--quick", "--device", "cpu", "--no-compile"]


def record(tmp_path: Path, *words: str) -> tuple[int, dict]:
    path = tmp_path / "compare.json"
    code = flash_attn_compare.main([*QUICK, "--json", str(path), *words])
    return code, json.loads(path.read_text())


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("only", ["varlen_qkvpacked_func full", "with_kvcache"])
def test_beside_plain_pytorch(tmp_path: Path, only: str) -> None:
    code, found = record(tmp_path, "--only", only)
    assert (code, found["finished"]) == (0, True)
    assert found["found"].startswith("no flash_attn")
    assert len(found["rows"]) == 2  # forward and backward, or full and causal
    for row in found["rows"]:
        assert only in row["case"]
        assert (row["rival"], row["agrees"], row["note"]) == ("eager", True, "")
        assert row["backend"]
        assert 0 < row["ours_error"] < 0.01
        assert row["rival_error"] == row["plain_error"]
        assert row["faster"] == pytest.approx(row["rival_ms"] / row["ours_ms"], rel=0.01)


def test_beside_the_package_where_it_runs_and_wrong_numbers_end_with_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package: Any = types.ModuleType("flash_attn")
    package.__version__ = "2.8.4"
    package.flash_attn_func = lambda q, k, v, causal=False: torch.zeros_like(q)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    code, found = record(tmp_path, "--only", "flash_attn_func full forward")
    assert code == 0  # the rival's errors are the rival's
    assert found["found"] == "flash_attn 2.8.4"
    (row,) = found["rows"]
    assert row["rival"] == "flash_attn"
    assert row["rival_error"] > 0.1

    real = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *args, **more: real(*args, **more) * 1.02)
    code, found = record(tmp_path, "--only", "flash_attn_func causal forward")
    assert code == 1
    assert not found["rows"][0]["agrees"]
    assert "flash_attn_func causal forward" in capsys.readouterr().err

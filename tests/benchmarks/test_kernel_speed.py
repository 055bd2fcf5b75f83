"""The kernel benchmark's own logic: work, order, checks, the table, and that it runs without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kernel_speed
import pytest
import torch
from clocks import HostClock
from kernel_cases import Call, Case
from kernel_speed import Column, Row

from attnsel.backends.contract import Result
from attnsel.backends.tiled import kernel as tiled
from attnsel.runtime.kernels import Kernel

CPU = torch.device("cpu")
SMALL = Case("backward", "bf16", 16, True, 2, 2, 1, 24, 24)
TILED = Kernel(tiled.forward, tiled.backward)


def measured(of: Case, name: str = "triton", **more: Any) -> Row:
    given = {"ms": 1.0, "rate": of.rate(1.0), "target": of.target, **more}
    return Row(*of, name=name, status="measured", unit=of.unit, **given)


def test_flops_follow_the_convention_of_flash_attention() -> None:
    forward, causal, backward = (
        Case(kind, "bf16", 128, mask, 4, 16, 16, 4096, 4096)
        for kind, mask in (("forward", False), ("forward", True), ("backward", False))
    )
    flops = 4 * 4 * 16 * 4096 * 4096 * 128
    assert (forward.flops, causal.flops, backward.flops) == (flops, flops / 2, 2.5 * flops)
    assert forward.rate(1.0) == pytest.approx(flops / 1e-3 / 1e12)


def test_a_right_kernel_gets_no_complaint() -> None:
    assert Call.of(SMALL, CPU).complaint(TILED) == ""
    assert Call.of(SMALL._replace(kind="decode", causal=False, seqlen_q=1), CPU).complaint(TILED) == ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda grads: grads._replace(k=grads.k * 1.05), "dk is off by"),
        (lambda grads: grads._replace(v=grads.v.index_fill(2, torch.tensor([3]), 0)), "dv is off by"),
        (lambda grads: grads._replace(q=grads.q * float("nan")), "dq is not finite"),
    ],
    ids=["scaled", "a row missing", "nan"],
)
def test_a_wrong_kernel_is_reported(spoil: Any, said: str) -> None:
    assert said in Call.of(SMALL, CPU).complaint(Kernel(tiled.forward, lambda *c: spoil(tiled.backward(*c))))


def test_what_is_wrong_or_cannot_run_is_a_row_with_its_reason() -> None:
    def full(*call: object) -> Result:
        raise torch.OutOfMemoryError("out of memory\nand a long report")

    def refuse(*call: object) -> Result:
        raise RuntimeError("no kernel image")

    def wrong(grads: Any) -> Any:
        return grads._replace(k=grads.k * 1.05)

    columns = [
        Column("full", "tiled", Kernel(full, tiled.backward)),
        Column("broken", "tiled", Kernel(refuse, tiled.backward)),
        Column("wrong", "tiled", Kernel(tiled.forward, lambda *call: wrong(tiled.backward(*call)))),
        Column("sdpa.cudnn", "sdpa.cudnn", TILED),
        Column("right", "tiled", TILED),
    ]
    rows = {row.name: row for row in kernel_speed.measure(SMALL, columns, CPU, HostClock(), 2)}
    assert rows["full"].status == "out of memory"
    assert rows["full"].reason == "OutOfMemoryError: out of memory"
    assert rows["broken"].status == "failed"
    assert (rows["wrong"].status, rows["wrong"].ms) == ("wrong", None)
    assert rows["sdpa.cudnn"].status == "refused"
    assert "SDPA300" in rows["sdpa.cudnn"].reason
    assert (rows["right"].status, rows["right"].samples) == ("measured", 2)


def test_ratios_are_medians_of_pairs_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Told:
        def rounds(self, calls: Any, count: int) -> list[list[float]]:
            return [[10.0, 20.0, 40.0], [5.0, 16.0, 20.0]]

        def host(self, call: Any) -> float:
            return 7.0

    columns = [Column("sdpa.flash", "tiled", TILED), Column("own", "tiled", TILED)]
    base, own = kernel_speed.measure(SMALL, columns, CPU, Told(), 3)
    assert own.ratio == 2.0  # of 2.0, 1.25 and 2.0
    assert base.ratio is None
    assert own.rate == pytest.approx(SMALL.rate(16.0))
    assert own.host_us == 7.0


@pytest.mark.parametrize("how", ["interrupted", "out of time", "the device is lost"])
def test_what_was_measured_stays(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Case] = []

    def once(of: Case, *rest: object) -> list[Row]:
        if seen and how == "interrupted":
            raise KeyboardInterrupt
        seen.append(of)
        return [measured(of)]

    monkeypatch.setattr(kernel_speed, "measure", once)
    if how == "the device is lost":
        monkeypatch.setattr(
            kernel_speed, "device_lost", lambda device: "RuntimeError: CUDA error: illegal address"
        )
    file = tmp_path / "kernels.json"
    words = ["--device", "cpu", "--json", str(file)]
    code = kernel_speed.main([*words, "--budget", "0"] if how == "out of time" else words)
    assert code == (130 if how == "interrupted" else 0)
    recorded = json.loads(file.read_text())
    assert len(recorded["rows"]) == len(seen) == (0 if how == "out of time" else 1)
    words_of = {"interrupted": "interrupted", "out of time": "is used up", "the device is lost": "illegal"}
    assert words_of[how] in recorded["stopped"]

"""The kernel benchmark's own logic: work, order, checks, the table, and that it runs without a GPU."""

from __future__ import annotations

from typing import Any

import kernel_speed
import pytest
import torch
from clocks import HostClock
from kernel_cases import Case
from kernel_speed import Column

from attnsel.backends.contract import Result
from attnsel.backends.tiled import kernel as tiled
from attnsel.runtime.kernels import Kernel

CPU = torch.device("cpu")
SMALL = Case("backward", "bf16", 16, True, 2, 2, 1, 24, 24)
TILED = Kernel(tiled.forward, tiled.backward)


def test_flops_follow_the_convention_of_flash_attention() -> None:
    forward, causal, backward = (
        Case(kind, "bf16", 128, mask, 4, 16, 16, 4096, 4096)
        for kind, mask in (("forward", False), ("forward", True), ("backward", False))
    )
    flops = 4 * 4 * 16 * 4096 * 4096 * 128
    assert (forward.flops, causal.flops, backward.flops) == (flops, flops / 2, 2.5 * flops)
    assert forward.rate(1.0) == pytest.approx(flops / 1e-3 / 1e12)


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

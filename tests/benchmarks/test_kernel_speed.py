"""The kernel benchmark's own logic: work, order, checks, the table, and that it runs without a GPU."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import clocks
import kernel_speed
import measure
import pytest
import torch
from clocks import HostClock, file_name
from kernel_cases import FULL, QUICK, Call, Case, cases
from kernel_speed import Column, Row
from rich.console import Console

from attnsel.backends.contract import Result
from attnsel.backends.tiled import kernel as tiled
from attnsel.runtime.kernels import Kernel

CPU = torch.device("cpu")
SMALL = Case("backward", "bf16", 16, True, 2, 2, 1, 24, 24)
TILED = Kernel(tiled.forward, tiled.backward)


def case(kind: str, causal: bool = False, d: int = 128) -> Case:
    return Case(kind, "bf16", d, causal, 4, 16, 16, 4096, 4096)


def measured(of: Case, name: str = "triton", **more: Any) -> Row:
    given = {"ms": 1.0, "rate": of.rate(1.0), "target": of.target, **more}
    return Row(*of, name=name, status="measured", unit=of.unit, **given)


# Work


def test_flops_follow_the_convention_of_flash_attention() -> None:
    forward = 4 * 4 * 16 * 4096 * 4096 * 128
    assert case("forward").flops == forward
    assert case("forward", causal=True).flops == forward / 2
    assert case("backward").flops == 2.5 * forward
    assert case("forward").rate(1.0) == pytest.approx(forward / 1e-3 / 1e12)


def test_decode_counts_the_bytes_of_grouped_keys_once() -> None:
    one = Case("decode", "bf16", 128, False, 16, 32, 8, 1, 65536)
    keys_and_values = 2 * 16 * 65536 * 8 * 128 * 2
    assert one.bytes == keys_and_values + 2 * 16 * 32 * 128 * 2
    assert one.rate(2.0) == pytest.approx(one.bytes / 2e-3 / 1e9)
    assert one.unit == "GB/s"


def test_the_grid_keeps_tokens_and_width_and_begins_with_what_has_a_target() -> None:
    made = cases(FULL)
    training = [c for c in made if c.kind != "decode"]
    assert {c.batch * c.seqlen_q for c in training} == {16384}
    assert {c.heads * c.head_dim for c in training} == {2048}
    assert {c.seqlen_kv for c in training} == {1024, 2048, 4096, 8192, 16384}
    assert {c.head_dim for c in training} == {64, 128, 256}
    assert {c.batch for c in made if c.kind == "decode"} == {1, 4, 16, 64}
    assert len(set(made)) == len(made)
    without = [c.target is None and c.kind != "decode" for c in made if c.dtype == "bf16"]
    assert without == sorted(without)
    assert set(cases(QUICK)) < set(made)


@pytest.mark.parametrize(
    ("kind", "d", "causal", "target"),
    [
        ("forward", 64, False, 1.2),
        ("forward", 64, True, None),
        ("forward", 128, False, 1.2),
        ("forward", 128, True, 1.1),
        ("backward", 64, True, 1.0),
        ("backward", 128, False, 0.9),
        ("forward", 256, False, None),
    ],
)
def test_targets(kind: str, d: int, causal: bool, target: float | None) -> None:
    assert case(kind, causal, d).target == target


# Right or wrong


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
def test_a_wrong_kernel_is_reported_and_not_timed(spoil: Any, said: str) -> None:
    wrong = Kernel(tiled.forward, lambda *call: spoil(tiled.backward(*call)))
    columns = [Column("right", "tiled", TILED), Column("wrong", "tiled", wrong)]
    rows = {row.name: row for row in kernel_speed.measure(SMALL, columns, CPU, HostClock(), 2)}
    assert rows["wrong"].status == "wrong"
    assert said in rows["wrong"].reason
    assert rows["wrong"].ms is None
    assert rows["right"].status == "measured"
    assert rows["right"].samples == 2


def test_what_cannot_run_is_a_row_with_its_reason() -> None:
    def full(*call: object) -> Result:
        raise torch.OutOfMemoryError("out of memory\nand a long report")

    def refuse(*call: object) -> Result:
        raise RuntimeError("no kernel image")

    columns = [
        Column("full", "tiled", Kernel(full, tiled.backward)),
        Column("broken", "tiled", Kernel(refuse, tiled.backward)),
        Column("sdpa.cudnn", "sdpa.cudnn", TILED),
        Column("right", "tiled", TILED),
    ]
    rows = {row.name: row for row in kernel_speed.measure(SMALL, columns, CPU, HostClock(), 2)}
    assert rows["full"].status == "out of memory"
    assert rows["full"].reason == "OutOfMemoryError: out of memory"
    assert rows["broken"].status == "failed"
    assert rows["sdpa.cudnn"].status == "refused"
    assert "SDPA300" in rows["sdpa.cudnn"].reason
    assert rows["right"].status == "measured"


def test_after_a_fault_of_the_device_nothing_is_blamed_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*call: object) -> Result:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(kernel_speed, "device_lost", lambda device: "RuntimeError: CUDA error")
    columns = [
        Column("before", "tiled", TILED),
        Column("faulty", "tiled", Kernel(fault, tiled.backward)),
        Column("after", "tiled", TILED),
    ]
    before, faulty, after = kernel_speed.measure(SMALL, columns, CPU, HostClock(), 2)
    assert "illegal memory access" in faulty.reason
    assert after.reason == "not tried: the device was lost to faulty"
    assert before.reason == "right, but not timed: the device was lost to faulty"
    assert {row.status for row in (before, faulty, after)} == {"failed"}


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


def test_samples_are_taken_in_turn_each_time_from_another() -> None:
    order: list[str] = []
    HostClock().rounds([lambda: order.append("a"), lambda: order.append("b")], 3)
    assert "".join(order) == "abbaab"


class Device:
    """A device of events: what is asked of it, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.now = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = -1.0

            def record(self) -> None:
                device.now += 1.0
                self.at = device.now
                device.asked.append("event")

            def synchronize(self) -> None:
                device.asked.append("wait")

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(clocks, "FLUSHED", 16)

    def zero_(self) -> None:
        self.asked.append("flush")


def test_a_sample_on_a_gpu_follows_a_flush_that_covers_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    clock = clocks.CudaClock(CPU)
    clock._buffer = device
    monkeypatch.setattr(clock, "host", lambda call: 1500.0)  # microseconds; a flush takes a millisecond here
    device.asked.clear()
    found = clock.rounds([lambda: device.asked.append("call")], 2)
    assert found == [[1.0, 1.0]]
    assert device.asked == ["flush"] * 4 + ["event", "call", "event", "wait"] + ["flush"] * 4 + [
        "event",
        "call",
        "event",
        "wait",
    ]


# Telling


def test_the_table_fits_80_columns_and_names_targets_reasons_and_variants() -> None:
    rows = [
        measured(case("forward"), ratio=1.31),
        measured(case("forward"), "triton descriptor", ratio=1.1),
        measured(case("forward"), "sdpa.flash", target=None),
        measured(case("forward"), "sdpa.cudnn", target=None, ratio=1.8),
        dataclasses.replace(
            measured(case("forward"), "sdpa.efficient", target=None, rate=None),
            status="wrong",
            reason="out is off by 1",
        ),
        measured(case("forward", causal=True), ratio=1.05),
    ]
    out = io.StringIO()
    kernel_speed.show(rows, Console(file=out, width=80))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "sdpa.efficient wrong: out is off by 1" in text
    lines = text.splitlines()
    assert any("forward d128 full" in line and "1.31" in line and "yes" in line for line in lines)
    assert any("triton descriptor" in line and "1.10" in line and " no" in line for line in lines)
    assert any("forward d128 causal" in line and "1.05" in line and " no" in line for line in lines)


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "record.json"
    measure.write(path, {"a": 1})
    with pytest.raises(TypeError):
        measure.write(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [each.name for each in path.parent.iterdir()] == ["record.json"]


def test_names_of_gpus_become_names_of_files() -> None:
    assert file_name("NVIDIA H200") == "h200"
    assert file_name("NVIDIA GeForce RTX 4090") == "geforce-rtx-4090"


def test_a_variant_of_a_kernel_is_a_column_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []

    def forward(spec: Any, inputs: Any, *, variant: str | None = None) -> Result:
        told.append(variant)
        return tiled.forward(spec, inputs)

    monkeypatch.setattr(kernel_speed, "kernel_of", lambda name: Kernel(forward, tiled.backward))
    monkeypatch.setattr(kernel_speed, "VARIANTS", {"triton": ("pointer",)})
    columns = kernel_speed.columns(["triton", "sdpa.flash"])
    assert [column.name for column in columns] == ["triton", "triton pointer", "sdpa.flash"]
    rows = kernel_speed.measure(SMALL._replace(kind="forward"), columns, CPU, HostClock(), 1)
    assert [row.name for row in rows] == ["triton", "triton pointer", "sdpa.flash"]
    assert set(told) == {None, "pointer"}
    assert [row.name for row in kernel_speed.measure(SMALL, columns, CPU, HostClock(), 1)] == [
        "triton",
        "sdpa.flash",
    ]


# The programs


def test_compiling_calls_our_own_kernels_once_in_each_case_and_minds_no_failure() -> None:
    called: list[str] = []

    def forward(*call: object) -> Result:
        called.append("forward")
        return tiled.forward(*call)

    def fail(*call: object) -> Result:
        raise RuntimeError("not today")

    columns = [
        Column("triton", "triton", Kernel(forward, tiled.backward)),
        Column("triton variant", "triton", Kernel(fail, tiled.backward)),
        Column("sdpa.flash", "sdpa.flash", Kernel(fail, tiled.backward)),
    ]
    kernel_speed.compile_cases([SMALL, SMALL._replace(kind="forward")], columns, CPU)
    assert called == ["forward", "forward"]
    assert kernel_speed.main(["--device", "cpu", "--compile", "0/9", "--kind", "decode"]) == 0


def test_what_compiles_ahead_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed.sys, "executable", shutil.which("sleep"))
    monkeypatch.setattr(kernel_speed, "__file__", "600")
    monkeypatch.setattr(kernel_speed.os, "cpu_count", lambda: 4)
    made: list[Any] = []
    popen = subprocess.Popen

    def starting(command: list[str], **rest: Any) -> Any:
        assert command[2:] == ["--quick", "--compile", f"{len(made)}/2"]
        made.append(popen([*command[:2]], **rest))
        return made[-1]

    monkeypatch.setattr(kernel_speed.subprocess, "Popen", starting)
    kernel_speed.compile_ahead(["--quick"], until=0.0)
    assert [process.returncode for process in made] == [-9, -9]


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("program", ["kernel_speed.py", "gpu.py"])
def test_without_cuda_it_says_so(program: str, run: Any) -> None:
    done = run(f"benchmarks/{program}")
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert "--device cpu" in done.stderr


def test_a_rehearsal_goes_all_the_way_and_is_no_measurement(tmp_path: Path, run: Any) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "kernels.json"
    done = run("benchmarks/kernel_speed.py", "--device", "cpu", "--json", file)
    assert done.returncode == 0, done.stderr
    assert "these figures measure nothing" in done.stdout
    recorded = json.loads(file.read_text(encoding="utf-8"))
    assert recorded["measurement"] is False
    assert recorded["stopped"] is None
    assert recorded["cases"]["planned"] == recorded["cases"]["done"]
    rows = {(row["kind"], row["name"]): row for row in recorded["rows"]}
    for kind in ("forward", "backward", "decode"):
        assert rows[kind, "triton"]["status"] == rows[kind, "sdpa.flash"]["status"] == "measured"
        assert rows[kind, "triton"]["ratio"] > 0
        assert rows[kind, "sdpa.efficient"]["status"] == "refused"

"""Two tables of the gate, compared."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if None in map(importlib.util.find_spec, ("torch", "triton")):
    pytest.skip("torch or triton is not installed", allow_module_level=True)

from gate import KernelReport
from gate_changes import Change, changes, unknown
from sass import LoopMix

LOOP = {"instructions": 500}
NAME = "sm90 dkdv 128/128 bf16 packed"


def report(loop: dict[str, Any] | None = LOOP, **fields: Any) -> dict[str, Any]:
    made = {
        "kernel": "dkdv", "arch": 90, "head_dim_qk": 128, "head_dim_v": 128, "dtype": "bf16",
        "feature": "packed", "rows": None, "block": [32, 128], "warps": 8, "registers": 200, "spills": 0,
        "error": None, "faults": [], "ok": True, "loop": loop and LOOP | loop,
    }  # fmt: skip
    return made | fields


def test_equal_tables_have_no_changes() -> None:
    assert changes([report()], [report()]) == []


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        (515, None),
        (485, None),
        (516, (True, "loop 500 → 516 instructions: +3% for the same scores")),
        (400, (False, "loop 500 → 400 instructions: -20% for the same scores")),
    ],
)
def test_a_loop_is_longer_from_three_percent_on(instructions: int, expected: tuple[bool, str] | None) -> None:
    found = changes([report({"instructions": instructions})], [report()])
    assert found == ([] if expected is None else [Change(NAME, expected[0], (expected[1],))])


def test_loops_of_other_tiles_are_compared_by_their_scores() -> None:
    doubled = report({"instructions": 900}, block=[64, 128])
    words = "loop 500 → 900 instructions, tile 32x128 → 64x128: -10% for the same scores"
    assert changes([doubled], [report()]) == [Change(NAME, False, (words,))]


def test_loops_of_more_warps_have_less_to_do() -> None:
    """Twice the warps have half of the tile each, so that 500 instructions of each are twice as many."""
    (change,) = changes([report(warps=16)], [report()])
    assert change.worse
    assert change.words == ("loop 500 → 500 instructions, warps 8 → 16: +100% for the same scores",)


@pytest.mark.parametrize(
    ("fields", "worse", "words"),
    [
        ({"spills": 26}, True, "spills 0 → 26"),
        ({"registers": 255}, False, "registers 200 → 255"),
        ({"registers": 168}, False, "registers 200 → 168"),
        ({"faults": ["ptxas: (C7515) why"], "ok": False}, True, "ptxas: (C7515) why"),
    ],
)
def test_spills_and_faults_are_worse_and_registers_are_told(
    fields: dict[str, Any], worse: bool, words: str
) -> None:
    assert changes([report(**fields)], [report()]) == [Change(NAME, worse, (words,))]


def test_fewer_spills_are_no_fault() -> None:
    assert changes([report()], [report(spills=26)]) == [Change(NAME, False, ("spills 26 → 0",))]


def test_a_kernel_that_does_not_compile_any_more_is_worse_and_has_no_registers() -> None:
    broken = report(None, error="no", faults=["no"], ok=False, registers=0)
    assert changes([broken], [report()]) == [Change(NAME, True, ("no",))]


def test_a_repaired_kernel_may_take_more_instructions() -> None:
    before = report(faults=["serialised"], ok=False)
    (change,) = changes([report({"instructions": 800})], [before])
    assert not change.worse
    assert change.words[0] == "no longer: serialised"


def test_worse_ones_come_first_and_kernels_are_told_apart_by_their_rows() -> None:
    now = [report(kernel="decode", rows=16, registers=99), report(kernel="decode", rows=64, spills=1)]
    before = [report(kernel="decode", rows=rows) for rows in (64, 16)]
    assert [(c.kernel.split()[-2], c.worse) for c in changes(now, before)] == [("64", True), ("16", False)]


def test_what_the_table_before_lacks_is_unknown_and_no_change() -> None:
    old = {key: value for key, value in report().items() if key not in ("loop", "faults", "rows")}
    assert changes([report()], [old]) == []
    assert unknown([report()], [old]) == [NAME]
    assert unknown([report(None)], [old]) == []
    assert unknown([report(arch=80)], [report()]) == [NAME.replace("sm90", "sm80")]


def test_reports_of_the_gate_have_what_is_compared() -> None:
    loop = LoopMix(9, 2, 1, *[0] * 9, 6, 1024, 2.0)  # type: ignore[call-arg]
    named, measured = ("forward", 90, 64, 64, "bf16", "causal"), (128, 0, 1, 2, ("mma",), 0.5)
    made = KernelReport(*named, (128, 64), 4, 2, *measured, loop=loop).as_json()
    twice = LoopMix(18, *[2] * 12, 1024, 2.0)  # type: ignore[call-arg]
    slower = KernelReport(*named, (128, 64), 4, 2, *measured, loop=twice)
    (change,) = changes([slower.as_json()], [made])
    assert change.words == ("loop 9 → 18 instructions: +100% for the same scores",)

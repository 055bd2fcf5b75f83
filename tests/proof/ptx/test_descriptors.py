"""The descriptor forward as PTX of Hopper, executed: its numbers, and faults planted in its waits."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import launch as descriptors
from ptx_interpreter import cases
from ptx_interpreter.cases import Case, CaseReport, report_on

pytestmark = pytest.mark.skipif(not descriptors.tried(), reason="the kernel is not for this Triton")

# Four tiles of keys for three stages: the first is used again.
CASE = Case("planted", lengths=(100, 500), variant="descriptor", backward=False)
TRY = r"mbarrier\.try_wait\.parity\.shared::cta\.b64 complete, (\[%r\d+\]), (%r\d+);"
WAIT = TRY + r"\s*@!complete bra\.uni waitLoop;"
EXPECT = r"(@%p\d+ )mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, (\[%r\d+\]), (\d+);"
ARRIVE = r"@%p\d+ mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\], 128;"
FREED = rf"wgmma\.wait_group\.sync\.aligned 0;(.*?{ARRIVE})"


def executed(change: Callable[[str], str]) -> CaseReport:
    before = cases.executed_on
    cases.executed_on = lambda arch, done: before(arch, done, lambda _, text: change(text))
    try:
        return report_on((CASE, 90, "bf16"))
    finally:
        cases.executed_on = before


def at(number: int, pattern: str, replacement: str) -> Callable[[str], str]:
    """The ``number``-th place."""

    def change(text: str) -> str:
        found = list(re.finditer(pattern, text, re.DOTALL))[number]
        return text[: found.start()] + found.expand(replacement) + text[found.end() :]

    return change


def everywhere(pattern: str, replacement: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, replacement, text)


def flipped(number: int) -> Callable[[str], str]:
    turn = r".reg .b32 other; xor.b32 other, \2, 1; waitLoop: "
    try_it = r"mbarrier.try_wait.parity.shared::cta.b64 complete, \1, other;"
    return at(number, r"waitLoop:\s*" + TRY, turn + try_it)


def test_it_is_right_and_has_no_fault() -> None:
    """Every row of both groups of warps: Triton once moved the second group's rows twice."""
    report = executed(lambda text: text)
    assert report.refused is None
    assert report.unsupported == ()
    assert [str(fault) for fault in report.faults] == []
    assert report.errors.keys() == {"out", "lse"}
    assert 0 < report.largest <= 1
    assert report.kernels == ["forward_descriptor"]


# Of the waits the first two are for Q's empty buffers, which nobody fills twice; then K's and V's by either
# consumer; then of each consumer Q's, K's and V's.
GO_ON = "mov.pred complete, -1;"
ARRIVAL = r"\1mbarrier.arrive{}.shared::cta.b64 _, \2{};"
PLANTED = [
    ("the producer does not wait for the second consumer's K", at(2, WAIT, GO_ON), {"race"}),
    ("nor for the first consumer's V", at(5, WAIT, GO_ON), {"not waited for"}),
    ("a consumer does not wait for Q", at(6, WAIT, GO_ON), {"race"}),
    ("a consumer does not wait for K", at(7, WAIT, GO_ON), {"not waited for"}),
    ("the producer has the other parity", flipped(2), {"deadlock"}),
    ("a consumer has the other parity", flipped(8), {"not waited for"}),
    ("half of K's bytes are expected", at(2, EXPECT, ARRIVAL.format(".expect_tx", ", 8192")), {"deadlock"}),
    ("no bytes of V are expected", at(3, EXPECT, ARRIVAL.format("", "")), {"not waited for"}),
    ("nobody arrives for V's bytes", at(3, EXPECT, ""), {"deadlock"}),
    ("a consumer does not give K back", at(0, ARRIVE, ""), {"deadlock"}),
    ("a consumer gives K back before it has read",
     at(0, FREED, r"\1 wgmma.wait_group.sync.aligned 0;"), {"race"}),
    ("three of four warps meet", at(-1, r"bar\.sync\s+2, 128;", "bar.sync 2, 96;"), {"misuse"}),
    ("no map is acquired", everywhere(r"@%p\d+ fence\.proxy\.tensormap.*;", ""), {"not waited for"}),
    ("nobody gives up registers", everywhere(r"setmaxnreg\.dec.*;", ""), {"deadlock"}),
    ("tiles beside their place", at(2, r"(cp\.async\.bulk\.tensor\S* \[%r\d+)\]", r"\1+64]"), {"misaligned"}),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kinds"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_planted_faults_are_found_and_blamed_on_our_lines(
    change: Callable[[str], str], kinds: set[str]
) -> None:
    report = executed(change)
    assert report.refused is None
    assert report.failed
    assert kinds <= {fault.kind for fault in report.faults}
    blamed = next(fault for fault in report.faults if fault.kind in kinds)
    assert blamed.kernel == "forward_descriptor_kernel"
    assert re.fullmatch(r"(forward_descriptor|tile)\.py:\d+( in \w+\.py:\d+)*", blamed.source)


def test_a_deadlock_names_the_mbarrier_its_waiter_and_what_is_missing() -> None:
    report = executed(at(2, EXPECT, ARRIVAL.format(".expect_tx", ", 32768")))
    stuck = [fault for fault in report.faults if fault.kind == "deadlock"]
    assert any(re.search(r"at the mbarrier at shared 0x\w+ .* wants 16384 bytes$", f.detail) for f in stuck)
    assert all("try_wait" in f.instruction or "bar" in f.instruction for f in stuck)

"""Our kernels as PTX, executed: their numbers, and faults planted in them."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Callable

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention_cases import CASES, assert_errs_little_more, build, carried_out, expected
from attnsel.backends.triton import run
from ptx_interpreter import cases
from ptx_interpreter.cases import CaseReport, report_on, wanted_cases
from ptx_interpreter.run import Executed, executed_on

SMALL = {"d": 64, "e": 64, "b": 1, "h": 2, "g": 1}


@pytest.mark.parametrize(
    ("arch", "dtype", "name"),
    [(75, torch.float16, "causal"), (80, torch.bfloat16, "sliding window")],
    ids=["sm75", "sm80"],
)
def test_forward_and_backward_are_right_and_have_no_fault(arch: int, dtype: torch.dtype, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    spec, inputs = build(dataclasses.replace(case, sizes=SMALL), dtype, scale=5)
    done: list[Executed] = []
    with executed_on(arch, done):
        actual, dout, dlse = carried_out(run.forward, run.backward, spec, inputs)
    assert [each.kernel for each in done] == ["forward", "rows", "dkdv", "dq"]
    assert [str(fault) for each in done for fault in each.faults] == []
    assert all(each.instructions > 1000 for each in done)
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    assert_errs_little_more(actual, wanted, plain, dtype)


def first_call(case: str) -> cases.Wanted:
    (wanted,) = [each for each in wanted_cases((80,), (case,)) if each[2] == "bf16"]
    return (wanted[0].calls()[0], *wanted[1:])


def changed(case: str, kernel: str, change: Callable[[str], str]) -> CaseReport:
    """The first call of a case on sm80, with the PTX of one kernel edited."""
    wanted = first_call(case)
    before = cases.executed_on
    cases.executed_on = lambda arch, done: before(
        arch, done, lambda name, text: change(text) if name == kernel else text
    )
    try:
        return report_on(wanted)
    finally:
        cases.executed_on = before


@pytest.fixture(scope="module")
def decoded() -> CaseReport:
    return report_on(first_call("pages of 16"))


def test_decode_over_pages(decoded: CaseReport) -> None:
    assert decoded.kernels == ["decode", "merge"]
    assert decoded.refused is None
    assert decoded.unsupported == ()
    assert [str(fault) for fault in decoded.faults] == []
    assert 0 < decoded.largest <= 1
    assert decoded.ok


def last(pattern: str, replacement: str) -> Callable[[str], str]:
    """The last place in the loop: what comes before may be done again by what follows."""

    def change(text: str) -> str:
        *_, found = re.finditer(pattern, text, re.MULTILINE)
        return text[: found.start()] + found.expand(replacement) + text[found.end() :]

    return change


PLANTED = [
    ("every wait deleted", lambda text: re.sub(r"cp\.async\.wait_group", "// ", text), {"not waited for"}),
    ("every barrier deleted", lambda text: re.sub(r"bar\.sync", "// ", text), {"race"}),
    ("a store 1 MB further", last(r"(st\.global.*\[ %rd\d+) \+ 0", r"\1 + 1048576"), {"out of bounds"}),
    ("a skewed matrix", last(r"(ldmatrix.*\[%r\d+)( ?\+ ?\d+)?\]", r"\1+2]"), {"misaligned"}),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kinds"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_planted_faults_are_found_and_blamed_on_our_lines(
    change: Callable[[str], str], kinds: set[str], decoded: CaseReport
) -> None:
    report = changed("pages of 16", "decode", change)
    assert kinds <= {fault.kind for fault in report.faults}
    assert report.failed
    blamed = next(fault for fault in report.faults if fault.kind in kinds)
    assert blamed.kernel == "decode_kernel"
    assert re.fullmatch(r"(forward|decode|tile)\.py:\d+( in \w+\.py:\d+)*", blamed.source)


def test_swapped_registers_of_a_product_are_found_by_the_numbers(decoded: CaseReport) -> None:
    swap = last(
        r"(mma\.sync.*\{[^}]*\}, \{ ?)(%r\d+), (%r\d+)(, %r\d+, %r\d+ ?\})",
        r"\1\3, \2\4",
    )
    report = changed("pages of 16", "decode", swap)
    assert not report.faults
    assert report.largest > 1
    assert report.failed


def test_what_is_not_executed_is_told_by_opcode() -> None:
    (wanted,) = wanted_cases((100,), ("causal, head_dim 128",), quick=True)
    report = report_on(wanted)
    assert not report.ok
    assert not report.failed
    assert "tcgen05.wait::st.sync.aligned" in report.unsupported
    assert report.kernels == []


def test_the_plain_computation_is_that_of_tiled() -> None:
    for case in cases.CASES:
        spec, inputs = cases.make(case, torch.float64)
        result = torch.randn(*inputs.q.shape[:-1], case.head_dims[1], dtype=torch.float64)
        dlse = torch.randn((inputs.q.shape[1], inputs.q.shape[0]) if spec.packed else inputs.q.shape[:3])
        exact = cases._exact(spec, inputs, result, dlse)
        plain = cases.plain(spec, inputs, torch.float64, result, dlse)
        assert exact.keys() == plain.keys()
        assert max(cases._error(plain[name], t) for name, t in exact.items()) < 1e-9, case

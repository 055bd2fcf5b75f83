"""Planted faults: what is planted where, that executing finds it, and the reasons where nothing does."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from ptx_interpreter.cases import wanted_cases
from ptx_interpreter.parse import Kernel, parse
from ptx_interpreter.planted import KINDS, Fault, Recorded, Verdict, drawn, faults_of, judged, recorded
from ptx_interpreter.survivors import explained
from ptx_programs import text_of

CP = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 16 ], 0x10"
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1, %r2}, {%r3, %r3}, {%r4, %r5}, {%r1, %r2};"
CHANGES = [
    ("barrier deleted", "bar.sync \t0;", [""]),
    ("barrier deleted", "bar.warp.sync -1;", []),
    ("wait for copies deleted", "cp.async.wait_group \t1;", [""]),
    ("wait for one group fewer", "cp.async.wait_group \t1;", ["cp.async.wait_group \t2;"]),
    ("commit of copies deleted", "cp.async.commit_group;", [""]),
    ("wait for products deleted", "wgmma.wait_group.sync.aligned 0;", [""]),
    ("commit of products deleted", "wgmma.commit_group.sync.aligned;", [""]),
    ("fence deleted", "fence.proxy.async.shared::cta;", [""]),
    ("address shifted", "ld.shared.v2.b32 {%r1, %r2}, [%r3];", ["ld.shared.v2.b32 {%r1, %r2}, [ %r3 + 8 ];"]),
    ("address shifted", "st.global.b16 [ %rd3 + 64 ], {%rs1};", ["st.global.b16 [ %rd3 + 66 ], {%rs1};"]),
    ("address shifted", f"{CP}, %r2;",
     [f"{CP}, %r2;".replace("%r1 + 0", "%r1 + 16"), f"{CP}, %r2;".replace("+ 16", "+ 32")]),
    ("address shifted", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r9+32];",
     ["ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [ %r9 + 48 ];"]),
    ("address shifted", "ld.param.b32 %r1, [kernel_param_3];", []),
    ("compare flipped", "setp.lt.s32 \t%p1, %r1, %r2;", ["setp.le.s32 \t%p1, %r1, %r2;"]),
    ("compare flipped", "@%p2 setp.ne.b32 %p1, %r1, 0;", ["@%p2 setp.eq.b32 %p1, %r1, 0;"]),
    ("compare flipped", "setp.neu.f32 %p1, %r1, %r2;", []),
    ("predicate dropped", "@!%p1 st.global.b32 [%rd1], %r1;", ["st.global.b32 [%rd1], %r1;"]),
    ("predicate dropped", f"@%p1 {CP}, %r2;", [f"{CP}, %r2;", f"@%p1 {CP};"]),
    ("predicate dropped", "@%p1 bra $L1;", []),
    ("registers swapped", MMA,
     [MMA.replace("{%r1, %r2}, {%r3", "{%r2, %r1}, {%r3"), MMA.replace("{%r4, %r5}", "{%r5, %r4}"),
      MMA.replace("{%r1, %r2};", "{%r2, %r1};")]),
    ("shuffle at another distance", "shfl.sync.bfly.b32 %r1, %r2, 4, 31, -1;",
     ["shfl.sync.bfly.b32 %r1, %r2, 2, 31, -1;", "shfl.sync.bfly.b32 %r1, %r2, 8, 31, -1;"]),
    ("shuffle at another distance", "shfl.sync.bfly.b32 %r1, %r2, 16, 31, -1;",
     ["shfl.sync.bfly.b32 %r1, %r2, 8, 31, -1;"]),
    ("shuffle at another distance", "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "before", "after"), CHANGES)
def test_what_is_planted_instead_of_a_statement(kind: str, before: str, after: list[str]) -> None:
    assert KINDS[kind](before) == after


def test_every_kind_has_an_example() -> None:
    assert {kind for kind, _, after in CHANGES if after} == set(KINDS)


def test_a_fault_stands_on_its_line_alone() -> None:
    text = "a;\nbar.sync 0;\nb;"
    assert Fault("barrier deleted", 2, "bar.sync 0;", "", "").planted(text) == "a;\n\nb;"


@pytest.fixture(scope="module")
def launches() -> list[Recorded]:
    """The forward of one small call on Hopper, whose kernel has a place of every kind."""
    wanted = next(each for each in wanted_cases((90,), ("full",)) if each[0].name == "full")
    small = dataclasses.replace(wanted[0], also=(), backward=False, lengths=(67, 201))
    return recorded((small, *wanted[1:]))


@pytest.fixture(scope="module")
def kernel(launches: list[Recorded]) -> Kernel:
    return parse(launches[0].compiled.ptx)


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_each_kind_are_found_in_the_forward(
    kind: str, launches: list[Recorded], kernel: Kernel
) -> None:
    """Of four places at least one: there are redundant barriers, fences and commits."""
    places = faults_of(launches[0].compiled.ptx, kernel)[kind]
    tried = [alternatives[-1] for alternatives in (*places[-2:], *places[:2])]
    verdicts = [judged(fault, launches) for fault in tried]
    assert not [verdict.refused for verdict in verdicts if verdict.refused]
    assert any(verdict.found for verdict in verdicts)
    waits = ("wait", "barrier", "fence", "commit of copies")
    assert any(verdict.memory for verdict in verdicts) or not kind.startswith(waits)


def test_swapped_registers_are_found_by_numbers_out_of_bounds_by_memory(
    launches: list[Recorded], kernel: Kernel
) -> None:
    places = faults_of(launches[0].compiled.ptx, kernel)
    swapped = judged(places["registers swapped"][0][0], launches)
    assert (swapped.numbers, swapped.memory, swapped.bound) == (True, (), True)
    stores = [each[0] for each in places["predicate dropped"] if "st.global" in each[0].before]
    dropped = judged(stores[-1], launches)
    assert "out of bounds" in dropped.memory
    assert dropped.lengths == (67, 201)


def test_what_changes_nothing_is_not_found_and_runs_are_the_same_each_time(
    launches: list[Recorded], kernel: Kernel
) -> None:
    i = next(i for i in kernel.instructions() if i.op.startswith("setp.lt.s32"))
    line = launches[0].compiled.ptx.split("\n")[i.line - 1].strip()
    for _ in range(2):
        verdict = judged(Fault("compare flipped", i.line, line, line, i.source), launches)
        assert not verdict.found
        assert verdict.visited


def test_the_same_seed_draws_the_same_faults_of_as_many_kinds_as_there_are(
    launches: list[Recorded], kernel: Kernel
) -> None:
    text = launches[0].compiled.ptx
    first = drawn(text, kernel, 12, "x")
    assert first == drawn(text, kernel, 12, "x")
    assert first != drawn(text, kernel, 12, "y")
    assert {fault.kind for fault in first} == set(KINDS)
    few = {kind: len(places) for kind, places in faults_of(text, kernel).items() if len(places) < 3}
    many = drawn(text, kernel, 60, "x")
    assert all(sum(fault.kind == kind for fault in many) == count for kind, count in few.items())


# -- reasons ------------------------------------------------------------------------------------------------
PUT, GET = "st.shared.b32 [%r1], %r2;", "ld.shared.b32 %r3, [%r1];"
REASONS = [
    ("barrier deleted", "bar.sync 1;", f"{PUT} bar.sync 0;\n bar.sync 1;\n {GET}", "no access"),
    ("barrier deleted", "bar.sync 1;", f"{PUT} bar.sync 0;\n {GET} bar.sync 1;\n {GET}", "only read"),
    ("barrier deleted", "bar.sync 1;", f"{PUT}\n bar.sync 1;\n {GET}", "were executed"),
    ("wait for copies deleted", "cp.async.wait_group 0;",
     f"{PUT} cp.async.wait_group 0;\n {GET}", "executed"),
    ("commit of copies deleted", "cp.async.commit_group;",
     "cp.async.commit_group;\n cp.async.commit_group; cp.async.wait_group 0;", "join the next group"),
    ("commit of copies deleted", "cp.async.commit_group;",
     f"cp.async.commit_group;\n cp.async.wait_group 0; {GET} cp.async.commit_group;", "executed"),
    ("commit of copies deleted", "cp.async.commit_group;",
     f"cp.async.commit_group;\n {GET} cp.async.commit_group; cp.async.wait_group 1;", "executed"),
    ("commit of copies deleted", "cp.async.commit_group;",
     "cp.async.commit_group;\n @%p1 bra $L1; cp.async.commit_group;\n$L1:\n cp.async.wait_group 0;",
     "executed"),
    ("compare flipped", "setp.lt.s32 %p1, %r1, %r2;", "setp.lt.s32 %p1, %r1, %r2;", None),
]  # fmt: skip


@pytest.mark.parametrize("visited", [True, False])
@pytest.mark.parametrize(("kind", "statement", "body", "reason"), REASONS)
def test_a_reason_is_read_off_the_code_around_a_fault(
    kind: str, statement: str, body: str, reason: str | None, visited: bool
) -> None:
    kernel = parse(text_of(body))
    line = next(i.line for i in kernel.instructions() if i.text == statement.rstrip(";"))
    blocks = frozenset(block.number for block in kernel.blocks) if visited else frozenset()
    why = explained(kernel, Verdict(Fault(kind, line, statement, "", ""), visited=blocks))
    if reason is None or ("executed" in reason and not visited):
        assert why is None
    else:
        assert why is not None
        assert reason in why


def test_swapped_registers_are_the_same_where_they_never_differ() -> None:
    kernel = parse(text_of(GET))
    fault = Fault("registers swapped", 1, MMA, "", "")
    assert explained(kernel, Verdict(fault, differs=False)) is not None
    assert explained(kernel, Verdict(fault, differs=True)) is None

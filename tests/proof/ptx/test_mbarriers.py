"""Mbarriers, barriers of some warps and the pool of registers: what they order, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest

from ptx_interpreter.faults import Fault
from ptx_programs import LOAD, STORE, execute

WORDS = np.arange(1536, dtype=np.uint32).reshape(384, 4)
# Thread t of warp 0 leaves its word for thread t + 32, of warp 1.
SLOTS = "and.b32 %r30, %r1, 31; shl.b32 %r30, %r30, 2; add.s32 %r30, %r30, 64;\nsetp.lt.u32 %p1, %r1, 32;\n"
PUT = "@%p1 st.shared.b32 [%r30], %r10;\n"
GET = "@!%p1 ld.shared.b32 %r20, [%r30];\n@!%p1 " + STORE
MEET = "bar.sync 0;\n"


def made(count: int, where: int = 0) -> str:
    """An mbarrier, made by thread 0."""
    init = f"@%p2 mbarrier.init.shared::cta.b64 [%r31], {count};\n"
    return f"setp.eq.u32 %p2, %r1, 0; mov.b32 %r31, {where}; {init}"


def waited(phase: str, where: int = 0, guard: str = "") -> str:
    """``guard``: the predicate of those that wait."""
    leave = f"@!{guard} bra done; " if guard else ""
    return (
        f"{{ .reg .pred ok; {leave}mov.b32 %r33, {where};\n again:\n"
        f" mbarrier.try_wait.{phase}; @!ok bra again;\n done: }}\n"
    ).replace("WHERE", "%r33")


PARITY = "parity.shared::cta.b64 ok, [WHERE], {}"
ODD, EVEN = PARITY.format(1), PARITY.format(0)
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r31];\n"
# Warp 0 stores, 32 arrivals; warp 1 waits for them and loads.
START = LOAD + SLOTS + made(32) + MEET + "setp.ge.u32 %p3, %r1, 32;\n"
WAIT = waited(EVEN, guard="%p3")


def run(body: str, threads: int = 64, registers: int = 0) -> tuple[np.ndarray, list[Fault]]:
    return execute(body, WORDS, threads=threads, blocks=2, registers=registers)


def kinds(faults: list[Fault]) -> set[str]:
    return {fault.kind for fault in faults}


def test_who_waits_sees_what_those_did_that_arrived() -> None:
    got, faults = run(START + PUT + ARRIVE + WAIT + GET)
    assert [str(fault) for fault in faults] == []
    assert got.reshape(-1, 64, 4)[:2, 32:, 0].tolist() == WORDS[:128, 0].reshape(2, 64)[:, :32].tolist()


ONCE = "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r31], {};\n"
FOUND: list[tuple[str, str, set[str]]] = [
    ("no wait", START + PUT + ARRIVE + GET, {"race"}),
    ("arrived before the store", START + ARRIVE + PUT + WAIT + GET, {"race"}),
    ("no arrival", START + PUT + WAIT + GET, {"deadlock"}),
    ("too few arrivals", START + PUT + ONCE.format(31) + WAIT + GET, {"deadlock"}),
    ("as many by one", START + PUT + "bar.warp.sync -1;\n" + ONCE.format(32) + WAIT + GET, set()),
    ("the phase before the first has ended", START + PUT + waited(ODD, guard="%p3") + ARRIVE + GET, {"race"}),
    ("the next phase", START + PUT + ARRIVE + waited(ODD, guard="%p3") + GET, {"deadlock"}),
    ("both warps arrive, a phase each",
     START + PUT + "mbarrier.arrive.shared::cta.b64 _, [%r31];\n" + waited(EVEN) + MEET + GET, {"deadlock"}),
    ("and the second phase is waited for",
     START + PUT + "mbarrier.arrive.shared::cta.b64 _, [%r31];\n" + waited(ODD) + MEET + GET, set()),
    ("too many arrivals", START + PUT + ONCE.format(33) + WAIT + GET, {"misuse"}),
    ("never made", LOAD + SLOTS + "mov.b32 %r31, 0;\n" + PUT + ARRIVE, {"uninitialised"}),
    ("made and not met",
     LOAD + SLOTS + made(32) + "setp.ge.u32 %p3, %r1, 32;\n" + PUT + ARRIVE + WAIT, {"race"}),
    ("made twice before it is used", made(7) + START + PUT + ARRIVE + WAIT + GET, set()),
    ("made anew in use", START + PUT + ARRIVE + WAIT + MEET + made(32), {"misuse"}),
    ("given up and made anew",
     START + PUT + ARRIVE + WAIT + MEET + "@%p2 mbarrier.inval.shared::cta.b64 [%r31];\n" + made(32), set()),
    ("used after it was given up",
     START + MEET + "@%p2 mbarrier.inval.shared::cta.b64 [%r31];\n" + MEET + ARRIVE, {"uninitialised"}),
    ("stored over", START + ARRIVE + WAIT + MEET + "@%p2 st.shared.b32 [4], %r10;\n", {"misuse"}),
    ("no arrivals to wait for", made(0), {"misuse"}),
    ("misaligned", made(1, 4), {"misaligned"}),
    ("beyond shared memory", made(1, 4096), {"out of bounds"}),
    ("bytes that nothing brings",
     START + PUT + "bar.warp.sync -1;\n" + ONCE.format(31)
     + "@%p2 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r31], 64;\n" + WAIT + GET, {"deadlock"}),
    ("more bytes than can be counted",
     START + "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r31], 1048576;\n", {"misuse"}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), [case[1:] for case in FOUND], ids=[case[0] for case in FOUND])
def test_faults(body: str, wanted: set[str]) -> None:
    _, faults = run(body)
    assert kinds(faults) == wanted


def test_a_deadlock_names_the_mbarrier_and_what_it_wants() -> None:
    expected = "@%p2 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r31], 48;\n"
    _, faults = run(LOAD + SLOTS + made(3, 1024) + MEET + expected + ONCE.format(2) + waited(EVEN, 1024))
    (fault,) = faults
    assert fault.kind == "deadlock"
    assert "at the mbarrier at shared 0x400" in fault.detail
    assert "wants 1 of 3 arrivals and 48 bytes" in fault.detail
    assert fault.instruction.startswith("mbarrier.try_wait.parity")
    assert fault.threads == 128


def test_phases_follow_each_other() -> None:
    """Warp 0 fills two slots in turn, four times over; warp 1 empties them."""
    body = LOAD + SLOTS + made(32, 0) + made(32, 8) + made(32, 16) + made(32, 24) + MEET
    body += "mov.b32 %r20, 0; mov.b32 %r40, 0; mov.b32 %r46, 64; @!%p1 bra $take;\n"
    step = (  # %r40 counts, %r41: the slot's mbarrier (full; empty at + 16), %r42: its phase
        "and.b32 %r41, %r40, 1; shr.u32 %r42, %r40, 1; and.b32 %r42, %r42, 1; xor.b32 %r43, %r42, 1;\n"
        "shl.b32 %r44, %r41, 7; shl.b32 %r41, %r41, 3; add.s32 %r44, %r44, %r30;\n"
    )
    try_it = "mbarrier.try_wait.parity.shared::cta.b64 ok, [{}], {}; @!ok bra again;"
    loop = "{{ .reg .pred ok;\n again:\n " + try_it + " }}\n"
    body += "$fill:\n" + step + loop.format("%r41 + 16", "%r43")
    body += "add.s32 %r45, %r10, %r40; st.shared.b32 [%r44], %r45;\n"
    body += "mbarrier.arrive.shared::cta.b64 _, [%r41];\n"
    body += "add.s32 %r40, %r40, 1; setp.lt.u32 %p3, %r40, 8; @%p3 bra $fill; bra $end;\n"
    body += "$take:\n" + step + loop.format("%r41", "%r42")
    body += "ld.shared.b32 %r45, [%r44]; mad.lo.s32 %r20, %r20, 3, %r45;\n"
    body += "mbarrier.arrive.shared::cta.b64 _, [%r41 + 16];\n"
    body += "add.s32 %r40, %r40, 1; setp.lt.u32 %p3, %r40, 8; @%p3 bra $take;\n" + STORE + "$end:\n"
    got, faults = run(body)
    assert [str(fault) for fault in faults] == []
    mine = WORDS[:128, 0].reshape(2, 64)[:, :32].astype(np.uint64)
    wanted = sum((mine + k) * 3 ** (7 - k) for k in range(8)) & 0xFFFFFFFF
    assert got[:128, 0].reshape(2, 64)[:, 32:].tolist() == wanted.tolist()
    # The filler does not wait for an empty slot and runs ahead: the phase that is waited for has long ended.
    wait = "mbarrier.try_wait.parity.shared::cta.b64 ok, [%r41 + 16], %r43; @!ok bra again;"
    assert wait in body
    _, faults = run(body.replace(wait, ""))
    assert kinds(faults) == {"deadlock"}


def test_a_state_names_the_phase_to_wait_for() -> None:
    body = START + PUT + "mbarrier.arrive.shared::cta.b64 %rd9, [%r31];\n" + MEET
    body = body.replace("], 32;", "], 64;")
    _, faults = run(body + waited("shared::cta.b64 ok, [WHERE], %rd9") + GET)
    assert not faults
    _, faults = run(body + "add.s64 %rd9, %rd9, 1;\n" + waited("shared::cta.b64 ok, [WHERE], %rd9") + GET)
    assert kinds(faults) == {"deadlock"}


def test_a_try_that_failed_is_not_a_wait() -> None:
    try_once = "{ .reg .pred ok; mov.b32 %r33, 0; mbarrier.try_wait.parity.shared::cta.b64 ok, [%r33], 0; }\n"
    later = "setp.lt.u32 %p3, %r1, 32; @%p3 bra $put; " + try_once + "bra $go;\n$put:\n"
    _, faults = run(START + later + PUT + ARRIVE + "$go:\n" + GET)
    assert kinds(faults) <= {"race", "uninitialised"}
    assert faults


# -- barriers of some warps --------------------------------------------------------------------------------
def pair(number: int, first: int) -> str:
    """Warps ``first`` and ``first + 1`` meet."""
    return (
        f"{{ .reg .pred no; .reg .b32 w; shr.u32 w, %r1, 5; sub.u32 w, w, {first}; setp.ge.u32 no, w, 2;\n"
        f" @no bra past; bar.sync {number}, 64;\n past: }}\n"
    )


def load_by(warp: int) -> str:
    return (
        f"{{ .reg .pred me; .reg .b32 w; shr.u32 w, %r1, 5; setp.eq.u32 me, w, {warp};\n"
        f" @me ld.shared.b32 %r20, [%r30]; @me {STORE} }}\n"
    )


PARTS: list[tuple[str, str, set[str]]] = [
    ("two warps of four", LOAD + SLOTS + PUT + pair(1, 0) + load_by(1), set()),
    ("another warp reads", LOAD + SLOTS + PUT + pair(1, 0) + load_by(2), {"race"}),
    ("through a warp that met both", LOAD + SLOTS + PUT + pair(1, 0) + pair(2, 1) + load_by(2), set()),
    ("met in the wrong order", LOAD + SLOTS + PUT + pair(2, 1) + pair(1, 0) + load_by(2), {"race"}),
    ("the whole block after a part", LOAD + SLOTS + PUT + pair(1, 0) + MEET + load_by(3), set()),
    ("overwritten by who did not meet the reader",
     LOAD + SLOTS + PUT + pair(1, 0) + load_by(1) + PUT, {"race"}),
    ("too few come", LOAD + pair(1, 0).replace("bar.sync 1, 64", "bar.sync 1, 96"), {"deadlock"}),
    ("too many come", LOAD + "bar.sync 1, 64;\n", {"misuse"}),
    ("no whole warps", LOAD + "bar.sync 1, 100;\n", {"misuse"}),
    ("different numbers",
     LOAD + "setp.lt.u32 %p1, %r1, 32; @%p1 bra $a; bar.sync 1, 128; bra $b;\n$a:\n bar.sync 1, 96;\n$b:\n",
     {"misuse"}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "wanted"), [case[1:] for case in PARTS], ids=[case[0] for case in PARTS])
def test_barriers_of_some_warps(body: str, wanted: set[str]) -> None:
    got, faults = run(body, threads=128)
    assert kinds(faults) == wanted
    if not wanted:
        reader = got.reshape(-1, 128, 4)[:2, :, 0]
        assert np.isin(WORDS[:32, 0], reader[0]).all()


def test_arriving_orders_one_way() -> None:
    """bar.arrive: who waits sees what the arriving warp did, not the other way round."""
    split = "@!%p1 bra $wait; bar.arrive 1, 64; bra $on;\n$wait:\n bar.sync 1, 64;\n$on:\n"
    got, faults = run(LOAD + SLOTS + PUT + split + GET)
    assert not faults
    assert got[:64, 0].tolist()[32:] == WORDS[:32, 0].tolist()
    back = "@!%p1 st.shared.b32 [%r30], %r10;\n" + split + "@%p1 ld.shared.b32 %r20, [%r30];\n@%p1 " + STORE
    _, faults = run(LOAD + SLOTS + back)
    assert kinds(faults) == {"race"}


# -- registers and leaders ---------------------------------------------------------------------------------
GROUPS = "shr.u32 %r30, %r1, 7; setp.eq.u32 %p1, %r30, 0; @%p1 bra $first;\n"
OTHERS = "setmaxnreg.dec.sync.aligned.u32 {}; bra $end;\n$first:\n"
MORE = "setmaxnreg.inc.sync.aligned.u32 {};\n$end:\n"
REGISTERS: list[tuple[str, str, int, set[str]]] = [
    ("what others give up", GROUPS + OTHERS.format(120) + MORE.format(264 - 8), 168, set()),
    ("more than others give up", GROUPS + OTHERS.format(160) + MORE.format(192), 168, {"deadlock"}),
    ("nobody gives", GROUPS + "bra $end;\n$first:\n" + MORE.format(176), 168, {"deadlock"}),
    ("more than there are", GROUPS + OTHERS.format(24) + MORE.format(264), 168, {"misuse"}),
    ("down to more", GROUPS + OTHERS.format(176) + MORE.format(168), 168, {"misuse"}),
    ("up to fewer", GROUPS + OTHERS.format(24) + MORE.format(96), 168, {"misuse"}),
    ("odd numbers", GROUPS + OTHERS.format(100) + MORE.format(168), 168, {"misuse"}),
    ("nothing is known", GROUPS + OTHERS.format(40) + MORE.format(40), 0, {"misuse", "deadlock"}),
    ("part of a warpgroup",
     "setp.lt.u32 %p1, %r1, 32; @%p1 bra $end; setmaxnreg.dec.sync.aligned.u32 40;\n$end:\n", 168,
     {"divergence"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "registers", "wanted"), [case[1:] for case in REGISTERS], ids=[case[0] for case in REGISTERS]
)
def test_registers_go_from_group_to_group(body: str, registers: int, wanted: set[str]) -> None:
    _, faults = run(body, threads=384, registers=registers)
    assert kinds(faults) == wanted


@pytest.mark.parametrize("members", [0xFFFFFFFF, 0x80000000, 0x00F00000])
def test_the_leader_is_one_of_the_members(members: int) -> None:
    body = f"mov.b32 %r30, {members}; shr.u32 %r31, %r30, %r1; and.b32 %r31, %r31, 1;\n"
    body += "setp.ne.b32 %p1, %r31, 0; mov.b32 %r20, 0; mov.b32 %r21, 77; @!%p1 bra $out;\n"
    body += (
        "elect.sync %r21|%p2, %r30; selp.b32 %r20, 1, 0, %p2;\n$out:\n st.global.v2.b32 [%rd5], {%r20, %r21};"
    )
    got, faults = execute(body, WORDS, threads=32)
    assert not faults
    chosen = np.array([members >> lane & 1 for lane in range(32)], bool)
    assert got[:32, 0].sum() == 1
    leader = int(np.argmax(got[:32, 0]))
    assert chosen[leader]
    assert (got[:32, 1] == np.where(chosen, leader, 77)).all()
    body = body.replace("@!%p1 bra $out;", "setp.lt.u32 %p3, %r1, 3; @%p3 bra $out;")
    _, faults = execute(body, WORDS, threads=32)
    assert ("divergence" in kinds(faults)) == bool(members & 7)

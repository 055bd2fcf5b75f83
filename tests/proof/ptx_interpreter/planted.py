"""Faults planted in the PTX of our kernels, one at a time, and whether executing it finds them.

A fault is a statement replaced by another on its line. ``Recorded`` keeps what a launch of a case found and
left in memory, so that a mutant costs one launch: it is executed from the same memory, and found by *memory*
where the executor reports a fault, by *numbers* where any bit of what it leaves differs. Executing is
deterministic. ``bound`` says whether a result also leaves the bound that ``cases.py`` holds it to.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import pool
from attnsel.backends.triton.launch import Launch
from ptx_interpreter.cases import DTYPES, Call, Wanted
from ptx_interpreter.parse import WIDTH, Kernel, parse
from ptx_interpreter.run import (
    Compiled,
    Executed,
    bytes_of,
    carry_out,
    compile_launch,
    launches_given_to,
    program_of,
)
from ptx_interpreter.tensors import empty_is_nan
from ptx_interpreter.translate import translate

# A mutant that runs away is stopped: it may take so many basic blocks more than the kernel as it is.
_MORE_STEPS = 300
# Faults that a call of other lengths may show: they are executed in all; others in the first few.
_OF_LENGTHS = ("compare flipped", "predicate dropped", "address shifted")
_FEW = 5
# The result that an argument of a launch holds.
_RESULTS = {
    "Out": "out",
    "Lse": "lse",
    "MaxLogit": "max_logit",
    "DQ": "dq",
    "DK": "dk",
    "DV": "dv",
    "DBias": "dbias",
    "DSinks": "dsoftmax_offset",
}
# Launches whose buffers are no results, and the launches that read them.
_READERS = {"decode": ("merge",), "rows": ("dkdv", "dq", "dbias")}

# -- what can be planted ------------------------------------------------------------------------------------
_OPPOSITE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_MEMORY = re.compile(r"(?:ld|st)\.(?:global|shared)\b|ldmatrix|stmatrix|cp\.async\.c[ag]")
_PLACE = re.compile(r"\[\s*([%\w]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
_DISTANCE = re.compile(r"(shfl\.sync\.(?:bfly|up|down)\.b32\s+[^,]+,\s*[^,]+,\s*)(\d+)")
_GROUP = re.compile(r"\{([^{}]*)\}")


def _deleted(pattern: str) -> Callable[[str], list[str]]:
    found = re.compile(pattern)
    return lambda code: [""] if found.match(code) else []


def _one_group_fewer(code: str) -> list[str]:
    found = re.match(r"(cp\.async\.wait_group\s+)(\d+)", code)
    return [f"{found[1]}{int(found[2]) + 1};"] if found else []


def _address_shifted(code: str) -> list[str]:
    """By one access: it stays aligned, and reads or writes a neighbour's."""
    if not _MEMORY.search(code):
        return []
    step = _bytes_at_once(code)
    made = []
    for place in _PLACE.finditer(code):
        offset = int(place[2] or "0", 0) + step
        made.append(f"{code[: place.start()]}[ {place[1]} + {offset} ]{code[place.end() :]}")
    return made


def _bytes_at_once(code: str) -> int:
    if "matrix" in code:
        return 16
    if copy := re.search(r"cp\.async.*\],\s*(0x\w+|\d+)", code):
        return int(copy[1], 0)
    op = code.split()[1 if code.startswith("@") else 0].split(".")
    count = next((int(part[1:]) for part in op if re.fullmatch(r"v[248]", part)), 1)
    return count * WIDTH[op[-1]]


def _compare_flipped(code: str) -> list[str]:
    found = re.match(r"(@!?\S+\s+)?setp\.(lt|le|gt|ge|eq|ne)\.", code)
    if not found:
        return []
    return [f"{found[1] or ''}setp.{_OPPOSITE[found[2]]}.{code[found.end() :]}"]


def _predicate_dropped(code: str) -> list[str]:
    """The guard of an access, or the length of a copy that its bound made short."""
    made = []
    if code.startswith("@") and _MEMORY.search(code):
        made.append(code.split(None, 1)[1])
    if found := re.search(r"(cp\.async\.c[ag].*\],\s*(?:0x\w+|\d+)),\s*%\w+", code):
        made.append(code[: found.start()] + found[1] + code[found.end() :])
    return made


def _registers_swapped(code: str) -> list[str]:
    """Two of one operand of a product."""
    if not re.search(r"\bmma\.sync|wgmma\.mma_async", code):
        return []
    made = []
    for group in _GROUP.finditer(code):
        names = [name.strip() for name in group[1].split(",")]
        for k in range(len(names) - 1):
            if names[k] != names[k + 1]:
                other = [*names[:k], names[k + 1], names[k], *names[k + 2 :]]
                made.append(f"{code[: group.start()]}{{{', '.join(other)}}}{code[group.end() :]}")
    return made


def _names(code: str) -> list[str]:
    return [name.strip() for group in _GROUP.finditer(code) for name in group[1].split(",")]


def _shuffled_elsewhere(code: str) -> list[str]:
    found = _DISTANCE.match(code)
    if not found:
        return []
    distance = int(found[2])
    return [
        f"{found[1]}{other}{code[found.end() :]}" for other in (distance // 2, 2 * distance) if 0 < other < 32
    ]


KINDS: dict[str, Callable[[str], list[str]]] = {
    "barrier deleted": _deleted(r"(bar|barrier)(\.cta)?\.sync\s"),
    "wait for copies deleted": _deleted(r"cp\.async\.wait_"),
    "wait for one group fewer": _one_group_fewer,
    "commit of copies deleted": _deleted(r"cp\.async\.commit_group"),
    "wait for products deleted": _deleted(r"wgmma\.wait_group"),
    "commit of products deleted": _deleted(r"wgmma\.commit_group"),
    "fence deleted": _deleted(r"fence\.proxy\.async"),
    "address shifted": _address_shifted,
    "compare flipped": _compare_flipped,
    "predicate dropped": _predicate_dropped,
    "registers swapped": _registers_swapped,
    "shuffle at another distance": _shuffled_elsewhere,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A statement of the PTX and what stands there instead."""

    kind: str
    line: int
    before: str
    after: str
    source: str  # of ours: file.py:line, and the calls it was inlined at

    def planted(self, text: str) -> str:
        lines = text.split("\n")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


def faults_of(text: str, kernel: Kernel) -> dict[str, list[list[Fault]]]:
    """By kind the places where there is one, each with its alternatives."""
    sources = {i.line: i.source for i in kernel.instructions()}
    made: dict[str, list[list[Fault]]] = {}
    for number, line in enumerate(text.split("\n"), 1):
        code = line.partition("//")[0].strip()
        if number not in sources or not code:
            continue
        for kind, change in KINDS.items():
            if found := [Fault(kind, number, code, after, sources[number]) for after in change(code)]:
                made.setdefault(kind, []).append(found)
    return made


def drawn(text: str, kernel: Kernel, count: int, seed: str) -> list[Fault]:
    """So many faults of a kernel, of as many kinds as there are; the same for the same ``seed``."""
    places = faults_of(text, kernel)
    chance = random.Random(seed)
    left = {kind: chance.sample(places[kind], len(places[kind])) for kind in KINDS if kind in places}
    made: list[Fault] = []
    while len(made) < count and left:
        for kind in chance.sample(sorted(left), len(left)):
            made.append(chance.choice(left[kind].pop()))
            if not left[kind]:
                del left[kind]
    return made[:count]


# -- launches to plant them in ------------------------------------------------------------------------------
@dataclass(slots=True)
class Recorded:
    """One launch of a call, with the bytes of its tensors before and after it."""

    call: Call
    launch: Launch
    compiled: Compiled
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    done: Executed
    later: list[Recorded] = field(default_factory=list)  # of the call: what reads this one's buffers

    def restore(self) -> None:
        for name, kept in self.before.items():
            bytes_of(self.launch.args[name]).copy_(kept)

    def changed(self) -> list[str]:
        """Arguments that hold other bytes than the kernel as it is left there."""
        return [
            name
            for name, kept in self.after.items()
            if not torch.equal(bytes_of(self.launch.args[name]), kept)
        ]


def recorded(wanted: Wanted) -> list[Recorded]:
    """Every launch of every call of a case, executed as it is."""
    case, arch, dtype = wanted
    made: list[Recorded] = []
    for each in case.calls():
        call = Call.of(each, arch, DTYPES[dtype])
        of_call: list[Recorded] = []

        def keep(launch: Launch, call: Call = call, of_call: list[Recorded] = of_call) -> None:
            compiled = compile_launch(launch, arch)
            before = _bytes_of_all(launch)
            done = carry_out(launch, compiled, program_of(compiled.ptx))
            if done.faults:
                raise RuntimeError(f"{launch.name} has faults without any planted: {done.faults[0]}")
            one = Recorded(call, launch, compiled, before, _bytes_of_all(launch), done)
            for earlier in of_call:
                if launch.name in _READERS.get(earlier.launch.name, ()):
                    earlier.later.append(one)
            of_call.append(one)

        with launches_given_to(keep, arch), empty_is_nan():
            call.carried_out()
        made += of_call
    return made


def _bytes_of_all(launch: Launch) -> dict[str, Tensor]:
    return {name: bytes_of(t).clone() for name, t in launch.args.items() if isinstance(t, Tensor)}


# -- whether it is found ------------------------------------------------------------------------------------
@dataclass(slots=True)
class Verdict:
    """What executing a mutant showed, in the first call that showed anything."""

    fault: Fault
    numbers: bool = False  # a bit differs
    bound: bool = False  # and a result errs more than is allowed
    memory: tuple[str, ...] = ()  # kinds of what was reported
    lengths: tuple[int, int] | None = None  # of that call
    refused: str | None = None  # the executor's words, where it does not take the mutant
    visited: frozenset[int] = frozenset()  # of a survivor: the kernel's basic blocks that some call runs
    differs: bool | None = None  # of a survivor: whether its statement ever does; see ``_witness``

    @property
    def found(self) -> bool:
        return self.numbers or bool(self.memory)


def judged(fault: Fault, launches: list[Recorded]) -> Verdict:
    """Execute a mutant in one launch after the other, all of one PTX text, until it is found."""
    verdict = Verdict(fault)
    try:
        program = translate(parse(fault.planted(launches[0].compiled.ptx)))
        if fault.kind not in _OF_LENGTHS:
            # The largest reaches the most of it.
            launches = [*launches[:_FEW], max(launches, key=lambda one: one.done.instructions)]
        for one in launches:
            one.restore()
            done = carry_out(one.launch, one.compiled, program, 2 * one.done.steps + _MORE_STEPS)
            changed = one.changed()
            verdict.memory = tuple(sorted({each.kind for each in done.faults}))
            verdict.numbers = bool(changed)
            if verdict.found:
                verdict.lengths = one.call.case.lengths
                verdict.bound = bool(changed) and _out_of_bound(one, changed)
                return verdict
    except Exception as error:  # what a mutant does to the executor is not foreseen
        verdict.refused = pool.words_of(error)
        return verdict
    verdict.visited = frozenset().union(*(one.done.visited for one in launches))
    if witness := _witness(fault):
        verdict.differs = _seen(fault, witness, launches)
    return verdict


def _out_of_bound(one: Recorded, changed: list[str]) -> bool:
    actual = _results(one.launch)
    if not set(changed) <= set(_RESULTS):
        for reader in one.later:
            program = program_of(reader.compiled.ptx)
            carry_out(reader.launch, reader.compiled, program, 2 * reader.done.steps + _MORE_STEPS)
            actual |= _results(reader.launch)
    return not max(one.call.errors(actual).values(), default=0.0) <= 1


def _results(launch: Launch) -> dict[str, Tensor]:
    """The results of a call that a launch writes."""
    if launch.name == "rows":
        return {"dsoftmax_offset": t.sum((1, 2))} if (t := launch.args["DSinks"]) is not None else {}
    made = {}
    for name, result in _RESULTS.items():
        t = launch.args.get(name)
        if t is not None and not (launch.name == "decode" and result in ("out", "lse")):
            made[result] = t.amax((1, 2)) if name == "MaxLogit" else t
    return made


# A statement that reports a fault when it is executed: a write through the null pointer.
_EXECUTED = "st.global.b32 [0], 0;"


def _witness(fault: Fault) -> str | None:
    """Statements that report where a mutant computes something else than the kernel: other results, operands
    that are equal, a guard that is false, a copy that is shorter than its place. None for other kinds."""
    code, begin = fault.before, "{ .reg .pred %seen; "
    if fault.kind in ("registers swapped", "address shifted") and (both := _twice(fault)):
        return both
    if fault.kind == "registers swapped":
        pairs = zip(_names(code), _names(fault.after), strict=True)
        a, b = next((x, y) for x, y in pairs if x != y)
        return f"{begin}setp.ne.b32 %seen, {a}, {b}; @%seen {_EXECUTED} }}"
    if fault.kind == "compare flipped":
        op, operands = re.search(r"(setp\.\S+)\s+([^;]*)", code).groups()
        if _OPPOSITE[op.split(".")[1]] in ("eq", "ne"):
            return _EXECUTED
        _, a, b, *_ = operands.split(", ")
        return f"{begin}setp.eq.{op.split('.')[-1]} %seen, {a}, {b}; @%seen {_EXECUTED} }}"
    if fault.kind == "predicate dropped":
        if code.startswith("@") and not fault.after.startswith("@"):
            guard = code[1:].split(None, 1)[0]
            return f"@{guard[1:] if guard.startswith('!') else '!' + guard} {_EXECUTED}"
        size, given = re.search(r"\],\s*(0x\w+|\d+),\s*(%\w+)", code).groups()
        return f"{begin}setp.lt.u32 %seen, {given}, {size}; @%seen {_EXECUTED} }}"
    return None


def _twice(fault: Fault) -> str | None:
    """The statement and its mutant, one after the other into registers of their own, which are compared. For
    those that write a vector of 32 bits each and nothing else."""
    vector = re.compile(r"((?:ldmatrix|mma\.sync|ld\.shared\.v[24]\.b32)\S*\s+)\{([^}]*)\}(.*)", re.DOTALL)
    forms = [vector.fullmatch(code.strip()) for code in (fault.before, fault.after)]
    if None in forms:
        return None
    made, count = [], len(forms[0][2].split(","))
    for number, form in enumerate(forms):
        own = ", ".join(f"%twice{number}_{k}" for k in range(count))
        made.append(f".reg .b32 {own}; {form[1]}{{{own}}}{form[3]}")
    compared = (f"setp.ne.b32 %seen, %twice0_{k}, %twice1_{k}; @%seen {_EXECUTED}" for k in range(count))
    return f"{{ .reg .pred %seen; {' '.join((*made, *compared))} }}"


def _seen(fault: Fault, statements: str, launches: list[Recorded]) -> bool:
    """Whether statements before the fault's place report anything, in any of the launches."""
    there = Fault(fault.kind, fault.line, fault.before, f"{statements} {fault.before}", fault.source)
    program = translate(parse(there.planted(launches[0].compiled.ptx)))
    for one in launches:
        one.restore()
        if carry_out(one.launch, one.compiled, program).faults:
            return True
    return False


# -- many of them -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Part:
    """Faults of every kernel of a case, on one architecture."""

    wanted: Wanted
    each: int  # faults of one kernel
    seed: int

    @property
    def name(self) -> str:
        case, arch, dtype = self.wanted
        return f"sm{arch} {dtype} {case.name}"


def examined(part: Part) -> list[tuple[str, Verdict, Kernel | None]]:
    """The kernels' names, what became of each fault and, of survivors, the kernel as it is."""
    torch.set_num_threads(1)
    made: list[tuple[str, Verdict, Kernel | None]] = []
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
        for launches in _most_called(recorded(part.wanted)):
            name, text = launches[0].launch.name, launches[0].compiled.ptx
            kernel = parse(text)
            for fault in drawn(text, kernel, part.each, f"{part.seed} {part.name} {name}"):
                verdict = judged(fault, launches)
                made.append((name, verdict, None if verdict.found else kernel))
    return made


def _most_called(launches: list[Recorded]) -> list[list[Recorded]]:
    """By kernel, the launches of the PTX that most calls share: Triton makes another for some lengths."""
    by_text: dict[tuple[str, str], list[Recorded]] = {}
    for one in launches:
        by_text.setdefault((one.launch.name, one.compiled.ptx), []).append(one)
    most: dict[str, list[Recorded]] = {}
    for (name, _), of_text in by_text.items():
        if len(of_text) > len(most.get(name, ())):
            most[name] = of_text
    return list(most.values())

"""Why a planted fault that nothing showed is none: rules that a program checks, then sentences read by hand.

A rule looks at the code around the fault, or at what ``planted.py`` saw while executing it. What no rule
explains is looked up in ``READ`` by its kind and the line of ours that it was compiled from; what is not
there either is a hole.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from pathlib import Path

import attnsel.backends
from ptx_interpreter.parse import BARRIER, BRANCH, RETURN, BasicBlock, Instruction, Kernel
from ptx_interpreter.planted import Verdict

_READS = re.compile(r"ld\.shared|ldmatrix|wgmma\.mma_async")
_WRITES = re.compile(r"st\.shared|stmatrix|cp\.async\.c[ag]")
_FENCE = re.compile(r"fence\.proxy\.async")
_PRODUCTS_WAIT, _PRODUCTS_COMMIT = re.compile(r"wgmma\.wait"), re.compile(r"wgmma\.commit")
_WAIT, _COMMIT = re.compile(r"cp\.async\.wait"), re.compile(r"cp\.async\.commit")


def explained(kernel: Kernel, verdict: Verdict) -> str | None:
    """A reason why the survivor computes what the kernel does; None where no rule has one."""
    rules = {
        "barrier deleted": _barrier,
        "wait for copies deleted": _wait,
        "wait for one group fewer": _wait,
        "wait for products deleted": _wait_for_products,
        "commit of copies deleted": _commit,
        "commit of products deleted": _commit,
        "fence deleted": _fence,
        "registers swapped": _equal_results,
        "address shifted": _equal_results,
    }
    rule = rules.get(verdict.fault.kind)
    return rule(kernel, verdict) if rule else None


# -- rules --------------------------------------------------------------------------------------------------
def _barrier(kernel: Kernel, verdict: Verdict) -> str | None:
    """Two intervals become one: harmless where the accesses of both may come in any order."""
    sides = [list(_until_barrier(kernel, verdict.fault.line, step)) for step in (-1, 1)]
    accesses = [[i for i in side if _READS.match(i.op) or _WRITES.match(i.op)] for side in sides]
    for side, told in zip(accesses, ("before", "after"), strict=True):
        if not side:
            return f"redundant: no access to shared memory between it and the barriers {told} it"
    if not any(_WRITES.match(i.op) for side in accesses for i in side):
        return "redundant: shared memory is only read between the barriers before and after it"
    if all(_run(kernel, i, verdict) for side in accesses for i in side):
        return (
            "redundant: all accesses between the barriers before and after it were executed without it, and "
            "no two warps met at a byte that one of them writes"
        )
    return None


def _wait(kernel: Kernel, verdict: Verdict) -> str | None:
    """What a copy under way may not be met by, the executor reports: any access to its bytes."""
    following = list(_until_next(kernel, verdict.fault.line, _WAIT))
    accesses = [i for i in following if _READS.match(i.op) or _WRITES.match(i.op)]
    if all(_run(kernel, i, verdict) for i in accesses):
        return (
            "redundant: what comes until the next wait or the end was executed without it, and touches no "
            "byte of a copy under way"
        )
    return None


def _wait_for_products(kernel: Kernel, verdict: Verdict) -> str | None:
    """A result under way is NaN to whoever reads it, and an operand that is overwritten is reported."""
    if all(_run(kernel, i, verdict) for i in _until_next(kernel, verdict.fault.line, _PRODUCTS_WAIT)):
        return (
            "redundant: what comes until the next wait or the end was executed without it, reads no result "
            "and overwrites no operand"
        )
    return None


def _commit(kernel: Kernel, verdict: Verdict) -> str | None:
    """They join the next group: the same where waits are for all groups and that group is committed."""
    of_copies = "copies" in verdict.fault.kind
    wait, commit = (_WAIT, _COMMIT) if of_copies else (_PRODUCTS_WAIT, _PRODUCTS_COMMIT)
    waits = [i for i in kernel.instructions() if wait.match(i.op)]
    if all(i.text.split()[-1] in ("0", "cp.async.wait_all") for i in waits):
        first = _first_of(kernel, verdict.fault.line, (wait, commit))
        if first and not any(wait.match(i.op) for i in first):
            what = "copies" if of_copies else "products"
            return f"its {what} join the next group, which every path commits before it waits for all groups"
    if all(_run(kernel, i, verdict) for i in _until_next(kernel, verdict.fault.line, commit)):
        return (
            "redundant: what comes until the next commit or the end was executed without it, and needs "
            "nothing that was not waited for"
        )
    return None


def _fence(kernel: Kernel, verdict: Verdict) -> str | None:
    """A product that reads bytes without a fence since they were written is reported."""
    following = _until_next(kernel, verdict.fault.line, _FENCE)
    products = [i for i in following if i.op.startswith("wgmma.mma_async")]
    if all(_run(kernel, i, verdict) for i in products):
        return (
            "redundant: all products before the next fence were executed without it, and read only what "
            "another fence made visible"
        )
    return None


def _equal_results(kernel: Kernel, verdict: Verdict) -> str | None:
    """What ``planted.py`` saw when it executed both."""
    if verdict.differs is False:
        return (
            "its results are the same whenever it runs: an accumulator that begins with zeros, or what lies "
            "past the head dimension or the sequence"
        )
    return None


def _run(kernel: Kernel, i: Instruction, verdict: Verdict) -> bool:
    """Whether some call executes an instruction."""
    return _block_of(kernel, i.line).number in verdict.visited


def _block_of(kernel: Kernel, line: int) -> BasicBlock:
    return next(
        b for b in kernel.blocks if any(i.line == line for i in (*b.body, *([b.end] if b.end else [])))
    )


def _until_barrier(kernel: Kernel, line: int, step: int) -> Iterator[Instruction]:
    """Instructions that may run between the one at a line and the next barrier, or (-1) the one before."""
    number = _block_of(kernel, line).number
    edges = _edges(kernel, barriers=False)
    if step > 0:
        todo = [number + 1] if number + 1 < len(kernel.blocks) else []
    else:
        todo, edges = [number], [(b, a) for a, b in edges]
    for at in _reached(todo, edges):
        yield from kernel.blocks[at].body


def _until_next(kernel: Kernel, line: int, stop: re.Pattern[str]) -> Iterator[Instruction]:
    """Instructions that may run after a line and before one of an opcode, on all paths."""
    block = _block_of(kernel, line)
    edges = _edges(kernel, barriers=True)
    todo = [(block.number, [i for i in block.body if i.line > line])]
    seen: set[int] = set()
    while todo:
        at, body = todo.pop()
        for i in body:
            if stop.match(i.op):
                break
            yield i
        else:
            following = {to for begin, to in edges if begin == at} - seen
            seen |= following
            todo += [(to, kernel.blocks[to].body) for to in following]


def _reached(todo: list[int], edges: list[tuple[int, int]]) -> set[int]:
    seen: set[int] = set()
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.add(at)
            todo += [to for begin, to in edges if begin == at]
    return seen


def _edges(kernel: Kernel, barriers: bool) -> list[tuple[int, int]]:
    """From which basic block to which a thread goes; over barriers or not."""
    made = []
    for block in kernel.blocks:
        op = "" if block.end is None else block.end.op
        always = block.end is not None and block.end.guard is None
        if BRANCH.fullmatch(op):
            made.append((block.number, block.target))
        stops = always and (BRANCH.fullmatch(op) or RETURN.fullmatch(op))
        if stops or (BARRIER.fullmatch(op) and not barriers):
            continue
        if block.number + 1 < len(kernel.blocks):
            made.append((block.number, block.number + 1))
    return made


def _first_of(kernel: Kernel, line: int, patterns: tuple[re.Pattern[str], ...]) -> list[Instruction]:
    """What of some instructions comes first after a line, on each path."""
    block = _block_of(kernel, line)
    edges = _edges(kernel, barriers=True)
    found, seen = [], set()
    todo = [(block.number, line)]
    while todo:
        at, after = todo.pop()
        body = [i for i in kernel.blocks[at].body if i.line > after and any(p.match(i.op) for p in patterns)]
        if body:
            found.append(body[0])
            continue
        for begin, to in edges:
            if begin == at and to not in seen:
                seen.add(to)
                todo.append((to, 0))
    return found


NO_LINE = "several lines"
_KERNELS = Path(attnsel.backends.__file__).parent / "triton"


# -- read by hand -------------------------------------------------------------------------------------------
def ours(source: str) -> str:
    """The text of the innermost line of ours that a statement was compiled from; NO_LINE if of several."""
    for place in source.split(" in "):
        name, _, number = place.partition(":")
        file = _KERNELS / name
        if file.exists() and number != "0":
            return linecache.getline(str(file), int(number)).strip()
    return NO_LINE


# Kernel, kind, whether the statement ever computes something else (``Verdict.differs``), part of the line of
# ours, pattern of the statement: why the fault changes nothing.
READ: tuple[tuple[str, str, bool | None, str, str, str], ...] = (
    (".*", "compare flipped", True, "", r"setp\.(eq|ne)\.b32",
     "several threads hold the value that is stored: it says which of them stores it"),
    (".*", "predicate dropped", True, "", r"@\S+ st\.",
     "the threads it let through write the same value, or where nobody reads: another value is a race"),
    (".*", "predicate dropped", False, "", r"@\S+ (ld|st)\.shared",
     "the guard holds for every thread: the block has no more than it counts"),
    ("forward|dq", "compare flipped", False, "m0 < len_q", r"setp\.(lt|ge)",
     "no block of a dense call begins where its queries end"),
    ("dkdv", "compare flipped", False, "for r in range(first_head, last_head)", r"setp\.(gt|lt|ge|le)",
     "a share of a group has at least one head"),
    ("dkdv|dq|dbias|forward|decode", "compare flipped", False, ">= threshold", r"setp\.(lt|ge)",
     "it keeps or drops otherwise where a random word is the threshold itself, one in 2^32: no call has one"),
    ("dkdv", "compare flipped", False, "n0 < len_kv", r"setp\.(lt|ge)",
     "no block of a dense call begins where its keys end"),
    ("dkdv|dbias", "compare flipped", False, NO_LINE, r"setp\.(lt|ge)\.s32",
     "n0 < len_kv: no block of a dense call begins where its keys end"),
    ("dbias", "compare flipped", False, "for i in range(0, batch * heads)", r"setp\.(gt|lt|ge|le)",
     "there is at least one sequence and one head"),
    ("dkdv", "compare flipped", True, "for r in range(first_head, last_head)", r"setp\.(lt|ge)",
     "a row past the queries has p = 0, and a column past the keys is set to zero in the end"),
    ("decode|forward", "compare flipped", False, "tl.log2(", r"2139095040|0f00800000",
     "the sum is neither infinite nor the least normal number: its largest term is 1"),
    ("merge", "compare flipped", False, "real = row < len_q", r"setp\.(lt|ge)",
     "no program of a dense call has a row past the last"),
    ("merge", "shuffle at another distance", None, "peak = tl.max(all2, 0)", "shfl",
     "the peak is a base for exponents and cancels; that of some of the parts does as well"),
    (".*", "compare flipped", True, "for n in range(begin, end, BLOCK_N)", r"setp\.(lt|ge|gt|le)\.[su]",
     "one tile more than the masked loop has, all of it masked: it adds zeros"),
    (".*", "compare flipped", True, "for counted in range(first, last, BLOCK_", r"setp\.(lt|ge|gt|le)\.[su]",
     "one tile more than the masked loop has, all of it masked: it adds zeros"),
    ("dkdv", "compare flipped", True, "lse2 = tl.load(Lse2 + rows, mask=rows < len_q", r"setp\.(lt|ge)",
     "the row behind the last has zeros for q, dout and delta: whatever its p is, it adds zeros"),
    ("dbias", "compare flipped", True, "(rows < len_q) & (cols < len_kv)", r"setp\.(lt|ge)",
     "the column behind the last key is hidden by its bound as well, and the row behind the last has an LSE "
     "of +inf: p is 0"),
    (".*", "compare flipped", True, "tl.where(cols < len_kv, x,", r"setp\.(lt|ge)",
     "the bound on the right hides the column behind the last key as well"),
    ("forward|decode|dkdv|dq", "compare flipped", True, "(rows < len_q) & (cols < len_kv)", r"setp\.(lt|ge)",
     "where there is a mask: it is loaded for the call's own columns, and hides all others"),
    (".*", "compare flipped", True, "mask=(first + row < length)[:, None], other=0.0", r"setp\.(lt|ge)",
     "the row behind the last is not loaded: in the last sequence it lies outside of the tensor, and that is "
     "reported. What else the comparison decides is masked where it is stored"),
    ("dkdv|dq", "address shifted", True, "& (col < WIDTH)[None, :]", "ldmatrix",
     "what it reads are zeros past the head dimension, where the other factor has zeros as well"),
    ("dkdv|dq", "address shifted", True, "tl.where(alive, q, tl.zeros_like(q))", "ldmatrix",
     "what it reads are zeros past the head dimension, where the other factor has zeros as well"),
)  # fmt: skip


def read(kernel: str, kind: str, differs: bool | None, line: str, statement: str) -> str | None:
    """What was read by hand about a fault of a kernel, at a line of ours."""
    for of_kernel, of_kind, differing, part, pattern, why in READ:
        same = re.fullmatch(of_kernel, kernel) and (kind, differs) == (of_kind, differing)
        if same and part in line and re.search(pattern, statement):
            return why
    return None

"""Ranks that compute together while one of them goes wrong: no wrong number, no hang, no unnamed error.

A case is a launch of two or four processes (``rank_launch.py``) that make some calls over one group. One rank
meets a fault: a kernel or an exchange that raises, dies or is late; input that cannot be right, or is not
that of the others; a call left out, made twice or out of order. It swallows what it is told and goes on.
"""

from __future__ import annotations

import json
import pprint
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from harness import Case, Target, Wrong
from hypothesis import strategies as st
from rank_launch import BAD_INPUT, ERRORS, FEATURES, OTHER_INPUT, case_of, launch, program

import context_parallel_cases as cases

# Seconds, timeouts of the process group: so long that a rank which waits for it hangs, as ranks are told at
# once; brief where a case may wait.
LONG, BRIEF = 600, 3
CPE = "ContextParallelError"
SAYS_SO = "start again with a new process group"
NAMED = {"InvalidInput", "NoBackendError", "UnsupportedArgument", CPE}
LEAVES = {"die", "oversleep"} | set(ERRORS)  # acts after which a rank has left the pass

# ---- cases -------------------------------------------------------------------------------------------

DENSE = ("causal", "causal sbhd", "no mask", "causal cross", "window", "grouped queries", "padding")
MORE = (
    "padding, bottom right",
    "packed",
    "packed, causal",
    "packed, unlike lengths",
    "learnable sinks",
    "max logit",
    "dropout",
    "bias",
    "flash",
)
RAISES = sorted(ERRORS)
KINDS = ["none", *["kernel"] * 3, *["input"] * 2, *["exchange"] * 6, *["program"] * 4]
ACTS = [*RAISES, *["die"] * 2, "sleep", "oversleep"]
CHANGES = ["leaves one out", "makes one twice", "swaps two", "swaps backwards", *["is interrupted"] * 2]
EVENTS = {  # by ranks: the exchanges of a forward and a backward, with those of the consensus
    "p2p": {2: (4, 8), 4: (8, 16)},
    "all_gather": {2: (4, 6), 4: (4, 6)},
    "a2a": {2: (6, 6), 4: (6, 6)},
    "a2a+p2p": {4: (10, 16)},
}


@st.composite
def launches(draw: st.DrawFn) -> Case:
    comm = draw(st.sampled_from(cases.COMMS))
    features = [name for name in DENSE + MORE if comm in FEATURES[name].comms]
    kind = draw(st.sampled_from(KINDS))
    case: Case = {
        "comm": comm,
        "ranks": 4 if comm == "a2a+p2p" else draw(st.sampled_from([2, 2, 4])),
        "features": draw(st.sampled_from(features)),
        "backward": draw(st.booleans()),
        "layers": draw(st.integers(1, 2)),
        "nested": draw(st.booleans()),
        "calls": 3,
        "timeout": LONG,
        "fault": {"kind": kind},
        "rank": -1,
    }
    steps = [what for what, _ in program(case, 0)]
    fault, case["rank"] = case["fault"], draw(st.integers(0, case["ranks"] - 1))
    if kind == "none":
        return case
    fault["step"] = at = draw(st.integers(0, len(steps) - 1))
    if kind == "kernel":
        fault["act"] = draw(st.sampled_from(ACTS))
        fault["event"] = draw(st.integers(1, case["ranks"] if comm == "p2p" else 2))
    elif kind == "input":
        fault["step"] = draw(st.sampled_from([at for at, what in enumerate(steps) if what == "forward"]))
        fault["input"] = draw(st.sampled_from([*BAD_INPUT, *OTHER_INPUT]))
    elif kind == "exchange":
        fault["act"] = draw(st.sampled_from(ACTS))
        fault["when"] = draw(st.sampled_from(["before", "in", "after"]))
        fault["event"] = draw(st.integers(1, EVENTS[comm][case["ranks"]][steps[at] == "backward"]))
        fault["input"] = ""
        if steps[at] == "forward" and draw(st.integers(0, 3)) == 3:  # of another rank
            fault["input"] = draw(st.sampled_from([*BAD_INPUT]))
            fault["event"] = draw(st.integers(1, 4))
    else:
        fault["change"] = draw(st.sampled_from(CHANGES))
        if fault["change"] == "swaps backwards":  # of the same module: only their number tells them apart
            case.update(backward=True, nested=True, layers=1)
            fault["step"] = 2
        elif fault["change"] == "is interrupted":  # before it exchanges anything
            fault["step"] = draw(st.sampled_from([at for at, what in enumerate(steps) if what == "forward"]))
    if fault.get("act") == "oversleep" or kind == "program":
        case["timeout"] = BRIEF
    return case


# ---- what ranks left ---------------------------------------------------------------------------------


class Step:
    """One call or backward of one rank."""

    def __init__(self, rank: int, record: dict[str, Any]) -> None:
        self.rank, self.at, self.what = rank, record["at"], record["what"]
        self.batch, self.number = record["batch"], record["number"]
        self.ended, self.kind, self.text = False, "", ""  # not ended: the rank died in it
        self.tensors: dict[str, torch.Tensor] = {}

    @property
    def right(self) -> bool:
        return self.ended and not self.kind

    def __str__(self) -> str:
        end = f"{self.kind}: {self.text[:300]}" if self.kind else "returned" if self.ended else "never ended"
        return f"rank {self.rank}, {self.what} of batch {self.batch} (call {self.number}): {end}"


class Launched:
    """All ranks' steps, and whether the fault struck."""

    def __init__(self, case: Case, folder: Path, ends: list[int | None]) -> None:
        self.case, self.ends = case, ends
        self.struck = False
        self.steps: list[list[Step]] = []
        self.dead = set()
        self.crash = "".join(file.read_text() for file in sorted(folder.glob("*.crash")))
        for rank in range(case["ranks"]):
            file, found = folder / f"{rank}.jsonl", {}
            for line in file.read_text().splitlines() if file.exists() else ():
                record = json.loads(line)
                if "fault" in record:
                    if not (case["fault"]["kind"] == "exchange" and record["fault"] in BAD_INPUT):
                        self.struck = True
                elif "dead" in record:
                    self.dead.add(rank)
                elif "began" in record:
                    found[record["at"]] = Step(rank, record)
                elif "ended" in record:
                    step = found[record["at"]]
                    step.ended, step.kind = True, record.get("kind", "")
                    step.text = record.get("text", "")
            tensors = folder / f"{rank}.pt"
            for at, value in (torch.load(tensors) if tensors.exists() else {}).items():
                found[at].tensors = value
            self.steps.append([found[at] for at in sorted(found)])

    @property
    def all(self) -> list[Step]:
        return [step for steps in self.steps for step in steps]

    def __str__(self) -> str:
        return "\n".join([f"the fault struck: {self.struck}", *(f"  {step}" for step in self.all)])


# ---- numbers -----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def definition(features: str, batches: tuple[int, ...], backward: bool) -> dict[str, torch.Tensor]:
    """One process's outputs and gradients, where each rank may have given its rows of another batch."""
    case, size = case_of(features, batches[0]), len(batches)
    whole = cases.make(case)
    for rank, batch in enumerate(batches):
        made = cases.make(case_of(features, batch))
        given = made.tensors
        if whole.bias is not None and made.bias is not None:
            rows = cases.positions(case, False, rank, size)
            whole.bias.index_copy_(2, rows, made.bias.index_select(2, rows))
        for name, t in whole.tensors.items():
            at = cases.positions(case, name in ("k", "v"), rank, size)
            dim = cases.ROWS[case.fmt]
            t.index_copy_(dim, at, given[name].index_select(dim, at))
    ran = cases.forward(case, case.make_module(), whole, grad=backward)
    if backward:
        ran.backward()
    return ran.found()


def check_numbers(found: Launched) -> None:
    case = found.case
    size, like = case["ranks"], case_of(case["features"], 0)
    for step in found.all:
        if not step.right:
            continue
        given = {s.rank: s.batch for s in found.all if s.what == "forward" and s.number == step.number}
        if len(given) < size:
            raise Wrong(f"{step}, though not all ranks made call {step.number}")
        wanted = definition(case["features"], tuple(given[rank] for rank in range(size)), case["backward"])
        for name, got in step.tensors.items():
            if name in ("dsink", "dbias"):
                continue  # sums over ranks
            want = wanted[name]
            if name != "max_logit":
                at = cases.positions(like, name in ("dk", "dv"), step.rank, size)
                want = want.index_select(cases.ROWS[like.fmt], at)
            tolerance = 1e-9 if got.dtype == torch.float64 else 2e-5
            if got.shape != want.shape or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
                raise Wrong(f"a wrong {name}: {step}")


# ---- verdicts ----------------------------------------------------------------------------------------


def judge(found: Launched) -> str:
    """A word for the tally; raises Wrong."""
    case = found.case
    if found.crash:
        raise Wrong(f"a rank crashed outside its calls: {found.crash}")
    for rank, end in enumerate(found.ends):
        if end is None:
            raise Wrong(f"rank {rank} hangs")
        if end and not (end == 17 and rank in found.dead):
            raise Wrong(f"rank {rank} ends with {end}")
    check_kinds(found)
    check_numbers(found)
    return OUTCOMES[case["fault"]["kind"]](found)


def check_kinds(found: Launched) -> None:
    """Named errors only, and a rank's own."""
    case = found.case
    for step in found.all:
        own = {case["fault"].get("act", "")} if step.rank == case["rank"] else set()
        if case["fault"].get("input") == "an unknown argument":
            own.add("TypeError")
        if case["fault"].get("change") == "is interrupted" and step.rank == case["rank"]:
            own.add("KeyboardInterrupt")
        second = case["fault"].get("change") == "makes one twice" and "second time" in step.text
        if step.kind and step.kind not in NAMED | own and not second:
            raise Wrong(f"an unnamed error: {step}")


def _undisturbed(found: Launched, but: int = -1) -> None:
    for step in found.all:
        if not step.right and step.at != but:
            raise Wrong(f"nothing was wrong with it: {step}")


def _all_or_none(found: Launched, at: int) -> str:
    """The step fails on all ranks or on none; all others are right."""
    _undisturbed(found, but=at)
    here = [step for step in found.all if step.at == at]
    if all(step.right for step in here):
        return "all right"
    for step in here:
        if step.right:
            raise Wrong(f"others were told of an error: {step}")
    return "told, then right"


def _none(found: Launched) -> str:
    _undisturbed(found)
    return "none: all right"


def _of_input(found: Launched) -> str:
    fault = found.case["fault"]
    outcome = "not reached"
    if found.struck:
        outcome = _all_or_none(found, fault["step"])
    else:
        _undisturbed(found)
    return f"{'bad' if fault['input'] in BAD_INPUT else 'other'} input: {outcome}"


def _of_kernel(found: Launched) -> str:
    fault = found.case["fault"]
    act = "raises" if fault["act"] in ERRORS else f"{fault['act']}s"
    if fault["act"] in ("die", "oversleep"):
        return f"kernel {act}: {_left(found)}"
    outcome = _all_or_none(found, fault["step"])
    return f"kernel {act}: {'not reached' if not found.struck else outcome}"


def _of_exchange(found: Launched) -> str:
    fault = found.case["fault"]
    act = "raises" if fault["act"] in ERRORS else f"{fault['act']}s"
    if fault["act"] == "sleep" or not found.struck:
        outcome = _all_or_none(found, fault["step"] if fault["input"] else -1)
        outcome = "not reached" if not found.struck else outcome
    else:
        outcome = _left(found)
    return f"exchange {act} {fault['when']}: {outcome}"


def _left(found: Launched) -> str:
    """A rank left a pass: nothing later runs, and that is said."""
    case = found.case
    at = case["fault"]["step"]
    if not found.struck:
        _undisturbed(found, but=at if case["fault"].get("input") else -1)
        return "not reached"
    for step in found.all:
        if step.at < at and not step.right:
            raise Wrong(f"nothing was wrong with it: {step}")
        if step.at > at and step.right:
            raise Wrong(f"a rank had left the group's calls: {step}")
    if case["fault"]["act"] in ERRORS and any(
        s.at == at and s.rank == case["rank"] and s.right for s in found.all
    ):
        raise Wrong("an error was swallowed")
    _said_so(found)
    return "told, then refused"


def _said_so(found: Launched) -> None:
    """After the error of the step in which it struck, errors say that they are for good."""
    at = found.case["fault"]["step"]
    for steps in found.steps:
        later = [step for step in steps if step.kind]
        for step in later[1:] if found.case["fault"]["kind"] != "program" else _after_told(later):
            if step.at > at and (step.kind != CPE or SAYS_SO not in step.text):
                raise Wrong(f"it does not say that the group is done for: {step}")


def _after_told(failed: list[Step]) -> list[Step]:
    """Those after the first error of the ranks, not of the step itself."""
    first = next((i for i, step in enumerate(failed) if step.kind == CPE), len(failed))
    return failed[first + 1 :]


def _of_program(found: Launched) -> str:
    change = found.case["fault"]["change"]
    _said_so(found)
    for steps in found.steps:
        told = False
        for step in steps:
            if told and step.right:
                raise Wrong(f"ranks were out of step: {step}")
            told = told or step.kind == CPE
    outcome = "told" if any(step.kind == CPE for step in found.all) else "all right of what was given"
    return f"a rank {change}: {outcome}"


OUTCOMES = {
    "none": _none,
    "input": _of_input,
    "kernel": _of_kernel,
    "exchange": _of_exchange,
    "program": _of_program,
}


def run(case: Case) -> Launched:
    with tempfile.TemporaryDirectory() as name:
        return Launched(case, Path(name), launch(case, Path(name)))


def attempt(case: Case) -> str:
    torch.set_num_threads(1)
    found = run(case)
    try:
        return judge(found)
    except Wrong as wrong:
        raise Wrong(f"{wrong}\n{found}") from None


def script(case: Case) -> str:
    return f"""\
# From the repository's root.
import sys
sys.path[:0] = [".", "tests/support", "tests/fuzz"]
import rank_faults

case = {pprint.pformat(case, sort_dicts=False)}
if __name__ == "__main__":  # ranks import it
    found = rank_faults.run(case)
    print(found)
    print(rank_faults.judge(found))
"""


TARGET = Target("rank_faults", launches(), attempt, script, gate=8)

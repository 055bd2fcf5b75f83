"""Ranks that compute together while one of them goes wrong: no wrong number, no hang, no unnamed error.

A case is a launch of two or four processes that make some calls over one group. One rank meets a fault: a
kernel or an exchange that raises, dies or is late; input that cannot be right, or is not that of the others;
a call left out, made twice or out of order. It swallows what it is told and goes on.
"""

from __future__ import annotations

import contextlib
import pprint
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import Case, Target, Wrong
from hypothesis import strategies as st

import context_parallel_cases as cases
import ranks
from attnsel.context_parallel import group as comm
from attnsel.errors import InvalidInput
from attnsel.runtime import kernels

# Seconds, timeouts of the process group: so long that a rank which waits for it hangs, as ranks are told at
# once; brief where a case may wait.
LONG, BRIEF = ranks.TIMEOUT, 3
SHORT = 0.7  # seconds: late, but not too late
CPE = "ContextParallelError"
SAYS_SO = "start again with a new process group"
NAMED = {"InvalidInput", "NoBackendError", "UnsupportedArgument", CPE}
WORDS = "injected"
ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError(WORDS),
    "ValueError": lambda: ValueError(WORDS),
    "KeyError": lambda: KeyError(WORDS),
    "MemoryError": lambda: MemoryError(WORDS),
    "InvalidInput": lambda: InvalidInput("field", WORDS, "must not be"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(WORDS),
}

# ---- cases -------------------------------------------------------------------------------------------

# What one rank passes and no call may have: arguments of the call.
BAD_INPUT: dict[str, dict[str, Any]] = {
    "no keys": {"k": None},
    "an unknown argument": {"colour": "red"},
    "an unsupported argument": {"inference_params": 1},
    "an unknown mask": {"attn_mask_type": "sideways"},
}
FEATURES = {case.name: case for case in cases.CASES}
DRAWN = (
    *("causal", "causal sbhd", "no mask", "causal cross", "window", "grouped queries", "padding"),
    *("padding, bottom right", "packed", "packed, causal", "packed, unlike lengths", "learnable sinks"),
    *("max logit", "dropout", "bias", "flash"),
)
KINDS = ["none", *["kernel"] * 3, *["input"] * 2, *["exchange"] * 6, *["program"] * 4]
ACTS = [*sorted(ERRORS), *["die"] * 2, "sleep", "oversleep"]
CHANGES = ["leaves one out", "makes one twice", "swaps two", "swaps backwards", *["is interrupted"] * 2]
EVENTS = {  # by ranks: the exchanges of a forward and a backward, with those of the consensus
    "p2p": {2: (4, 8), 4: (8, 16)},
    "all_gather": {2: (4, 6), 4: (4, 6)},
    "a2a": {2: (6, 6), 4: (6, 6)},
    "a2a+p2p": {4: (10, 16)},
}


def program(case: Case, rank: int) -> list[tuple[str, int]]:
    """What a rank does, in order: ("forward" or "backward", batch)."""
    steps: list[tuple[str, int]] = []
    for batch in range(3):
        steps.append(("forward", batch))
        if case["backward"] and not (case["nested"] and batch == 0):
            steps.append(("backward", batch))
        if case["backward"] and case["nested"] and batch == 1:
            steps.append(("backward", 0))
    fault = case["fault"]
    if fault["kind"] == "program" and rank in case["fails"]:
        at = fault["step"] % len(steps)
        if fault["change"] == "leaves one out":
            del steps[at]
        elif fault["change"] == "makes one twice":
            steps.insert(at, steps[at])
        elif fault["change"].startswith("swaps"):
            after = (at + 1) % len(steps)
            steps[at], steps[after] = steps[after], steps[at]
    return steps


@st.composite
def launches(draw: st.DrawFn) -> Case:
    comm = draw(st.sampled_from(cases.COMMS))
    kind = draw(st.sampled_from(KINDS))
    case: Case = {
        "comm": comm,
        "ranks": 4 if comm == "a2a+p2p" else draw(st.sampled_from([2, 2, 4])),
        "features": draw(st.sampled_from([name for name in DRAWN if comm in FEATURES[name].comms])),
        "backward": draw(st.booleans()),
        "layers": draw(st.integers(1, 2)),
        "nested": draw(st.booleans()),
        "timeout": LONG,
        "fault": {"kind": kind},
        "fails": [],
    }
    steps = [what for what, _ in program(case, 0)]
    fault, case["fails"] = case["fault"], [draw(st.integers(0, case["ranks"] - 1))]
    if kind == "none":
        return case
    fault["step"] = at = draw(st.integers(0, len(steps) - 1))
    a_forward = st.sampled_from([at for at, what in enumerate(steps) if what == "forward"])
    if kind == "kernel":
        fault["act"] = draw(st.sampled_from(ACTS))
        fault["event"] = draw(st.integers(1, case["ranks"] if comm == "p2p" else 2))
    elif kind == "input":
        fault["step"] = draw(a_forward)
        fault["input"] = draw(st.sampled_from([*BAD_INPUT]))
    elif kind == "exchange":
        fault["act"] = draw(st.sampled_from(ACTS))
        fault["when"] = draw(st.sampled_from(["before", "in", "after"]))
        if (
            "sleep" in fault["act"] and fault["when"] == "in"
        ):  # late with half of what it sends: no such thing
            fault["when"] = "before"
        fault["event"] = draw(st.integers(1, EVENTS[comm][case["ranks"]][steps[at] == "backward"]))
    else:
        fault["change"] = draw(st.sampled_from(CHANGES))
        if fault["change"] == "swaps backwards":  # of the same module: only their number tells them apart
            case.update(backward=True, nested=True, layers=1)
            fault["step"] = 2
        elif fault["change"] == "is interrupted":  # before it exchanges anything
            fault["step"] = draw(a_forward)
    if fault.get("act") == "oversleep" or kind == "program":
        case["timeout"] = BRIEF
    return case


def case_of(features: str, batch: int) -> cases.Case:
    """Batches of the same shapes and of other contents."""
    case = FEATURES[features]
    return replace(case, name=case.name + " again" * batch)


# ---- a rank ------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One call or backward of one rank."""

    rank: int
    at: int
    what: str
    batch: int
    number: int  # of the call
    struck: bool = False  # the fault was here
    ended: bool = False  # otherwise the rank died in it
    kind: str = ""  # of the error that it ended with
    text: str = ""
    tensors: dict[str, torch.Tensor] | None = None

    @property
    def right(self) -> bool:
        return self.ended and not self.kind

    def __str__(self) -> str:
        end = f"{self.kind}: {self.text[:300]}" if self.kind else "returned" if self.ended else "never ended"
        return f"rank {self.rank}, {self.what} of batch {self.batch} (call {self.number}): {end}"


class Rank:
    """It makes its calls one after the other, whatever they raise."""

    def __init__(self, case: Case, rank: int, group: Any) -> None:
        self.case, self.rank, self.fault = case, rank, case["fault"]
        self.steps: list[Step] = []
        feature = FEATURES[case["features"]]
        given = {"cp_group": group, "cp_comm_type": case["comm"]}
        self.modules = [feature.make_module(**given) for _ in range(case["layers"])]
        self.ran: dict[int, tuple[int, cases.Ran]] = {}  # by batch: the call's number, what it left
        self.calls = 0
        self.left = 0  # events until the fault strikes; it does at 1
        self.part = ""

    def work(self) -> list[Step]:
        with mock.patch.dict(kernels.KERNELS):
            if self.rank in self.case["fails"] and self.fault["kind"] == "kernel":
                for name in ("tiled", "sdpa.flash"):  # before any call: one keeps the kernel of its forward
                    kernel = kernels.kernel_of(name)
                    parts = {
                        part: self.struck_in(part, getattr(kernel, part)) for part in ("forward", "backward")
                    }
                    kernels.KERNELS[name] = kernel._replace(**parts)
            for at, (what, batch) in enumerate(program(self.case, self.rank)):
                self.calls += what == "forward"
                if what == "forward" or batch in self.ran:  # otherwise its forward failed here
                    number = self.calls if what == "forward" else self.ran[batch][0]
                    self.make(Step(self.rank, at, what, batch, number))
        return self.steps

    def make(self, step: Step) -> None:
        self.steps.append(step)
        try:
            with self.faulty(step):
                step.tensors = self.forward(step) if step.what == "forward" else self.backward(step.batch)
        except BaseException as error:
            step.kind, step.text = type(error).__name__, str(error)
        step.ended = True

    def forward(self, step: Step) -> dict[str, torch.Tensor]:
        case = case_of(self.case["features"], step.batch)
        module = self.modules[step.batch % len(self.modules)]
        grad = self.case["backward"]
        ran = cases.forward(case, module, cases.make(case), self.rank, self.case["ranks"], grad=grad)
        self.ran[step.batch] = step.number, ran
        return ran.found()

    def backward(self, batch: int) -> dict[str, torch.Tensor]:
        self.ran[batch][1].backward()
        return self.ran[batch][1].found()

    def strike(self) -> None:
        act = self.fault["act"]
        if "sleep" in act:
            time.sleep(SHORT if act == "sleep" else self.case["timeout"] + 1)  # the fault itself is a delay
        self.steps[-1].struck = True
        if act == "die":
            ranks.arrive("done", self.case["ranks"])
            ranks.leave(self.steps)
        if act in ERRORS:
            raise ERRORS[act]()

    def counted(self) -> bool:
        self.left -= 1
        return self.left == 0

    def struck_in(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.part == part and self.counted():
                self.strike()
            return function(*arguments)

        return call

    def faulty(self, step: Step) -> contextlib.AbstractContextManager[Any]:
        """The fault, where this rank meets it in this step."""
        fault = self.fault
        if self.rank not in self.case["fails"] or fault.get("step") != step.at:
            self.part = ""
            return contextlib.nullcontext()
        self.left, self.part = fault.get("event", 0), step.what
        if fault.get("change") == "is interrupted":
            from attnsel.context_parallel import run  # loads Dynamo: a second that collecting need not take

            return mock.patch.object(run, "make_call", side_effect=KeyboardInterrupt)
        if fault["kind"] == "input":
            return self.bad_input(step)
        return self.in_exchange() if fault["kind"] == "exchange" else contextlib.nullcontext()

    def in_exchange(self) -> contextlib.AbstractContextManager[Any]:
        """Before, in or after an exchange: a collective, a post, or the wait for one."""
        when, send = self.fault["when"], dist.batch_isend_irecv

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                now = self.counted()
                if now and when != "after":
                    if when == "in" and function is send:  # one of two is on its way
                        function(arguments[0][:1])
                    self.strike()
                result = function(*arguments, **more)
                if now and when == "after":
                    self.strike()
                return result

            return call

        post = comm.Ring.post
        names = ("all_gather", "all_to_all_single", "all_reduce", "all_gather_object", "batch_isend_irecv")
        stack = contextlib.ExitStack()
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, around(getattr(dist, name))))
        stack.enter_context(
            mock.patch.object(comm.Ring, "post", lambda *given, **more: around(post(*given, **more)))
        )
        return stack

    def bad_input(self, step: Step) -> contextlib.AbstractContextManager[Any]:
        module = self.modules[step.batch % len(self.modules)]
        forward = module.forward
        step.struck = True

        def changed(q: torch.Tensor, k: Any, v: torch.Tensor, **arguments: Any) -> Any:
            more = arguments | BAD_INPUT[self.fault["input"]]
            return forward(q, more.pop("k", k), v, **more)

        return mock.patch.object(module, "forward", changed)


def work(rank: int, size: int, case: Case) -> list[Step]:
    torch.set_num_threads(1)
    group = ranks.groups_of(case["comm"], rank, size, {}, case["timeout"])
    steps = Rank(case, rank, group).work()
    ranks.wait_for_all("done", size)  # a rank that ends closes its connections: a fault of its own
    return steps


# ---- verdicts ----------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def definition(features: str, batches: tuple[int, ...], backward: bool) -> dict[str, torch.Tensor]:
    """One process's outputs and gradients, where each rank may have given its rows of another batch."""
    case, size = case_of(features, batches[0]), len(batches)
    whole = cases.make(case)
    for rank, batch in enumerate(batches):
        made = cases.make(case_of(features, batch))
        if whole.bias is not None and made.bias is not None:
            rows = cases.positions(case, False, rank, size)
            whole.bias.index_copy_(2, rows, made.bias.index_select(2, rows))
        for name, t in whole.tensors.items():
            at = cases.positions(case, name in ("k", "v"), rank, size)
            dim = cases.ROWS[case.fmt]
            t.index_copy_(dim, at, made.tensors[name].index_select(dim, at))
    ran = cases.forward(case, case.make_module(), whole, grad=backward)
    if backward:
        ran.backward()
    return ran.found()


def check_numbers(case: Case, steps: list[Step]) -> None:
    size, like = case["ranks"], case_of(case["features"], 0)
    for step in steps:
        if not step.right:
            continue
        given = {s.rank: s.batch for s in steps if s.what == "forward" and s.number == step.number}
        if len(given) < size:
            raise Wrong(f"{step}, though not all ranks made call {step.number}")
        wanted = definition(case["features"], tuple(given[rank] for rank in range(size)), case["backward"])
        for name, got in (step.tensors or {}).items():
            if name in ("dsink", "dbias"):
                continue  # sums over ranks
            want = wanted[name]
            if name != "max_logit":
                at = cases.positions(like, name in ("dk", "dv"), step.rank, size)
                want = want.index_select(cases.ROWS[like.fmt], at)
            tolerance = 1e-9 if got.dtype == torch.float64 else 2e-5
            if got.shape != want.shape or not torch.allclose(got, want, rtol=tolerance, atol=tolerance):
                raise Wrong(f"a wrong {name}: {step}")


def check_kinds(case: Case, steps: list[Step]) -> None:
    """Named errors only, and a rank's own."""
    fault = case["fault"]
    for step in steps:
        own = {"TypeError"} if fault.get("input") == "an unknown argument" else set()
        if step.rank in case["fails"]:
            own |= {fault.get("act"), "KeyboardInterrupt" if fault.get("change") == "is interrupted" else ""}
        second = fault.get("change") == "makes one twice" and "second time" in step.text
        if step.kind and step.kind not in NAMED | own and not second:
            raise Wrong(f"an unnamed error: {step}")


def says_so(steps: list[Step]) -> None:
    for step in steps:
        if step.kind != CPE or SAYS_SO not in step.text:
            raise Wrong(f"it does not say that the group is done for: {step}")


def of_program(case: Case, steps: list[Step]) -> str:
    """From the first word of the ranks on, nothing is right; and it says for how long."""
    for rank in range(case["ranks"]):
        mine = [step for step in steps if step.rank == rank]
        told = [step.kind == CPE for step in mine]
        after = mine[told.index(True) + 1 :] if any(told) else []
        if any(step.right for step in after):
            raise Wrong(f"ranks were out of step: {mine}")
        says_so([step for step in after if step.at > case["fault"]["step"]])
    return "told" if any(step.kind == CPE for step in steps) else "all right of what was given"


def of_one_who_left(case: Case, steps: list[Step]) -> str:
    """A rank left a pass: nothing later runs, and that is said."""
    fault = case["fault"]
    for step in steps:
        if step.at < fault["step"] and not step.right:
            raise Wrong(f"nothing was wrong with it: {step}")
        if step.at > fault["step"] and step.right:
            raise Wrong(f"a rank had left the group's calls: {step}")
        if step.struck and step.right and fault["act"] in ERRORS:
            raise Wrong(f"an error was swallowed: {step}")
    for rank in range(case["ranks"]):
        failed = [step for step in steps if step.rank == rank and step.kind]
        says_so([step for step in failed[1:] if step.at > fault["step"]])
    return "told, then refused"


def of_one_step(steps: list[Step], at: int) -> str:
    """The step fails on all ranks or on none; all others are right. Whose error it was is told to all."""
    here = [step for step in steps if step.at == at]
    told = [
        f"rank {s.rank} of the context parallel group: {s.kind}: " for s in here if s.struck and s.kind != CPE
    ]
    for step in steps:
        if not step.right and step.at != at:
            raise Wrong(f"nothing was wrong with it: {step}")
        if step.right and step.at == at and not all(one.right for one in here):
            raise Wrong(f"others were told of an error: {step}")
        if step.kind and not step.struck and told and not step.text.startswith(told[0]):
            raise Wrong(f"it was told of another error: {step}")
    return "all right" if all(step.right for step in here) else "told, then right"


def judge(case: Case, found: list[list[Step] | None]) -> str:
    """A word for the tally; raises Wrong."""
    if None in found:
        raise Wrong(f"rank {found.index(None)} died by itself")
    steps = [step for part in found if part is not None for step in part]
    check_kinds(case, steps)
    check_numbers(case, steps)
    fault = case["fault"]
    kind, act = fault["kind"], fault.get("act", "")
    if kind == "program":
        return f"a rank {fault['change']}: {of_program(case, steps)}"
    what = " ".join([kind, "raises" if act in ERRORS else act, fault.get("when", "")]).strip()
    if kind == "none" or not any(step.struck for step in steps):
        of_one_step(steps, at=-1)
        return f"{what}: {'all right' if kind == 'none' else 'not reached'}"
    late = ("die", "oversleep") if kind == "kernel" else ("die", "oversleep", *ERRORS)
    if act in late:  # after these acts a rank has left the pass
        return f"{what}: {of_one_who_left(case, steps)}"
    return f"{what}: {of_one_step(steps, -1 if act == 'sleep' else fault['step'])}"


def launch(case: Case) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return ranks.run(work, case["ranks"], Path(folder), case, timeout=case["timeout"])


def attempt(case: Case) -> str:
    torch.set_num_threads(1)
    try:
        found = launch(case)
    except AssertionError as error:  # a rank hangs, or crashed outside its calls
        raise Wrong(str(error)) from None
    try:
        return judge(case, found)
    except Wrong as wrong:
        raise Wrong("\n".join([str(wrong), *(str(step) for part in found for step in part or ())])) from None


def script(case: Case) -> str:
    return f"""\
# From the repository's root.
import sys
sys.path[:0] = [".", "tests/support", "tests/fuzz"]
import rank_faults

case = {pprint.pformat(case, sort_dicts=False)}
if __name__ == "__main__":  # ranks import it
    print(rank_faults.attempt(case))
"""


TARGET = Target("rank_faults", launches(), attempt, script, gate=8)

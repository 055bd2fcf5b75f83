"""One launch of ranks (tests/support/ranks.py), with a fault in one of them: each leaves files."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import context_parallel_cases as cases
import ranks
from attnsel.context_parallel import comm, run
from attnsel.errors import InvalidInput
from attnsel.runtime import kernels

LAUNCH_LIMIT = 90  # seconds, then the ranks are killed: they hang
WORDS = "injected"
ERRORS: dict[str, Callable[[], BaseException]] = {
    "RuntimeError": lambda: RuntimeError(WORDS),
    "ValueError": lambda: ValueError(WORDS),
    "KeyError": lambda: KeyError(WORDS),
    "MemoryError": lambda: MemoryError(WORDS),
    "InvalidInput": lambda: InvalidInput("field", WORDS, "must not be"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(WORDS),
}
FEATURES = {case.name: case for case in cases.CASES}
SHORT = 0.7  # seconds: late, but not too late

Record = dict[str, Any]

# What one rank passes and the others do not: arguments of the call. First what no call may have.
BAD_INPUT: dict[str, dict[str, Any]] = {
    "no keys": {"k": None},
    "keys of another type": {"k": torch.float16},
    "an unknown argument": {"colour": "red"},
    "an unsupported argument": {"inference_params": 1},
    "an unknown mask": {"attn_mask_type": "sideways"},
}
OTHER_INPUT: dict[str, dict[str, Any]] = {
    "another scale": {"softmax_scale": 0.3},
    "another window": {"window_size": (5, 5)},
    "other types": {"all": torch.float32},
    "fewer heads": {"heads": 2},
    "fewer features of values": {"features": 4},
}


def case_of(features: str, batch: int) -> cases.Case:
    """Batches of the same shapes and of other contents."""
    case = FEATURES[features]
    return replace(case, name=case.name + " again" * batch)


# ---- faults ------------------------------------------------------------------------------------------


class Fault:
    """What happens to one rank in the middle of a pass: an error, a delay, or its end."""

    def __init__(self, act: str, timeout: int, log: Callable[..., None]) -> None:
        self.act, self.timeout, self.log = act, timeout, log
        self.seen = self.event = 0
        self.part = ""

    def strike(self) -> None:
        if self.act == "sleep":
            time.sleep(SHORT)
        elif self.act == "oversleep":
            time.sleep(self.timeout + 1)
        self.log(fault=self.act)
        if self.act == "die":
            self.log(dead=True)
            os._exit(17)
        if self.act in ERRORS:
            raise ERRORS[self.act]()

    def install(self) -> None:
        """Kernels that strike while ``kernel`` names their part; a call keeps the kernel of its forward."""
        for name in ("tiled", "sdpa.flash"):
            kernel = kernels.kernel_of(name)
            kernels.KERNELS[name] = kernel._replace(
                forward=self._struck("forward", kernel.forward),
                backward=self._struck("backward", kernel.backward),
            )

    def _struck(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if self.part == part:
                self.seen += 1
                if self.seen == self.event:
                    self.strike()
            return function(*arguments)

        return call

    @contextmanager
    def in_kernel(self, part: str, event: int) -> Iterator[None]:
        """In the ``event``-th kernel call of a forward or backward."""
        self.part, self.event = part, event
        try:
            yield
        finally:
            self.part = ""

    @contextmanager
    def in_exchange(self, event: int, when: str) -> Iterator[None]:
        """Before, in or after the ``event``-th exchange: a collective, a post, or the wait for one."""
        inside = [False]  # the exchange that fails is running

        def around(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                self.seen += 1
                if self.seen != event:
                    return function(*arguments, **more)
                if when == "before":
                    self.strike()
                inside[0] = when == "in"
                try:
                    result = function(*arguments, **more)
                finally:
                    inside[0] = False
                if when == "after":
                    self.strike()
                return result

            return call

        def within(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **more: Any) -> Any:
                if inside[0]:
                    if function is batch_isend_irecv and "sleep" not in self.act:  # one of two is on its way
                        function(arguments[0][:1])
                    self.strike()
                return function(*arguments, **more)

            return call

        def posting(function: Callable[..., Any]) -> Callable[..., Any]:
            posted = around(function)
            return lambda *arguments, **more: around(posted(*arguments, **more))

        batch_isend_irecv = dist.batch_isend_irecv
        counted: dict[str, Any] = {name: within(getattr(dist, name)) for name in TRANSPORT}
        with (
            mock.patch.multiple(  # type: ignore[call-overload]
                comm.Member,
                **{
                    name: around(getattr(comm.Member, name))
                    for name in ("gather", "swap", "largest", "objects")
                },
            ),
            mock.patch.multiple(dist, **counted),
            mock.patch.object(comm.Ring, "post", posting(comm.Ring.post)),
        ):
            yield


TRANSPORT = ("all_gather", "all_to_all_single", "all_reduce", "all_gather_object", "batch_isend_irecv")


# ---- a rank ------------------------------------------------------------------------------------------


def program(case: Record, rank: int) -> list[tuple[str, int]]:
    """What a rank does, in order: ("forward" or "backward", batch)."""
    steps: list[tuple[str, int]] = []
    for batch in range(case["calls"]):
        steps.append(("forward", batch))
        if case["backward"] and not (case["nested"] and batch == 0):
            steps.append(("backward", batch))
        if case["backward"] and case["nested"] and batch == 1:
            steps.append(("backward", 0))
    fault = case["fault"]
    if fault["kind"] == "program" and rank == case["rank"]:
        at = fault["step"] % len(steps)
        if fault["change"] == "leaves one out":
            del steps[at]
        elif fault["change"] == "makes one twice":
            steps.insert(at, steps[at])
        elif fault["change"].startswith("swaps"):
            after = (at + 1) % len(steps)
            steps[at], steps[after] = steps[after], steps[at]
    return steps


class Worker:
    """One rank: it makes its calls one after the other, whatever they raise."""

    def __init__(self, case: Record, rank: int, folder: Path) -> None:
        self.case, self.rank, self.size, self.folder = case, rank, case["ranks"], folder
        self.file = (folder / f"{rank}.jsonl").open("a")
        self.modules: list[Any] = []
        self.ran: dict[int, tuple[int, cases.Ran]] = {}  # by batch: the call's number, what it left
        self.calls = 0
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}
        self.fault = Fault(case["fault"].get("act", ""), case["timeout"], self.log)
        if rank == case["rank"] and case["fault"]["kind"] == "kernel":
            self.fault.install()

    def log(self, **record: Any) -> None:
        print(json.dumps(record), file=self.file, flush=True)

    def work(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.case["timeout"]),
        )
        group = ranks.groups_of(self.case["comm"], self.rank, self.size, {}, self.case["timeout"])
        for _ in range(self.case["layers"]):
            made = FEATURES[self.case["features"]].make_module(cp_group=group, cp_comm_type=self.case["comm"])
            self.modules.append(made)
        for at, (what, batch) in enumerate(program(self.case, self.rank)):
            self.step(at, what, batch)
        torch.save(self.tensors, self.folder / f"{self.rank}.pt")
        self.log(done=True)
        self._stay()

    def step(self, at: int, what: str, batch: int) -> None:
        if what == "forward":
            self.calls += 1
        elif batch not in self.ran:
            return  # its forward failed here
        number = self.calls if what == "forward" else self.ran[batch][0]
        self.log(at=at, what=what, batch=batch, number=number, began=True)
        error: BaseException | None = None
        try:
            with self.struck(at, what):
                self.make(what, batch, number, at)
        except BaseException as raised:
            error = raised
        told = {} if error is None else {"kind": type(error).__name__, "text": str(error)}
        self.log(at=at, ended=True, **told)
        if error is None and what == "backward":
            self.tensors[at] = self.ran[batch][1].found()

    def make(self, what: str, batch: int, number: int, at: int) -> None:
        if what == "backward":
            self.ran[batch][1].backward()
            return
        case = case_of(self.case["features"], batch)
        whole = cases.make(case)
        module = self.modules[batch % len(self.modules)]
        with self.other_input(at, module):
            ran = cases.forward(case, module, whole, self.rank, self.size, grad=self.case["backward"])
        self.ran[batch] = number, ran
        self.tensors[at] = ran.found()

    @contextmanager
    def struck(self, at: int, what: str) -> Iterator[None]:
        fault = self.case["fault"]
        mine = self.rank == self.case["rank"] and fault.get("step", -1) == at
        if mine and fault.get("change") == "is interrupted":
            with mock.patch.object(run, "make_call", side_effect=KeyboardInterrupt):
                yield
            return
        if not mine or fault["kind"] not in ("kernel", "exchange"):
            yield
            return
        if fault["kind"] == "kernel":
            context = self.fault.in_kernel(what, fault["event"])
        else:
            context = self.fault.in_exchange(fault["event"], fault["when"])
        with context:
            yield

    @contextmanager
    def other_input(self, at: int, module: Any) -> Iterator[None]:
        fault = self.case["fault"]
        which, rank = fault.get("input", ""), self.case["rank"]
        if fault["kind"] == "exchange":
            rank = (rank + 1) % self.size  # two ranks have troubles
        if not which or rank != self.rank or fault.get("step", -1) != at:
            yield
            return
        given = {**BAD_INPUT, **OTHER_INPUT}[which]
        self.log(fault=which)
        forward = module.forward

        def changed(q: torch.Tensor, k: Any, v: torch.Tensor, **arguments: Any) -> Any:
            more = dict(given)
            k = more.pop("k") if "k" in more else k
            k = q.to(k) if isinstance(k, torch.dtype) else k
            if dtype := more.pop("all", None):
                q, k, v = (t.to(dtype) for t in (q, k, v))
            if heads := more.pop("heads", 0):
                q, k, v = (t[..., :heads, :] for t in (q, k, v))
            if features := more.pop("features", 0):
                v = v[..., :features]
            return forward(q, k, v, **arguments | more)

        with mock.patch.object(module, "forward", changed):
            yield

    def _stay(self) -> None:
        """A rank that ends closes its connections; that is a fault of its own. So all end together."""
        for _ in range(100 * LAUNCH_LIMIT):
            files = [self.folder / f"{rank}.jsonl" for rank in range(self.size)]
            if all('"done"' in t or '"dead"' in t for t in (f.read_text() for f in files if f.exists())):
                return
            time.sleep(0.01)


# ---- a launch ----------------------------------------------------------------------------------------


def work(rank: int, case: Record, folder: Path) -> None:
    status = 1
    try:
        with (folder / f"{rank}.err").open("w") as errors:
            os.dup2(errors.fileno(), 2)
            Worker(case, rank, folder).work()
        status = 0
    except BaseException:
        (folder / f"{rank}.crash").write_text(traceback.format_exc())
    finally:
        os._exit(status)  # Gloo's teardown may wait for ranks that are gone


def launch(case: Record, folder: Path) -> list[int | None]:
    """The exit status of each rank, None for one that hangs."""
    return ranks.start(work, (case, folder), case["ranks"], LAUNCH_LIMIT)

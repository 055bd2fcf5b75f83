"""Execution plans: built once per graph, device and library, kept, counted, and run.

A plan takes 0.4 to 4 seconds to build (cuDNN compiles its kernels) and microseconds to look up. Its key
holds all that is baked in: the graph's digest (every dimension, stride, dtype, flag, and the scale), the
device, and the versions of libcudnn and of the frontend.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.cudnn.build import backend_only, check, declare, workspace_bounded
from attnsel.backends.cudnn.graph import Graph
from attnsel.backends.cudnn.session import Session, listening
from attnsel.backends.cudnn.words import refusal


class PlanRefused(RuntimeError):
    """libcudnn builds no plan for this graph. The message is its own reason; ``log`` is what it logged."""

    def __init__(self, message: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.log = log


class ExecutionPlan(NamedTuple):
    """A graph that is ready to run on one device, and the bytes of workspace it wants."""

    graph: Graph
    made: Any  # the frontend's graph
    workspace: int

    def run(self, session: Session, buffers: Mapping[str, Tensor]) -> None:
        """Launch it on the session's stream. ``buffers``: one tensor for each name in the graph.

        The workspace comes from PyTorch's allocator, which keeps one pool per stream and, in a CUDA graph,
        per graph. Raises RuntimeError in cuDNN's words.
        """
        graph = self.graph
        pack: dict[int, Tensor] = {t.uid: buffers[t.name] for t in graph.inputs}
        pack.update((t.uid, buffers[t.name]) for t in graph.outputs)
        pack.update((t.uid, buffers[t.name]) for t in graph.ragged)
        workspace = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=session.device)
        self.made.execute(pack, workspace, handle=session.handle)


def build(graph: Graph, session: Session) -> ExecutionPlan:
    """A plan from the library. Raises Refused with its reason."""
    reached: list[str] = []
    versions = dict(zip(("cudnn", "cudnn_frontend"), session.versions, strict=True))
    arch = session.arch if dict(graph.options).get("deterministic") else 0  # of other graphs nothing is asked
    with listening() as heard, workspace_bounded(graph, arch, versions):
        try:
            made = declare(graph, session.cudnn, handle=session.handle)
            check(made, session.cudnn, reached)
            reached.append("build_plans")
            backend_only(made, session.cudnn)
            made.build_plans()
            return ExecutionPlan(graph, made, int(made.get_workspace_size()))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the bindings raise many types
            stage = reached[-1] if reached else "declare"
            raise PlanRefused(refusal(graph.node, stage, str(error), heard), tuple(heard)) from error


class PlanInfo(NamedTuple):
    """Counters of the plan cache. ``pinned`` plans are in a captured CUDA graph and are never dropped."""

    hits: int
    builds: int
    size: int
    limit: int
    pinned: int


class PlanCache:
    """Keys to plans, the least recently used dropped when full. Of threads that want one plan at the same
    time, one builds it and the others wait: no plan is built twice."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._renew()
        if hasattr(os, "register_at_fork"):  # a child has neither the builders nor a device that works
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._plans: OrderedDict[Hashable, Future[ExecutionPlan]] = OrderedDict()
        self._pinned: set[Hashable] = set()
        self._hits = self._builds = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], ExecutionPlan], *, pin: bool = False) -> ExecutionPlan:
        """The plan of ``key``, from ``make`` when it is not there. What ``make`` raises is not kept.

        ``pin``: a CUDA graph is being captured, and will run this plan's code for as long as it lives.
        """
        with self._lock:
            future = self._plans.get(key)
            mine = future is None
            if future is None:
                future = self._plans[key] = Future()
            else:
                self._plans.move_to_end(key)
                self._hits += 1
            if pin:
                self._pinned.add(key)
        if not mine:
            return future.result()
        try:
            plan = make()
        except BaseException as error:
            with self._lock:
                if self._plans.get(key) is future:
                    del self._plans[key]
                self._pinned.discard(key)
            future.set_exception(error)
            raise
        future.set_result(plan)
        with self._lock:
            self._builds += 1
            self._drop_oldest()
        return plan

    def _drop_oldest(self) -> None:
        droppable = [key for key, future in self._plans.items() if future.done() and key not in self._pinned]
        for key in droppable[: max(0, len(self._plans) - self.limit)]:
            del self._plans[key]

    def info(self) -> PlanInfo:
        with self._lock:
            return PlanInfo(self._hits, self._builds, len(self._plans), self.limit, len(self._pinned))

    def clear(self) -> None:
        """Forget all plans but the pinned ones, and the counts."""
        with self._lock:
            kept = OrderedDict((key, self._plans[key]) for key in self._plans if key in self._pinned)
            self._plans, self._hits, self._builds = kept, 0, 0


# Plans hold compiled kernels, 65 to 350 KB each as serialised; training with both directions and a dozen
# bucketed lengths needs a few dozen.
PLANS = PlanCache(limit=512)


def plan_of(graph: Graph, digest: str, session: Session) -> ExecutionPlan:
    """The plan that runs ``graph`` (whose ``key()`` is ``digest``) here. Raises Refused."""
    key = (digest, session.device, session.versions)
    return PLANS.get(key, lambda: build(graph, session), pin=_capturing(session.device))


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

"""Execution plans: built once per graph, device and library, kept, counted, and run.

A plan takes 0.4 to 4 seconds to build (cuDNN compiles its kernels) and microseconds to look up. Its key
holds all that is baked in: the graph's digest (every dimension, stride, dtype, flag, and the scale), the
device, and the versions of libcudnn and of the frontend.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import capturing, stream_of
from attnsel.backends.cudnn.build import backend_only, check, declare, workspace_bounded
from attnsel.backends.cudnn.candidate import refusal
from attnsel.backends.cudnn.graph import Graph
from attnsel.base.processes import ForkSafeLock
from attnsel.environment.versions import Version

# --------------------------------------------------------------------------------------------------------
# What of cuDNN lives as long as the process: the frontend, a handle per thread and device, and the log.


class Session(NamedTuple):
    """cuDNN as one thread uses it on one device. ``handle`` runs on the thread's current stream."""

    cudnn: Any  # the frontend's module
    handle: Any  # an int, or a cudnn.Handle from frontend 1.28 on
    device: torch.device
    versions: tuple[str, ...]  # of libcudnn and the frontend: part of a plan's key

    @property
    def arch(self) -> int:
        """90 for sm90; 0 where the device is a stand-in without one."""
        if self.device.type != "cuda":
            return 0
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor


def current(device: torch.device) -> Session:
    """This thread's session on ``device``, its handle set to the stream that PyTorch uses there now.

    Raises RuntimeError where the frontend or libcudnn does not load, ValueError off CUDA.
    """
    if device.type != "cuda":
        raise ValueError(f"cuDNN runs on CUDA tensors, got {device.type}")
    cudnn, versions = _frontend()
    index = torch.cuda.current_device() if device.index is None else device.index
    kept = _mine.handles.get(index)
    if kept is None:
        kept = _mine.handles[index] = _Lent(cudnn, index)
    stream = stream_of(device)
    if stream != kept.stream:
        # cudnnSetStream asks the driver several questions: 2.4 us a call on Blackwell.
        cudnn.set_stream(handle=kept.handle, stream=stream)
        kept.stream = stream
    return Session(cudnn, kept.handle, device, versions)


@lru_cache(maxsize=1)
def _frontend() -> tuple[Any, tuple[str, str]]:
    """The frontend's module, and the versions of libcudnn and of itself."""
    try:
        import cudnn

        number = cudnn.backend_version()
    except (ImportError, OSError, RuntimeError) as error:
        raise RuntimeError(
            f"cudnn-frontend does not load ({error}): pip install 'nvidia-cudnn-frontend<1.29', and "
            "nvidia-cudnn-cu12 where PyTorch brings no libcudnn"
        ) from error
    others = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if others is not None and others != number:
        # The rules, known bugs among them, were asked about PyTorch's.
        raise RuntimeError(
            f"cudnn-frontend loads libcudnn {Version.parse(number)} and PyTorch {Version.parse(others)}: "
            "install one of them only, or take the other out of LD_LIBRARY_PATH"
        )
    return cudnn, (str(Version.parse(number)), cudnn.__version__)


# ---- handles ----------------------------------------------------------------------------------------

# Handles of threads that ended, for the next thread. They are never destroyed: cudnnDestroy waits for the
# device, which would break a CUDA graph that another thread captures.
_free: defaultdict[int, list[tuple[Any, int | None]]] = defaultdict(list)
_free_lock = ForkSafeLock()


class _Lent:
    """A handle on loan to one thread; it goes back when the thread's locals die."""

    __slots__ = ("handle", "index", "stream")

    def __init__(self, cudnn: Any, index: int) -> None:
        self.index = index
        self.handle: Any = None
        self.stream: int | None = None
        with _free_lock:
            if _free[index]:
                self.handle, self.stream = _free[index].pop()
        if self.handle is None:
            with torch.cuda.device(index):  # a handle belongs to the device that is current now
                self.handle = cudnn.create_handle()

    def __del__(self) -> None:
        # No list any more: the interpreter is ending.
        if getattr(self, "handle", None) is not None and _free is not None:
            _free[self.index].append((self.handle, self.stream))  # atomic: no lock in a finaliser


class _Mine(threading.local):
    def __init__(self) -> None:
        self.handles: dict[int, _Lent] = {}


_mine = _Mine()


# ---- the log ----------------------------------------------------------------------------------------

_ERRORS_AND_WARNINGS = (1 << 1) | (1 << 2)  # CUDNN_SEV_ERROR_EN and CUDNN_SEV_WARNING_EN of cudnn_graph.h
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_log_lock = ForkSafeLock()


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What libcudnn logs meanwhile. Nothing is heard where the user sends its log elsewhere by CUDNN_LOG*.

    cudnnSetCallback is per process, so those who listen do it one after another.
    """
    heard: list[str] = []
    library = None if any(name.startswith("CUDNN_LOG") for name in os.environ) else _libcudnn()
    if library is None:
        yield heard
        return

    def hear(severity: int, own: Any, details: Any, text: bytes | None) -> None:
        heard.append((text or b"").decode(errors="replace"))

    callback = _CALLBACK(hear)  # alive until the callback is taken back
    with _log_lock:
        library.cudnnSetCallback(_ERRORS_AND_WARNINGS, None, callback)
        try:
            yield heard
        finally:
            library.cudnnSetCallback(0, None, _CALLBACK())


@lru_cache(maxsize=1)
def _libcudnn() -> Any:
    """The libcudnn that the frontend has loaded, by the name both know it under; None where that fails."""
    try:
        library = ctypes.CDLL("libcudnn.so.9")
        library.cudnnSetCallback.argtypes = (ctypes.c_uint, ctypes.c_void_p, _CALLBACK)
    except (OSError, AttributeError):
        return None
    return library


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
    names: tuple[tuple[int, str], ...]  # uids and names of all buffers, by uid
    launch: Callable[[int, int, int, int], None] | None = None  # see _by_address

    def run(self, session: Session, buffers: Mapping[str, Tensor]) -> None:
        """Launch it on the session's stream. ``buffers``: one tensor for each name in the graph.

        The workspace comes from PyTorch's allocator, which keeps one pool per stream and, in a CUDA graph,
        per graph. Raises RuntimeError in cuDNN's words.
        """
        size = self.workspace
        if self.launch is None:
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=session.device)
            pack = {uid: buffers[name] for uid, name in self.names}
            self.made.execute(pack, workspace, handle=session.handle)
            return
        held = torch.empty(size, dtype=torch.uint8, device=session.device) if size else None
        addresses = array("q", [buffers[name].data_ptr() for _, name in self.names])
        first, count = addresses.buffer_info()
        self.launch(first, count, 0 if held is None else held.data_ptr(), session.handle.backend_handle)


def ready(graph: Graph, made: Any, workspace: int, session: Session) -> ExecutionPlan:
    """The plan of a graph that the frontend has built."""
    every: tuple[Any, ...] = (*graph.inputs, *graph.outputs, *graph.ragged)
    names = sorted((t.uid, t.name) for t in every)
    launch = _by_address(made, [uid for uid, _ in names], session.versions[1])
    return ExecutionPlan(graph, made, workspace, tuple(names), launch)


def _by_address(made: Any, uids: list[int], frontend: str) -> Callable[[int, int, int, int], None] | None:
    """``launch(addresses, how many, workspace, handle)``, with the address of an array of the buffers' own in
    the order of ``uids``: what ``execute`` of frontend 1.28 ends in. None where it would not end there.

    Why: ``execute`` looks up the chosen plan and describes each tensor anew at every call, in Python. Before
    1.28 it only asks each tensor for its address.
    Source: nvidia-cudnn-frontend 1.28.0, _pygraph.py, ``execute``, ``_normalize``, ``_variant_pack_uids``.
    """
    if not frontend.startswith("1.28."):
        return None
    try:
        plan = made._materialize_backend_plan(made._plan_index) if made._plans else None
        index = -1 if plan is None or plan.cpp_index is None else plan.cpp_index
        launch = made._lowered_graph._execute_with_raw_ptrs
        if made.selected_engine is not None or made._data_bindings or made._variant_pack_uids() != uids:
            return None
    except (AttributeError, LookupError, TypeError):  # private: it may go, or be something else
        return None
    return lambda first, count, workspace, handle: launch(first, count, workspace, handle, index)


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
            return ready(graph, made, int(made.get_workspace_size()), session)
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
    return PLANS.get(key, lambda: build(graph, session), pin=capturing(session.device))

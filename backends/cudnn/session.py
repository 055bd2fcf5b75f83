"""What of cuDNN lives as long as the process: the frontend, a handle per thread and device, and the log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnsel.base.lock import ForkSafeLock
from attnsel.environment.versions import Version


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
    stream = torch.cuda.current_stream(device).cuda_stream
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
        if getattr(self, "handle", None) is not None:
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

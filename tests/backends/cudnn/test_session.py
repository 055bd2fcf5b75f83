"""Handles, streams and the log: what lives as long as the process, with a frontend that writes down calls."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnsel.backends.cudnn import plans as session
from attnsel.backends.cudnn.candidate import refusal

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


class Frontend:
    """Handles are objects, as from frontend 1.28 on; every call is written down."""

    __version__ = "1.28.0"

    def __init__(self) -> None:
        self.made: list[object] = []
        self.streams: list[tuple[object, int]] = []

    def backend_version(self) -> int:
        return 91801

    def create_handle(self) -> object:
        self.made.append(object())
        return self.made[-1]

    def set_stream(self, handle: object, stream: int) -> None:
        self.streams.append((handle, stream))


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Frontend]:
    made = Frontend()
    monkeypatch.setitem(sys.modules, "cudnn", made)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(session, "_mine", session._Mine())
    monkeypatch.setattr(session, "_free", type(session._free)(list))
    session._frontend.cache_clear()
    yield made
    session._frontend.cache_clear()


def test_one_handle_for_each_thread_and_device_and_one_that_ends_leaves_its_own(frontend: Frontend) -> None:
    def in_threads(count: int, gate: threading.Barrier) -> list[object]:
        seen: list[object] = []

        def work() -> None:
            seen.append(session.current(CUDA0).handle)
            gate.wait(5)

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    first = session.current(CUDA0)
    assert session.current(CUDA0).handle is first.handle
    assert session.current(CUDA1).handle is not first.handle
    assert first.versions == ("9.18.1", "1.28.0")
    together = in_threads(3, threading.Barrier(3))  # so that none ends before the others begin
    assert len({id(handle) for handle in [*together, first.handle]}) == 4
    made = len(frontend.made)
    assert in_threads(1, threading.Barrier(1))[0] in together
    assert len(frontend.made) == made


def test_the_stream_is_set_when_it_changes_and_not_otherwise(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stream in (7, 7, 9, 9, 7):
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device, n=stream: SimpleNamespace(cuda_stream=n)
        )
        session.current(CUDA0)
    assert [stream for _, stream in frontend.streams] == [7, 9, 7]


def test_other_devices_and_a_frontend_that_does_not_load_are_refused(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="cuDNN runs on CUDA tensors, got cpu"):
        session.current(torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "cudnn", None)
    session._frontend.cache_clear()
    with pytest.raises(RuntimeError, match=r"cudnn-frontend does not load .*pip install"):
        session.current(CUDA0)


def test_two_libcudnns_in_one_process_are_refused(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    with pytest.raises(RuntimeError, match=r"loads libcudnn 9\.18\.1 and PyTorch 9\.10\.2"):
        session.current(CUDA0)


class Log:
    """A libcudnn that logs when it is told to."""

    callback: Any = None

    def cudnnSetCallback(self, mask: int, own: Any, callback: Any) -> None:
        self.callback = callback if ctypes.c_uint(mask).value else None
        assert own is None

    def log(self, text: bytes) -> None:
        if self.callback is not None:
            self.callback(1, None, None, text)


def test_what_the_library_logs_is_heard_while_one_listens_unless_the_user_sends_it_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = Log()
    monkeypatch.setattr(session, "_libcudnn", lambda: library)
    library.log(b"before")
    with session.listening() as heard:
        library.log(b"Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: too wide at: d > 128")
    library.log(b"after")
    assert heard == ["Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: too wide at: d > 128"]
    monkeypatch.setenv("CUDNN_LOGLEVEL_DBG", "3")
    with session.listening() as heard:
        library.log(b"text")
    assert heard == []


def test_a_refusal_says_direction_stage_reason_and_log() -> None:
    logged = [
        "CuDNN (v92800 42) function cudnnBackendFinalize() called:",
        "CuDNN (v92800 42) function cudnnBackendFinalize() called:",
    ]
    said = refusal("sdpa_backward", "create_execution_plans", "Num hidden_dim\n  should be 8", logged)
    assert said == (
        "cuDNN builds no backward plan (create_execution_plans): Num hidden_dim; "
        "its log: in cudnnBackendFinalize"
    )
    assert refusal("sdpa", "validate", "") == "cuDNN builds no forward plan (validate): no reason given"

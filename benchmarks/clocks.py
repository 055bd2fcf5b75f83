"""How long a call takes on a device: CUDA events with a cold L2, or the host's clock for a rehearsal."""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Work = Callable[[], Any]
FLUSHED = 256 * 2**20  # bytes: more than any L2 there is (H200 60 MB, B200 126 MB)


class Clock(Protocol):
    def rounds(self, calls: Sequence[Work], count: int) -> list[list[float]]:
        """``count`` times each call once; milliseconds, per call."""

    def host(self, call: Work) -> float:
        """Microseconds until a call returns to Python, its work on the device not waited for."""


class CudaClock:
    """Events around each call. What comes before it empties L2, and lets Python run ahead of the device.

    Without that, the time between the events would hold what Python takes to launch, which callers hide
    behind the kernel before.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.empty(FLUSHED, dtype=torch.uint8, device=device)
        self._flush_ms = statistics.median(self._timed(lambda: None, 1) for _ in range(5))

    def rounds(self, calls: Sequence[Work], count: int) -> list[list[float]]:
        ahead = [1 + math.ceil(1.5 * self.host(call) / 1e3 / self._flush_ms) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for n in range(count):
            for i in _rotated(len(calls), n):
                found[i].append(self._sample(calls[i], max(ahead)))
        return found

    def host(self, call: Work) -> float:
        seen = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            seen.append((time.perf_counter_ns() - start) / 1e3)
        torch.cuda.synchronize()
        return statistics.median(seen)

    def _sample(self, call: Work, flushes: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(flushes):
            self._buffer.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def _timed(self, call: Work, flushes: int) -> float:
        """The flush itself."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._buffer.zero_()
        begin.record()
        for _ in range(flushes):
            self._buffer.zero_()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


class HostClock:
    """For a rehearsal on CPU tensors: its figures say nothing about a GPU."""

    def rounds(self, calls: Sequence[Work], count: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in calls]
        for n in range(count):
            for i in _rotated(len(calls), n):
                found[i].append(self.host(calls[i]) / 1e3)
        return found

    def host(self, call: Work) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3


def _rotated(size: int, by: int) -> list[int]:
    """0 to size, begun elsewhere each time: what the machine does meanwhile falls on all."""
    return [(i + by) % size for i in range(size)]


def copy_rate(device: torch.device) -> float:
    """GB/s of a large copy within the device, bytes read and written: the ceiling of what moves bytes."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    (samples,) = CudaClock(device).rounds([lambda: target.copy_(source)], 9)
    return 2 * source.numel() / statistics.median(samples) / 1e6


def describe(device: torch.device) -> dict[str, Any]:
    """The device as a record needs it; nothing that tells one card from another of its kind."""
    if device.type != "cuda":
        return {"type": device.type, "name": "interpreter", "arch": None}
    p = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": p.name,
        "arch": p.major * 10 + p.minor,
        "memory_gib": round(p.total_memory / 2**30, 1),
        "sm_count": p.multi_processor_count,
        "l2_mib": round(getattr(p, "L2_cache_size", 0) / 2**20, 1),
        **_ask(
            {
                "driver": lambda nvml, gpu: nvml.nvmlSystemGetDriverVersion(),
                "power_limit": lambda nvml, gpu: f"{nvml.nvmlDeviceGetPowerManagementLimit(gpu) / 1e3:.2f} W",
            }
        ),
    }


def file_name(gpu: str) -> str:
    """ "NVIDIA H200" as part of a file's name: h200."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")


def state() -> dict[str, str | None]:
    """Clocks and power at this moment, from the driver; what is missing where it cannot be asked."""
    return _ask(
        {
            "clocks.sm": lambda nvml, gpu: f"{nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)} MHz",
            "clocks.mem": lambda nvml, gpu: f"{nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)} MHz",
            "power.draw": lambda nvml, gpu: f"{nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3:.2f} W",
            "temperature.gpu": lambda nvml, gpu: str(
                nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
            ),
        }
    )


def _ask(questions: dict[str, Callable[[Any, Any], str]]) -> dict[str, str | None]:
    """What NVML answers for the current device; None of what the board has not, "missing" what is to install.

    By the device's own name: CUDA_VISIBLE_DEVICES renumbers devices for torch alone.
    """
    nothing: dict[str, str | None] = dict.fromkeys(questions)
    if not torch.cuda.is_available():
        return nothing
    try:
        import pynvml as nvml
    except ImportError:
        return {**nothing, "missing": "pip install nvidia-ml-py"}
    found = nothing
    try:
        nvml.nvmlInit()
        uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
        gpu = nvml.nvmlDeviceGetHandleByIndex(0) if uuid is None else _by_uuid(nvml, uuid)
        for name, question in questions.items():
            with contextlib.suppress(nvml.NVMLError):  # not on this board
                found[name] = question(nvml, gpu)
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return {**nothing, "missing": f"NVML: {error}"}
    return found


def _by_uuid(nvml: Any, uuid: object) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

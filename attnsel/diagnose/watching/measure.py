"""Time and memory of calls, where they are asked for: medians of what each site's calls took.

Time: CUDA events on a GPU, which wait for nothing; the clock on a CPU. Memory: the allocator's peak on a GPU,
which is reset for each call, so that the program's own reading of it changes; on a CPU what the call is known
to have written: its result and what was materialised. The first calls of a site are left out: kernels are
loaded then, and the operators inside are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from attnsel.diagnose.watching.sites import Tally

WARM_UP = 2
MOST_SAMPLES = 100

FORWARD, BACKWARD, PEAK = "_forward", "_backward", "_peak"
"""Where a tally keeps its samples."""


class Meter:
    """Measures what runs while it is entered."""

    def __init__(self, *, time: bool, memory: bool) -> None:
        self._gpu = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        self._time, self._memory = time, memory
        self._begun: Any = None
        self._before = 0
        self.took: Any = None  # seconds, or two events
        self.peak: int | None = None

    def __enter__(self) -> Meter:
        if self._memory and self._gpu:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        if self._time:
            self._begun = _now(self._gpu)
        return self

    def __exit__(self, *_: object) -> None:
        if self._time:
            self.took = _between(self._begun, _now(self._gpu))
        if self._memory and self._gpu:
            self.peak = torch.cuda.max_memory_allocated() - self._before

    def file(self, tally: Tally, out: Any) -> None:
        """Keep it with the tally where the call was counted."""
        if self.took is not None:
            sample(tally, FORWARD, self.took)
        if self._memory:
            written = out[0] if isinstance(out, (tuple, list)) and out else out
            peak = self.peak
            if peak is None and isinstance(written, Tensor):
                peak = written.numel() * written.element_size()
                peak += sum(one.bytes for one in tally.seen.materialised)
                tally.notes["memory is what the call is known to have written: there is no GPU"] = None
            if peak is not None:
                sample(tally, PEAK, peak)


def _now(gpu: bool) -> Any:
    if not gpu:
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(begun: Any, ended: Any) -> Any:
    return ended - begun if isinstance(begun, float) else (begun, ended)


def sample(tally: Tally, name: str, value: Any) -> None:
    kept = tally.extra.get(name)
    if kept is None:
        kept = tally.extra[name] = deque(maxlen=MOST_SAMPLES + WARM_UP)
    if len(kept) < MOST_SAMPLES + WARM_UP:  # the first ones: they cost no more than a list
        kept.append(value)


def time_backward(tally: Tally, node: Any) -> None:
    """From the moment when an autograd node is run until it is done."""
    begun: list[Any] = []

    def before(_: Any) -> None:
        begun.append(_now(torch.cuda.is_initialized()))

    def after(*_: Any) -> None:
        if begun:
            sample(tally, BACKWARD, _between(begun.pop(), _now(torch.cuda.is_initialized())))

    node.register_prehook(before)
    node.register_hook(after)


def settle(tallies: Iterable[Tally]) -> None:
    """Medians of what was sampled, as the fields of a Site."""
    for tally in tallies:
        for name, field in (
            (FORWARD, "seconds"), (BACKWARD, "backward_seconds"), (PEAK, "peak_bytes")
        ):  # fmt: skip
            values = list(tally.extra.get(name, ()))
            if values:
                values = [_number(value) for value in (values[WARM_UP:] or values)]
                tally.extra[field] = int(median(values)) if field == "peak_bytes" else median(values)


def _number(value: Any) -> Any:
    if not isinstance(value, tuple):
        return value
    begun, ended = value
    ended.synchronize()
    return begun.elapsed_time(ended) / 1e3

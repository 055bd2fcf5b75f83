"""One call measured on this machine: every candidate that runs it, compared with the reference, then timed.

Inputs are random. Candidates take turns, so that what the machine does meanwhile falls on all of them; on
CUDA events are read after they were waited for, with L2 emptied before each. What was measured stays when the
time is over, somebody interrupts, or a kernel takes the device with it.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import json_fields
from attnsel.decision import Selection, select
from attnsel.errors import InvalidInput, in_words
from attnsel.params import AttentionParams, Tensors
from attnsel.runtime import selfcheck
from attnsel.runtime.bind import Bound, bind
from attnsel.runtime.call import NO_EXTRAS, Call, Extras, config
from attnsel.runtime.inputs import params_of
from attnsel.runtime.refusals import WrongNumbers
from attnsel.selection.evaluate import memory_parts, tensor_bytes
from attnsel.settings import current
from attnsel.verdicts.measured import Row, card_of, cells_of
from attnsel.verdicts.requirements import size

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SAMPLES, _SLOW_SAMPLES = 41, 5  # of one that is _SLOW times as slow as the fastest
_SLOW = 4.0
_ROUNDS = 3  # whatever the budget, where a round takes less than a third of it
_SAMPLE_US, _CALLS = 2000.0, 32  # short calls are timed several at once: so long, so many
_FLUSHED = 256 << 20  # bytes: more than any L2 there is (H200 60 MB, B200 126 MB)


class Times(NamedTuple):
    """Microseconds of one direction: the median and the quartiles."""

    direction: str
    median_us: float
    low_us: float
    high_us: float
    samples: int
    tflops: float | None


@json_fields("name", "status", "reason", "times", "peak_bytes")
@dataclass
class Timed:
    """One candidate. ``status``: measured, or why it was not: wrong, failed, out of memory, too large, not
    reached; ``reason`` says more. ``peak_bytes``: beside the call's tensors; None on a CPU, where nobody
    counts."""

    name: str
    status: str = "not reached"
    reason: str = ""
    times: tuple[Times, ...] = ()
    peak_bytes: int | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    forward: Callable[[], Any] | None = None
    took: float = 0.0  # microseconds of one call, when it was tried
    host: float = 0.0  # of them until Python had it back

    @property
    def measured(self) -> bool:
        return bool(self.times)


class Measuring:
    """A call that is measured: ``run`` does it, and whatever stops it, ``timed`` has what was done.

    Raises InvalidInput for a call that cannot be made of random tensors.
    """

    def __init__(self, selection: Selection) -> None:
        _require_measurable(selection.params)
        self.selection = selection
        ranked = [c.name for c in selection.ranked if c.executable]
        self.timed = [Timed(name) for name in ranked]
        self.interrupted, self.seconds = False, 0.0

    @property
    def fastest(self) -> Timed | None:
        """By what the choice goes by: in training forward and backward together."""
        return min((one for one in self.timed if one.measured), key=_last_median, default=None)

    def run(self, budget: float, moved: Callable[[float], None] = lambda seconds: None) -> None:
        """At most about ``budget`` seconds; ``moved`` hears how many have gone, between two samples."""
        began = time.monotonic()

        def left() -> float:
            gone = time.monotonic() - began
            moved(gone)
            return budget - gone

        enabled = gc.isenabled()
        try:
            self._all(budget, left)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            if enabled:
                gc.enable()
            for one in self.timed:
                self._summarise(one)
                one.forward = None
            self.seconds = time.monotonic() - began

    def _all(self, budget: float, left: Callable[[], float]) -> None:
        p, device = self.selection.params, _device(self.selection)
        need, free = 2 * tensor_bytes(p), _free(device)
        if free is not None and need > free:
            for one in self.timed:
                one.status = "too large"
                one.reason = f"its tensors and their copies take {size(need)}, and {size(free)} are free"
            return
        try:
            call, clock = random_call(p, device), _Clock(device)
        except Exception as error:
            if not _out_of_memory(error):
                raise
            for one in self.timed:
                one.status, one.reason = "out of memory", f"no room for its tensors: {_first_line(error)}"
            return
        lost = ""
        for one in self.timed:
            if left() <= 0 or lost:
                one.reason = lost or f"the {budget:g} seconds were over"
                continue
            self._try(one, call, clock, free)
            if one.status == "failed":
                lost = _lost(device, one.name)
        gc.collect()
        gc.disable()
        ready = [one for one in self.timed if one.forward is not None and not lost]
        while ready:
            quickest = min(one.took for one in ready)
            most = {one.name: _SLOW_SAMPLES if one.took > _SLOW * quickest else _SAMPLES for one in ready}
            due = [one for one in ready if _count(one) < most[one.name]]
            rounds = max(map(_count, due), default=0)
            short = sum(one.took for one in ready) / 1e6 < budget / 3
            if not due or (left() <= 0 and not (short and rounds < _ROUNDS)):
                return
            for one in due[rounds % len(due) :] + due[: rounds % len(due)]:
                if left() <= 0 and not (short and rounds < _ROUNDS):
                    return
                try:
                    self._sample(one, call, clock)
                except Exception as error:  # it ran before: memory that others took, or the device
                    one.status = "out of memory" if _out_of_memory(error) else "failed"
                    one.reason, one.samples = _first_line(error), {}
                    ready.remove(one)
                    if lost := _lost(device, one.name):
                        return

    def _try(self, one: Timed, call: Call, clock: _Clock, free: int | None) -> None:
        """Right numbers first; then once, to know how long it takes."""
        selection, p = self.selection, self.selection.params
        env = selection.environment
        parts = memory_parts(one.name, p, env, selection[one.name].adaptations)
        need = 2 * tensor_bytes(p) + sum(amount for _, amount in parts)
        if free is not None and need > free:
            one.status, one.reason = "too large", f"takes {size(need)}, and {size(free)} are free"
            return
        try:
            forced = selection.policy.replace(backend=one.name, figures=None)
            bound = bind(select(params_of(call), env, policy=forced).require(), call)
            selfcheck.compare(bound, call)
            one.forward = _forward(bound, call)
            before = time.perf_counter_ns()
            self._sample(one, call, clock, calls=1)
            one.took = (time.perf_counter_ns() - before) / 1e3
            one.host = clock.host(one.forward)
            one.samples, one.status = {}, "measured"
            one.took = sum(map(statistics.median, self._sample(one, call, clock, calls=1).values()))
            one.peak_bytes = clock.peak(lambda: self._step(one, call))
        except WrongNumbers as error:
            one.status, one.reason = "wrong", str(error)
        except Exception as error:  # a kernel's or a compiler's, of whatever type
            one.status = "out of memory" if _out_of_memory(error) else "failed"
            one.reason = _first_line(error)
        if one.status != "measured":
            one.forward, one.samples = None, {}

    def _step(self, one: Timed, call: Call) -> None:
        assert one.forward is not None
        with torch.set_grad_enabled(call.need_grad):
            out = one.forward()
            if call.need_grad:
                torch.autograd.grad(out, _leaves(call), torch.ones_like(out))

    def _sample(self, one: Timed, call: Call, clock: _Clock, calls: int = 0) -> Mapping[str, list[float]]:
        """Time it once more, forward and in training backward."""
        forward = one.forward
        assert forward is not None
        calls = calls or max(1, min(_CALLS, int(_SAMPLE_US / max(one.took, 1.0))))
        outs: list[Tensor] = []
        with torch.set_grad_enabled(call.need_grad):
            if call.need_grad:
                ahead = clock.time(lambda: outs.extend(forward() for _ in range(calls)), one.host * calls)
                leaves, dout = _leaves(call), torch.ones_like(outs[0])
                back = clock.time(
                    lambda: [torch.autograd.grad(out, leaves, dout) for out in outs], one.host * calls * 2
                )
                found = {"fwd": ahead, "bwd": back, "fwd+bwd": ahead + back}
            else:
                found = {
                    "fwd": clock.time(lambda: [forward() for _ in range(calls)] and None, one.host * calls)
                }
        for direction, micro in found.items():
            one.samples.setdefault(direction, []).append(micro / calls)
        return one.samples

    def _summarise(self, one: Timed) -> None:
        if one.status == "measured" and not one.samples:
            one.status, one.reason = "not reached", "it ran, and there was no time to time it"
        one.times = tuple(
            Times(way, *_quartiles(seen), len(seen), self._rate(way, statistics.median(seen)))
            for way, seen in one.samples.items()
        )

    def _rate(self, way: str, micro: float) -> float | None:
        """TFLOP/s as publications count them: half of the work under a causal mask, of windows none said."""
        p = self.selection.params
        if p.windowed or _device(self.selection).type == "cpu":
            return None
        d, e = p.head_dim_qk, p.head_dim_v
        products = {"fwd": d + e, "bwd": 3 * d + 2 * e, "fwd+bwd": 4 * d + 3 * e}[way]
        work = 2.0 * p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv * products
        return work * (0.5 if p.causal else 1.0) / micro / 1e6

    def rows(self) -> list[Row]:
        """What was measured as rows of a file of measurements."""
        env, p = self.selection.environment, self.selection.params
        about = cells_of(p) | {
            "arch": str(env.arch or ""),
            "gpu": card_of(env),
            "unit": "us",
            "cudnn": str(env.cudnn or ""),
            "torch": str(env.torch or ""),
            "source": "measured here",
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        rows: list[Row] = []
        for one in self.timed:
            version = getattr(env, CANDIDATES[one.name].library or "", None)
            for t in one.times:
                told = {
                    "direction": t.direction,
                    "kernel": one.name,
                    "kernel_version": str(version or ""),
                    "tflops": "" if t.tflops is None else f"{t.tflops:.4g}",
                    "samples": str(t.samples),
                    "peak_bytes": "" if one.peak_bytes is None else str(one.peak_bytes),
                }
                figures = {"value": t.median_us, "low": t.low_us, "high": t.high_us}
                rows.append(about | told | {name: f"{value:.6g}" for name, value in figures.items()})
        return rows


def _count(one: Timed) -> int:
    return len(next(iter(one.samples.values()), []))


def _last_median(one: Timed) -> float:
    return one.times[-1].median_us


def _quartiles(seen: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(seen) == 1:
        return seen[0], seen[0], seen[0]
    low, median, high = statistics.quantiles(seen, n=4, method="inclusive")
    return median, low, high


# ---- the call ---------------------------------------------------------------------------------------


def _require_measurable(p: AttentionParams) -> None:
    """Raises InvalidInput for what no random tensors are made of here."""
    for bad, name, value, why in (
        (p.context_parallel, "cp_size", p.cp_size, "several ranks are not measured"),
        (
            p.kv_cache != "none",
            "kv_cache",
            p.kv_cache,
            "a cache is not measured; ask for its lengths without",
        ),
        (p.dtype not in _DTYPES, "dtype", p.dtype, "is planned, not run"),
        (
            p.fp8_attention,
            "fp8_recipe",
            getattr(p.recipe, "kind", None),
            "attention in FP8 is planned, not run",
        ),
        (
            p.layout.q_format != p.layout.kv_format,
            "qkv_layout",
            p.qkv_layout,
            "mixed formats are not measured",
        ),
        (p.tensors != Tensors(), "tensors", "described", "strides and addresses are not measured"),
        (min(p.max_seqlen_q, p.max_seqlen_kv) == 0, "max_seqlen_q", p.max_seqlen_q, "nothing is to be timed"),
    ):
        if bad:
            raise InvalidInput(name, value, f"{why} (--measure)")


def random_call(p: AttentionParams, device: torch.device) -> Call:
    """A call that asks ``p``, of normal numbers; every sequence has its full length."""
    generator = torch.Generator(device).manual_seed(0)
    b, h, g, sq, skv = p.batch_size, p.num_heads, p.num_gqa_groups, p.max_seqlen_q, p.max_seqlen_kv
    d, e, group = p.head_dim_qk, p.head_dim_v, p.layout.group

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=_DTYPES[p.dtype])

    def lead(s: int) -> tuple[int, ...]:
        return {"bshd": (b, s), "sbhd": (s, b), "thd": (b * s,)}[p.qkv_format]

    shared = {"3hd": (3, -3), "h3d": (3, -2), "hd_2hd": (2, -3), "hd_h2d": (2, -2)}.get(group)
    if p.qkv_format == "bhsd":
        tensors = [drawn(b, h, sq, d), drawn(b, g, skv, d), drawn(b, g, skv, e)]
    elif shared is None:
        tensors = [drawn(*lead(sq), h, d), drawn(*lead(skv), g, d), drawn(*lead(skv), g, e)]
    else:
        count, axis = shared
        inner = (count, g, d) if axis == -3 else (g, count, d)
        tensors = [drawn(*lead(sq), h, d)] if count == 2 else []
        tensors += drawn(*lead(skv), *inner).unbind(axis)
    q, k, v = (t.requires_grad_(p.is_training) for t in tensors)
    return Call(_static(p), q, k, v, _extras(p, device, drawn), current(), p.is_training)


def _static(p: AttentionParams) -> Any:
    return config(
        qkv_format=p.qkv_format,
        attn_mask_type=p.attn_mask_type,
        window_size=p.window_size if p.windowed else None,
        bottom_right_diagonal=None if p.causal else p.bottom_right_diagonal,
        softcap=p.softcap,
        attention_dropout=p.attention_dropout,
        softmax_type=p.softmax_type,
        bias_type=p.core_attention_bias_type,
        is_training=p.is_training,
        deterministic=p.deterministic,
        return_lse=p.return_lse,
        return_max_logit=p.return_max_logit,
    )


def _extras(p: AttentionParams, device: torch.device, drawn: Callable[..., Tensor]) -> Extras:
    b, h, sq, skv = p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv
    extras = NO_EXTRAS
    if p.padding:
        starts = [torch.arange(b + 1, dtype=torch.int32, device=device) * s for s in (sq, skv)]
        kv = starts[0] if sq == skv else starts[1]
        extras = extras._replace(cu_seqlens_q=starts[0], cu_seqlens_kv=kv)
        if p.qkv_format == "thd":
            extras = extras._replace(max_seqlen_q=sq, max_seqlen_kv=skv)
    if p.attn_mask_type == "arbitrary":
        mask = torch.rand((1, 1, sq, skv), device=device) < 0.5
        mask[..., :1] = False  # no row without a key
        extras = extras._replace(attention_mask=mask)
    if p.has_bias:
        sizes = zip(p.core_attention_bias_shape or "", (b, h, sq, skv), strict=True)
        bias = drawn(*(1 if letter == "1" else count for letter, count in sizes))
        bias.requires_grad_(p.core_attention_bias_requires_grad)
        extras = extras._replace(core_attention_bias=bias)
    if p.softmax_type == "learnable":
        extras = extras._replace(softmax_offset=torch.zeros(h, device=device))
    return extras


def _leaves(call: Call) -> list[Tensor]:
    bias = call.extras.core_attention_bias
    return [call.q, call.k, call.v, *([bias] if bias is not None and bias.requires_grad else [])]


def _forward(bound: Bound, call: Call) -> Callable[[], Tensor]:
    """The output, by the way that a call of this signature takes."""
    if bound.plain is not None and call.extras is NO_EXTRAS:
        plain, (q, k, v) = bound.plain, call[1:4]
        return lambda: plain(q, k, v)
    run = bound.run

    def forward() -> Tensor:
        out = run(call)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return forward


# ---- the machine ------------------------------------------------------------------------------------


class _Clock:
    """Microseconds of some work: the host's clock, or CUDA events around it.

    On CUDA L2 is emptied before, as often as lets Python run ahead of the device: the time between two events
    would else hold what it takes to launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None
        if device.type == "cuda":
            self._buffer = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
            self._flush_us = 1.0
            seen = [self.time(self._buffer.zero_, 0.0) for _ in range(5)]
            self._flush_us = max(1.0, statistics.median(seen))

    def time(self, work: Callable[[], Any], host_us: float) -> float:
        if self._buffer is None:
            start = time.perf_counter_ns()
            work()
            return (time.perf_counter_ns() - start) / 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(min(500, 1 + math.ceil(1.5 * host_us / self._flush_us))):
            self._buffer.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def host(self, work: Callable[[], Any]) -> float:
        """Until Python has it back, its work on the device not waited for."""
        if self._buffer is None:
            return 0.0
        torch.cuda.synchronize(self._device)
        start = time.perf_counter_ns()
        with torch.no_grad():
            work()
        taken = (time.perf_counter_ns() - start) / 1e3
        torch.cuda.synchronize(self._device)
        return taken

    def peak(self, work: Callable[[], Any]) -> int | None:
        """Bytes that PyTorch's allocator gave out at once beside what it had; None on a CPU."""
        if self._buffer is None:
            return None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_allocated(self._device) - before)


def _device(selection: Selection) -> torch.device:
    kind = selection.environment.device.type
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind in ("cuda", "rocm") else torch.device(kind)
    )


def _free(device: torch.device) -> int | None:
    """Bytes that can be had now; None where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) - _FLUSHED
    with suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _out_of_memory(error: Exception) -> bool:
    """PyTorch's CPU allocator raises a RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(error)


def _lost(device: torch.device, name: str) -> str:
    """After a kernel that faulted nothing runs in this process: who did it; or empty."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"the device was lost to {name}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return in_words(error)[:200]

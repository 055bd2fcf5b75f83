"""One call measured on this machine: every candidate that runs it, compared with the reference, then timed.

Inputs are random. Candidates take turns, so that what the machine does meanwhile falls on all of them; on
CUDA events are read after they were waited for, with L2 emptied before each. What was measured stays when the
time is over, somebody interrupts, or a kernel takes the device with it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import json_fields
from attnsel.decision import Selection, select
from attnsel.errors import InvalidInput, in_words
from attnsel.params import AttentionParams, Tensors
from attnsel.runtime import selfcheck
from attnsel.runtime.bind import bind
from attnsel.runtime.call import NO_EXTRAS, Call, Extras, config
from attnsel.runtime.inputs import params_of
from attnsel.runtime.refusals import WrongNumbers
from attnsel.selection.evaluate import memory_parts, tensor_bytes
from attnsel.settings import current
from attnsel.verdicts.measured import Row, card_of, cells_of
from attnsel.verdicts.requirements import size

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SAMPLES, _SLOW, _OF_SLOW = 101, 4.0, 7  # at most; of what is so many times as slow as the fastest so many
_ROUNDS = 3  # at least, where a round is a third of the budget or less
_SAMPLE_US, _CALLS = 300.0, 16  # short calls are timed several at once: so long, so many
_LONG_US = 1e6  # what takes longer is not run once more because it was cold
_FLUSHED = 256 << 20  # bytes: more than any L2 there is (H200 60 MB, B200 126 MB)


@json_fields("name", "status", "reason", "peak_bytes")
@dataclass
class Timed:
    """One candidate. ``status``: measured, wrong, failed, out of memory, too large or not reached; ``reason``
    says more. ``peak_bytes``: beside the call's tensors; None on a CPU, where nobody counts.
    ``samples``: microseconds of a call by direction, in training fwd, bwd and fwd+bwd."""

    name: str
    status: str = "not reached"
    reason: str = ""
    peak_bytes: int | None = None
    samples: dict[str, list[float]] = field(default_factory=dict)
    forward: Callable[[], Tensor] | None = None
    host: float = 0.0  # microseconds until Python has a forward back

    @property
    def quartiles(self) -> dict[str, tuple[float, float, float]]:
        """By direction. The last direction is what the choice goes by: in training forward and backward."""
        return {way: _quartiles(seen) for way, seen in self.samples.items()}

    @property
    def whole(self) -> list[float]:
        return self.samples[list(self.samples)[-1]] if self.samples else []

    @property
    def median(self) -> float:
        return statistics.median(self.whole)

    @property
    def took(self) -> float:
        """Microseconds of a call at its best."""
        return min(self.whole, default=math.inf)

    def give_up(self, status: str, reason: str) -> None:
        self.status, self.reason, self.samples, self.forward = status, reason, {}, None


class Measuring:
    """A call that is measured: ``run`` does it, and whatever stops it, ``timed`` has what was done.

    Raises InvalidInput for a call that is not made of random tensors here.
    """

    def __init__(self, selection: Selection) -> None:
        _require_measurable(selection.params)
        self.selection, self.interrupted = selection, False
        self.timed = [Timed(candidate.name) for candidate in selection.ranked if candidate.executable]

    def best_first(self) -> list[Timed]:
        """Those that were measured."""
        return sorted((t for t in self.timed if t.samples), key=lambda t: t.median)

    def run(self, budget: float, moved: Callable[[float], None] = lambda seconds: None) -> None:
        """At most about ``budget`` seconds; ``moved`` hears between two samples how many have gone."""
        began = time.monotonic()

        def left() -> float:
            gone = time.monotonic() - began
            moved(gone)
            return budget - gone

        try:
            self._all(budget, left)
        except KeyboardInterrupt:
            self.interrupted = True
        for one in self.timed:
            one.forward, one.status = None, "measured" if one.samples else one.status

    def _all(self, budget: float, left: Callable[[], float]) -> None:
        p = self.selection.params
        kind = self.selection.environment.device.type
        device = torch.device("cpu" if kind == "cpu" else "cuda")
        need, free = 2 * tensor_bytes(p), _free(device)  # the self-check copies what goes in
        why = ("too large", f"q, k, v and copies take {size(need)}, and {size(free)} are free")
        try:
            made = (random_call(p, device), _Clock(device)) if need <= free else None
        except Exception as error:  # memory that others took
            made, why = None, _failure(error)
        if made is None:
            for one in self.timed:
                one.give_up(*why)
            return
        (call, clock), stop = made, ""
        # What is compiled first comes last: a compiler may take more than all the rest.
        for one in sorted(self.timed, key=lambda one: CANDIDATES[one.name].compiled_here):
            if stop or left() <= 0:
                one.give_up("not reached", stop or "the time was over")
                continue
            self._try(one, call, clock, free - need)
            if one.status == "failed":
                stop = _lost(device, one.name)
        ready = [] if stop else [one for one in self.timed if one.forward is not None]
        rounds, best = 0, min((one.took for one in ready), default=0.0)
        short = sum(one.took for one in ready) / 1e6 < budget / 3
        while ready and rounds < _SAMPLES:
            for one in ready[rounds % len(ready) :] + ready[: rounds % len(ready)]:
                if left() <= 0 and not (short and rounds < _ROUNDS):
                    return
                if rounds >= _OF_SLOW and one.took > _SLOW * best:
                    continue
                try:
                    _sample(one, call, clock)
                except Exception as error:  # it ran before: memory that others took, or the device
                    one.give_up(*_failure(error))
                    ready.remove(one)
                    if _lost(device, one.name):
                        return
            rounds, best = rounds + 1, min((one.took for one in ready), default=0.0)

    def _try(self, one: Timed, call: Call, clock: _Clock, room: int) -> None:
        """Right numbers first; then a time, which stays if nothing else fits into the budget."""
        selection = self.selection
        p, env, policy = selection.params, selection.environment, selection.policy
        own = sum(amount for _, amount in memory_parts(one.name, p, env, selection[one.name].adaptations))
        if own > room:
            return one.give_up("too large", f"takes {size(own)} more, and {size(max(0, room))} are free")
        try:
            forced = policy.replace(backend=one.name, figures=None)
            bound = bind(select(params_of(call), env, policy=forced).require(), call)
            selfcheck.compare(bound, call)
            plain, run = bound.plain if call.extras is NO_EXTRAS else None, bound.run
            q, k, v = call[1:4]
            one.forward = (lambda: run(call)) if plain is None else (lambda: plain(q, k, v))
            one.host = clock.host(one.forward)
            _sample(one, call, clock, most=1)
            if one.took < _LONG_US:
                one.samples = {}  # it was cold
                _sample(one, call, clock, most=1)
            one.peak_bytes = clock.peak(lambda: _sample(one, call, clock, most=1))
        except Exception as error:  # a kernel's or a compiler's, of whatever type
            one.give_up(*_failure(error))

    def rows(self) -> list[Row]:
        """What was measured as rows of a file of measurements."""
        env, p = self.selection.environment, self.selection.params
        about = cells_of(p) | {"arch": str(env.arch or ""), "gpu": card_of(env), "source": "measured here"}
        about |= {"unit": "us", "torch": str(env.torch or ""), "cudnn": str(env.cudnn or "")}
        about["date"] = datetime.now(timezone.utc).date().isoformat()
        rows: list[Row] = []
        for one in self.best_first():
            about["kernel"] = one.name
            about["kernel_version"] = str(getattr(env, CANDIDATES[one.name].library or "", None) or "")
            about["peak_bytes"] = "" if one.peak_bytes is None else str(one.peak_bytes)
            for way, (low, median, high) in one.quartiles.items():
                about |= {"direction": way, "samples": str(len(one.samples[way]))}
                about |= {"value": f"{median:.6g}", "low": f"{low:.6g}", "high": f"{high:.6g}"}
                rows.append({**about, "tflops": _tflops(p, way, median) if env.arch else ""})
        return rows


def _quartiles(seen: list[float]) -> tuple[float, float, float]:
    if len(seen) == 1:
        return seen[0], seen[0], seen[0]
    low, median, high = statistics.quantiles(seen, n=4, method="inclusive")
    return low, median, high


def _sample(one: Timed, call: Call, clock: _Clock, most: int = _CALLS) -> None:
    """Time it once more, forward and in training backward."""
    forward, outs = one.forward, list[Any]()
    assert forward is not None
    calls = max(1, min(most, int(_SAMPLE_US / one.took)))
    with torch.set_grad_enabled(call.need_grad):
        found = {"fwd": clock.time(lambda: outs.extend(forward() for _ in range(calls)), one.host * calls)}
        if call.need_grad:
            outs = [out[0] if isinstance(out, tuple) else out for out in outs]
            bias, dout = call.extras.core_attention_bias, torch.ones_like(outs[0])
            leaves = [t for t in (call.q, call.k, call.v, bias) if t is not None and t.requires_grad]
            found["bwd"] = clock.time(
                lambda: [torch.autograd.grad(out, leaves, dout) for out in outs], 2 * one.host * calls
            )
            found["fwd+bwd"] = sum(found.values())
    for way, micro in found.items():
        one.samples.setdefault(way, []).append(micro / calls)


def _tflops(p: AttentionParams, way: str, micro: float) -> str:
    """As publications count them: half of the work under a causal mask, and no rate with a window."""
    d, e = p.head_dim_qk, p.head_dim_v
    products = {"fwd": d + e, "bwd": 3 * d + 2 * e, "fwd+bwd": 4 * d + 3 * e}[way]
    work = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv * products * (1 if p.causal else 2)
    return "" if p.windowed else f"{work / micro / 1e6:.4g}"


# ---- the call ---------------------------------------------------------------------------------------


def _require_measurable(p: AttentionParams) -> None:
    """Raises InvalidInput for what no random tensors are made of here."""
    for name, value, bad in (
        ("cp_size", p.cp_size, p.context_parallel),
        ("kv_cache", p.kv_cache, p.kv_cache != "none"),
        ("dtype", p.dtype, p.dtype not in _DTYPES),
        ("fp8_recipe", getattr(p.recipe, "kind", None), p.fp8_attention),
        ("qkv_layout", p.qkv_layout, p.layout.q_format != p.layout.kv_format),
        ("tensors", "described", p.tensors != Tensors()),
        ("max_seqlen_q", p.max_seqlen_q, not p.max_seqlen_q),
        ("max_seqlen_kv", p.max_seqlen_kv, not p.max_seqlen_kv),
    ):
        if bad:
            raise InvalidInput(name, value, "is not measured: leave it out with --measure")


def random_call(p: AttentionParams, device: torch.device) -> Call:
    """A call that asks ``p``, of normal numbers in three tensors; every sequence has its full length."""
    generator = torch.Generator(device).manual_seed(0)
    b, h, g, sq, skv = p.batch_size, p.num_heads, p.num_gqa_groups, p.max_seqlen_q, p.max_seqlen_kv
    d, e = p.head_dim_qk, p.head_dim_v

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=_DTYPES[p.dtype])

    def lead(s: int) -> tuple[int, ...]:
        return {"bshd": (b, s), "sbhd": (s, b), "thd": (b * s,)}[p.qkv_format]

    if p.qkv_format == "bhsd":
        tensors = [drawn(b, h, sq, d), drawn(b, g, skv, d), drawn(b, g, skv, e)]
    else:
        tensors = [drawn(*lead(sq), h, d), drawn(*lead(skv), g, d), drawn(*lead(skv), g, e)]
    q, k, v = (t.requires_grad_(p.is_training) for t in tensors)
    same = "qkv_format attn_mask_type softcap attention_dropout softmax_type is_training deterministic"
    static = config(
        **{name: getattr(p, name) for name in f"{same} return_lse return_max_logit".split()},
        bias_type=p.core_attention_bias_type,
        window_size=p.window_size if p.windowed else None,
        bottom_right_diagonal=None if p.causal else p.bottom_right_diagonal,
    )
    return Call(static, q, k, v, _extras(p, device, drawn), current(), p.is_training)


def _extras(p: AttentionParams, device: torch.device, drawn: Callable[..., Tensor]) -> Extras:
    b, h, sq, skv = p.batch_size, p.num_heads, p.max_seqlen_q, p.max_seqlen_kv
    given: dict[str, Any] = {}
    if p.padding:
        starts = torch.arange(b + 1, dtype=torch.int32, device=device)
        given["cu_seqlens_q"] = starts * sq
        given["cu_seqlens_kv"] = given["cu_seqlens_q"] if sq == skv else starts * skv
        given |= {"max_seqlen_q": sq, "max_seqlen_kv": skv} if p.qkv_format == "thd" else {}
    if p.attn_mask_type == "arbitrary":
        given["attention_mask"] = mask = torch.rand((1, 1, sq, skv), device=device) < 0.5
        mask[..., :1] = False  # no row without a key
    if p.has_bias:
        sizes = zip(p.core_attention_bias_shape or "", (b, h, sq, skv), strict=True)
        bias = drawn(*(1 if letter == "1" else count for letter, count in sizes))
        given["core_attention_bias"] = bias.requires_grad_(p.core_attention_bias_requires_grad)
    if p.softmax_type == "learnable":
        given["softmax_offset"] = torch.zeros(h, device=device)
    return Extras(**given) if given else NO_EXTRAS


# ---- the machine ------------------------------------------------------------------------------------


class _Clock:
    """Microseconds of some work: the host's clock, or CUDA events around it.

    On CUDA L2 is emptied before, as often as lets Python run ahead of the device: the time between two events
    would else hold what it takes to launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer, self._flush_us = None, 1.0
        if device.type == "cuda":
            self._buffer = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)
            self._flush_us = max(1.0, min(self.time(self._buffer.zero_, 0.0) for _ in range(5)))

    def time(self, work: Callable[[], Any], host_us: float) -> float:
        if self._buffer is None:
            return _host_us(work)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(min(500, 1 + math.ceil(1.5 * host_us / self._flush_us))):
            self._buffer.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def host(self, work: Callable[[], Any]) -> float:
        """Until Python has it back, its work on the device not waited for; 0 on a CPU."""
        if self._buffer is None:
            return 0.0
        torch.cuda.synchronize()
        with torch.no_grad():
            taken = _host_us(work)
        torch.cuda.synchronize()
        return taken

    def peak(self, work: Callable[[], Any]) -> int | None:
        """Bytes that PyTorch's allocator gave out at once beside what it had; None on a CPU."""
        if self._buffer is None:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_allocated() - before)


def _host_us(work: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1e3


def _free(device: torch.device) -> int:
    """Bytes that can be had now; more than anybody has where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info()[0]) - _FLUSHED
    with suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        return int(next(line.split()[1] for line in file if line.startswith("MemAvailable:"))) << 10
    return 1 << 62


def _failure(error: Exception) -> tuple[str, str]:
    """Its status, and the reason. PyTorch's CPU allocator raises a RuntimeError."""
    if isinstance(error, WrongNumbers):
        return "wrong", str(error)
    full = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "not enough memory" in str(error)
    return "out of memory" if full else "failed", _first_line(error)


def _lost(device: torch.device, name: str) -> str:
    """After a kernel that faulted nothing runs in this process: who did it; or empty."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return f"the device was lost to {name}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return in_words(error)[:200]

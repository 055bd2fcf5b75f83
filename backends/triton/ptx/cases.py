"""Calls that are executed and held against float64: each feature, odd lengths, head dimensions, both dtypes.

Small, but larger than the tiles: every loop runs its first, middle and last part. A case names the kernels it
reaches; ``on`` leaves out what an architecture does not have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.tiled.backward import backward as exact_backward
from attnsel.backends.tiled.forward import forward as exact_forward
from attnsel.backends.triton import pool, run

from .faults import Fault, Unsupported
from .plain import DIFFERENTIABLE, plain
from .run import Executed, executed_on
from .tensors import empty_is_nan, in_pages, make, upstream

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Case:
    """One call. ``tensors``: optional inputs, with the letters of their shape where they have a choice."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)
    head_dims: tuple[int, int] = (64, 64)
    lengths: tuple[int, int] = (150, 201)  # s_q, s_kv
    dtypes: tuple[str, ...] = ("bf16",)  # on Turing fp16 only
    page_size: int = 0  # the keys lie in pages
    splits: int | None = None  # of decode; None: as the call would choose
    backward: bool = True
    variant: str | None = None  # of the forward: see ``run.forward``
    archs: tuple[int, ...] = ()  # the only ones; all if left out
    heads: tuple[int, int] = (2, 1)  # of queries, of keys and values
    also: tuple[dict[str, Any], ...] = ()  # more calls: lengths, and what of ``spec`` is another
    quick: bool = False  # one of the representative part

    def calls(self) -> list[Case]:
        """This one, and with each entry of ``also`` in place of its own."""
        made = [dataclasses.replace(self, also=())]
        for other in self.also:
            lengths = other.get("lengths", self.lengths)
            spec = {**self.spec, **{name: value for name, value in other.items() if name != "lengths"}}
            made.append(dataclasses.replace(self, also=(), lengths=lengths, spec=spec))
        return made

    def dtypes_on(self, arch: int) -> tuple[str, ...]:
        return ("fp16",) if arch < 80 else self.dtypes


_CAUSAL = {"window_right": 0}
_BOTTOM_RIGHT = {"window_right": 0, "bottom_right": True}
_BOTH = ("bf16", "fp16")
_PACKED = {"packed": True}
_ALL = {**_BOTTOM_RIGHT, "window_left": 70, "softcap": 1.5, "softmax_type": "learnable", "dropout_p": 0.3}
_DECODED: dict[str, Any] = {"spec": _BOTTOM_RIGHT, "lengths": (3, 300), "backward": False}

# Lengths of every remainder that a lane's own column or row can have in a tile, for calls of one kernel: a
# comparison is only seen to be strict where both sides are equal. None is a multiple of 16, for which Triton
# makes another kernel.
_SWEEP = tuple(
    {"lengths": (67 + 8 * (5 * i % 16), 128 * (i % 2) + 8 * i + (2, 5)[(i + i // 8) % 2])} for i in range(16)
)
_DECODED_SWEEP = tuple({"lengths": (3, 128 + each["lengths"][1])} for each in _SWEEP)
# Bounds of the window on the edges of tiles and beside them.
_EDGES = ((64, 0), (63, 1), (32, 0), (33, 31), (0, 0), (127, 64), (128, 128), (65, 32))
_WINDOWS = tuple(
    {**each, "window_left": left, "window_right": right}
    for each, (left, right) in zip(_SWEEP, 2 * _EDGES, strict=True)
)

CASES = (
    Case("full", dtypes=_BOTH, also=_SWEEP),
    Case("causal, head_dim 128", _CAUSAL, head_dims=(128, 128), dtypes=_BOTH, also=_SWEEP),
    Case("causal bottom-right, rows without a key", _BOTTOM_RIGHT, lengths=(150, 77), also=_SWEEP),
    Case("window", {"window_left": 60, "window_right": 9}, also=_WINDOWS),
    Case("offsets", {"window_left": 90, "window_right": 20, "q_offset": 100, "kv_offset": 50}),
    Case("softcap", {"softcap": 1.2}, also=_SWEEP),
    Case("alibi", _CAUSAL, {"alibi_slopes": "h"}, also=_SWEEP),
    Case("bias", {}, {"bias": "1 h s_q s_kv"}, also=_SWEEP),
    Case("mask", {}, {"attn_mask": "b 1 s_q s_kv"}, also=_SWEEP),
    Case("dropout", {"dropout_p": 0.3}, also=_SWEEP),
    Case("sinks", {"softmax_type": "learnable"}, {"softmax_offset": "h"}, also=_SWEEP),
    Case("lengths", {}, {"seqlens_q": "b", "seqlens_kv": "b"}, dtypes=("fp16",), also=_SWEEP),
    Case("packed", {**_PACKED, **_CAUSAL}, dtypes=_BOTH, also=_SWEEP),
    Case("packed, apart, everything", {**_PACKED, **_ALL},
         {"padded": "", "bias": "1 h s_q s_kv", "alibi_slopes": "b h", "softmax_offset": "h"},
         also=_SWEEP),
    Case("everything", _ALL,
         {"seqlens_kv": "b", "bias": "1 h s_q s_kv", "attn_mask": "b 1 s_q s_kv", "alibi_slopes": "h",
          "softmax_offset": "h"}, also=_SWEEP),
    Case("head_dims 192 and 128, causal", _CAUSAL, head_dims=(192, 128), also=_SWEEP),
    Case("head_dim 256", head_dims=(256, 256), lengths=(70, 101), also=_SWEEP),
    Case("head_dims 40 and 24, causal", _CAUSAL, head_dims=(40, 24), dtypes=("fp16",), also=_SWEEP),
    Case("one query row", **(_DECODED | {"lengths": (1, 131)}), splits=1,
         also=tuple({"lengths": (1, each["lengths"][1])} for each in _DECODED_SWEEP)),
    Case("decode, three parts", **_DECODED, splits=3, dtypes=_BOTH, also=_DECODED_SWEEP),
    Case("decode, pages of 16", **_DECODED, page_size=16, splits=3, also=_DECODED_SWEEP),
    Case("pages of 256", **(_DECODED | {"lengths": (90, 300)}), page_size=256, splits=0, also=_SWEEP),
    Case("descriptors, causal", _CAUSAL, head_dims=(128, 128), variant="descriptor", backward=False,
         archs=(90, 100)),
)  # fmt: skip


@dataclass(slots=True)
class CaseReport:
    """A case on one architecture. ``errors``: by result, the largest over what is allowed (1: all of it)."""

    case: str
    arch: int
    dtype: str
    head_dims: tuple[int, int]
    kernels: list[str] = field(default_factory=list)
    blocks: int = 0
    instructions: int = 0  # that warps executed
    seconds: float = 0.0
    compiling: float = 0.0  # seconds of them
    errors: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    unsupported: tuple[str, ...] = ()  # opcodes
    refused: str | None = None  # the compiler's words, or the executor's

    @property
    def largest(self) -> float:
        return max(self.errors.values(), default=0.0)

    @property
    def failed(self) -> bool:
        return bool(self.faults) or not self.largest <= 1 or self.refused is not None

    @property
    def ok(self) -> bool:
        return not self.failed and not self.unsupported

    def as_json(self) -> dict[str, Any]:
        shown = {name: round(e, 4) if math.isfinite(e) else None for name, e in self.errors.items()}
        times = {"seconds": round(self.seconds, 2), "compiling": round(self.compiling, 2)}
        return dataclasses.asdict(self) | {"errors": shown, **times, "ok": self.ok}


Wanted = tuple[Case, int, str]  # a case, an architecture, a dtype


def wanted_cases(archs: tuple[int, ...], words: tuple[str, ...] = ()) -> list[Wanted]:
    """In the order of the architectures. ``words``: only cases whose names have one of them."""
    return [
        (case, arch, dtype)
        for arch in archs
        for case in CASES
        if not case.archs or arch in case.archs
        if not words or any(word in case.name for word in words)
        for dtype in case.dtypes_on(arch)
    ]


def reports(wanted: list[Wanted], progress: Callable[[int], None], jobs: int = 1) -> list[CaseReport]:
    """In the order of ``wanted``, ``jobs`` processes at a time; ``progress`` is told how many are done."""

    def ended(wanted: Wanted, error: RuntimeError) -> CaseReport:
        case, arch, dtype = wanted
        return CaseReport(case.name, arch, dtype, case.head_dims, refused=str(error))

    return pool.collect(report_on, wanted, jobs, ended, lambda count, _: progress(count))


def report_on(wanted: Wanted) -> CaseReport:
    """Execute a case: forward and, where it has one, backward."""
    torch.set_num_threads(1)
    case, arch, dtype = wanted
    report = CaseReport(case.name, arch, dtype, case.head_dims)
    done: list[Executed] = []
    start = time.perf_counter()
    try:
        # What ptxas refuses Triton prints in full, though it is in the error as well.
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(io.StringIO()):
            report.errors = _compared(case, arch, DTYPES[dtype], done)
    except Unsupported as missing:
        report.unsupported = missing.opcodes
    except Exception as error:  # the compiler's own failures have no common type
        report.refused = pool.words_of(error)
    report.seconds = time.perf_counter() - start
    for each in done:
        report.kernels.append(each.kernel)
        report.blocks += each.blocks
        report.instructions += each.instructions
        report.compiling += each.compiling
        report.faults += each.faults
    return report


def _compared(case: Case, arch: int, dtype: torch.dtype, done: list[Executed]) -> dict[str, float]:
    """By result the largest error of all calls."""
    largest: dict[str, float] = {}
    for each in case.calls():
        call = Call.of(each, arch, dtype)
        with executed_on(arch, done), empty_is_nan():
            actual = call.carried_out()
        errors = call.errors(actual)
        if missing := call.held()[0].keys() - errors.keys():
            raise ValueError(f"the kernels gave no {', '.join(sorted(missing))}")
        for name, error in errors.items():
            largest[name] = max(error, largest.get(name, 0.0))
    return largest


@dataclass(slots=True)
class Call:
    """One call's tensors, as the kernels get them and as its definition reads them."""

    case: Case
    dtype: torch.dtype
    spec: Spec
    inputs: Inputs
    given: Inputs
    dout: Tensor | None = None
    dlse: Tensor | None = None
    _held: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    @classmethod
    def of(cls, case: Case, arch: int, dtype: torch.dtype) -> Call:
        spec, inputs = make(case, dtype)
        # On Turing the dK/dV pass ends at head_dim 128.
        backward = case.backward and (arch >= 80 or max(case.head_dims) <= 128)
        spec = dataclasses.replace(spec, need_grad=backward)
        given = in_pages(inputs, case.page_size) if case.page_size else inputs
        if given.bias is not None and backward:
            given = given._replace(bias=given.bias.detach().requires_grad_())
        return cls(case, dtype, spec, inputs, given)

    def carried_out(self) -> dict[str, Tensor]:
        """Forward and, where the case has one, backward, in the context of the caller: results by name."""
        result = run.forward(self.spec, self.given, splits=self.case.splits, variant=self.case.variant)
        assert result.lse is not None
        actual = {"out": result.out, "lse": result.lse}
        if result.max_logit is not None:
            actual["max_logit"] = result.max_logit
        if self.spec.need_grad:
            self.dout, self.dlse = upstream(self.spec, self.inputs, result)
            grads = run.backward(self.spec, self.given, result, self.dout, self.dlse)
            actual |= {f"d{name}": t for name, t in grads._asdict().items() if t is not None}
        return actual

    def held(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the results are held against: exact ones, and those at the call's own precision."""
        if self._held is None:
            exact = _exact(self.spec, self.inputs, self.dout, self.dlse)
            self._held = exact, plain(self.spec, self.inputs, self.dtype, self.dout, self.dlse)
        return self._held

    def errors(self, actual: dict[str, Tensor]) -> dict[str, float]:
        """Of all results, or some: each over what is allowed of it."""
        return _against(actual, *self.held(), self.dtype)


def _exact(spec: Spec, inputs: Inputs, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Tensor]:
    """The same call in float64, by ``tiled``."""
    halves = {name: t for name in DIFFERENTIABLE if (t := getattr(inputs, name)) is not None}
    changes: dict[str, Any] = {name: t.detach().double() for name, t in halves.items()}
    wide = inputs._replace(**changes)
    result = exact_forward(spec, wide)
    assert result.lse is not None
    made = {"out": result.out, "lse": result.lse}
    if result.max_logit is not None:
        made["max_logit"] = result.max_logit
    if dout is not None and dlse is not None:
        grads = exact_backward(spec, wide, Result(*result[:2]), dout.double(), dlse.double())
        made |= {f"d{name}": t for name, t in grads._asdict().items() if t is not None}
    return made


def _against(
    actual: dict[str, Tensor], expected: dict[str, Tensor], low: dict[str, Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """By result its error, over twice (gradients: thrice) that of plain PyTorch and two ulp of the top."""
    ratios = {}
    for name, result in actual.items():
        t = expected[name]
        finite = t[t.isfinite()]
        ulp = torch.finfo(dtype).eps * (finite.abs().max().item() if finite.numel() else 0.0)
        allowed = (3 if name.startswith("d") else 2) * _error(low[name], t) + 2 * ulp
        off = _error(result, t)
        ratios[name] = off / allowed if allowed else (0.0 if off == 0 else math.inf)
    return ratios


def _error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where only one of two is a number."""
    difference = torch.where(actual == expected, 0.0, (actual.double() - expected.double()).abs())
    return difference.nan_to_num(math.inf, math.inf).max().item() if difference.numel() else 0.0

"""Calls that are executed and held against float64: features alone and in pairs, lengths, head dimensions.

Small, but larger than the tiles: every loop runs its first, middle and last part (``grid.py``).
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

import pool
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.tiled.kernel import backward as exact_backward
from attnsel.backends.tiled.kernel import forward as exact_forward
from attnsel.backends.triton import run
from ptx_interpreter.faults import Fault, Unsupported
from ptx_interpreter.grid import (
    ALL,
    ALL_REMAINDERS,
    BOTH,
    BOTTOM_RIGHT,
    CAUSAL,
    DECODED,
    DECODED_SWEEP,
    DIAGONALS,
    PACKED,
    PAIRS,
    SWEEP,
    WHOLE,
    WIDE_DIAGONALS,
    WIDE_SWEEP,
    WINDOWS,
    Case,
)
from ptx_interpreter.plain import DIFFERENTIABLE, plain
from ptx_interpreter.run import Executed, executed_on
from ptx_interpreter.tensors import empty_is_nan, in_pages, make, upstream

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


CASES = (
    Case("full", dtypes=BOTH, also=WIDE_SWEEP),
    Case("causal, head_dim 128", CAUSAL, head_dims=(128, 128), dtypes=BOTH, also=WIDE_DIAGONALS, quick=True),
    Case("causal bottom-right, rows without a key", BOTTOM_RIGHT, lengths=(150, 77),
         also=({"lengths": (90, 301)}, *SWEEP), quick=True),
    Case("window", {"window_left": 60, "window_right": 9}, also=WINDOWS, quick=True),
    Case("offsets", {"window_left": 90, "window_right": 20, "q_offset": 100, "kv_offset": 50},
         also=SWEEP),
    Case("softcap", {"softcap": 1.2}, also=SWEEP),
    Case("alibi", CAUSAL, {"alibi_slopes": "h"}, also=DIAGONALS),
    Case("bias", {}, {"bias": "1 h s_q s_kv"}, also=SWEEP),
    Case("mask", {}, {"attn_mask": "b 1 s_q s_kv"}, also=SWEEP),
    Case("dropout", {"dropout_p": 0.3}, also=SWEEP),
    Case("sinks", {"softmax_type": "learnable"}, {"softmax_offset": "h"}, also=SWEEP),
    Case("lengths", {}, {"seqlens_q": "b", "seqlens_kv": "b"}, dtypes=("fp16",), also=(*WHOLE, *SWEEP)),
    Case("packed", {**PACKED, **CAUSAL}, dtypes=BOTH, also=(*WHOLE, *DIAGONALS)),
    Case("packed, apart, everything", {**PACKED, **ALL},
         {"padded": "", "bias": "1 h s_q s_kv", "alibi_slopes": "b h", "softmax_offset": "h"},
         also=(*WHOLE, *SWEEP), quick=True),
    Case("everything", ALL,
         {"seqlens_kv": "b", "bias": "1 h s_q s_kv", "attn_mask": "b 1 s_q s_kv", "alibi_slopes": "h",
          "softmax_offset": "h"}, also=(*WHOLE, *SWEEP), quick=True),
    Case("head_dims 192 and 128, causal", CAUSAL, head_dims=(192, 128), also=DIAGONALS),
    Case("head_dim 256", head_dims=(256, 256), lengths=(70, 101), also=SWEEP),
    Case("head_dims 40 and 24, causal", CAUSAL, head_dims=(40, 24), dtypes=("fp16",),
         also=(*DIAGONALS, *ALL_REMAINDERS)),
    Case("one query row", **(DECODED | {"lengths": (1, 131)}), splits=1,
         also=({"heads": (12, 1)}, *({"lengths": (1, each["lengths"][1])} for each in DECODED_SWEEP[7:]))),
    Case("decode, three parts", **DECODED, splits=3, dtypes=BOTH, also=DECODED_SWEEP),
    Case("decode, pages of 16", **DECODED, page_size=16, splits=3, also=DECODED_SWEEP, quick=True),
    Case("pages of 256", **(DECODED | {"lengths": (90, 300)}), page_size=256, splits=0, also=SWEEP),
    Case("bias of each key", {}, {"bias": "b 1 1 s_kv"}, dtypes=("fp16",), also=SWEEP),
    Case("bias of each row", {}, {"bias": "1 h s_q 1"}, also=SWEEP),
    Case("largest scores", {"return_max_logit": True}, also=SWEEP),
    Case("whole tiles", {"window_left": 64, "window_right": 0}, lengths=(128, 256),
         also=({"lengths": (256, 128)}, {"lengths": (64, 64), "window_left": 128, "window_right": 64},
               *({"lengths": (s_q, s_kv), "window_left": s_kv // 2 + k, "window_right": k}
                 for k, (s_q, s_kv) in enumerate(((48, 80), (112, 208), (16, 32), (208, 144), (96, 16)))),
               *({"lengths": (16, 96), "window_left": 9, "window_right": 3, "q_offset": offset}
                 for offset in range(0, 96, 5)))),
    Case("head_dims 576 and 512", CAUSAL, head_dims=(576, 512), lengths=(70, 101), backward=False, splits=0,
         also=DIAGONALS),
    Case("decode, head_dims 576 and 512", **DECODED, head_dims=(576, 512), heads=(4, 1), splits=3,
         also=({"lengths": (3, 2300), "splits": 128}, *DECODED_SWEEP[1::2])),
    Case("decode, groups, lengths, largest scores",
         **(DECODED | {"spec": {**BOTTOM_RIGHT, "return_max_logit": True}}),
         tensors={"seqlens_kv": "b"}, heads=(4, 2), splits=3, dtypes=("fp16",),
         also=({"heads": (10, 2)}, *DECODED_SWEEP)),
    Case("decode, pages of 64, window, softcap, sinks",
         **(DECODED | {"spec": {**BOTTOM_RIGHT, "window_left": 130, "softcap": 1.5,
                                "softmax_type": "off-by-one"}}),
         tensors={"seqlens_kv": "b"}, page_size=64, splits=4, also=DECODED_SWEEP),
    *PAIRS,
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


def wanted_cases(archs: tuple[int, ...], words: tuple[str, ...] = (), quick: bool = False) -> list[Wanted]:
    """In the order of the architectures. ``words``: only cases whose names have one of them.

    ``quick``: only the representative ones, each at its first dtype and with few calls.
    """
    return [
        (case.shortened() if quick else case, arch, dtype)
        for arch in archs
        for case in CASES
        if not words or any(word in case.name for word in words)
        if case.quick or not quick
        for dtype in case.dtypes_on(arch)[: 1 if quick else None]
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
        result = run.forward(self.spec, self.given, splits=self.case.splits)
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

"""The offline gate: every configuration that ships is compiled for its architecture, with no GPU.

The launches are those ``run.py`` would make, of tensors without memory: what is proven here is what runs.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.gpus import SHARED_MEMORY

from . import launch as _launch
from . import pool
from .blocks import ARCHS, Block
from .launch import ROWS_BLOCK, Buffers, Launch, make_call, tile_count

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512))
FEATURES = ("full", "causal")  # shipped for every head dimension and dtype


@dataclass(frozen=True, slots=True)
class Configuration:
    """One kernel to compile. ``feature``: a key of ``_CALLS``, "all" being every optional tensor at once."""

    kernel: str  # forward, rows, dkdv, dq, dbias
    arch: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str  # fp16, bf16, fp32
    feature: str = "causal"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What the compiler said of one configuration; ``error`` when it said no."""

    kernel: str
    arch: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    feature: str
    block: tuple[int, int] | None
    warps: int
    stages: int
    registers: int
    spills: int  # local loads and stores, or the stack's bytes where there are none of those
    shared_memory: int  # bytes
    shared_memory_limit: int
    matrix_instructions: tuple[str, ...]
    seconds: float
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Compiled, fits, spills nothing, and uses the tensor cores where it multiplies 16-bit numbers."""
        tensor_cores = bool(self.matrix_instructions) or self.kernel == "rows" or self.dtype == "fp32"
        fits = self.shared_memory <= self.shared_memory_limit
        return self.error is None and fits and not self.spills and tensor_cores

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def configurations(
    archs: Iterable[int] = ARCHS,
    *,
    head_dims: Iterable[tuple[int, int]] = HEAD_DIMS,
    dtypes: Iterable[str] = ("bf16", "fp16"),
    features: Iterable[str] = FEATURES,
    kernels: Iterable[str] = ("forward", "dkdv", "dq"),
) -> list[Configuration]:
    """The shipped table, without what rules refuse.

    On Turing fp16 only, and no dK/dV pass above head_dim 128; no backward above 256.
    """
    return [
        Configuration(kernel, arch, d, e, dtype, feature)
        for arch in archs
        for d, e in head_dims
        for dtype in dtypes
        if arch >= 80 or dtype == "fp16"
        for feature in features
        for kernel in kernels
        if not (arch < 80 and kernel == "dkdv" and max(d, e) > 128)
        if kernel == "forward" or max(d, e) <= 256
    ]


def run_gate(
    archs: Iterable[int] = ARCHS,
    *,
    progress: Callable[[int, int, KernelReport], None] | None = None,
    jobs: int = 1,
    **chosen: Any,
) -> list[KernelReport]:
    """Compile and report every configuration of ``archs``; ``chosen`` narrows as ``configurations`` does.

    ``progress(done, total, report)`` is called after each. A refusal of the compiler is a report as well.
    With ``jobs`` over 1 that many processes compile.
    """
    return reports(configurations(archs, **chosen), progress, jobs)


def reports(
    wanted: list[Configuration],
    progress: Callable[[int, int, KernelReport], None] | None = None,
    jobs: int = 1,
) -> list[KernelReport]:
    """In the order of ``wanted``; ``progress`` hears of them as they are done."""
    made: dict[int, KernelReport] = {}
    with contextlib.closing(_made(wanted, min(jobs, len(wanted)))) as coming:
        for place, report in coming:
            made[place] = report
            if progress is not None:
                progress(len(made), len(wanted), report)
    return [made[place] for place in range(len(wanted))]


def _made(wanted: list[Configuration], jobs: int) -> Generator[tuple[int, KernelReport], None, None]:
    if jobs <= 1:
        for place, configuration in enumerate(wanted):
            yield place, report_on(configuration)
        return
    with contextlib.closing(pool.apply(report_on, wanted, jobs)) as values:
        for place, value in values:
            yield place, value if isinstance(value, KernelReport) else refused(wanted[place], value)


def report_on(c: Configuration) -> KernelReport:
    from .aot import compile_launch

    start, launch = time.perf_counter(), None
    try:
        launch = launch_of(c)
        # What ptxas refuses Triton prints in full, though it is in the error as well.
        with contextlib.redirect_stdout(io.StringIO()):
            made = compile_launch(launch, c.arch)
    except Exception as error:  # the compiler's own failures have no common type
        return refused(c, error, launch.block if launch else None, time.perf_counter() - start)
    b = launch.block
    return KernelReport(
        *_named(c),
        (b.m, b.n),
        b.warps,
        b.stages,
        made.registers,
        made.spills or made.stack,
        made.shared_memory,
        made.shared_memory_limit,
        made.matrix_instructions,
        made.seconds,
    )


def refused(
    c: Configuration, error: Exception, block: Block | None = None, seconds: float = 0.0
) -> KernelReport:
    tile, warps, stages = ((block.m, block.n), block.warps, block.stages) if block else (None, 0, 0)
    words = f"{type(error).__name__}: {error}".strip()[:500]
    limit = SHARED_MEMORY[c.arch]
    return KernelReport(*_named(c), tile, warps, stages, 0, 0, 0, limit, (), seconds, words)


def _named(c: Configuration) -> tuple[str, int, int, int, str, str]:
    return c.kernel, c.arch, c.head_dim_qk, c.head_dim_v, c.dtype, c.feature


def launch_of(c: Configuration, sequence: int = 4096) -> Launch:
    """The launch a training call of this configuration would make: b 2, h 16, g 4, bshd or thd."""
    spec, inputs = _call(c, sequence)
    call = make_call(spec, inputs)
    q = inputs.q
    if spec.packed:
        out = _meta(2 * sequence, 16, c.head_dim_v, dtype=q.dtype)
        lse = _meta(16, 2 * sequence, dtype=torch.float32)
    else:
        out = _meta(2, sequence, 16, c.head_dim_v, dtype=q.dtype).transpose(1, 2)
        lse = _meta(2, 16, sequence, dtype=torch.float32)
    if c.kernel == "forward":
        return _launch.forward_launch(call, c.arch, out, lse, None, call.block("forward", c.arch))
    dsinks = None
    if spec.softmax_type == "learnable":
        dsinks = _meta(16, 2, tile_count(sequence, ROWS_BLOCK), dtype=torch.float32)
    buffers = Buffers(out, lse, lse, q, inputs.k, inputs.v, inputs.bias, dsinks)
    for launch in _launch.backward_launches(call, c.arch, Result(out, lse), None, buffers, only=c.kernel):
        return launch
    raise ValueError(f"no kernel {c.kernel!r} in this call")


_BAND = {"window_left": 512, "window_right": 0}
# What a call asks for beyond plain attention: fields of its Spec, and its optional tensors.
_CALLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "full": ({}, ()),
    "causal": ({"window_right": 0}, ()),
    "window": (_BAND, ()),
    "bias": ({}, ("bias",)),
    "mask": ({}, ("attn_mask",)),
    "dropout": ({"window_right": 0, "dropout_p": 0.1}, ("dropout_seed", "dropout_offset")),
    "alibi": (_BAND, ("alibi_slopes",)),
    "softcap": ({**_BAND, "softcap": 30.0}, ()),
    "packed": ({"window_right": 0, "packed": True}, ("cu_seqlens_q", "cu_seqlens_kv")),
    "all": (
        {
            **_BAND,
            "bottom_right": True,
            "softcap": 30.0,
            "softmax_type": "learnable",
            "dropout_p": 0.1,
        },
        (
            *("attn_mask", "bias", "alibi_slopes", "softmax_offset", "seqlens_q", "seqlens_kv"),
            *("dropout_seed", "dropout_offset"),
        ),
    ),
}


def _call(c: Configuration, sequence: int) -> tuple[Spec, Inputs]:
    if c.feature not in _CALLS:
        raise ValueError(f"feature is {c.feature!r}; allowed: {', '.join(_CALLS)}")
    fields, names = _CALLS[c.feature]
    spec = Spec(softmax_scale=c.head_dim_qk**-0.5, need_grad=True, **fields)
    dtype = _DTYPES[c.dtype]
    dense = (
        _meta(2, sequence, heads, width, dtype=dtype)
        for heads, width in ((16, c.head_dim_qk), (4, c.head_dim_qk), (4, c.head_dim_v))
    )
    q, k, v = (t.flatten(0, 1) if spec.packed else t.transpose(1, 2) for t in dense)
    lengths, scalar = _meta(2, dtype=torch.int32), _meta(1, dtype=torch.int64)
    optional: dict[str, Any] = {
        "attn_mask": _meta(2, 1, 1, sequence, dtype=torch.bool),
        "bias": _meta(1, 16, sequence, sequence, dtype=dtype),
        "alibi_slopes": _meta(16, dtype=torch.float32),
        "softmax_offset": _meta(16, dtype=torch.float32),
        "seqlens_q": lengths,
        "seqlens_kv": lengths,
        "cu_seqlens_q": _meta(3, dtype=torch.int32),
        "cu_seqlens_kv": _meta(3, dtype=torch.int32),
        "dropout_seed": scalar,
        "dropout_offset": scalar,
    }
    return spec, Inputs(q, k, v, **{name: optional[name] for name in names})


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

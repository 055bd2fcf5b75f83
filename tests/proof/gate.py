"""The offline gate: every configuration that ships is compiled for its architecture, with no GPU.

The launches are those ``run.py`` would make, of tensors without memory: what is proven here is what runs.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import pool
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.triton import launch as _launch
from attnsel.backends.triton.blocks import ARCHS, DECODE_ROWS, Block
from attnsel.backends.triton.launch import (
    ROWS_BLOCK,
    Buffers,
    Launch,
    backward_launches,
    decode_launches,
    make_call,
    make_parts,
    tile_count,
)
from attnsel.environment.gpus import ARCHITECTURES
from sass import LoopMix

if TYPE_CHECKING:
    from machine_code import Compiled

HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256), (576, 512))
FEATURES = ("full", "causal", "paged", "paged-256")  # shipped for every head dimension and dtype
KERNELS = ("forward", "dkdv", "dq", "decode", "merge")
EVERY_KERNEL = (*KERNELS, "rows", "dbias")
# Shipped for all of them as well, and compiled for some: what scores a pair otherwise takes registers.
SCORED_FEATURES = ("packed", "window", "dropout", "bias")
SCORED_HEAD_DIMS = ((64, 64), (128, 128))
SCORED_KERNELS = ("forward", "dkdv", "dq")
_PAGE_SIZES = {"paged": 16, "paged-256": 256}  # smaller than a tile; several tiles
_HEADS, _GROUPS = 16, 4
OUTSIDE = 16  # spills, once per program, that cost less than the smaller tile without them


@dataclass(frozen=True, slots=True)
class Configuration:
    """One kernel to compile. ``feature``: a key of ``_CALLS``, "paged" being pages of 16 rows and "all" every
    optional tensor at once.
    """

    kernel: str  # forward, rows, dkdv, dq, dbias, decode, merge
    arch: int
    head_dim_qk: int
    head_dim_v: int
    dtype: str  # fp16, bf16, fp32
    feature: str = "causal"
    rows: int = 64  # of a tile of decode: query rows times heads of a group, one of DECODE_ROWS


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
    warps: int  # of a program, with those that warp specialisation adds
    stages: int
    registers: int
    spills: int  # local loads and stores, or the stack's bytes where there are none of those
    shared_memory: int  # bytes
    shared_memory_limit: int
    matrix_instructions: tuple[str, ...]
    seconds: float
    error: str | None = None
    specialised: bool = False  # warps hand registers over to one another
    rows: int | None = None  # of a tile of decode, as asked for
    warnings: tuple[str, ...] = ()  # of ptxas
    loop: LoopMix | None = None  # where it spends its time; None: no loop multiplies matrices
    matrix_work: float | None = None  # multiply-adds done over those of a tile; above 1 warps repeat some
    loops: tuple[int, ...] = ()  # instructions of each such loop: over tiles without a mask, and with one

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong, in words."""
        if self.error is not None:
            return (self.error,)
        multiplies = self.kernel not in ("rows", "merge") and self.dtype != "fp32"
        in_loop = self.loop is None or self.loop.local
        limit, per_wait = self.shared_memory_limit, self.loop and self.loop.matrix_per_wait
        found = {
            f"{self.spills} spills": self.spills > OUTSIDE or bool(self.spills and in_loop),
            f"{self.shared_memory} bytes of shared memory, {limit} allowed": self.shared_memory > limit,
            "no matrix instruction": multiplies and not self.matrix_instructions,
            f"serialised, {per_wait} matrix instructions per wait": self.loop and self.loop.serialised,
        }
        return (*(words for words, wrong in found.items() if wrong), *(f"ptxas: {w}" for w in self.warnings))

    @property
    def ok(self) -> bool:
        """Compiled, fits, spills nothing in its loop and next to nothing outside, is warned of nothing, does
        not wait for each product before the next, and uses the tensor cores for products of 16-bit numbers.
        """
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"faults": self.faults, "ok": self.ok}


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def configurations(
    archs: Iterable[int] = ARCHS,
    *,
    head_dims: Iterable[tuple[int, int]] = HEAD_DIMS,
    dtypes: Iterable[str] = ("bf16", "fp16"),
    features: Iterable[str] | None = None,
    kernels: Iterable[str] = KERNELS,
) -> list[Configuration]:
    """The shipped table, without what rules refuse.

    On Turing fp16 only, and no dK/dV pass above head_dim 128; no backward above 256 or with pages. Decode
    comes with each of its tiles, causal. ``features`` None: FEATURES, and SCORED_FEATURES in the first of
    ``dtypes`` where SCORED_HEAD_DIMS and SCORED_KERNELS are asked for.
    """
    archs, head_dims, dtypes, kernels = tuple(archs), tuple(head_dims), tuple(dtypes), tuple(kernels)
    if features is not None:
        return _table(archs, head_dims, dtypes, tuple(features), kernels)
    scored_dims = tuple(dims for dims in head_dims if dims in SCORED_HEAD_DIMS)
    scored_kernels = tuple(name for name in kernels if name in SCORED_KERNELS)
    made = _table(archs, head_dims, dtypes, FEATURES, kernels)
    for arch in archs:
        scored = ("fp16",) if arch < 80 and "fp16" in dtypes else dtypes[:1]
        made += _table((arch,), scored_dims, scored, SCORED_FEATURES, scored_kernels)
    return made


def _table(
    archs: tuple[int, ...],
    head_dims: tuple[tuple[int, int], ...],
    dtypes: tuple[str, ...],
    features: tuple[str, ...],
    kernels: tuple[str, ...],
) -> list[Configuration]:
    return [
        Configuration(kernel, arch, d, e, dtype, feature, rows)
        for arch in archs
        for d, e in head_dims
        for dtype in dtypes
        if arch >= 80 or dtype == "fp16"
        for feature in features
        for kernel in kernels
        if not (arch < 80 and kernel == "dkdv" and max(d, e) > 128)
        if kernel in _FORWARD or (max(d, e) <= 256 and feature not in _PAGE_SIZES)
        if feature not in _LEFT_OUT.get(kernel, ()) and (kernel != "dbias" or "bias" in _CALLS[feature][1])
        for rows in (DECODE_ROWS if kernel == "decode" else DECODE_ROWS[-1:])
    ]


_FORWARD = ("forward", "decode", "merge")
# Causal decode does more, and what the merge does depends on neither.
_LEFT_OUT: dict[str, tuple[str, ...]] = {
    "decode": ("full",),
    "merge": ("full", "window", *_PAGE_SIZES),
}


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
    """In the order of ``wanted``; ``progress`` is called as each is done."""

    def done(count: int, report: KernelReport) -> None:
        if progress is not None:
            progress(count, len(wanted), report)

    return pool.collect(report_on, wanted, jobs, refused, done)


def report_on(c: Configuration) -> KernelReport:
    from machine_code import compile_launch

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
        made.warps,
        b.stages,
        made.registers,
        made.spills or made.stack,
        made.shared_memory,
        made.shared_memory_limit,
        made.matrix_instructions,
        made.seconds,
        specialised=made.specialised,
        rows=_rows(c),
        warnings=made.warnings,
        loop=made.loop,
        matrix_work=matrix_work(launch, made),
        loops=tuple(loop.instructions for loop in made.loops),
    )


_PRODUCTS = {"forward": (1, 1), "decode": (1, 1), "dkdv": (2, 2), "dq": (2, 1), "dbias": (1, 1)}


def matrix_work(launch: Launch, made: Compiled) -> float | None:
    """The hottest loop's multiply-adds over those that one tile needs, of all warps.

    Where a tile has fewer rows than its warps multiply at once, some compute the same as others. A loop that
    the compiler unrolled would have more as well. None: not told by the code, or warps do different work.
    """
    of_qk, of_v = _PRODUCTS.get(launch.name, (0, 0))  # products as wide as q and k, as wide as v
    if not of_qk or made.loop is None or not made.loop.multiply_adds:
        return None
    args, block = launch.args, launch.block
    width = args["BLOCK_D"] + (args["BLOCK_D2"] if args.get("D2") else 0)
    needed = block.m * block.n * (of_qk * width + of_v * args["BLOCK_E"])
    return round(made.loop.multiply_adds * made.warps / needed, 3)


def refused(
    c: Configuration, error: Exception, block: Block | None = None, seconds: float = 0.0
) -> KernelReport:
    tile, warps, stages = ((block.m, block.n), block.warps, block.stages) if block else (None, 0, 0)
    limit = ARCHITECTURES[c.arch].shared_memory
    words, rows = pool.words_of(error), _rows(c)
    return KernelReport(*_named(c), tile, warps, stages, 0, 0, 0, limit, (), seconds, words, rows=rows)


def _rows(c: Configuration) -> int | None:
    return c.rows if c.kernel == "decode" else None


def _named(c: Configuration) -> tuple[str, int, int, int, str, str]:
    return c.kernel, c.arch, c.head_dim_qk, c.head_dim_v, c.dtype, c.feature


def launch_of(c: Configuration, sequence: int = 4096) -> Launch:
    """The launch a call of this configuration would make: b 2, h 16, g 4, bshd or thd."""
    decoded = c.kernel in ("decode", "merge")
    queries = c.rows * _GROUPS // _HEADS if decoded else sequence
    spec, inputs = _call(c, queries, sequence)
    call = make_call(spec, inputs)
    q = inputs.q
    if spec.packed:
        out = _meta(2 * queries, _HEADS, c.head_dim_v, dtype=q.dtype)
        lse = _meta(_HEADS, 2 * queries, dtype=torch.float32)
    else:
        out = _meta(2, queries, _HEADS, c.head_dim_v, dtype=q.dtype).transpose(1, 2)
        lse = _meta(2, _HEADS, queries, dtype=torch.float32)
    if decoded:
        # Both ways out of the kernel are compiled: one split writes the results itself.
        block = call.block("decode", c.arch)
        parts = make_parts(call, 1 if c.feature == "paged" else 8, block)
        launches = decode_launches(call, out, lse, None, parts, block)
        return next(launch for launch in launches if launch.name == c.kernel)
    if c.kernel == "forward":
        return _launch.forward_launch(call, c.arch, out, lse, None, call.block("forward", c.arch))
    dsinks = None
    if spec.softmax_type == "learnable":
        dsinks = _meta(_HEADS, 2, tile_count(sequence, ROWS_BLOCK), dtype=torch.float32)
    buffers = Buffers(out, lse, lse, q, inputs.k, inputs.v, inputs.bias, dsinks)
    for launch in backward_launches(call, c.arch, Result(out, lse), None, buffers, only=c.kernel):
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
    "paged": ({"window_right": 0, "bottom_right": True}, ("block_table", "seqlens_kv")),
    "paged-256": ({"window_right": 0, "bottom_right": True}, ("block_table", "seqlens_kv")),
    "packed": ({"window_right": 0, "packed": True}, ("cu_seqlens_q", "cu_seqlens_kv")),
    "packed-cross": ({"window_right": 0, "packed": True}, ("cu_seqlens_q", "cu_seqlens_kv")),
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

EVERY_FEATURE = tuple(_CALLS)


def _call(c: Configuration, queries: int, sequence: int) -> tuple[Spec, Inputs]:
    if c.feature not in _CALLS:
        raise ValueError(f"feature is {c.feature!r}; allowed: {', '.join(_CALLS)}")
    fields, names = _CALLS[c.feature]
    page_size = _PAGE_SIZES.get(c.feature, 0)
    spec = Spec(softmax_scale=c.head_dim_qk**-0.5, need_grad=not page_size, **fields)
    dtype = _DTYPES[c.dtype]
    pools = (512, page_size) if page_size else (2, sequence)
    dense = (
        _meta(2, queries, _HEADS, c.head_dim_qk, dtype=dtype),
        _meta(*pools, _GROUPS, c.head_dim_qk, dtype=dtype),
        _meta(*pools, _GROUPS, c.head_dim_v, dtype=dtype),
    )
    q, k, v = (t.flatten(0, 1) if spec.packed else t.transpose(1, 2) for t in dense)
    starts = _meta(3, dtype=torch.int32)
    lengths, scalar = _meta(2, dtype=torch.int32), _meta(1, dtype=torch.int64)
    optional: dict[str, Any] = {
        "attn_mask": _meta(2, 1, 1, sequence, dtype=torch.bool),
        "bias": _meta(1, _HEADS, queries, sequence, dtype=dtype),
        "alibi_slopes": _meta(_HEADS, dtype=torch.float32),
        "softmax_offset": _meta(_HEADS, dtype=torch.float32),
        "seqlens_q": lengths,
        "seqlens_kv": lengths,
        "cu_seqlens_q": starts,
        # Self-attention shares them, and the kernels know.
        "cu_seqlens_kv": starts if c.feature == "packed" else _meta(3, dtype=torch.int32),
        "dropout_seed": scalar,
        "dropout_offset": scalar,
        "block_table": _meta(2, sequence // max(1, page_size), dtype=torch.int32),
    }
    return spec, Inputs(q, k, v, **{name: optional[name] for name in names})


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

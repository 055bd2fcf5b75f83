"""A call as launches: which kernels run, over which grid, with which arguments. Nothing here runs one.

A ``Launch`` is made from tensors of any device, meta included, so that what is compiled ahead of time
(``tests/support/aot.py``) is exactly what would run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.rows import longest_paged, page_size
from attnsel.backends.tiled.tiles import check as check_features
from attnsel.backends.tiled.tiles import four_dims
from attnsel.backends.triton.backward import dbias_kernel, dkdv_kernel, dq_kernel, rows_kernel
from attnsel.backends.triton.blocks import (
    MAX_SPLITS,
    Block,
    Tiles,
    choose,
    choose_special,
    interpreted,
    pad,
    pieces,
    split_count,
)
from attnsel.backends.triton.forward import decode_kernel, forward_kernel, merge_kernel
from attnsel.backends.triton.tile import ALL, BRANCH, EDGES

# Head dimensions of a forward without a backward: multi-head latent attention's 576 and 512.
WIDEST = {"q": 576, "k": 576, "v": 512}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_NO_BOUND = 1 << 30  # positions stay below: no window is wider
_FARTHEST = 1 << 24  # elements between rows: within a tile of 128 of them addresses have 32 bits


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: ``kernel[(programs,)](**args)`` with ``block``'s warps and stages."""

    name: str  # forward, decode, merge, rows, dkdv, dq, dbias
    kernel: Any  # a triton JITFunction
    programs: int
    args: dict[str, Any]
    block: Block


def masking(call: LaunchCall, block: Block) -> dict[str, Any]:
    """Which tiles the kernel masks: all, where a score costs so much that the bounds do not show."""
    spec = call.spec
    masks = ALL if call.heavy else {"all": ALL, "edges": EDGES, "branch": BRANCH}[block.masks]
    if block.always_right and masks is EDGES and spec.window_right < 0 and spec.q_offset == spec.kv_offset:
        return {"MASKS": masks.value, "RIGHT": True, "window_right": _NO_BOUND}
    return {"MASKS": masks.value}


def make_launch(name: str, kernel: Any, programs: int, args: dict[str, Any], block: Block) -> Launch:
    """A launch with the arguments that its kernel has: a compiled one refuses any other."""
    return Launch(name, kernel, programs, {each: args[each] for each in kernel.arg_names}, block)


def check(spec: Spec, inputs: Inputs) -> None:
    """ValueError, before any launch, for what the kernels cannot take."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k and v must share float16, bfloat16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    check_features(spec, inputs)
    if spec.head_offset and spec.dropout_p:
        raise ValueError(f"the kernels' dropout counts heads from 0, got head_offset {spec.head_offset}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"the innermost stride of {name} is {t.stride(-1)}; the kernels need 1")
        rows = 0 if spec.packed else 2
        apart = t.stride(rows) if t.shape[rows] > 1 else 0
        if abs(apart) >= _FARTHEST:
            raise ValueError(f"rows of {name} lie {apart} elements apart; the kernels need fewer than 2**24")
        limit = 256 if spec.need_grad else WIDEST[name]
        if t.shape[-1] > limit:
            direction = " with a backward" if spec.need_grad else ""
            raise ValueError(f"Triton kernels stop at head_dim {limit}{direction}; {name} has {t.shape[-1]}")
    if max(spec.q_offset, spec.kv_offset, -spec.q_offset, -spec.kv_offset) >= _NO_BOUND:
        raise ValueError(
            f"positions must stay below 2**30, got q_offset {spec.q_offset}, kv_offset {spec.kv_offset}"
        )


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """What every launch of a call shares."""

    spec: Spec
    inputs: Inputs
    batch: int
    heads: int
    groups: int
    longest_q: int
    longest_kv: int
    tiles: Tiles | None  # overrides the table

    @property
    def d(self) -> int:
        return self.inputs.q.shape[-1]

    @property
    def e(self) -> int:
        return self.inputs.v.shape[-1]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // max(1, self.groups)

    @property
    def heavy(self) -> bool:
        """Whether scoring a pair takes loads or random numbers of its own."""
        i = self.inputs
        return i.bias is not None or i.attn_mask is not None or bool(self.spec.dropout_p)

    def block(self, name: str, arch: int | None) -> Block:
        """This pass's tile; ``arch`` None: on the interpreter."""
        if self.tiles is not None:
            return getattr(self.tiles, name) or self.tiles.forward
        rows = self.longest_q * self.group
        if arch is None:
            return getattr(interpreted(rows if name == "decode" else self.longest_q, self.longest_kv), name)
        # Both bounds at once spill in Blackwell's wide forward tiles.
        windowed = self.spec.window_left >= 0
        # Rows that Triton does not know to be aligned are loaded element by element, which takes registers.
        ragged = bool(self.d % 16 or self.e % 16)
        heavy = self.heavy or ragged or (windowed and name == "forward" and arch >= 100)
        itemsize, paged = self.inputs.q.element_size(), page_size(self.inputs)
        if itemsize == 2 and not heavy and not paged:
            special = choose_special(name, arch, max(self.d, self.e), windowed, self.spec.packed)
            if special is not None:
                return special
        return choose(name, arch, self.d, self.e, itemsize, heavy, rows, paged)


def make_call(spec: Spec, inputs: Inputs, tiles: Tiles | None = None) -> LaunchCall:
    q, k = inputs.q, inputs.k
    batch, longest_q, longest_kv = q.shape[0], q.shape[2 if not spec.packed else 0], 0
    if spec.packed:
        assert inputs.cu_seqlens_q is not None
        batch = inputs.cu_seqlens_q.numel() - 1
        longest_q = _longest(inputs.max_seqlen_q, inputs.cu_seqlens_q, q.shape[0])
    if inputs.block_table is not None:
        longest_kv = longest_paged(inputs)
    elif spec.packed:
        assert inputs.cu_seqlens_kv is not None
        longest_kv = _longest(inputs.max_seqlen_kv, inputs.cu_seqlens_kv, k.shape[0])
    else:
        longest_kv = k.shape[2]
    return LaunchCall(spec, inputs, batch, q.shape[1], k.shape[1], longest_q, longest_kv, tiles)


def _longest(given: int | None, cu_seqlens: Tensor, rows: int) -> int:
    """The longest sequence of a packed batch; where it would cost a synchronisation, all rows."""
    if given is not None:
        return min(given, rows)
    if cu_seqlens.device.type == "cpu" and cu_seqlens.numel() > 1:
        return min(max(0, int((cu_seqlens[1:] - cu_seqlens[:-1]).max())), rows)
    return rows


def strides(prefix: str, t: Tensor, packed: bool) -> dict[str, int]:
    """Batch, head and row strides of ``[b, h, s, d]`` or packed ``[t, h, d]``."""
    b, h, s = (0, t.stride(1), t.stride(0)) if packed else t.stride()[:3]
    return {f"{prefix}_b": b, f"{prefix}_h": h, f"{prefix}_s": s}


def broadcast_strides(prefix: str, t: Tensor | None) -> dict[str, int]:
    """The four strides of a bias or mask, 0 where it broadcasts."""
    names = [f"{prefix}_{dim}" for dim in ("b", "h", "q", "kv")]
    if t is None:
        return dict.fromkeys(names, 0)
    return {
        name: 0 if size == 1 else step for name, size, step in zip(names, t.shape, t.stride(), strict=True)
    }


def shared_args(call: LaunchCall) -> dict[str, Any]:
    """Arguments that the score of a pair depends on: the same in the forward and every backward pass."""
    spec, i = call.spec, call.inputs
    bias = None if i.bias is None else four_dims(i.bias.detach())
    mask = None if i.attn_mask is None else four_dims(i.attn_mask).view(torch.uint8)
    slopes = None if i.alibi_slopes is None else i.alibi_slopes.contiguous()
    per_sequence = slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1
    dropout = bool(spec.dropout_p)
    first, second = pieces(call.d)
    # Pools of pages have a dense tensor's dimensions, pages for batch entries.
    packed_kv = spec.packed and i.block_table is None
    # Words are compared as signed integers with the top bit flipped.
    threshold = min(round(spec.dropout_p * 2**32), 2**32 - 1) - 2**31
    return {
        "Q": i.q.detach(),
        "K": i.k.detach(),
        "V": i.v.detach(),
        "Bias": bias,
        "Mask": mask,
        "Slopes": slopes,
        "LenQ": None if spec.packed else i.seqlens_q,
        "LenKV": None if packed_kv else i.seqlens_kv,
        "CuQ": i.cu_seqlens_q if spec.packed else None,
        "CuKV": i.cu_seqlens_kv if packed_kv else None,
        "StartQ": i.cu_seqlens_q_padded if spec.packed else None,
        "StartKV": i.cu_seqlens_kv_padded if packed_kv else None,
        "Seed": on_device(i.dropout_seed, i.q) if dropout else None,
        "Offset": on_device(i.dropout_offset, i.q) if dropout else None,
        **strides("q", i.q, spec.packed),
        **strides("k", i.k, packed_kv),
        **strides("v", i.v, packed_kv),
        **page_args(i),
        **broadcast_strides("bias", bias),
        **broadcast_strides("mask", mask),
        "slope_b": slopes.stride(0) if slopes is not None and per_sequence else 0,
        "group": call.group,
        "rows_q": i.q.shape[0 if spec.packed else 2],
        "rows_kv": i.k.shape[0] if packed_kv else call.longest_kv,
        "scale": float(spec.softmax_scale),
        "cap": float(spec.softcap),
        "window_left": min(spec.window_left, _NO_BOUND),
        "window_right": min(spec.window_right, _NO_BOUND),
        "q_offset": spec.q_offset,
        "kv_offset": spec.kv_offset,
        "threshold": threshold,
        "keep_scale": 1.0 / (1.0 - spec.dropout_p) if spec.dropout_p < 1.0 else 0.0,
        "D": first,
        "D2": second,
        "E": call.e,
        "BLOCK_D": pad(first),
        "BLOCK_D2": pad(second),
        "BLOCK_E": pad(call.e),
        "LEFT": spec.window_left >= 0,
        "RIGHT": spec.window_right >= 0,
        "BOTTOM_RIGHT": spec.bottom_right,
        "SOFTCAP": bool(spec.softcap),
        "DROPOUT": (1 if spec.kv_offset % 4 else 4) if dropout else 0,
        "PRECISION": "ieee",
    }


def page_args(inputs: Inputs) -> dict[str, Any]:
    """The kernels' arguments for pages. PAGE_SIZE is a constant of theirs: every column is divided by it."""
    table = inputs.block_table
    return {
        "Table": table,
        "table_b": 0 if table is None else table.stride(0),
        "pages": 0 if table is None else inputs.k.shape[0],
        "PAGE_SIZE": page_size(inputs),
    }


def on_device(t: Tensor | None, like: Tensor) -> Tensor | None:
    return t if t is None else t.to(device=like.device, dtype=torch.int64, non_blocking=True)


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are one tensor, or views of the same memory that read alike."""
    if a is b or a is None or b is None:
        return a is b
    return (
        a.device.type != "meta"
        and a.data_ptr() == b.data_ptr()
        and (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
    )


def triton_is_among(releases: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    """Whether the installed Triton is one of those from the first to the last (major, minor)."""
    major, minor = triton.__version__.split(".")[:2]
    return releases[0] <= (int(major), int(minor)) <= releases[1]


def tile_count(rows: int, size: int) -> int:
    return -(-rows // size)


def sinks_of(call: LaunchCall) -> Tensor | None:
    """The learnable sink logits [h]; off-by-one has none to load."""
    if call.spec.softmax_type != "learnable" or call.inputs.softmax_offset is None:
        return None
    return call.inputs.softmax_offset.detach().contiguous()


def forward_args(
    call: LaunchCall, out: Tensor, lse: Tensor, max_logit: Tensor | None, block: Block
) -> dict[str, Any]:
    """Arguments of the kernels that write results."""
    packed = call.spec.packed
    return {
        **shared_args(call),
        "Out": out,
        "Lse": lse,
        "MaxLogit": max_logit,
        "Sinks": sinks_of(call),
        **strides("o", out, packed),
        "lse_b": 0 if packed else lse.stride(0),
        "lse_h": lse.stride(0) if packed else lse.stride(1),
        "heads": call.heads,
        "batch": call.batch,
        "BLOCK_M": block.m,
        "BLOCK_N": block.n,
        "AHEAD": block.ahead,
        "SINK": call.spec.softmax_type != "vanilla",
    }


def forward_launch(
    call: LaunchCall, arch: int | None, out: Tensor, lse: Tensor, max_logit: Tensor | None, block: Block
) -> Launch:
    """``max_logit``: float32 [h, b, tiles], or None."""
    tiles = tile_count(call.longest_q, block.m)
    args = {
        **forward_args(call, out, lse, max_logit, block),
        "tiles": tiles,
        **masking(call, block),
    }
    return make_launch("forward", forward_kernel, tiles * call.heads * call.batch, args, block)


# ---- Short queries as launches: the keys split over programs, and the merge of the parts ---------------
# How many splits is decided from shapes and the device's size, never from lengths that lie on the device: a
# CUDA graph replays whatever lengths its tensors hold by then.


# Queries of at most this many rows are decoded. The backward reads out and lse alone, which are the
# forward's, so that calls with one may be decoded as well.
SHORT = 16


@dataclass(frozen=True, slots=True)
class Parts:
    """What each split leaves for the merge, float32 [splits, b, longest_q, h] and ``out`` [..., e]."""

    out: Tensor
    lse: Tensor
    peak: Tensor | None  # where max_logit is asked for


def choose_splits(call: LaunchCall, arch: int | None, processors: int, asked: int | None = None) -> int:
    """Over how many programs the keys of a row block are split; 0: not a call to decode.

    ``processors``: streaming multiprocessors of the device, 0 on the interpreter. ``asked`` overrides the
    choice; raises ValueError above MAX_SPLITS and below 0.
    """
    if asked is not None:
        if not 0 <= asked <= MAX_SPLITS:
            raise ValueError(f"splits must be 0 (no decode kernel) to {MAX_SPLITS}, got {asked}")
        return asked
    if call.longest_q > SHORT:
        return 0
    block = call.block("decode", arch)
    programs = call.batch * call.groups * tile_count(call.longest_q * call.group, block.m)
    return split_count(programs, processors, tile_count(call.longest_kv, block.n))


def make_parts(call: LaunchCall, splits: int, block: Block) -> Parts | None:
    """Memory for the parts; None for one split, which writes the results itself."""
    # More than 16 rows of latent attention take every register: what finishes them would be spilled.
    crowded = block.m > 16 and max(call.d, call.e) > 256
    if splits == 1 and not crowded:
        return None
    shape = (splits, call.batch, call.longest_q, call.heads)
    device = call.inputs.q.device
    lse = torch.empty(shape, dtype=torch.float32, device=device)
    out = torch.empty((*shape, call.e), dtype=torch.float32, device=device)
    return Parts(out, lse, torch.empty_like(lse) if call.spec.return_max_logit else None)


def decode_launches(
    call: LaunchCall,
    out: Tensor,
    lse: Tensor,
    max_logit: Tensor | None,
    parts: Parts | None,
    block: Block,
) -> list[Launch]:
    """Decode, and the merge where there are parts. ``max_logit``: float32 [h, b, longest_q], or None."""
    tiles = tile_count(call.longest_q * call.group, block.m)
    splits = 1 if parts is None else parts.lse.shape[0]
    args: dict[str, Any] = {
        **forward_args(call, out, lse, max_logit, block),
        "PartOut": None if parts is None else parts.out,
        "PartLse": None if parts is None else parts.lse,
        "PartPeak": None if parts is None else parts.peak,
        "tiles": tiles,
        "splits": splits,
        "longest_q": call.longest_q,
        "groups": call.groups,
        "BLOCK_S": MAX_SPLITS,
        # As many parts as 4 warps hold in 32 registers each.
        "CHUNK": max(4, min(32, 4096 // pad(call.e))),
    }
    programs = tiles * splits * call.groups * call.batch
    launches = [make_launch("decode", decode_kernel, programs, args, block)]
    if parts is not None:
        merged = call.longest_q * call.heads * call.batch
        launches.append(make_launch("merge", merge_kernel, merged, args, Block(1, 1, 4, 1)))
    return launches


# ---- A backward as launches: rows, dK/dV, dQ and dbias, in that order, and the memory they write --------


@dataclass(frozen=True, slots=True)
class Buffers:
    """The backward's results and what its passes hand on, all allocated by the caller."""

    dout: Tensor
    lse2: Tensor  # float32 [b, h, s_q] or [h, t_q], contiguous; so is delta
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None  # float32 [h, b, tiles of ROWS_BLOCK]
    parts: tuple[Tensor, Tensor] | None = None  # float32 [head_shares, *shape] of dk and dv, to be summed


ROWS_BLOCK = 64  # rows of a program of the first backward pass


def backward_launches(
    call: LaunchCall,
    arch: int | None,
    result: Result,
    dlse: Tensor | None,
    buffers: Buffers,
    only: str | None = None,
) -> list[Launch]:
    """In the order they run: rows, dkdv, dq, and dbias where the bias wants a gradient; or ``only`` one."""
    packed, shared = call.spec.packed, shared_args(call)
    common = {
        **shared,
        "DOut": buffers.dout,
        "Lse2": buffers.lse2,
        "Delta": buffers.delta,
        **strides("do", buffers.dout, packed),
        **_row_strides("row", buffers.lse2, packed),
    }
    makers = {
        "rows": lambda: _rows_launch(call, result, dlse, buffers),
        "dkdv": lambda: _dkdv_launch(call, call.block("dkdv", arch), common, buffers),
        "dq": lambda: _dq_launch(call, call.block("dq", arch), common, buffers),
    }
    if buffers.dbias is not None:
        dbias = buffers.dbias
        makers["dbias"] = lambda: _dbias_launch(call, call.block("dbias", arch), common, dbias)
    return [make() for name, make in makers.items() if only in (None, name)]


def head_shares(call: LaunchCall, arch: int | None, processors: int) -> int:
    """Over how many programs the query heads of a kv head are divided in the dK/dV pass.

    As many as fill the device twice: with one kv head and one short sequence most of it would have nothing to
    do. Each leaves its part in float32; their sum has one order, so results repeat bitwise.
    """
    programs = tile_count(call.longest_kv, call.block("dkdv", arch).n) * call.groups * call.batch
    return max(1, min(call.group, -(-2 * processors // max(1, programs))))


def _dkdv_launch(call: LaunchCall, block: Block, common: dict[str, Any], buffers: Buffers) -> Launch:
    tiles = tile_count(call.longest_kv, block.n)
    dk, dv = buffers.parts or (buffers.dk[None], buffers.dv[None])
    shares = dk.shape[0]
    args = {
        **common,
        "DK": dk,
        "DV": dv,
        **strides("dk", dk[0], call.spec.packed),
        **strides("dv", dv[0], call.spec.packed),
        "dk_share": dk.stride(0) if shares > 1 else 0,
        "dv_share": dv.stride(0) if shares > 1 else 0,
        "shares": shares,
        "SHARED": buffers.parts is not None,
        "tiles": tiles,
        "groups": call.groups,
        "BLOCK_M": block.m,
        "BLOCK_N": block.n,
        **masking(call, block),
        "AHEAD": block.ahead,
        "DEAD_ROWS": may_have_dead_rows(call),
    }
    programs = tiles * call.groups * call.batch * shares
    return make_launch("dkdv", dkdv_kernel, programs, args, block)


def _dq_launch(call: LaunchCall, block: Block, common: dict[str, Any], buffers: Buffers) -> Launch:
    tiles = tile_count(call.longest_q, block.m)
    args = {
        **common,
        "DQ": buffers.dq,
        **strides("dq", buffers.dq, call.spec.packed),
        "tiles": tiles,
        "heads": call.heads,
        "BLOCK_M": block.m,
        "BLOCK_N": block.n,
        **masking(call, block),
        "AHEAD": block.ahead,
    }
    return make_launch("dq", dq_kernel, tiles * call.heads * call.batch, args, block)


def _row_strides(prefix: str, t: Tensor, packed: bool) -> dict[str, int]:
    """Batch and head strides of per-row tensors, ``[b, h, s]`` or packed ``[h, t]``."""
    b, h = (0, t.stride(0)) if packed else t.stride()[:2]
    return {f"{prefix}_b": b, f"{prefix}_h": h}


def _rows_launch(call: LaunchCall, result: Result, dlse: Tensor | None, buffers: Buffers) -> Launch:
    packed, i = call.spec.packed, call.inputs
    tiles = tile_count(call.longest_q, ROWS_BLOCK)
    assert result.lse is not None
    args = {
        "Out": result.out,
        "DOut": buffers.dout,
        "Lse": result.lse,
        "DLse": dlse,
        "Lse2": buffers.lse2,
        "Delta": buffers.delta,
        "Sinks": sinks_of(call),
        "DSinks": buffers.dsinks,
        "LenQ": None if packed else i.seqlens_q,
        "CuQ": i.cu_seqlens_q if packed else None,
        "StartQ": i.cu_seqlens_q_padded if packed else None,
        **strides("o", result.out, packed),
        **strides("do", buffers.dout, packed),
        **_row_strides("lse", result.lse, packed),
        "lse_s": result.lse.stride(-1),
        **(_row_strides("dlse", dlse, packed) if dlse is not None else {"dlse_b": 0, "dlse_h": 0}),
        "dlse_s": 0 if dlse is None else dlse.stride(-1),
        **_row_strides("row", buffers.lse2, packed),
        "tiles": tiles,
        "heads": call.heads,
        "batch": call.batch,
        "rows_q": i.q.shape[0 if packed else 2],
        "E": call.e,
        "BLOCK_E": pad(call.e),
        "BLOCK_M": ROWS_BLOCK,
    }
    return make_launch("rows", rows_kernel, tiles * call.heads * call.batch, args, Block(ROWS_BLOCK, 1, 8, 1))


def _dbias_launch(call: LaunchCall, block: Block, common: dict[str, Any], dbias: Tensor) -> Launch:
    bias_b, bias_h, rows, cols = dbias.shape
    # A dimension of size 1 is both full and broadcast where the call's is 1 as well.
    all_rows, all_cols = rows == 1, cols == 1
    tiles = 1 if all_rows else tile_count(rows, block.m)
    tiles_kv = 1 if all_cols else tile_count(cols, block.n)
    args = {
        **common,
        "DBias": dbias,
        **broadcast_strides("dbias", dbias),
        "tiles": tiles,
        "tiles_kv": tiles_kv,
        "batch": call.batch if bias_b == 1 else 1,
        "heads": call.heads if bias_h == 1 else 1,
        "programs_h": bias_h,
        "bias_rows": rows,
        "bias_cols": cols,
        "BLOCK_M": block.m,
        "BLOCK_N": block.n,
        "ALL_ROWS": all_rows,
        "ALL_COLS": all_cols,
    }
    return make_launch("dbias", dbias_kernel, tiles * tiles_kv * bias_b * bias_h, args, block)


def may_have_dead_rows(call: LaunchCall) -> bool:
    """Whether a row of a sequence may see no key at all, for all that shapes and flags tell."""
    spec, i = call.spec, call.inputs
    if i.bias is not None or i.attn_mask is not None:
        return True
    apart = spec.kv_offset != spec.q_offset and (spec.window_left >= 0 or spec.window_right >= 0)
    if i.seqlens_kv is not None or i.cu_seqlens_kv is not None:
        # In self-attention each row sees at least its own key, whatever the lengths are.
        alike = same_tensor(i.seqlens_q, i.seqlens_kv) and same_tensor(i.cu_seqlens_q, i.cu_seqlens_kv)
        return apart or not alike
    shifted = spec.bottom_right and call.longest_q > call.longest_kv
    too_long = spec.window_left >= 0 and call.longest_q != call.longest_kv
    return shifted or apart or too_long or call.longest_kv == 0

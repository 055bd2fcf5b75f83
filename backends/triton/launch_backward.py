"""A backward as launches: rows, dK/dV, dQ and dbias, in that order, and the memory they write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnsel.backends.contract import Result

from .backward import dbias_kernel, dkdv_kernel, dq_kernel, rows_kernel
from .blocks import Block, pad
from .launch import (
    Launch,
    LaunchCall,
    broadcast_strides,
    make_launch,
    masking,
    same_tensor,
    shared_args,
    sinks_of,
    strides,
    tile_count,
)


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

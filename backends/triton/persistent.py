"""Which forwards the persistent kernel can take, and its launch: nothing here runs one.

Like the descriptor kernel it is chosen by nobody but ``forward(..., variant="persistent")``, until a
measurement on a GPU says where it wins. For it: the copies for a block of rows begin while the block before
is finished; and dealt out longest first, every other turn backwards, a causal call of 4,096 positions, two
sequences of 16 heads, ends 0.2 % later on 132 processors than if all had the same to do, where one program
per block ends 13 % later (counted in tiles: tests/backends/triton/test_persistent.py). Against it: with more
key heads than half the processors, each is read again for almost every block of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .blocks import Block, choose_persistent, interpreted, pad
from .forward_persistent import forward_persistent_kernel
from .launch import Launch, LaunchCall, forward_args, make_launch, tile_count

_MOST_ROWS = 2**31 - 1  # coordinates of a descriptor are 32-bit


@dataclass(frozen=True, slots=True)
class Matrix:
    """A tensor [b, h, s, d] as rows of a matrix, and how far apart batch entries and heads lie in it."""

    rows: int
    row_b: int
    row_h: int
    col_b: int
    col_h: int


def matrix_of(t: Tensor) -> Matrix | None:
    """None where heads or batch entries begin neither at a multiple of a row's stride nor within one."""
    row_stride, starts, last = t.stride(2), [], 0
    for dim in (0, 1):
        step = t.stride(dim) if t.shape[dim] > 1 else 0
        rows, columns = (step // row_stride, 0) if step % row_stride == 0 else (0, step)
        starts.append((rows, columns))
        last += rows * (t.shape[dim] - 1)
    (row_b, col_b), (row_h, col_h) = starts
    width = sum(columns * (t.shape[dim] - 1) for dim, (_, columns) in enumerate(starts)) + t.shape[-1]
    rows = last + t.shape[2]
    return Matrix(rows, row_b, row_h, col_b, col_h) if width <= row_stride and rows <= _MOST_ROWS else None


def persistent_block(call: LaunchCall, arch: int | None) -> Block:
    """The persistent kernel's tile. Raises ValueError where it cannot take the call, beside what keeps the
    descriptor kernel from it (``descriptors.obstacle``)."""
    block = _tile(call, arch)
    reason = f"no tile for head_dim {call.d} and {call.e} on sm{arch}" if block is None else None
    reason = reason or _obstacle(call, block)
    if block is None or reason:
        raise ValueError(f"variant 'persistent' is not possible: {reason}")
    return block


def _tile(call: LaunchCall, arch: int | None) -> Block | None:
    if call.tiles is not None:
        return call.tiles.forward
    if arch is None:
        return interpreted(call.longest_q, call.longest_kv).forward
    return choose_persistent(arch, call.d, call.e, call.inputs.q.element_size())


def _obstacle(call: LaunchCall, block: Block | None) -> str | None:
    i = call.inputs
    if call.spec.packed or i.seqlens_q is not None or i.seqlens_kv is not None:
        return "its descriptors are of whole tensors, and sequences of lengths of their own end within one"
    if (call.d, call.e) != (pad(call.d), pad(call.e)):
        return f"head_dim {call.d} and {call.e} are no powers of two: a row's next columns are another head's"
    if block is not None and call.longest_kv % block.n:
        return f"{call.longest_kv} keys are no multiple of {block.n}: the next rows are another sequence's"
    for name, t in (("q", i.q), ("k", i.k), ("v", i.v)):
        if matrix_of(t) is None:
            return f"{name} with strides {tuple(t.stride())} is no matrix of rows"
    return None


def persistent_launch(call: LaunchCall, processors: int, out: Tensor, lse: Tensor, block: Block) -> Launch:
    """One program per processor, as its shared memory fits no second; fewer where there are fewer blocks."""
    i = call.inputs
    tiles = tile_count(call.longest_q, block.m)
    args = {**forward_args(call, out, lse, None, block), "tiles": tiles}
    for prefix, t in (("q", i.q), ("k", i.k), ("v", i.v)):
        matrix = matrix_of(t)
        assert matrix is not None
        for part in ("rows", "row_b", "row_h", "col_b", "col_h"):
            args[f"{prefix}_{part}"] = getattr(matrix, part)
    programs = tiles * call.heads * call.batch
    programs = min(programs, processors) if processors else programs
    return make_launch("forward_persistent", forward_persistent_kernel, programs, args, block)

"""The forward of dense calls on Hopper, one program to a processor: the descriptor kernel made persistent.

The three descriptors are made once, of whole tensors as matrices of rows, and a loop over row blocks is what
Triton specialises: while two groups of warps finish a block and store it, the third has the first keys of
the next one copied. A descriptor of each sequence, as ``forward_descriptor.py`` has them, would have to be
written again while copies through it may be under way.
"""

import triton
import triton.language as tl

from .forward_descriptor import accumulate
from .tile import LOG2E, PLAIN, finish, span, store_rows


@triton.jit(do_not_specialize=PLAIN)
def forward_persistent_kernel(
    Q, K, V, Out, Lse, Slopes, Sinks,
    q_s, k_s, v_s,  # between rows, as all other strides in elements
    q_rows, k_rows, v_rows,  # of the matrices; batch entries and heads lie rows or columns apart in them
    q_row_b, q_row_h, q_col_b, q_col_h, k_row_b, k_row_h, k_col_b, k_col_h,
    v_row_b, v_row_h, v_col_b, v_col_h,
    o_b, o_h, o_s, lse_b, lse_h, slope_b,
    tiles,  # row blocks of a head
    batch, heads, group, rows_q, rows_kv,
    scale, cap, window_left, window_right, q_offset, kv_offset,
    D: tl.constexpr, E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    queries = tl.make_tensor_descriptor(Q, [q_rows, q_s], [q_s, 1], [BLOCK_M, D])
    keys = tl.make_tensor_descriptor(K, [k_rows, k_s], [k_s, 1], [BLOCK_N, D])
    values = tl.make_tensor_descriptor(V, [v_rows, v_s], [v_s, 1], [BLOCK_N, E])
    diag = q_offset - kv_offset
    if BOTTOM_RIGHT:
        diag += rows_kv - rows_q
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E
    sequences = batch * heads
    blocks = tiles * sequences
    for turn in tl.range(0, tl.cdiv(blocks, programs), warp_specialize=True):
        # Blocks with the most keys first, every other turn backwards: no program is left with the largest.
        place = turn * programs + tl.where(turn % 2 == 0, pid, programs - 1 - pid)
        block = tl.where(place < blocks, tiles - 1 - place // sequences, tiles)
        head = place % heads
        z = place // heads % batch
        z64, head64 = z.to(tl.int64), head.to(tl.int64)
        kv_head = head // group
        m0 = block * BLOCK_M
        rows = m0 + tl.arange(0, BLOCK_M)
        # A block past the end meets no column, and is stored nowhere.
        reach = tl.where(m0 < rows_q, rows_kv, 0)
        slope2 = 0.0
        if Slopes is not None:
            slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
        # Not m0: see forward_descriptor.py.
        first = z * q_row_b + head * q_row_h + tl.minimum(m0, rows_q)
        q = queries.load([first, z * q_col_b + head * q_col_h])
        acc = tl.zeros([BLOCK_M, E], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        begin, _full_begin, _full_end, end = span(
            m0, BLOCK_M, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
        )
        k_row, k_col = z * k_row_b + kv_head * k_row_h, z * k_col_b + kv_head * k_col_h
        v_row, v_col = z * v_row_b + kv_head * v_row_h, z * v_col_b + kv_head * v_col_h
        for n in range(begin, end, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            k = keys.load([k_row + n, k_col])
            acc, total, peak = accumulate(
                q, k, values, v_row + n, v_col, acc, total, peak, rows, cols, rows_q, rows_kv,
                diag, scale2, cap, slope2, window_left, window_right, LEFT, RIGHT, SOFTCAP,
                Slopes is not None, False,
            )  # fmt: skip
        acc, lse = finish(acc, total, peak, rows < rows_q, Sinks, head, 1.0, SINK, False)
        store_rows(Out + z64 * o_b + head64 * o_h, acc, m0, o_s, rows_q, E, E, BLOCK_M)
        tl.store(Lse + z64 * lse_b + head64 * lse_h + rows, lse, mask=rows < rows_q)

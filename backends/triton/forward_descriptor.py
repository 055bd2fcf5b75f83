"""The forward of common calls on Hopper and Blackwell: tensor descriptors and specialised warps.

The same sums as ``forward.py``, in the one shape that Triton's warp specialisation takes on Hopper:
descriptors made in the kernel, four warps, and a single loop that holds both products and, for every tile,
the masks. One warp group then only has tiles copied by the tensor memory accelerator, the others multiply.
Hopper divides the rows between two of them, so nothing here may be reduced over rows: no largest logit.
"""

import triton
import triton.language as tl

from .tile import ALL, LOG2E, PLAIN, bounded, finish, score, sequence, span, store_rows


@triton.jit(do_not_specialize=PLAIN)
def forward_descriptor_kernel(
    Q, K, V, Out, Lse, Slopes, Sinks, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, lse_b, lse_h, slope_b,
    tiles,  # row blocks of the longest sequence
    heads, group, rows_q, rows_kv,
    scale, cap, window_left, window_right, q_offset, kv_offset,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr,
    TAIL: tl.constexpr,  # whether the last tile may reach past the last column
):  # fmt: skip
    pid = tl.program_id(0)
    # The last rows of a causal call have the most work: first come, first served.
    block = tiles - 1 - pid % tiles
    head = pid // tiles % heads
    z = pid // tiles // heads
    z64 = z.to(tl.int64)
    first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
    first_kv, len_kv = sequence(z, LenKV, CuKV, StartKV, rows_kv)
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    diag = q_offset - kv_offset
    if BOTTOM_RIGHT:
        diag += len_kv - len_q
    # A block past the end of its sequence meets no column.
    reach = tl.where(m0 < len_q, len_kv, 0)

    # The hardware gives 0 beyond a descriptor's shape, here the sequence's own length: padding is never read.
    # No dimension may be 0, and a sequence of no rows may begin at the end of memory.
    Q += z64 * q_b + head.to(tl.int64) * q_h + tl.minimum(first_q, rows_q - 1) * q_s
    K += z64 * k_b + (head // group).to(tl.int64) * k_h + first_kv * k_s
    V += z64 * v_b + (head // group).to(tl.int64) * v_h + first_kv * v_s
    q_rows = tl.make_tensor_descriptor(Q, [tl.maximum(len_q, 1), D], [q_s, 1], [BLOCK_M, BLOCK_D])
    k_rows = tl.make_tensor_descriptor(K, [tl.maximum(len_kv, 1), D], [k_s, 1], [BLOCK_N, BLOCK_D])
    v_rows = tl.make_tensor_descriptor(V, [tl.maximum(len_kv, 1), E], [v_s, 1], [BLOCK_N, BLOCK_E])
    slope2 = 0.0
    if Slopes is not None:
        slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E

    # Not m0: where Triton divides the rows between two groups of warps it moves this load's coordinate by
    # half a tile, and every other use of the same value with it: the second group stored its rows half a tile
    # too far (3.5 to 3.7; seen by executing the PTX). Beyond the end there is nothing to load.
    q = q_rows.load([tl.minimum(m0, len_q), 0])
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin, _full_begin, _full_end, end = span(
        m0, BLOCK_M, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
    )
    for n in tl.range(begin, end, BLOCK_N, warp_specialize=True):
        cols = n + tl.arange(0, BLOCK_N)
        k = k_rows.load([n, 0])
        x = tl.dot(q, tl.trans(k))
        # An `if` around the masks would end the specialisation of warps: every tile computes them.
        x, _ = score(
            x, rows[:, None], cols[None, :], len_q, len_kv, diag, scale2, cap, None, 0, 0, None, 0, 0, slope2,
            SOFTCAP, Slopes is not None,
        )  # fmt: skip
        x = bounded(
            x, rows[:, None], cols[None, :], True, len_kv, diag, window_left, window_right, ALL, TAIL, LEFT,
            RIGHT,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(x, 1))
        # Where nothing was visible yet both are -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(x - base[:, None])
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.sum(p, 1)
        peak = new_peak
        # Loaded where they are needed: the wait for them stands here.
        v = v_rows.load([n, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])

    acc, lse = finish(acc, total, peak, rows < len_q, Sinks, head, 1.0, SINK, False)
    # Dense rows past the length hold zeros; packed memory there belongs to others.
    limit = rows_q
    if CuQ is not None:
        limit = len_q
    Out += z64 * o_b + head.to(tl.int64) * o_h + first_q * o_s
    store_rows(Out, acc, m0, o_s, limit, E, BLOCK_E, BLOCK_M)
    tl.store(Lse + z64 * lse_b + head.to(tl.int64) * lse_h + first_q + rows, lse, mask=rows < limit)

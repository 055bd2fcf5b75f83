"""Forward: one program per block of rows and head, online softmax over the columns its band reaches."""

import triton
import triton.language as tl

from .tile import (
    LN2,
    LOG2E,
    dropout_key,
    finish,
    kept,
    load_cached,
    load_rows,
    page_of,
    score,
    sequence,
    span,
    store_rows,
)


@triton.jit
def columns(
    acc, total, peak, q, q2, begin, end,
    K, V,
    k_s, v_s,
    Table,
    k_p, v_p, pages, rows, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2, key, q_offset, kv_offset, head, z, threshold,
    D: tl.constexpr, E: tl.constexpr, D2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns [begin, end) of one row block into acc [m, e], total [m] and peak [m] (in units of log2(e)).

    ``head``, ``slope2``, Bias and Mask belong to the block, or as [m, 1] to each row. ``k_p`` and ``v_p`` are
    the strides of pages, where Table [n] says in which ones the keys and values lie.
    """
    for n in range(begin, end, BLOCK_N):
        cols = n + tl.arange(0, BLOCK_N)
        page = 0
        if PAGE_SIZE:
            page = page_of(Table, n, len_kv, pages, PAGE_SIZE, BLOCK_N)
        k = load_cached(K, page, n, k_s, k_p, len_kv, D, BLOCK_D, BLOCK_N, PAGE_SIZE, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if D2:
            k2 = load_cached(K + D, page, n, k_s, k_p, len_kv, D2, BLOCK_D2, BLOCK_N, PAGE_SIZE, MASKED)
            x = tl.dot(q2, tl.trans(k2), x, input_precision=PRECISION)
        x, _ = score(
            x, rows[:, None], cols[None, :], len_q, len_kv, diag, scale2, cap, window_left, window_right,
            Bias, bias_q, bias_kv, Mask, mask_q, mask_kv, slope2, MASKED, MASKED and LEFT,
            MASKED and RIGHT, SOFTCAP, ALIBI,
        )  # fmt: skip
        new_peak = tl.maximum(peak, tl.max(x, 1))
        # Where nothing was visible yet both are -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(x - base[:, None])
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.sum(p, 1)
        peak = new_peak
        if DROPOUT:
            keep = kept(key, rows + q_offset, n + kv_offset, head, z, threshold, BLOCK_N, DROPOUT)
            p = tl.where(keep, p, 0.0)
        v = load_cached(V, page, n, v_s, v_p, len_kv, E, BLOCK_E, BLOCK_N, PAGE_SIZE, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, total, peak


@triton.jit(do_not_specialize=["q_offset", "kv_offset", "window_left", "window_right", "threshold", "tiles"])
def forward_kernel(
    Q, K, V, Out, Lse,
    MaxLogit,  # float32 [h, b * tiles], the largest score of each program; None: not asked for
    Bias, Mask, Slopes, Sinks, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV, Seed, Offset,
    Table,  # int32 [b, n] of pages; None: keys and values lie dense or packed
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, lse_b, lse_h, bias_b, bias_h, bias_q,
    bias_kv, mask_b, mask_h, mask_q, mask_kv, slope_b, table_b,
    tiles,  # row blocks of the longest sequence
    heads, group, batch, rows_q, rows_kv,
    pages, scale, cap, window_left, window_right, q_offset, kv_offset, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, D2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: no pages
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    DROPOUT: tl.constexpr,  # columns that share a draw: 4, or 1 at odd offsets; 0: no dropout
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
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

    Q += z64 * q_b + head.to(tl.int64) * q_h + first_q * q_s
    K += (head // group).to(tl.int64) * k_h
    V += (head // group).to(tl.int64) * v_h
    if PAGE_SIZE:
        Table += z64 * table_b
    else:
        K += z64 * k_b + first_kv * k_s
        V += z64 * v_b + first_kv * v_s
    if Bias is not None:
        Bias += z64 * bias_b + head.to(tl.int64) * bias_h
    if Mask is not None:
        Mask += z64 * mask_b + head.to(tl.int64) * mask_h
    slope2 = 0.0
    if Slopes is not None:
        slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
    key = 0
    if Seed is not None:
        key = dropout_key(Seed, Offset)
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E

    q = load_rows(Q, m0, q_s, len_q, D, BLOCK_D, BLOCK_M, True)
    q2 = q
    if D2:
        # A head dimension such as 576 is not padded to 1024 but taken as 512 + 64.
        q2 = load_rows(Q + D, m0, q_s, len_q, D2, BLOCK_D2, BLOCK_M, True)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    _begin, full_begin, full_end, end = span(
        m0, BLOCK_M, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT, SPLIT
    )
    if SPLIT:
        acc, total, peak = columns(
            acc, total, peak, q, q2, full_begin, full_end, K, V, k_s, v_s, Table, k_b, v_b, pages, rows,
            len_q, len_kv, diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask, mask_q,
            mask_kv, slope2, key, q_offset, kv_offset, head, z, threshold, D, E, D2, BLOCK_D, BLOCK_D2,
            BLOCK_E, BLOCK_N, PAGE_SIZE, False, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT,
            PRECISION,
        )  # fmt: skip
    acc, total, peak = columns(
        acc, total, peak, q, q2, full_end, end, K, V, k_s, v_s, Table, k_b, v_b, pages, rows, len_q, len_kv,
        diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask, mask_q, mask_kv, slope2,
        key, q_offset, kv_offset, head, z, threshold, D, E, D2, BLOCK_D, BLOCK_D2, BLOCK_E, BLOCK_N,
        PAGE_SIZE, True, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, PRECISION,
    )  # fmt: skip

    real = rows < len_q
    if MaxLogit is not None:
        largest = tl.max(tl.where(real, peak, float("-inf")), 0) * LN2
        tl.store(MaxLogit + (head.to(tl.int64) * batch + z) * tiles + block, largest)
    acc, lse = finish(acc, total, peak, real, Sinks, head, keep_scale, SINK, Seed is not None)
    # Dense rows past the length hold zeros; packed memory there belongs to others.
    limit = rows_q
    if CuQ is not None:
        limit = len_q
    Out += z64 * o_b + head.to(tl.int64) * o_h + first_q * o_s
    store_rows(Out, acc, m0, o_s, limit, E, BLOCK_E, BLOCK_M)
    tl.store(Lse + z64 * lse_b + head.to(tl.int64) * lse_h + first_q + rows, lse, mask=rows < limit)

"""Forward: one program per block of rows and head, online softmax over the columns its band reaches."""

import triton
import triton.language as tl

from .tile import (
    EDGES,
    INNER,
    LN2,
    LOG2E,
    PLAIN,
    bounded,
    dropout_key,
    finish,
    kept,
    largest_of,
    load_cached,
    load_rows,
    maximum_of,
    page_of,
    score,
    sequence,
    span,
    store_rows,
    tile_at,
    tiles_of,
)


@triton.jit
def columns(
    acc, total, peak, q, q2, begin, full_begin, full_end, end,
    K, V,
    k_s, v_s,
    Table,
    k_p, v_p, pages, rows, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2, key, q_offset, kv_offset, head, z, threshold,
    D: tl.constexpr, E: tl.constexpr, D2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr, PART: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns of one row block into acc [m, e], total [m] and peak [m] (in units of log2(e)): those of
    [begin, end) that PART says.

    ``head``, ``slope2``, Bias and Mask belong to the block, or as [m, 1] to each row. ``k_p`` and ``v_p`` are
    the strides of pages, where Table [n] says in which ones the keys and values lie. AHEAD: a tile of keys is
    read while the one before it is used, and values while scores are computed.
    """
    GUARD: tl.constexpr = PART != INNER
    first, last, skipped = tiles_of(begin, full_begin, full_end, end, PART, LEFT, True)
    if AHEAD:
        start = tile_at(first, full_begin, skipped, PART, LEFT, True)
        start_page = page_of(Table, start, len_kv, pages, PAGE_SIZE, BLOCK_N)
        k_ahead = load_cached(K, start_page, start, k_s, k_p, len_kv, D, BLOCK_D, BLOCK_N, PAGE_SIZE, True)
        v_ahead = load_cached(V, start_page, start, v_s, v_p, len_kv, E, BLOCK_E, BLOCK_N, PAGE_SIZE, True)
    for counted in range(first, last, BLOCK_N):
        n = tile_at(counted, full_begin, skipped, PART, LEFT, True)
        cols = n + tl.arange(0, BLOCK_N)
        page = page_of(Table, n, len_kv, pages, PAGE_SIZE, BLOCK_N)
        if AHEAD:
            k, v = k_ahead, v_ahead
            # Guarded: behind the last tile may be no memory.
            then = tile_at(counted + BLOCK_N, full_begin, skipped, PART, LEFT, True)
            then_page = page_of(Table, then, len_kv, pages, PAGE_SIZE, BLOCK_N)
            k_ahead = load_cached(K, then_page, then, k_s, k_p, len_kv, D, BLOCK_D, BLOCK_N, PAGE_SIZE, True)
            v_ahead = load_cached(V, then_page, then, v_s, v_p, len_kv, E, BLOCK_E, BLOCK_N, PAGE_SIZE, True)
        else:
            k = load_cached(K, page, n, k_s, k_p, len_kv, D, BLOCK_D, BLOCK_N, PAGE_SIZE, GUARD)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if D2:
            k2 = load_cached(K + D, page, n, k_s, k_p, len_kv, D2, BLOCK_D2, BLOCK_N, PAGE_SIZE, GUARD)
            x = tl.dot(q2, tl.trans(k2), x, input_precision=PRECISION)
        x, _ = score(
            x, rows[:, None], cols[None, :], len_q, len_kv, diag, scale2, cap, Bias, bias_q, bias_kv, Mask,
            mask_q, mask_kv, slope2, SOFTCAP, ALIBI,
        )  # fmt: skip
        x = bounded(
            x, rows[:, None], cols[None, :], (n < full_begin) | (n >= full_end), len_kv, diag, window_left,
            window_right, PART, True, LEFT, RIGHT,
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
        if not AHEAD:
            v = load_cached(V, page, n, v_s, v_p, len_kv, E, BLOCK_E, BLOCK_N, PAGE_SIZE, GUARD)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return acc, total, peak


@triton.jit(do_not_specialize=PLAIN)
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
    MASKS: tl.constexpr,  # ALL, EDGES or BRANCH
    AHEAD: tl.constexpr, PRECISION: tl.constexpr,
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
    begin, full_begin, full_end, end = span(
        m0, BLOCK_M, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
    )
    if MASKS == EDGES:
        acc, total, peak = columns(
            acc, total, peak, q, q2, begin, full_begin, full_end, end, K, V, k_s, v_s, Table, k_b, v_b,
            pages, rows, len_q, len_kv, diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv,
            Mask, mask_q, mask_kv, slope2, key, q_offset, kv_offset, head, z, threshold, D, E, D2, BLOCK_D,
            BLOCK_D2, BLOCK_E, BLOCK_N, PAGE_SIZE, INNER, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT,
            AHEAD, PRECISION,
        )  # fmt: skip
    acc, total, peak = columns(
        acc, total, peak, q, q2, begin, full_begin, full_end, end, K, V, k_s, v_s, Table, k_b, v_b, pages,
        rows, len_q, len_kv, diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask,
        mask_q, mask_kv, slope2, key, q_offset, kv_offset, head, z, threshold, D, E, D2, BLOCK_D, BLOCK_D2,
        BLOCK_E, BLOCK_N, PAGE_SIZE, MASKS, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, AHEAD,
        PRECISION,
    )  # fmt: skip

    real = rows < len_q
    if MaxLogit is not None:
        largest = maximum_of(largest_of(peak, total, real)) * LN2
        tl.store(MaxLogit + (head.to(tl.int64) * batch + z) * tiles + block, largest)
    acc, lse = finish(acc, total, peak, real, Sinks, head, keep_scale, SINK, Seed is not None)
    # Dense rows past the length hold zeros; packed memory there belongs to others.
    limit = rows_q
    if CuQ is not None:
        limit = len_q
    Out += z64 * o_b + head.to(tl.int64) * o_h + first_q * o_s
    store_rows(Out, acc, m0, o_s, limit, E, BLOCK_E, BLOCK_M)
    tl.store(Lse + z64 * lse_b + head.to(tl.int64) * lse_h + first_q + rows, lse, mask=rows < limit)

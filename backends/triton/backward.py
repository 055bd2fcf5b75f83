"""Backward: a pass over rows for what softmax's derivative takes off, then dK/dV, dQ and dbias, each alone.

Every result element is written by one program, in one order of summation: no atomics, bitwise repeatable.
"""

import triton
import triton.language as tl

from .tile import (
    ALL,
    EDGES,
    INNER,
    LOG2E,
    PLAIN,
    bounded,
    dropout_key,
    kept,
    load_rows,
    score,
    sequence,
    span,
    store_rows,
    tile_at,
    tiles_of,
)


@triton.jit(do_not_specialize=PLAIN)
def rows_kernel(
    Out, DOut, Lse,
    DLse,  # or None
    Lse2,  # result: the LSE in units of log2(e), +inf in rows that pass nothing back
    Delta,  # result: rowsum(out * dout) - dlse
    Sinks,
    DSinks,  # result: float32 [h, b * tiles], each program's share; None: not asked for
    LenQ, CuQ, StartQ,
    o_b, o_h, o_s, do_b, do_h, do_s, lse_b, lse_h, lse_s, dlse_b, dlse_h, dlse_s,
    row_b,  # strides of Lse2 and Delta, whose rows are contiguous
    row_h,
    tiles, heads, batch, rows_q,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    block = pid % tiles
    head = pid // tiles % heads
    z = pid // tiles // heads
    z64, head64 = z.to(tl.int64), head.to(tl.int64)
    first, length = sequence(z, LenQ, CuQ, StartQ, rows_q)
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    real = rows < length
    at = first + rows
    lse = tl.load(Lse + z64 * lse_b + head64 * lse_h + at * lse_s, mask=real, other=float("-inf"))
    alive = real & (lse != float("-inf"))
    col = tl.arange(0, BLOCK_E)
    inside = alive[:, None] & (col < E)[None, :]
    row = tl.arange(0, BLOCK_M)
    Out += z64 * o_b + head64 * o_h + (first + m0) * o_s
    DOut += z64 * do_b + head64 * do_h + (first + m0) * do_s
    out = tl.load(Out + (row[:, None] * o_s + col[None, :]), mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(DOut + (row[:, None] * do_s + col[None, :]), mask=inside, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if DLse is not None:
        dlse = tl.load(DLse + z64 * dlse_b + head64 * dlse_h + at * dlse_s, mask=alive, other=0.0)
        delta -= dlse.to(tl.float32)
    if DSinks is not None:
        sink = tl.load(Sinks + head).to(tl.float32)
        share = tl.where(alive, tl.exp2((sink - lse) * LOG2E) * delta, 0.0)
        tl.store(DSinks + (head64 * batch + z) * tiles + block, -tl.sum(share, 0))
    # exp2(score - inf) is 0 for every score, -inf included.
    lse2 = tl.where(alive, lse * LOG2E, float("inf"))
    limit = rows_q
    if CuQ is not None:
        limit = length
    tl.store(Lse2 + z64 * row_b + head64 * row_h + at, lse2, mask=rows < limit)
    tl.store(Delta + z64 * row_b + head64 * row_h + at, delta, mask=rows < limit)


@triton.jit
def _rows_of_dkdv(
    dk, dv, k, v, begin, full_begin, full_end, end,
    Q, DOut, Lse2, Delta,
    q_s, do_s,
    n0, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    PART: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, DEAD_ROWS: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one query head into dk [n, d] and dv [n, e], scores transposed, [n, m]: those of [begin, end)
    that PART says.

    So P^T and dS^T come out of their dots as the left operands of the next, with no change of layout. AHEAD:
    a tile of rows is read while the one before it is used.
    """
    BLOCK_N: tl.constexpr = k.shape[0]
    cols = n0 + tl.arange(0, BLOCK_N)
    first, last, skipped = tiles_of(begin, full_begin, full_end, end, PART, RIGHT, LEFT)
    if AHEAD:
        start = tile_at(first, full_begin, skipped, PART, RIGHT, LEFT)
        q_ahead = load_rows(Q, start, q_s, len_q, D, BLOCK_D, BLOCK_M, True)
        dout_ahead = load_rows(DOut, start, do_s, len_q, E, BLOCK_E, BLOCK_M, True)
    for counted in range(first, last, BLOCK_M):
        m = tile_at(counted, full_begin, skipped, PART, RIGHT, LEFT)
        rows = m + tl.arange(0, BLOCK_M)
        lse2 = tl.load(Lse2 + rows, mask=rows < len_q, other=float("inf"))
        delta = tl.load(Delta + rows, mask=rows < len_q, other=0.0)
        if AHEAD:
            q, dout = q_ahead, dout_ahead
            then = tile_at(counted + BLOCK_M, full_begin, skipped, PART, RIGHT, LEFT)
            q_ahead = load_rows(Q, then, q_s, len_q, D, BLOCK_D, BLOCK_M, True)
            dout_ahead = load_rows(DOut, then, do_s, len_q, E, BLOCK_E, BLOCK_M, True)
        else:
            q = load_rows(Q, m, q_s, len_q, D, BLOCK_D, BLOCK_M, True)
            dout = load_rows(DOut, m, do_s, len_q, E, BLOCK_E, BLOCK_M, True)
        if DEAD_ROWS:
            # What they hold may be NaN, and 0 * NaN leaks.
            alive = (lse2 != float("inf"))[:, None]
            q = tl.where(alive, q, tl.zeros_like(q))
            dout = tl.where(alive, dout, tl.zeros_like(dout))
        x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        x, t = score(
            x, rows[None, :], cols[:, None], len_q, len_kv, diag, scale2, cap, Bias, bias_q, bias_kv, Mask,
            mask_q, mask_kv, slope2, SOFTCAP, ALIBI,
        )  # fmt: skip
        # Columns past the last need no mask: they reach no result but their own, which is not stored.
        x = bounded(
            x, rows[None, :], cols[:, None], (m < full_begin) | (m >= full_end), len_kv, diag, window_left,
            window_right, PART, False, LEFT, RIGHT,
        )  # fmt: skip
        p = tl.exp2(x - lse2[None, :])
        dp = tl.dot(v, tl.trans(dout), input_precision=PRECISION)
        if DROPOUT:
            keep = kept(key, rows + q_offset, n0 + kv_offset, head, z, threshold, BLOCK_N, DROPOUT)
            keep = tl.trans(keep)
            dv = tl.dot(tl.where(keep, p, 0.0).to(dout.dtype), dout, dv, input_precision=PRECISION)
            dp = tl.where(keep, dp * keep_scale, 0.0)
        else:
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=PLAIN)
def dkdv_kernel(
    Q, K, V, DOut, Lse2, Delta, DK, DV, Bias, Mask, Slopes, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV, Seed,
    Offset,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dk_b, dk_h, dk_s, dv_b, dv_h, dv_s,
    row_b, row_h, bias_b, bias_h, bias_q, bias_kv, mask_b, mask_h, mask_q, mask_kv, slope_b,
    tiles,  # column blocks of the longest sequence
    shares,  # programs that divide the query heads of a group among them
    dk_share, dv_share, groups, group, rows_q, rows_kv,
    scale, cap, window_left, window_right, q_offset, kv_offset, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    MASKS: tl.constexpr,  # ALL, EDGES or BRANCH
    DEAD_ROWS: tl.constexpr, AHEAD: tl.constexpr,
    SHARED: tl.constexpr,  # DK and DV are float32 [shares, ...]
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per block of columns, kv head and share of its query heads, one after the other."""
    pid = tl.program_id(0)
    first_head, last_head = 0, group
    if SHARED:
        share = pid % shares
        pid = pid // shares
        first_head, last_head = share * group // shares, (share + 1) * group // shares
    block = pid % tiles
    g = pid // tiles % groups
    z = pid // tiles // groups
    z64, g64 = z.to(tl.int64), g.to(tl.int64)
    first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
    first_kv, len_kv = sequence(z, LenKV, CuKV, StartKV, rows_kv)
    n0 = block * BLOCK_N
    cols = n0 + tl.arange(0, BLOCK_N)
    diag = q_offset - kv_offset
    if BOTTOM_RIGHT:
        diag += len_kv - len_q
    reach = tl.where(n0 < len_kv, len_q, 0)
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E
    key = 0
    if Seed is not None:
        key = dropout_key(Seed, Offset)

    k = load_rows(K + z64 * k_b + g64 * k_h + first_kv * k_s, n0, k_s, len_kv, D, BLOCK_D, BLOCK_N, True)
    v = load_rows(V + z64 * v_b + g64 * v_h + first_kv * v_s, n0, v_s, len_kv, E, BLOCK_E, BLOCK_N, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    # Seen from a column, row - column lies between -(diag + right) and -(diag - left).
    begin, full_begin, full_end, end = span(
        n0, BLOCK_N, reach, -diag - window_right, window_left - diag, BLOCK_M, RIGHT, LEFT
    )
    if not LEFT:
        full_end = end  # rows past the last have a probability of 0
    for r in range(first_head, last_head):
        head = g * group + r
        head64 = head.to(tl.int64)
        q = Q + z64 * q_b + head64 * q_h + first_q * q_s
        dout = DOut + z64 * do_b + head64 * do_h + first_q * do_s
        lse2 = Lse2 + z64 * row_b + head64 * row_h + first_q
        delta = Delta + z64 * row_b + head64 * row_h + first_q
        bias = Bias
        if Bias is not None:
            bias = Bias + z64 * bias_b + head64 * bias_h
        mask = Mask
        if Mask is not None:
            mask = Mask + z64 * mask_b + head64 * mask_h
        slope2 = 0.0
        if Slopes is not None:
            slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
        if MASKS == EDGES:
            dk, dv = _rows_of_dkdv(
                dk, dv, k, v, begin, full_begin, full_end, end, q, dout, lse2, delta, q_s, do_s, n0, len_q,
                len_kv, diag, scale2, cap, window_left, window_right, bias, bias_q, bias_kv, mask, mask_q,
                mask_kv, slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale, D, E, BLOCK_D,
                BLOCK_E, BLOCK_M, INNER, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, DEAD_ROWS,
                AHEAD, PRECISION,
            )  # fmt: skip
        dk, dv = _rows_of_dkdv(
            dk, dv, k, v, begin, full_begin, full_end, end, q, dout, lse2, delta, q_s, do_s, n0, len_q,
            len_kv, diag, scale2, cap, window_left, window_right, bias, bias_q, bias_kv, mask, mask_q,
            mask_kv, slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale, D, E, BLOCK_D,
            BLOCK_E, BLOCK_M, MASKS, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, DEAD_ROWS, AHEAD,
            PRECISION,
        )  # fmt: skip
    limit = rows_kv
    if CuKV is not None:
        limit = len_kv
    if Seed is not None:
        dv = dv * keep_scale
    # Dense columns past the length hold zeros.
    own = (cols < len_kv)[:, None]
    dk = tl.where(own, dk * scale, 0.0)
    dv = tl.where(own, dv, 0.0)
    if SHARED:
        DK += share.to(tl.int64) * dk_share
        DV += share.to(tl.int64) * dv_share
    DK += z64 * dk_b + g64 * dk_h + first_kv * dk_s
    DV += z64 * dv_b + g64 * dv_h + first_kv * dv_s
    store_rows(DK, dk, n0, dk_s, limit, D, BLOCK_D, BLOCK_N)
    store_rows(DV, dv, n0, dv_s, limit, E, BLOCK_E, BLOCK_N)


@triton.jit
def _columns_of_dq(
    dq, q, dout, lse2, delta, begin, full_begin, full_end, end,
    K, V,
    k_s, v_s,
    rows, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    PART: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns of one row block into dq [m, d]: those of [begin, end) that PART says. AHEAD: a tile of keys
    and values is read while the one before it is used.
    """
    GUARD: tl.constexpr = PART != INNER
    first, last, skipped = tiles_of(begin, full_begin, full_end, end, PART, LEFT, True)
    if AHEAD:
        start = tile_at(first, full_begin, skipped, PART, LEFT, True)
        k_ahead = load_rows(K, start, k_s, len_kv, D, BLOCK_D, BLOCK_N, True)
        v_ahead = load_rows(V, start, v_s, len_kv, E, BLOCK_E, BLOCK_N, True)
    for counted in range(first, last, BLOCK_N):
        n = tile_at(counted, full_begin, skipped, PART, LEFT, True)
        edge = (n < full_begin) | (n >= full_end)
        if AHEAD:
            k, v = k_ahead, v_ahead
            # Guarded: behind the last tile may be no memory.
            then = tile_at(counted + BLOCK_N, full_begin, skipped, PART, LEFT, True)
            k_ahead = load_rows(K, then, k_s, len_kv, D, BLOCK_D, BLOCK_N, True)
            v_ahead = load_rows(V, then, v_s, len_kv, E, BLOCK_E, BLOCK_N, True)
        else:
            k = load_rows(K, n, k_s, len_kv, D, BLOCK_D, BLOCK_N, GUARD)
            v = load_rows(V, n, v_s, len_kv, E, BLOCK_E, BLOCK_N, GUARD)
        ds, t = _dscore(
            q, k, v, dout, lse2, delta, rows, n, edge, len_q, len_kv, diag, scale2, cap, window_left,
            window_right, Bias, bias_q, bias_kv, Mask, mask_q, mask_kv, slope2, key, q_offset, kv_offset,
            head, z, threshold, keep_scale, PART, LEFT, RIGHT, SOFTCAP, ALIBI, DROPOUT, PRECISION,
        )  # fmt: skip
        if SOFTCAP:
            ds = ds * (1.0 - t * t)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _dscore(
    q, k, v, dout, lse2, delta, rows, n, edge, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale,
    PART: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile's biased scores [m, n], before the softcap's derivative, and its tanh."""
    BLOCK_N: tl.constexpr = k.shape[0]
    cols = n + tl.arange(0, BLOCK_N)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    x, t = score(
        x, rows[:, None], cols[None, :], len_q, len_kv, diag, scale2, cap, Bias, bias_q, bias_kv, Mask,
        mask_q, mask_kv, slope2, SOFTCAP, ALIBI,
    )  # fmt: skip
    x = bounded(
        x, rows[:, None], cols[None, :], edge, len_kv, diag, window_left, window_right, PART, True, LEFT,
        RIGHT,
    )  # fmt: skip
    p = tl.exp2(x - lse2[:, None])
    dp = tl.dot(dout, tl.trans(v), input_precision=PRECISION)
    if DROPOUT:
        keep = kept(key, rows + q_offset, n + kv_offset, head, z, threshold, BLOCK_N, DROPOUT)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    return p * (dp - delta[:, None]), t


@triton.jit
def _live_rows(
    Q, DOut, Lse2, Delta, m0, q_s, do_s, len_q, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """q [m, d], dout [m, e], lse2 [m] and delta [m] of a row block, zero in rows that pass nothing back."""
    rows = m0 + tl.arange(0, BLOCK_M)
    lse2 = tl.load(Lse2 + rows, mask=rows < len_q, other=float("inf"))
    delta = tl.load(Delta + rows, mask=rows < len_q, other=0.0)
    alive = (lse2 != float("inf"))[:, None]
    q = load_rows(Q, m0, q_s, len_q, D, BLOCK_D, BLOCK_M, True)
    dout = load_rows(DOut, m0, do_s, len_q, E, BLOCK_E, BLOCK_M, True)
    return tl.where(alive, q, tl.zeros_like(q)), tl.where(alive, dout, tl.zeros_like(dout)), lse2, delta


@triton.jit(do_not_specialize=PLAIN)
def dq_kernel(
    Q, K, V, DOut, Lse2, Delta, DQ, Bias, Mask, Slopes, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV, Seed,
    Offset,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dq_b, dq_h, dq_s, row_b, row_h, bias_b,
    bias_h, bias_q, bias_kv, mask_b, mask_h, mask_q, mask_kv, slope_b,
    tiles,  # row blocks of the longest sequence
    heads, group, rows_q, rows_kv,
    scale, cap, window_left, window_right, q_offset, kv_offset, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    MASKS: tl.constexpr,  # ALL, EDGES or BRANCH
    AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per block of rows and head."""
    pid = tl.program_id(0)
    block = tiles - 1 - pid % tiles
    head = pid // tiles % heads
    z = pid // tiles // heads
    z64, head64, g64 = z.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
    first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
    first_kv, len_kv = sequence(z, LenKV, CuKV, StartKV, rows_kv)
    m0 = block * BLOCK_M
    rows = m0 + tl.arange(0, BLOCK_M)
    diag = q_offset - kv_offset
    if BOTTOM_RIGHT:
        diag += len_kv - len_q
    reach = tl.where(m0 < len_q, len_kv, 0)
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E
    key = 0
    if Seed is not None:
        key = dropout_key(Seed, Offset)
    if Bias is not None:
        Bias += z64 * bias_b + head64 * bias_h
    if Mask is not None:
        Mask += z64 * mask_b + head64 * mask_h
    slope2 = 0.0
    if Slopes is not None:
        slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
    K += z64 * k_b + g64 * k_h + first_kv * k_s
    V += z64 * v_b + g64 * v_h + first_kv * v_s
    q, dout, lse2, delta = _live_rows(
        Q + z64 * q_b + head64 * q_h + first_q * q_s,
        DOut + z64 * do_b + head64 * do_h + first_q * do_s,
        Lse2 + z64 * row_b + head64 * row_h + first_q,
        Delta + z64 * row_b + head64 * row_h + first_q,
        m0, q_s, do_s, len_q, D, E, BLOCK_D, BLOCK_E, BLOCK_M,
    )  # fmt: skip
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, full_begin, full_end, end = span(
        m0, BLOCK_M, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
    )
    if MASKS == EDGES:
        dq = _columns_of_dq(
            dq, q, dout, lse2, delta, begin, full_begin, full_end, end, K, V, k_s, v_s, rows, len_q, len_kv,
            diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
            slope2, key, q_offset, kv_offset, head, z, threshold, keep_scale, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
            INNER, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, AHEAD, PRECISION,
        )  # fmt: skip
    dq = _columns_of_dq(
        dq, q, dout, lse2, delta, begin, full_begin, full_end, end, K, V, k_s, v_s, rows, len_q, len_kv,
        diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask, mask_q, mask_kv, slope2,
        key, q_offset, kv_offset, head, z, threshold, keep_scale, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
        MASKS, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, AHEAD, PRECISION,
    )  # fmt: skip
    limit = rows_q
    if CuQ is not None:
        limit = len_q
    store_rows(
        DQ + z64 * dq_b + head64 * dq_h + first_q * dq_s, dq * scale, m0, dq_s, limit, D, BLOCK_D, BLOCK_M
    )


@triton.jit(do_not_specialize=PLAIN)
def dbias_kernel(
    Q, K, V, DOut, Lse2, Delta, DBias, Bias, Mask, Slopes, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV, Seed,
    Offset,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, do_b, do_h, do_s, dbias_b, dbias_h, dbias_q, dbias_kv,
    row_b, row_h, bias_b, bias_h, bias_q, bias_kv, mask_b, mask_h, mask_q, mask_kv, slope_b,
    tiles,  # row blocks that programs are made for: all, or 1 where the bias broadcasts over rows
    tiles_kv,
    batch,  # entries a program sums over: 1, or all where the bias broadcasts over the batch
    heads,
    programs_h,  # heads of the bias
    group, rows_q, rows_kv,
    bias_rows, bias_cols, scale, cap, window_left, window_right, q_offset, kv_offset, threshold,
    keep_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_COLS: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per tile of the bias: it sums over whatever the bias broadcasts over."""
    pid = tl.program_id(0)
    tile_q = pid % tiles
    tile_kv = pid // tiles % tiles_kv
    bias_head = pid // tiles // tiles_kv % programs_h
    bias_z = pid // tiles // tiles_kv // programs_h
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E
    key = 0
    if Seed is not None:
        key = dropout_key(Seed, Offset)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in range(0, batch * heads):
        z = bias_z + i // heads
        head = bias_head + i % heads
        z64, head64, g64 = z.to(tl.int64), head.to(tl.int64), (head // group).to(tl.int64)
        first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
        first_kv, len_kv = sequence(z, LenKV, CuKV, StartKV, rows_kv)
        diag = q_offset - kv_offset
        if BOTTOM_RIGHT:
            diag += len_kv - len_q
        bias = Bias + z64 * bias_b + head64 * bias_h
        mask = Mask
        if Mask is not None:
            mask = Mask + z64 * mask_b + head64 * mask_h
        slope2 = 0.0
        if Slopes is not None:
            slope2 = tl.load(Slopes + z * slope_b + head) * LOG2E
        q_from, q_to = tile_q * BLOCK_M, tl.minimum(tile_q * BLOCK_M + BLOCK_M, len_q)
        if ALL_ROWS:
            q_to = len_q
        for m0 in range(q_from, q_to, BLOCK_M):
            rows = m0 + tl.arange(0, BLOCK_M)
            q, dout, lse2, delta = _live_rows(
                Q + z64 * q_b + head64 * q_h + first_q * q_s,
                DOut + z64 * do_b + head64 * do_h + first_q * do_s,
                Lse2 + z64 * row_b + head64 * row_h + first_q,
                Delta + z64 * row_b + head64 * row_h + first_q,
                m0, q_s, do_s, len_q, D, E, BLOCK_D, BLOCK_E, BLOCK_M,
            )  # fmt: skip
            begin, _full_begin, _full_end, end = span(
                m0, BLOCK_M, len_kv, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
            )
            if not ALL_COLS:
                begin = tl.maximum(begin, tile_kv * BLOCK_N)
                end = tl.minimum(end, tile_kv * BLOCK_N + BLOCK_N)
            for n in range(begin, end, BLOCK_N):
                k = load_rows(
                    K + z64 * k_b + g64 * k_h + first_kv * k_s, n, k_s, len_kv, D, BLOCK_D, BLOCK_N, True
                )
                v = load_rows(
                    V + z64 * v_b + g64 * v_h + first_kv * v_s, n, v_s, len_kv, E, BLOCK_E, BLOCK_N, True
                )
                ds, _tanh = _dscore(
                    q, k, v, dout, lse2, delta, rows, n, True, len_q, len_kv, diag, scale2, cap, window_left,
                    window_right, bias, bias_q, bias_kv, mask, mask_q, mask_kv, slope2, key, q_offset,
                    kv_offset, head, z, threshold, keep_scale, ALL, LEFT, RIGHT, SOFTCAP,
                    Slopes is not None, DROPOUT, PRECISION,
                )  # fmt: skip
                acc += ds
    DBias += bias_z.to(tl.int64) * dbias_b + bias_head.to(tl.int64) * dbias_h
    rows = tile_q * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_kv * BLOCK_N + tl.arange(0, BLOCK_N)
    at_rows = rows * tl.cast(dbias_q, tl.int64)
    at_cols = cols * tl.cast(dbias_kv, tl.int64)
    kind = DBias.dtype.element_ty
    if ALL_ROWS and ALL_COLS:
        tl.store(DBias, tl.sum(tl.sum(acc, 1), 0).to(kind))
    elif ALL_ROWS:
        tl.store(DBias + at_cols, tl.sum(acc, 0).to(kind), mask=cols < bias_cols)
    elif ALL_COLS:
        tl.store(DBias + at_rows, tl.sum(acc, 1).to(kind), mask=rows < bias_rows)
    else:
        inside = (rows < bias_rows)[:, None] & (cols < bias_cols)[None, :]
        tl.store(DBias + at_rows[:, None] + at_cols[None, :], acc.to(kind), mask=inside)

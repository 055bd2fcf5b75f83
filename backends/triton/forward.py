"""Forward: one program per block of rows and head, online softmax over the columns its band reaches."""

from __future__ import annotations

import triton
import triton.language as tl

from attnsel.backends.triton.tile import (
    ALL,
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


# --------------------------------------------------------------------------------------------------------
# Decode: few query rows, many keys. The keys are split over programs, and a second kernel merges the parts.
#
# A tile's rows are pairs (query row, head of the group), query rows outermost: a group reads its keys once.


@triton.jit
def _load_q(Q, at, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[m, BLOCK]`` of the rows that begin at ``at`` [m] (int64), 0 where not ``real`` and beyond WIDTH."""
    col = tl.arange(0, BLOCK)
    return tl.load(Q + at[:, None] + col[None, :], mask=real[:, None] & (col < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=PLAIN)
def decode_kernel(
    Q, K, V, Out, Lse,
    MaxLogit,  # float32 [h, b, longest_q], each row's largest score; None: not asked for
    PartOut,  # float32 [splits, b, longest_q, h, e]; None: one split, which writes the results itself
    PartLse,  # float32 [splits, b, longest_q, h], in units of log2(e), sinks not counted
    PartPeak,  # the same for the largest score; None: not asked for
    Bias, Mask, Slopes, Sinks, LenQ, LenKV, CuQ, CuKV, StartQ, StartKV, Seed, Offset, Table,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, o_b, o_h, o_s, lse_b, lse_h, bias_b, bias_h, bias_q,
    bias_kv, mask_b, mask_h, mask_q, mask_kv, slope_b, table_b,
    tiles,  # row blocks of the longest sequence
    splits,
    longest_q,
    groups, group, batch, rows_q, rows_kv,
    pages, scale, cap, window_left, window_right, q_offset, kv_offset, threshold, keep_scale,
    D: tl.constexpr, E: tl.constexpr, D2: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    SINK: tl.constexpr, DROPOUT: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    # Row blocks that read the same keys run side by side.
    block = pid % tiles
    split = pid // tiles % splits
    g = pid // tiles // splits % groups
    z = pid // tiles // splits // groups
    z64 = z.to(tl.int64)
    first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
    first_kv, len_kv = sequence(z, LenKV, CuKV, StartKV, rows_kv)
    pairs = block * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = pairs // group
    head = g * group + pairs % group
    head64 = head.to(tl.int64)
    real = rows < tl.minimum(len_q, longest_q)
    diag = q_offset - kv_offset
    if BOTTOM_RIGHT:
        diag += len_kv - len_q

    K += g.to(tl.int64) * k_h
    V += g.to(tl.int64) * v_h
    if PAGE_SIZE:
        Table += z64 * table_b
    else:
        K += z64 * k_b + first_kv * k_s
        V += z64 * v_b + first_kv * v_s
    if Bias is not None:
        Bias += (z64 * bias_b + head64 * bias_h)[:, None]
    if Mask is not None:
        Mask += (z64 * mask_b + head64 * mask_h)[:, None]
    slope2 = 0.0
    if Slopes is not None:
        slope2 = (tl.load(Slopes + z * slope_b + head) * LOG2E)[:, None]
    key = 0
    if Seed is not None:
        key = dropout_key(Seed, Offset)
    if SOFTCAP:
        scale2 = scale / cap
    else:
        scale2 = scale * LOG2E

    at = z64 * q_b + head64 * q_h + (first_q + rows) * q_s
    q = _load_q(Q, at, real, D, BLOCK_D)
    q2 = q
    if D2:
        q2 = _load_q(Q + D, at, real, D2, BLOCK_D2)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)

    # The block's own band, by the sequence's real length, in shares that differ by one tile at most.
    row0 = block * BLOCK_M // group
    row1 = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // group + 1, len_q)
    reach = tl.where(row0 < len_q, len_kv, 0)
    begin, _full_begin, _full_end, end = span(
        row0, row1 - row0, reach, diag - window_left, diag + window_right, BLOCK_N, LEFT, RIGHT
    )
    count = (end - begin) // BLOCK_N
    share, rest = count // splits, count % splits
    begin += (share * split + tl.minimum(split, rest)) * BLOCK_N
    end = begin + (share + tl.where(split < rest, 1, 0)) * BLOCK_N
    acc, total, peak = columns(
        acc, total, peak, q, q2, begin, begin, begin, end, K, V, k_s, v_s, Table, k_b, v_b, pages, rows,
        len_q, len_kv, diag, scale2, cap, window_left, window_right, Bias, bias_q, bias_kv, Mask, mask_q,
        mask_kv, slope2, key, q_offset, kv_offset, head[:, None], z, threshold, D, E, D2, BLOCK_D, BLOCK_D2,
        BLOCK_E, BLOCK_N, PAGE_SIZE, ALL, LEFT, RIGHT, SOFTCAP, Slopes is not None, DROPOUT, AHEAD, PRECISION,
    )  # fmt: skip

    col = tl.arange(0, BLOCK_E)
    if PartOut is None:
        if MaxLogit is not None:
            largest = largest_of(peak, total, real) * LN2
            tl.store(MaxLogit + (head64 * batch + z) * longest_q + rows, largest, mask=rows < longest_q)
        acc, lse = finish(acc, total, peak, real, Sinks, head, keep_scale, SINK, DROPOUT)
        # Dense rows past the length hold zeros; packed memory there belongs to others.
        limit = rows_q
        if CuQ is not None:
            limit = len_q
        inside = rows < tl.minimum(limit, longest_q)
        at_out = z64 * o_b + head64 * o_h + (first_q + rows) * o_s
        value = acc.to(Out.dtype.element_ty)
        tl.store(Out + at_out[:, None] + col[None, :], value, mask=inside[:, None] & (col < E)[None, :])
        tl.store(Lse + z64 * lse_b + head64 * lse_h + first_q + rows, lse, mask=inside)
    else:
        part = ((split.to(tl.int64) * batch + z) * longest_q + rows) * (groups * group) + head
        dead = (total == 0.0) | (real == 0)
        safe = tl.where(dead, 1.0, total)
        # A part without keys is not read by the merge, so that its output need not be written.
        value = acc / safe[:, None]
        inside = (dead == 0)[:, None] & (col < E)[None, :]
        tl.store(PartOut + part[:, None] * E + col[None, :], value, mask=inside)
        tl.store(PartLse + part, tl.where(dead, float("-inf"), peak + tl.log2(safe)), mask=real)
        if PartPeak is not None:
            tl.store(PartPeak + part, largest_of(peak, total, real), mask=real)


@triton.jit(do_not_specialize=PLAIN)
def merge_kernel(
    Out, Lse, MaxLogit, PartOut, PartLse, PartPeak, Sinks, LenQ, CuQ, StartQ,
    o_b, o_h, o_s, lse_b, lse_h,
    splits,
    longest_q,
    heads, batch, rows_q,
    keep_scale,
    E: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,  # at least splits
    CHUNK: tl.constexpr,  # parts read at once
    SINK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head into its result, always in the same order."""
    pid = tl.program_id(0)
    row = pid % longest_q
    head = pid // longest_q % heads
    z = pid // longest_q // heads
    z64, head64 = z.to(tl.int64), head.to(tl.int64)
    first_q, len_q = sequence(z, LenQ, CuQ, StartQ, rows_q)
    real = row < len_q
    # Between the parts of a row lie those of every other row.
    step = tl.cast(batch, tl.int64) * longest_q * heads
    part = (z64 * longest_q + row) * heads + head
    each = tl.arange(0, BLOCK_S)
    held = (each < splits) & real
    all2 = tl.load(PartLse + part + each * step, mask=held, other=float("-inf"))
    peak = tl.max(all2, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(all2 - base), 0)
    if MaxLogit is not None:
        largest = maximum_of(tl.load(PartPeak + part + each * step, mask=held, other=float("-inf")))
        tl.store(MaxLogit + (head64 * batch + z) * longest_q + row, largest * LN2)

    col = tl.arange(0, BLOCK_E)
    acc = tl.zeros([1, BLOCK_E], tl.float32)
    for s in range(0, splits, CHUNK):
        some = s + tl.arange(0, CHUNK)
        at = part + some * step
        lse2 = tl.load(PartLse + at, mask=(some < splits) & real, other=float("-inf"))
        alive = lse2 != float("-inf")
        value = tl.load(
            PartOut + at[:, None] * E + col[None, :], mask=alive[:, None] & (col < E)[None, :], other=0.0
        )
        acc += tl.sum(tl.exp2(lse2 - base)[:, None] * value, 0)[None, :]

    one = tl.arange(0, 1)
    acc, lse = finish(
        acc, total + one, peak + one, (one + row) < len_q, Sinks, head, keep_scale, SINK, DROPOUT
    )
    limit = rows_q
    if CuQ is not None:
        limit = len_q
    if row < limit:
        Out += z64 * o_b + head64 * o_h + (first_q + row) * o_s
        tl.store(Out + col[None, :], acc.to(Out.dtype.element_ty), mask=(col < E)[None, :])
        tl.store(Lse + z64 * lse_b + head64 * lse_h + first_q + row + one, lse)

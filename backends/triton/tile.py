"""What every kernel does with a tile: find its sequence, load rows, score pairs, draw dropout.

No ``from __future__ import annotations`` here or in the kernels: Triton reads the annotations.
Rows and columns are index tensors that broadcast with each other, ``[m, 1]`` and ``[1, n]``, or transposed
``[1, m]`` and ``[n, 1]``: the same code scores a tile and its transpose.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def sequence(z, Len, Cu, Start, rows):
    """First row in memory (int64) and length (int32) of sequence z, inside ``rows`` whatever was given."""
    if Cu is not None:
        begin = tl.load(Cu + z)
        length = tl.load(Cu + z + 1) - begin
        if Start is not None:
            begin = tl.load(Start + z)
        first = tl.minimum(tl.maximum(begin, 0), rows)
        length = tl.minimum(tl.maximum(length, 0), rows - first)
    else:
        first = z * 0
        length = z * 0 + rows
        if Len is not None:
            length = tl.minimum(tl.maximum(tl.load(Len + z), 0), rows)
    return first.to(tl.int64), length.to(tl.int32)


@triton.jit
def load_rows(
    Base,
    first,
    stride,
    length,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GUARD: tl.constexpr,
):
    """``[ROWS, BLOCK]`` from row ``first`` on, 0 beyond WIDTH and (with GUARD) from row ``length`` on."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    # 64 bits for where the tile begins, 32 within it.
    at = Base + first * tl.cast(stride, tl.int64) + (row[:, None] * stride + col[None, :])
    if GUARD and BLOCK != WIDTH:
        return tl.load(at, mask=(first + row < length)[:, None] & (col < WIDTH)[None, :], other=0.0)
    elif GUARD:
        return tl.load(at, mask=(first + row < length)[:, None], other=0.0)
    elif BLOCK != WIDTH:
        return tl.load(at, mask=(col < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def page_of(Table, n, length, pages, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """Page (int64) of rows [n, n + ROWS) of a sequence: one where pages hold whole tiles, else one per row.

    Whatever the table holds, the page is one of the pool's; entries past the length are not read.
    """
    if PAGE_SIZE % ROWS == 0:
        page = tl.load(Table + n // PAGE_SIZE)
    else:
        row = n + tl.arange(0, ROWS)
        page = tl.load(Table + row // PAGE_SIZE, mask=row < length, other=0)
    return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)


@triton.jit
def load_cached(
    Base,
    page, first, stride, page_stride, length,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GUARD: tl.constexpr,
):  # fmt: skip
    """``load_rows`` of keys or values that may lie in pages (PAGE_SIZE not 0), as ``page_of`` gave them."""
    if PAGE_SIZE == 0:
        return load_rows(Base, first, stride, length, WIDTH, BLOCK, ROWS, GUARD)
    elif PAGE_SIZE % ROWS == 0:
        inside = first % PAGE_SIZE
        start = Base + page * page_stride
        return load_rows(start, inside, stride, length - first + inside, WIDTH, BLOCK, ROWS, GUARD)
    else:
        row = first + tl.arange(0, ROWS)
        col = tl.arange(0, BLOCK)
        at = Base + (page * page_stride + (row % PAGE_SIZE).to(tl.int64) * stride)[:, None] + col[None, :]
        if GUARD:
            return tl.load(at, mask=(row < length)[:, None] & (col < WIDTH)[None, :], other=0.0)
        elif BLOCK != WIDTH:
            return tl.load(at, mask=(col < WIDTH)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_rows(
    Base, value, first, stride, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Store ``[ROWS, BLOCK]`` from row ``first`` on, as far as WIDTH and ``length`` reach."""
    row = tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    # 64 bits for where the tile begins, 32 within it.
    at = Base + first * tl.cast(stride, tl.int64) + (row[:, None] * stride + col[None, :])
    mask = (first + row < length)[:, None] & (col < WIDTH)[None, :]
    tl.store(at, value.to(Base.dtype.element_ty), mask=mask)


@triton.jit
def score(
    x, rows, cols, len_q, len_kv, diag, scale2, cap, window_left, window_right,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2,
    TAIL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2(e), -inf where invisible, and the softcap's tanh (else the scores again).

    ``scale2`` is softmax_scale * log2(e), or softmax_scale / softcap with a softcap; ``diag`` is
    q_offset - kv_offset + shift, so that ``cols - rows - diag`` is the contract's j - i - shift. TAIL, LEFT
    and RIGHT say which bounds this tile may cross: the last column's, the window's.
    """
    x = x * scale2
    t = x
    if SOFTCAP:
        t = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
        x = t * (cap * LOG2E)
    if Bias is not None:
        inside = (rows < len_q) & (cols < len_kv)
        at = Bias + (rows * tl.cast(bias_q, tl.int64) + cols * tl.cast(bias_kv, tl.int64))
        x += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
    if ALIBI:
        x -= slope2 * tl.abs(cols - rows - diag).to(tl.float32)
    if Mask is not None:
        inside = (rows < len_q) & (cols < len_kv)
        at = Mask + (rows * tl.cast(mask_q, tl.int64) + cols * tl.cast(mask_kv, tl.int64))
        x = tl.where(tl.load(at, mask=inside, other=1) != 0, float("-inf"), x)
    # One bound per row against the bare columns: a difference per pair would cost registers.
    if TAIL:
        x = tl.where(cols < len_kv, x, float("-inf"))
    if LEFT:
        x = tl.where(cols >= rows + (diag - window_left), x, float("-inf"))
    if RIGHT:
        x = tl.where(cols <= rows + (diag + window_right), x, float("-inf"))
    return x, t


@triton.jit
def dropout_key(Seed, Offset):
    """``seed XOR rotate_left64(offset, 32)``, read on the device: graphs and checkpoints replay it."""
    key = tl.load(Seed)
    if Offset is not None:
        offset = tl.load(Offset)
        key = key ^ ((offset << 32) | ((offset >> 32) & 0xFFFFFFFF))
    return key


@triton.jit
def kept(key, rows, first, head, z, threshold, N: tl.constexpr, SHARED: tl.constexpr):
    """Which pairs ``[m, N]`` dropout keeps: rows ``[m]`` and columns from ``first`` on, absolute positions.

    A draw makes the words of four neighbouring columns. SHARED 4: ``first`` is a multiple of four, and each
    draw is made once; 1: once per pair. ``threshold`` is compared as signed after flipping the top bit: it
    travels as an int32 argument.
    """
    if SHARED == 4:
        cols = (first >> 2) + tl.arange(0, N // 4)
    else:
        cols = first + tl.arange(0, N)
    zero = rows[:, None] * 0 + cols[None, :] * 0
    if SHARED == 4:
        w0, w1, w2, w3 = tl.philox(key, zero + cols[None, :], zero + rows[:, None], zero + head, zero + z)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [rows.shape[0], N])
    else:
        counter = zero + (cols >> 2)[None, :]
        w0, w1, w2, w3 = tl.philox(key, counter, zero + rows[:, None], zero + head, zero + z)
        lane = zero + (cols & 3)[None, :]
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    return word.to(tl.int32, bitcast=True) ^ -2147483648 >= threshold


@triton.jit
def finish(acc, total, peak, real, Sinks, head, keep_scale, SINK: tl.constexpr, DROPOUT: tl.constexpr):
    """Output [m, e] and natural-log LSE [m] of rows whose every key was seen; 0 and -inf where not ``real``.

    ``head`` is one head or one per row [m]; without learnable Sinks the sink's logit is 0.
    """
    if SINK:
        # One more key, whose value is 0.
        sink2 = 0.0
        if Sinks is not None:
            sink2 = tl.load(Sinks + head).to(tl.float32) * LOG2E
        new_peak = tl.maximum(peak, sink2)
        rescale = tl.exp2(peak - new_peak)
        total = total * rescale + tl.exp2(sink2 - new_peak)
        acc = acc * rescale[:, None]
        peak = new_peak
    dead = (peak == float("-inf")) | (real == 0)
    safe = tl.where(dead, 1.0, total)
    factor = keep_scale / safe if DROPOUT else 1.0 / safe
    acc = tl.where(dead[:, None], 0.0, acc * factor[:, None])
    return acc, tl.where(dead, float("-inf"), (peak + tl.log2(safe)) * LN2)


@triton.jit
def span(
    m0,
    M,
    length,
    reach_low,
    reach_high,
    N: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Where the band meets a block ``[m0, m0 + M)``: ``(begin, full_begin, full_end, end)``, multiples of N.

    An index x of the other side is met by index y of this block iff reach_low <= x - y <= reach_high (LOW and
    HIGH say which of the two bounds exist). Between full_begin and full_end every pair is visible; without
    SPLIT that part is empty and all of it comes last.
    """
    begin = m0 * 0
    end = tl.cdiv(length, N) * N
    full_end = length // N * N
    if LOW:
        begin = tl.minimum(tl.maximum(m0 + reach_low, 0) // N * N, end)
    full_begin = begin
    if HIGH:
        end = tl.maximum(tl.minimum(end, tl.cdiv(tl.maximum(m0 + M + reach_high, 0), N) * N), begin)
        full_end = tl.minimum(full_end, tl.maximum(m0 + reach_high + 1, 0) // N * N)
    if SPLIT:
        if LOW:
            full_begin = tl.cdiv(tl.maximum(m0 + M - 1 + reach_low, 0), N) * N
            full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    else:
        full_end = full_begin
    return begin, full_begin, full_end, end

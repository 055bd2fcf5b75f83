"""What every kernel does with a tile: find its sequence, load rows, score pairs, draw dropout.

No ``from __future__ import annotations`` here or in the kernels: Triton reads the annotations.
Rows and columns are index tensors that broadcast with each other, ``[m, 1]`` and ``[1, n]``, or transposed
``[1, m]`` and ``[n, 1]``: the same code scores a tile and its transpose.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# Arguments that a kernel is not compiled anew for when they become 1 or a multiple of 16: they change from
# call to call, and no address has them as a factor.
PLAIN = (
    *("rows_q", "rows_kv", "batch", "heads", "groups", "group", "pages"),
    *("tiles", "tiles_kv", "splits", "longest_q"),
    *("shares", "programs_h", "bias_rows", "bias_cols"),
    *("q_offset", "kv_offset", "window_left", "window_right", "threshold"),
)

# Where a loop over tiles masks their scores.
ALL = tl.constexpr(0)  # every tile
INNER = tl.constexpr(1)  # none: a loop over the tiles that no bound crosses
EDGES = tl.constexpr(2)  # every tile, in a loop over those that a bound crosses
BRANCH = tl.constexpr(3)  # a loop over all tiles, which asks of each


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

    Whatever the table holds, the page is one of the pool's; entries past the length are not read. 0 without
    pages.
    """
    if PAGE_SIZE == 0:
        return 0
    else:
        row = n
        if PAGE_SIZE % ROWS != 0:
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
    x, rows, cols, len_q, len_kv, diag, scale2, cap,
    Bias, bias_q, bias_kv, Mask, mask_q, mask_kv,
    slope2,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2(e), -inf where Mask hides, and the softcap's tanh (else the scores again).

    ``scale2`` is softmax_scale * log2(e), or softmax_scale / softcap with a softcap; ``diag`` as in
    ``bounded``, which comes next.
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
    return x, t


@triton.jit
def bounded(
    x, rows, cols, edge, len_kv, diag, window_left, window_right,
    PART: tl.constexpr, TAIL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Scores ``x`` of a tile, -inf past the last column and outside of the window.

    ``edge``: whether a bound crosses this tile at all, which only BRANCH asks. TAIL, LEFT and RIGHT say which
    bounds there are. ``diag`` is q_offset - kv_offset + shift, so that ``cols - rows - diag`` is the
    contract's j - i - shift.
    """
    if PART == INNER:
        return x
    elif PART == BRANCH:
        if edge:
            x = _hidden(x, rows, cols, len_kv, diag, window_left, window_right, TAIL, LEFT, RIGHT)
        return x
    else:
        return _hidden(x, rows, cols, len_kv, diag, window_left, window_right, TAIL, LEFT, RIGHT)


@triton.jit
def _hidden(
    x, rows, cols, len_kv, diag, window_left, window_right,
    TAIL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # One bound per row against the bare columns: a difference per pair would cost registers.
    if TAIL:
        x = tl.where(cols < len_kv, x, float("-inf"))
    if LEFT:
        x = tl.where(cols >= rows + (diag - window_left), x, float("-inf"))
    if RIGHT:
        x = tl.where(cols <= rows + (diag + window_right), x, float("-inf"))
    return x


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

    NaN among the scores stays: ``peak`` may have lost it, as a maximum of the hardware's does, ``total`` has
    not. ``head`` is one head or one per row [m]; without learnable Sinks the sink's logit is 0.
    """
    if SINK:
        # One more key, whose value is 0.
        sink2 = 0.0
        if Sinks is not None:
            sink2 = tl.load(Sinks + head).to(tl.float32) * LOG2E
        new_peak = tl.maximum(peak, sink2)
        # Both may be -inf, and -inf - -inf is NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - base)
        total = total * rescale + tl.exp2(sink2 - base)
        acc = acc * rescale[:, None]
        peak = new_peak
    dead = (total == 0.0) | (real == 0)
    safe = tl.where(dead, 1.0, total)
    factor = keep_scale / safe if DROPOUT else 1.0 / safe
    acc = tl.where(dead[:, None], 0.0, acc * factor[:, None])
    return acc, tl.where(dead, float("-inf"), (peak + tl.log2(safe)) * LN2)


@triton.jit
def largest_of(peak, total, real):
    """The largest score [m] of each row: -inf where not ``real``, NaN where a score was."""
    lost = (total != total) & (peak != float("inf"))  # the total is NaN beside an infinite score, too
    return tl.where(real, tl.where(lost, float("nan"), peak), float("-inf"))


@triton.jit
def maximum_of(x):
    """The maximum of [n] as [], NaN where there is one."""
    return tl.where(tl.max((x != x).to(tl.int32), 0) != 0, float("nan"), tl.max(x, 0))


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
):
    """Where the band meets a block ``[m0, m0 + M)``: ``(begin, full_begin, full_end, end)``, multiples of N.

    An index x of the other side is met by index y of this block iff reach_low <= x - y <= reach_high (LOW and
    HIGH say which of the two bounds exist). Between full_begin and full_end every pair is visible.
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
    if LOW:
        full_begin = tl.cdiv(tl.maximum(m0 + M - 1 + reach_low, 0), N) * N
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def tiles_of(begin, full_begin, full_end, end, PART: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr):
    """``(first, last, skipped)`` of a loop over a part of what ``span`` gave: see ``INNER``.

    FRONT and BACK say whether there may be edges before and behind the inner tiles. With both the loop counts
    on where it leaves those out, and ``tile_at`` adds the ``skipped``.
    """
    if PART == INNER:
        return full_begin, full_end, 0
    elif PART == EDGES and not FRONT:
        return full_end, end, 0
    elif PART == EDGES and not BACK:
        return begin, full_begin, 0
    elif PART == EDGES:
        return begin, end - (full_end - full_begin), full_end - full_begin
    else:
        return begin, end, 0


@triton.jit
def tile_at(counted, full_begin, skipped, PART: tl.constexpr, FRONT: tl.constexpr, BACK: tl.constexpr):
    """The first row or column of the tile that a loop over ``tiles_of`` has come to."""
    if PART == EDGES and FRONT and BACK:
        return counted + tl.where(counted < full_begin, 0, skipped)
    else:
        return counted

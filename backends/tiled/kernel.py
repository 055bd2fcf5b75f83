"""The contract's two functions, side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import LARGEST_LSE, check_gradients, sum_is_lost
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.tiled.tiles import (
    NEG_INF,
    Blocks,
    Chunk,
    Dense,
    Sequence,
    accumulation_dtype,
    check,
    choose_blocks,
    chunks,
    columns,
    dense_problem,
    dropout_factor,
    empty_like_rows,
    four_dims,
    load_kv,
    load_rows,
    packed_problems,
    pick,
    row_padding,
    scores,
    split,
    sum_rows,
    times_keys,
)

# ---- Forward: online softmax over column blocks, one row block at a time -------------------------------


def forward(spec: Spec, inputs: Inputs, *, blocks: Blocks | None = None) -> Result:
    """Attention as the contract states it; ``blocks`` overrides the tile size.

    ``out`` has q's dtype and memory order, ``[b, h, s_q, e]`` (packed ``[t_q, h, e]``). ``lse`` is always
    given; it and ``max_logit`` are float32, float64 for float64 inputs. Rows that see no key give 0 and an
    LSE of -inf, with sinks the sink's logit; padded rows, and packed rows of no sequence, 0 and -inf.
    Saved for the backward, beside ``out`` and ``lse``, is what rounding took from lse: beside scores of -1e9
    that is all that it says of the sum.

    Raises ValueError for head counts that do not divide, an unknown softmax_type, a missing tensor that the
    spec calls for, or cu_seqlens that reach outside the packed tensors.
    """
    check(spec, inputs)
    q = inputs.q
    h, a = q.shape[1], accumulation_dtype(q)
    # The loops would otherwise record every tile when called on tensors that require a gradient.
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out = empty_like_rows(q, inputs.v.shape[-1])
        max_logit = None
        if spec.return_max_logit:
            max_logit = torch.full((h,), NEG_INF, dtype=a, device=q.device)
        if not spec.packed:
            lse, low = torch.empty((2, *q.shape[:3]), dtype=a, device=q.device)
            _forward(dense_problem(spec, inputs), blocks, out, (lse, low), max_logit)
        else:
            out.zero_()
            lse = torch.full((h, q.shape[0]), NEG_INF, dtype=a, device=q.device)
            low = torch.zeros_like(lse)
            for sequence, dense in packed_problems(spec, inputs):
                of_both = sequence.of_lse(lse), sequence.of_lse(low)
                _forward(dense, blocks, sequence.of_q(out), of_both, max_logit)
        return Result(out, lse, max_logit, (low,) if spec.need_grad and inputs.bias is not None else ())


def _forward(
    dense: Dense, blocks: Blocks | None, out: Tensor, lse: tuple[Tensor, Tensor], max_logit: Tensor | None
) -> None:
    """Fill ``out`` [b, h, s_q, e] and ``lse`` [b, h, s_q] with its rounding, raise ``max_logit`` [h]."""
    q, blocks = dense.q, blocks or choose_blocks(dense)
    for chunk in chunks(dense, blocks):
        n, h = slice(chunk.n.start, chunk.n.stop), slice(chunk.h.start, chunk.h.stop)
        for rows in split(q.shape[2], blocks.q):
            block, *both, largest = _row_block(dense, chunk, rows, blocks)
            out[n, h, rows.start : rows.stop] = block.flatten(1, 2)
            for whole, part in zip(lse, both, strict=True):
                whole[n, h, rows.start : rows.stop] = part.flatten(1, 2)
            if max_logit is not None:
                max_logit[h] = torch.maximum(max_logit[h], largest.amax((0, 3, 4)).flatten())


def _row_block(
    dense: Dense, chunk: Chunk, rows: range, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a row block: out ``[n, g, r, q, e]``, LSE ``[n, g, r, q]``, what rounding took from it, and the
    largest score ``[n, g, r, q, 1]``."""
    padded = row_padding(dense, chunk, rows)
    q = load_rows(dense.q, dense, chunk, rows, padded) * dense.spec.softmax_scale
    per_row = (*q.shape[:-1], 1)
    largest = q.new_full(per_row, NEG_INF)
    if dense.sinks is None:
        peak, total = largest, q.new_zeros(per_row)
    else:
        # A sink is one more key whose value is 0, met before all others.
        peak = dense.sinks[chunk.h.start : chunk.h.stop].view(1, len(chunk.g), chunk.r, 1, 1).expand(per_row)
        total = q.new_ones(per_row)
    acc = q.new_zeros((*q.shape[:-1], dense.v.shape[-1]))

    for cols in columns(dense, rows, blocks.kv):
        x, _ = scores(dense, chunk, rows, cols, q, load_kv(dense.k, dense, chunk, cols))
        tile_peak = x.amax(-1, keepdim=True)
        largest = torch.maximum(largest, tile_peak)
        new_peak = torch.maximum(peak, tile_peak)
        # Where nothing was visible yet both are -inf, and -inf - -inf is NaN.
        base = new_peak.masked_fill(new_peak == NEG_INF, 0.0)
        p, rescale = x.sub_(base).exp_(), (peak - base).exp_()
        peak, total = new_peak, total * rescale + p.sum(-1, keepdim=True)
        kept = dropout_factor(dense, chunk, rows, cols)
        if kept is not None:
            p.mul_(kept)
        acc.mul_(rescale).add_(times_keys(p, load_kv(dense.v, dense, chunk, cols)))

    dead = peak == NEG_INF
    if padded is not None:
        dead = dead | padded
    lse = peak + total.log()
    # Of smaller ones rounding takes as much as in every kernel: gradients stay those of a mask, bit for bit.
    low = (total.log() - (lse - peak)).masked_fill(dead | (lse.abs() <= LARGEST_LSE), 0.0)
    lse = lse.masked_fill(dead, NEG_INF)
    return acc.div_(total).masked_fill_(dead, 0.0), lse.squeeze(-1), low.squeeze(-1), largest


# ---- Backward: the scores are computed again from q, k and the LSE, tile by tile -----------------------


class _Given(NamedTuple):
    """What the forward gave, and the gradients that flow into it; shapes as out [b, h, s_q, e]."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    low: Tensor | None  # what rounding took from lse


class _Wanted(NamedTuple):
    """dq, dk, dv are filled; dbias (4 dims, each full or 1) and dsinks [h] are added to."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


def backward(
    spec: Spec,
    inputs: Inputs,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None = None,
    *,
    blocks: Blocks | None = None,
) -> Grads:
    """Gradients of ``(out * dout).sum() + (lse * dlse).sum()``; ``blocks`` overrides the tile size.

    ``result`` may hold an ``out`` and ``lse`` merged from several parts of the keys: what comes back is then
    this part's share. Rows that see no key, padded rows, and packed rows of no sequence pass nothing back,
    whatever dout and dlse hold there. The bias's gradient is summed over the dimensions it broadcasts over.

    Raises ValueError as ``forward`` does, and without ``result.lse``.
    """
    check(spec, inputs)
    if result.lse is None:
        raise ValueError("the backward needs result.lse")
    check_gradients(spec, inputs, result, dout, dlse)
    q, bias, softmax_offset = inputs.q, inputs.bias, inputs.softmax_offset
    a, device = accumulation_dtype(q), q.device
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        dq, dk, dv = (empty_like_rows(t, t.shape[-1]) for t in (q, inputs.k, inputs.v))
        dbias = dsinks = None
        if bias is not None:
            dbias = torch.zeros(bias.shape, dtype=a, device=device)
        if spec.softmax_type == "learnable":
            dsinks = torch.zeros(q.shape[1], dtype=a, device=device)
        low = result.saved[0] if result.saved else None
        if low is None and bias is not None and sum_is_lost(result.lse):
            again = forward(replace(spec, need_grad=True), inputs, blocks=blocks)
            if again.lse is not None and torch.allclose(again.lse, result.lse, rtol=1e-6):  # not merged ones
                low = again.saved[0] + (again.lse - result.lse).nan_to_num_(0.0)
        given = _Given(result.out, result.lse, dout, dlse, low)
        wanted = _Wanted(dq, dk, dv, None if dbias is None else four_dims(dbias), dsinks)
        if not spec.packed:
            _backward(dense_problem(spec, inputs), blocks, given, wanted)
        else:
            for grad in (dq, dk, dv):
                grad.zero_()
            for sequence, dense in packed_problems(spec, inputs):
                _backward(dense, blocks, _given_of(sequence, given), _wanted_of(sequence, wanted))
        return Grads(
            dq,
            dk,
            dv,
            dbias.to(bias.dtype) if dbias is not None and bias is not None else None,
            dsinks.to(softmax_offset.dtype) if dsinks is not None and softmax_offset is not None else None,
        )


def _given_of(s: Sequence, given: _Given) -> _Given:
    dlse, low = (None if t is None else s.of_lse(t) for t in (given.dlse, given.low))
    return _Given(s.of_q(given.out), s.of_lse(given.lse), s.of_q(given.dout), dlse, low)


def _wanted_of(s: Sequence, wanted: _Wanted) -> _Wanted:
    dbias = None if wanted.dbias is None else s.of_pairs(wanted.dbias)
    return _Wanted(s.of_q(wanted.dq), s.of_kv(wanted.dk), s.of_kv(wanted.dv), dbias, wanted.dsinks)


def _backward(dense: Dense, blocks: Blocks | None, given: _Given, wanted: _Wanted) -> None:
    dq, dk, dv, dbias, dsinks = wanted
    blocks = blocks or choose_blocks(dense)
    for chunk in chunks(dense, blocks):
        n, g, h = (slice(x.start, x.stop) for x in (chunk.n, chunk.g, chunk.h))
        dk_acc = torch.zeros(dk[n, g].shape, dtype=dense.a, device=dk.device)
        dv_acc = torch.zeros(dv[n, g].shape, dtype=dense.a, device=dv.device)
        for rows in split(dense.q.shape[2], blocks.q):
            block = _Rows(dense, chunk, rows, given)
            if dsinks is not None:
                dsinks[h] += block.dsinks()
            dq_acc = torch.zeros_like(block.q)
            for cols in columns(dense, rows, blocks.kv):
                at = slice(cols.start, cols.stop)
                dq_acc += block.tile(cols, dk_acc[:, :, at], dv_acc[:, :, at], dbias)
            dq[n, h, rows.start : rows.stop] = dq_acc.mul_(dense.spec.softmax_scale).flatten(1, 2)
        dk[n, g] = dk_acc
        dv[n, g] = dv_acc


class _Rows:
    """A row block's own tensors ``[n, g, r, q, .]``, zero in rows that pass nothing back."""

    def __init__(self, dense: Dense, chunk: Chunk, rows: range, given: _Given) -> None:
        out, lse, dout, dlse, low = given
        self.dense, self.chunk, self.rows = dense, chunk, rows
        row_lse = pick(lse[:, :, rows.start : rows.stop, None], chunk).to(dense.a)
        dead, padded = row_lse == NEG_INF, row_padding(dense, chunk, rows)
        if padded is not None:
            dead = dead | padded
        # exp(score - inf) is 0 for every score, -inf included.
        self.lse = row_lse.masked_fill(dead, float("inf"))
        self.low = None if low is None else pick(low[:, :, rows.start : rows.stop, None], chunk)
        self.q = load_rows(dense.q, dense, chunk, rows, dead) * dense.spec.softmax_scale
        self.dout = load_rows(dout, dense, chunk, rows, dead)
        # What softmax's derivative takes off each dp; a gradient into the LSE enters at the same place.
        self.delta = (self.dout * load_rows(out, dense, chunk, rows, dead)).sum(-1, keepdim=True)
        if dlse is not None:
            self.delta -= load_rows(dlse[..., None], dense, chunk, rows, dead)

    def dsinks(self) -> Tensor:
        """This block's share of the sink logits' gradient, ``[h of the chunk]``."""
        assert self.dense.sinks is not None
        h = self.chunk.h
        sinks = self.dense.sinks[h.start : h.stop].view(1, len(self.chunk.g), self.chunk.r, 1, 1)
        return -((sinks - self.lse).exp_() * self.delta).sum((0, 3, 4)).flatten()

    def tile(self, cols: range, dk: Tensor, dv: Tensor, dbias: Tensor | None) -> Tensor:
        """Add a tile's share to dk ``[n, g, k, d]``, dv ``[n, g, k, e]`` and dbias; return dq's, unscaled."""
        dense, chunk, rows = self.dense, self.chunk, self.rows
        k, v = load_kv(dense.k, dense, chunk, cols), load_kv(dense.v, dense, chunk, cols)
        x, tanh = scores(dense, chunk, rows, cols, self.q, k)
        x.sub_(self.lse)
        p = (x if self.low is None else x.sub_(self.low)).exp_()
        dp = times_keys(self.dout, v.transpose(-1, -2))
        kept = dropout_factor(dense, chunk, rows, cols)
        if kept is None:
            dv += sum_rows(p, self.dout)
        else:
            dv += sum_rows(p * kept, self.dout)
            dp.mul_(kept)
        ds = dp.sub_(self.delta).mul_(p)
        if dbias is not None:
            _add_dbias(dbias, ds, chunk, rows, cols)
        if tanh is not None:
            ds.mul_(1.0 - tanh.square())
        dk += sum_rows(ds, self.q)
        return times_keys(ds, k)


def _add_dbias(dbias: Tensor, ds: Tensor, chunk: Chunk, rows: range, cols: range) -> None:
    """Add a tile's ``ds`` [n, g, r, q, k] to the bias's gradient, summed where the bias broadcasts."""
    ds = ds.flatten(1, 2)
    at = []
    for dim, positions in enumerate((chunk.n, chunk.h, rows, cols)):
        if dbias.shape[dim] == 1:
            ds = ds.sum(dim, keepdim=True)
            at.append(slice(0, 1))
        else:
            at.append(slice(positions.start, positions.stop))
    dbias[tuple(at)] += ds


# --------------------------------------------------------------------------------------------------------
# The same attention over whole score matrices, in operations that autograd can follow any number of times.
#
# O(s_q * s_kv) memory: for derivatives of the gradients, which no kernel gives. What a pair scores and which
# pairs are visible is read from where the tiles read it.


_MATRICES = 17  # that two derivatives hold at their peak: 14 to 17 with torch 2.13's CPU allocator, s = 1024


def attend(spec: Spec, inputs: Inputs) -> Tensor:
    """``out`` as ``forward`` gives it. Raises ValueError as that does, and for keys in pages."""
    check(spec, inputs)
    if inputs.block_table is not None:
        raise ValueError("keys in pages have no gradients")
    q = inputs.q
    with torch.autocast(q.device.type, enabled=False):
        if not spec.packed:
            return _attend(dense_problem(spec, inputs)).to(q.dtype)
        out = q.new_zeros((*q.shape[:-1], inputs.v.shape[-1]))
        for sequence, dense in packed_problems(spec, inputs):
            rows = _attend(dense)[0].transpose(0, 1).to(q.dtype)
            out = out.index_copy(0, torch.arange(sequence.q.start, sequence.q.stop, device=q.device), rows)
        return out


def score_matrix(spec: Spec, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Scores ``[b, h, s_q, s_kv]`` of a dense call, -inf where a pair is not visible, and which of them
    dropout keeps (bool; None without dropout).

    In float32, float64 for float64 inputs. Raises ValueError as ``forward`` does, and for packed calls.
    """
    check(spec, inputs)
    if spec.packed:
        raise ValueError("a packed call has a score matrix per sequence")
    with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
        dense = dense_problem(spec, inputs)
        (b, h, s_q, _), g = dense.q.shape, dense.k.shape[1]
        chunk, rows, cols = Chunk(range(b), range(g), h // g), range(s_q), range(dense.s_kv)
        factor = dropout_factor(dense, chunk, rows, cols)
        kept = None if factor is None else factor.flatten(1, 2) > 0.0
        return _all_scores(dense, chunk, rows, cols).flatten(1, 2), kept


def bytes_held(spec: Spec, inputs: Inputs) -> int:
    """What ``attend`` and two derivatives of it hold at their peak, about."""
    dense = (
        [part for _, part in packed_problems(spec, inputs)] if spec.packed else [dense_problem(spec, inputs)]
    )
    scores = sum(part.q.shape[0] * part.q.shape[1] * part.q.shape[2] * part.s_kv for part in dense)
    return _MATRICES * scores * accumulation_dtype(inputs.q).itemsize


def _all_scores(dense: Dense, chunk: Chunk, rows: range, cols: range) -> Tensor:
    """``[b, g, r, s_q, s_kv]``"""
    q = load_rows(dense.q, dense, chunk, rows, row_padding(dense, chunk, rows)) * dense.spec.softmax_scale
    return scores(dense, chunk, rows, cols, q, load_kv(dense.k, dense, chunk, cols))[0]


def _attend(dense: Dense) -> Tensor:
    """[b, h, s_q, e]"""
    (b, h, s_q, _), g = dense.q.shape, dense.k.shape[1]
    chunk, rows, cols = Chunk(range(b), range(g), h // g), range(s_q), range(dense.s_kv)
    padded = row_padding(dense, chunk, rows)
    x = _all_scores(dense, chunk, rows, cols)
    hidden = x == NEG_INF
    # A constant shift changes no derivative; 0 where a row sees nothing, as -inf - -inf is NaN.
    peak = x.detach().amax(-1, keepdim=True) if dense.s_kv else x.new_full((*x.shape[:-1], 1), NEG_INF)
    sinks = None if dense.sinks is None else dense.sinks.view(1, g, h // g, 1, 1)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach())
    peak = peak.masked_fill(peak == NEG_INF, 0.0)
    p = (x.masked_fill(hidden, 0.0) - peak).exp().masked_fill(hidden, 0.0)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - peak).exp()
    dead = total == 0.0
    p = p / total.masked_fill(dead, 1.0)
    kept = dropout_factor(dense, chunk, rows, cols)
    if kept is not None:
        p = p * kept
    out = times_keys(p, load_kv(dense.v, dense, chunk, cols))
    return out.masked_fill(dead if padded is None else dead | padded, 0.0).flatten(1, 2)

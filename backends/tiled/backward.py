"""Backward: the scores are computed again from q, k and the LSE, tile by tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnsel.backends.checks import check_gradients
from attnsel.backends.contract import Grads, Inputs, Result, Spec

from .sequences import (
    Sequence,
    accumulation_dtype,
    check,
    dense_problem,
    empty_like_rows,
    four_dims,
    packed_problems,
)
from .tiles import (
    NEG_INF,
    Blocks,
    Chunk,
    Dense,
    choose_blocks,
    chunks,
    columns,
    dropout_factor,
    load_kv,
    load_rows,
    pick,
    row_padding,
    scores,
    split,
    sum_rows,
    times_keys,
)


class _Given(NamedTuple):
    """What the forward gave, and the gradients that flow into it; shapes as out [b, h, s_q, e]."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


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
        given = _Given(result.out, result.lse, dout, dlse)
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
    dlse = None if given.dlse is None else s.of_lse(given.dlse)
    return _Given(s.of_q(given.out), s.of_lse(given.lse), s.of_q(given.dout), dlse)


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
        out, lse, dout, dlse = given
        self.dense, self.chunk, self.rows = dense, chunk, rows
        row_lse = pick(lse[:, :, rows.start : rows.stop, None], chunk).to(dense.a)
        dead, padded = row_lse == NEG_INF, row_padding(dense, chunk, rows)
        if padded is not None:
            dead = dead | padded
        # exp(score - inf) is 0 for every score, -inf included.
        self.lse = row_lse.masked_fill(dead, float("inf"))
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
        p = x.sub_(self.lse).exp_()
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

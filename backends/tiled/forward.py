"""Forward: online softmax over column blocks, one row block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Result, Spec

from .sequences import accumulation_dtype, check, dense_problem, empty_like_rows, packed_problems
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
    row_padding,
    scores,
    split,
    times_keys,
)


def forward(spec: Spec, inputs: Inputs, *, blocks: Blocks | None = None) -> Result:
    """Attention as the contract states it; ``blocks`` overrides the tile size.

    ``out`` has q's dtype and memory order, ``[b, h, s_q, e]`` (packed ``[t_q, h, e]``). ``lse`` is always
    given; it and ``max_logit`` are float32, float64 for float64 inputs. Rows that see no key give 0 and an
    LSE of -inf, with sinks the sink's logit; padded rows, and packed rows of no sequence, 0 and -inf.
    Nothing is saved for the backward but ``out`` and ``lse``.

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
            lse = torch.empty(q.shape[:3], dtype=a, device=q.device)
            _forward(dense_problem(spec, inputs), blocks, out, lse, max_logit)
            return Result(out, lse, max_logit)
        out.zero_()
        lse = torch.full((h, q.shape[0]), NEG_INF, dtype=a, device=q.device)
        for sequence, dense in packed_problems(spec, inputs):
            _forward(dense, blocks, sequence.of_q(out), sequence.of_lse(lse), max_logit)
        return Result(out, lse, max_logit)


def _forward(dense: Dense, blocks: Blocks | None, out: Tensor, lse: Tensor, max_logit: Tensor | None) -> None:
    """Fill ``out`` [b, h, s_q, e] and ``lse`` [b, h, s_q], raise ``max_logit`` [h]."""
    q, blocks = dense.q, blocks or choose_blocks(dense)
    for chunk in chunks(dense, blocks):
        n, h = slice(chunk.n.start, chunk.n.stop), slice(chunk.h.start, chunk.h.stop)
        for rows in split(q.shape[2], blocks.q):
            block, block_lse, largest = _row_block(dense, chunk, rows, blocks)
            out[n, h, rows.start : rows.stop] = block.flatten(1, 2)
            lse[n, h, rows.start : rows.stop] = block_lse.flatten(1, 2)
            if max_logit is not None:
                max_logit[h] = torch.maximum(max_logit[h], largest.amax((0, 3, 4)).flatten())


def _row_block(dense: Dense, chunk: Chunk, rows: range, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Out ``[n, g, r, q, e]``, LSE ``[n, g, r, q]`` and largest score ``[n, g, r, q, 1]`` of a row block."""
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
    lse = (peak + total.log()).masked_fill(dead, NEG_INF)
    return acc.div_(total).masked_fill_(dead, 0.0), lse.squeeze(-1), largest

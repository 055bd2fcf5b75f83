"""The same attention over whole score matrices, in operations that autograd can follow any number of times.

O(s_q * s_kv) memory: for derivatives of the gradients, which no kernel gives. What a pair scores and which
pairs are visible is read from where the tiles read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec

from .sequences import accumulation_dtype, check, dense_problem, packed_problems
from .tiles import NEG_INF, Chunk, Dense, dropout_factor, load_kv, load_rows, row_padding, scores, times_keys

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


def bytes_held(spec: Spec, inputs: Inputs) -> int:
    """What ``attend`` and two derivatives of it hold at their peak, about."""
    dense = (
        [part for _, part in packed_problems(spec, inputs)] if spec.packed else [dense_problem(spec, inputs)]
    )
    scores = sum(part.q.shape[0] * part.q.shape[1] * part.q.shape[2] * part.s_kv for part in dense)
    return _MATRICES * scores * accumulation_dtype(inputs.q).itemsize


def _attend(dense: Dense) -> Tensor:
    """[b, h, s_q, e]"""
    (b, h, s_q, _), g = dense.q.shape, dense.k.shape[1]
    chunk, rows, cols = Chunk(range(b), range(g), h // g), range(s_q), range(dense.s_kv)
    padded = row_padding(dense, chunk, rows)
    q = load_rows(dense.q, dense, chunk, rows, padded) * dense.spec.softmax_scale
    x, _ = scores(dense, chunk, rows, cols, q, load_kv(dense.k, dense, chunk, cols))
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

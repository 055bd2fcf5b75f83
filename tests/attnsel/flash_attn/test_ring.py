"""Ring attention over FlashAttention's private functions: keys in parts, merged log-sum-exps, one gradient.

Two ranks of a ring are played by one process. Each holds half of the rows and sees the keys half by half, as
ring-attention code does; together they must be one whole call, forward and backward.
"""

from __future__ import annotations

import pytest
import torch

from attention_cases import assert_errs_little_more
from attnsel.flash_attn.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    flash_attn_func,
    flash_attn_varlen_func,
)

RANKS = 2
TAIL = {
    "dropout_p": 0.0,
    "softmax_scale": 0.25,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
DENSE = (_flash_attn_forward, _flash_attn_backward)
PACKED = (_flash_attn_varlen_forward, _flash_attn_varlen_backward)


def merged(parts):
    """(out, lse) over all keys from those over parts of them; out [.., h, d] in float32, lse [.., h]."""
    lse = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    return sum(out.float() * (part - lse).exp()[..., None] for out, part in parts), lse


def steps(rank, causal):
    """Which parts of the keys a rank sees, and whether its own diagonal runs through them."""
    return [(other, causal and other == rank) for other in range(RANKS) if not causal or other <= rank]


def ring(functions, q, k, v, dout, causal, lengths=()):
    """Out, dq, dk, dv of every rank; q, k, v, dout: a tensor per rank, packed with the ranks' ``lengths``."""
    forward, backward = functions
    dk, dv = ([torch.zeros_like(t, dtype=torch.float32) for t in tensors] for tensors in (k, v))
    outs, dqs = [], []
    for rank in range(RANKS):
        parts = []
        for other, diagonal in steps(rank, causal):
            given = (q[rank], k[other], v[other], *lengths)
            out, lse, _, _ = forward(*given, causal=diagonal, return_softmax=False, **TAIL)
            parts.append((out, lse.transpose(-1, -2)))
        out, lse = merged(parts)
        out, lse = out.to(q[rank].dtype), lse.transpose(-1, -2).contiguous()
        dq = torch.zeros_like(q[rank], dtype=torch.float32)
        for other, diagonal in steps(rank, causal):
            given = (q[rank], k[other], v[other])
            grads = [torch.empty_like(t) for t in given]
            backward(
                dout[rank], *given, out, lse, *grads, *lengths, causal=diagonal, deterministic=False, **TAIL
            )
            for total, grad in zip((dq, dk[other], dv[other]), grads, strict=True):
                total += grad
        outs.append(out)
        dqs.append(dq)
    return outs, dqs, dk, dv


def in_one_go(q, k, v, dout, call):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype)))


def tensors(*shape_q, groups):
    generator = torch.Generator().manual_seed(3)
    shape_kv = (*shape_q[:-2], groups, shape_q[-1])
    return [
        torch.randn(shape, generator=generator).half() for shape in (shape_q, shape_kv, shape_kv, shape_q)
    ]


@pytest.mark.parametrize("causal", [False, True])
def test_two_ranks_are_one_whole_call(causal):
    q, k, v, dout = tensors(2, 24, 4, 16, groups=2)

    def plain(q, k, v):
        k, v = (t.repeat_interleave(2, dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * 0.25
        if causal:
            scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), -torch.inf)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    def named(results):
        return dict(zip(("out", "dq", "dk", "dv"), results, strict=True))

    true = named(in_one_go(*(t.double() for t in (q, k, v, dout)), plain))
    rough = named(in_one_go(q, k, v, dout, plain))
    whole = in_one_go(q, k, v, dout, lambda *t: flash_attn_func(*t, 0.0, 0.25, causal))
    ranks = ring(DENSE, *(t.chunk(RANKS, dim=1) for t in (q, k, v, dout)), causal)
    for ours in ([torch.cat(parts, 1) for parts in ranks], whole):
        assert_errs_little_more(named(ours), true, rough, torch.float16)


@pytest.mark.parametrize("causal", [False, True])
def test_two_ranks_of_packed_sequences_are_one_whole_call(causal):
    halves = [5, 12, 1]
    cu = torch.tensor([0, 5, 17, 18], dtype=torch.int32)
    q, k, v, dout = tensors(36, 4, 16, groups=2)

    def split(t):
        """Two ranks' halves of every sequence."""
        parts = [part.chunk(2) for part in t.split([2 * n for n in halves])]
        return [torch.cat([part[rank] for part in parts]) for rank in range(RANKS)]

    lengths = (cu, cu, max(halves), max(halves))
    ours = ring(PACKED, *(split(t) for t in (q, k, v, dout)), causal, lengths)
    whole = in_one_go(
        q, k, v, dout,
        lambda *t: flash_attn_varlen_func(*t, 2 * cu, 2 * cu, 24, 24, 0.0, 0.25, causal),
    )  # fmt: skip
    for got, wanted in zip(ours, whole, strict=True):
        for mine, half in zip(got, split(wanted), strict=True):
            torch.testing.assert_close(mine.half(), half, atol=4e-3, rtol=4e-3)

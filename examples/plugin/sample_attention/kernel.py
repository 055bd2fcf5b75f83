"""The kernel: softmax(scale * Q K^T) V with the scores stored, and its derivative."""

from __future__ import annotations

import torch

from attnsel.backends.contract import Grads, Result


def forward(spec, inputs):
    """out [b, h, s_q, e] and lse [b, h, s_q]."""
    a = torch.promote_types(inputs.q.dtype, torch.float32)
    with torch.no_grad():
        scores = _scores(spec, inputs, a)
        lse = torch.logsumexp(scores, dim=-1)
        out = _weights(scores, lse) @ _per_head(inputs.v, inputs).to(a)
    return Result(out.to(inputs.q.dtype), lse)


def backward(spec, inputs, result, dout, dlse=None):
    """Gradients from lse: the scores are made again."""
    a = result.lse.dtype
    with torch.no_grad():
        k, v = (_per_head(t, inputs).to(a) for t in (inputs.k, inputs.v))
        p, dout = _weights(_scores(spec, inputs, a), result.lse), dout.to(a)
        delta = (dout * result.out.to(a)).sum(-1, keepdim=True)
        ds = p * (dout @ v.transpose(-1, -2) - delta + (0.0 if dlse is None else dlse[..., None]))
        ds = ds * spec.softmax_scale
        dq, dk, dv = ds @ k, ds.transpose(-1, -2) @ inputs.q.to(a), p.transpose(-1, -2) @ dout
    groups = inputs.k.shape[1]
    dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
    return Grads(*(t.to(inputs.q.dtype) for t in (dq, dk, dv)))


def _per_head(t, inputs):
    """[b, g, s, d] as [b, h, s, d]."""
    return t.repeat_interleave(inputs.q.shape[1] // t.shape[1], dim=1)


def _scores(spec, inputs, a):
    """[b, h, s_q, s_kv], -inf right of the diagonal."""
    q, k = inputs.q.to(a), _per_head(inputs.k, inputs).to(a)
    scores = spec.softmax_scale * (q @ k.transpose(-1, -2))
    if spec.window_right == 0:
        i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill(j > i[:, None], -torch.inf)
    return scores


def _weights(scores, lse):
    return torch.exp(scores - lse[..., None])

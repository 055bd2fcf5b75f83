"""FlashAttention's private forward and backward: what ring attention and other merging code calls.

Signatures and results as in flash_attn/flash_attn_interface.py of 2.8. The log-sum-exp and output that go
into a backward may be merged from several parts of the keys; what comes out is then that part's share. No
autograd. The backward goes through the selector as well, without adaptations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from attnsel.flash_attn.arguments import (
    check_lengths,
    check_qkv,
    plan,
    refuse,
    renamed,
    rows_contiguous,
)
from attnsel.flash_attn.functions import check_varlen, packed_call, with_probabilities
from attnsel.runtime.call import Config, Extras, config
from attnsel.runtime.directions import backward, draw_seed, seeded_dropout

Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:
    """(out [b, s_q, h, d], softmax_lse float32 [b, h, s_q], S_dmask, rng_state int64 [2]).

    With return_softmax, which needs dropout, S_dmask is filled; else it is empty.
    """
    check_qkv(q, k, v, 4)
    _check_return_softmax(return_softmax, dropout_p)
    window = (window_size_left, window_size_right)
    cfg, bounds = _dense_plan(
        "_flash_attn_forward", q, k, window, softmax_scale, softcap, dropout_p, causal, alibi_slopes
    )
    rng_state = _rng_state(dropout_p, q.device)
    extras = Extras(alibi_slopes=alibi_slopes, dropout_seed=rng_state[0] if dropout_p else None)
    with torch.no_grad():
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        out, lse, s_dmask = with_probabilities(cfg, q, k, v, extras, bounds, None, None)
    return out, lse, s_dmask if return_softmax else q.new_empty(0), rng_state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Forward:
    """(out [t_q, h, d], softmax_lse float32 [h, t_q], S_dmask, rng_state int64 [2]).

    leftpad_k: int32 [b], rows at the start of each sequence's keys that are not there. seqused_k: int32 [b],
    how many rows of each (leftpad_k's among them) are used. Not with a block_table: leftpad_k.
    zero_tensors: rows of no sequence are 0 with or without it.
    """
    check_qkv(q, k, v, 3, pages=block_table is not None)
    _check_return_softmax(return_softmax, dropout_p)
    max_q, max_k = check_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None and leftpad_k is not None:
        refuse("leftpad_k", "a tensor", "must be None with a block_table")
    window = (window_size_left, window_size_right)
    same = cu_seqlens_q is cu_seqlens_k and block_table is None and leftpad_k is None and seqused_k is None
    cfg, bounds = plan(
        "_flash_attn_varlen_forward",
        "thd",
        max_q,
        max_k,
        window,
        softmax_scale,
        softcap,
        dropout_p,
        causal=causal,
        alibi=alibi_slopes is not None,
        lengths=True,
        same_lengths=same,
        return_lse=True,
        is_training=block_table is None,
    )
    rng_state = _rng_state(dropout_p, q.device)
    extras = Extras(
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_k,
        dropout_seed=rng_state[0] if dropout_p else None,
    )
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    with torch.no_grad():
        if leftpad_k is not None or seqused_k is not None:
            k, v, extras = _used(k, v, extras, leftpad_k, seqused_k, paged=block_table is not None)
        out, lse, s_dmask = packed_call(cfg, q, k, v, extras, bounds, block_table, True)
    return out, lse, s_dmask if return_softmax else q.new_empty(0), rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Fills dq, dk and dv (each may be None); returns softmax_d, sum(out * dout), [b, h, ceil128(s_q)]."""
    check_qkv(q, k, v, 4)
    window = (window_size_left, window_size_right)
    cfg, _ = _dense_plan(
        "_flash_attn_backward", q, k, window, softmax_scale, softcap, dropout_p, causal, alibi_slopes,
        deterministic,
    )  # fmt: skip
    extras = Extras(alibi_slopes=alibi_slopes, dropout_seed=_seed(rng_state, dropout_p))
    _fill(cfg, dout, q, k, v, out, softmax_lse, (dq, dk, dv), extras)
    rows = _row_sums(out, dout).transpose(1, 2)
    return torch.nn.functional.pad(rows, (0, -rows.shape[2] % 128))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Fills dq, dk and dv; returns softmax_d [h, t_q + 128 b], sequence m from cu_seqlens_q[m] + 128 m on.

    ``softmax_lse`` is [h, t_q]. zero_tensors: gradients of rows of no sequence are 0 with or without it.
    """
    check_qkv(q, k, v, 3)
    max_q, max_k = check_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = (window_size_left, window_size_right)
    cfg, _ = plan(
        "_flash_attn_varlen_backward",
        "thd",
        max_q,
        max_k,
        window,
        softmax_scale,
        softcap,
        dropout_p,
        causal=causal,
        alibi=alibi_slopes is not None,
        lengths=True,
        same_lengths=cu_seqlens_q is cu_seqlens_k,
        return_lse=True,
        deterministic=deterministic,
        is_training=True,
    )
    extras = Extras(
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_k,
        dropout_seed=_seed(rng_state, dropout_p),
    )
    _fill(cfg, dout, q, k, v, out, softmax_lse, (dq, dk, dv), extras)
    at = torch.arange(q.shape[0], device=q.device)
    at += 128 * torch.searchsorted(cu_seqlens_q[1:], at.to(torch.int32), right=True)
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = torch.zeros(q.shape[1], q.shape[0] + 128 * batch, dtype=torch.float32, device=q.device)
    softmax_d[:, at.clamp(max=softmax_d.shape[1] - 1)] = _row_sums(out, dout).T
    return softmax_d


# ---- shared -----------------------------------------------------------------------------------------


def _dense_plan(
    label: str,
    q: Tensor,
    k: Tensor,
    window: tuple[int, int],
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    deterministic: bool = False,
) -> tuple[Config, tuple[int, int]]:
    return plan(
        label,
        "bshd",
        q.shape[1],
        k.shape[1],
        window,
        softmax_scale,
        softcap,
        dropout_p,
        causal=causal,
        alibi=alibi_slopes is not None,
        lengths=False,
        same_lengths=q.shape[1] == k.shape[1],
        deterministic=deterministic,
        return_lse=True,
        is_training=True,
    )


def _check_return_softmax(return_softmax: bool, dropout_p: float) -> None:
    if return_softmax and not dropout_p:
        refuse("return_softmax", True, "needs dropout_p above 0")


def _rng_state(dropout_p: float, device: torch.device) -> Tensor:
    """(seed, 0): what the backward drops the same entries from."""
    state = torch.zeros(2, dtype=torch.int64, device=device)
    if dropout_p:
        state[0] = draw_seed(device)
    return state


def _seed(rng_state: Tensor | None, dropout_p: float) -> Tensor | None:
    if not dropout_p:
        return None
    if rng_state is None:
        refuse("rng_state", None, "must be the forward's with dropout_p above 0: the backward drops the same")
    return rng_state[0]


def _used(
    k: Tensor, v: Tensor, extras: Extras, leftpad_k: Tensor | None, seqused_k: Tensor | None, *, paged: bool
) -> tuple[Tensor, Tensor, Extras]:
    """Where the keys that are used lie, as lengths and starts."""
    cu = extras.cu_seqlens_kv
    assert cu is not None
    batch = cu.shape[0] - 1
    for name, lengths in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if lengths is not None:
            check_lengths(name, lengths, batch, what="batch")
    starts, used = cu[:-1], cu[1:] - cu[:-1] if seqused_k is None else seqused_k
    if leftpad_k is not None:
        starts, used = starts + leftpad_k, used - leftpad_k
    ends = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    if paged:
        return k, v, extras._replace(cu_seqlens_kv=ends)
    starts = torch.cat([starts, cu[-1:]])
    if starts.device.type == "cpu" and (first := int(starts[0])):  # attnsel checks that they begin at 0
        k, v, starts = k[first:], v[first:], starts - first
    return (
        k,
        v,
        extras._replace(
            cu_seqlens_kv=ends, cu_seqlens_q_padded=extras.cu_seqlens_q, cu_seqlens_kv_padded=starts
        ),
    )


def _fill(
    cfg: Config,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    grads: tuple[Tensor | None, Tensor | None, Tensor | None],
    extras: Extras,
) -> None:
    for name, t in (("out", out), ("dout", dout)):
        if t.shape != q.shape or t.dtype != q.dtype:
            refuse(name, f"{t.dtype} {tuple(t.shape)}", f"must be q's, {q.dtype} {tuple(q.shape)}")
    packed = q.dim() == 3
    rows = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    if tuple(softmax_lse.shape) != rows:
        refuse("softmax_lse.shape", tuple(softmax_lse.shape), f"must be {list(rows)}")
    for name, grad, t in zip(("dq", "dk", "dv"), grads, (q, k, v), strict=True):
        if grad is not None and grad.shape != t.shape:
            refuse(f"{name}.shape", tuple(grad.shape), f"must be {list(t.shape)}")
    given = {name: getattr(cfg, name) for name in Config.__slots__ if name != "text"}
    cfg = config(**{**given, "adapt": "never"})
    lse = softmax_lse.float().masked_fill(softmax_lse == torch.inf, -torch.inf).contiguous()
    q, k, v, out, dout = (rows_contiguous(t.detach()) for t in (q, k, v, out, dout))
    try:
        if cfg.attention_dropout:
            with seeded_dropout():
                made: Any = backward(cfg, q, k, v, extras, out, lse, dout)
        else:
            made = backward(cfg, q, k, v, extras, out, lse, dout)
    except InvalidInput as error:
        raise renamed(error) from error
    with torch.no_grad():
        for grad, value in zip(grads, (made.q, made.k, made.v), strict=True):
            if grad is not None:
                grad.copy_(value)


def _row_sums(out: Tensor, dout: Tensor) -> Tensor:
    with torch.no_grad():
        return (out.float() * dout.float()).sum(-1)

"""The names of ``flash_attn.flash_attn_interface`` that programs import, public and private.

The private forward and backward are what ring attention and other merging code call: signatures and results
as in flash_attn/flash_attn_interface.py of 2.8. The output and log-sum-exp that go into a backward may be
merged from several parts of the keys; its gradients are then those of its own part. Autograd records none of
this. The backward goes through the selector as well, without adaptations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from attnsel.flash_attn.cache import flash_attn_with_kvcache
from attnsel.flash_attn.functions import (
    _get_block_size_n,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    forward,
)
from attnsel.flash_attn.options import (
    FlashAttentionError,
    Lengths,
    Options,
    check_qkv,
    config_and_extras,
    refuse,
    renamed,
)
from attnsel.flash_attn.options import rows_contiguous as maybe_contiguous
from attnsel.runtime.bind import draw_seed
from attnsel.runtime.dispatch import MergedResult, merged_gradients, seeded_dropout

USE_TRITON_ROCM = False  # stands for the package's own kernels for AMD

Forward = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv; None: not computed


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:  # fmt: skip
    """(out [b, s_q, h, d], softmax_lse float32 [b, h, s_q], S_dmask, rng_state int64 [2]).

    S_dmask is empty without return_softmax, which needs dropout.
    """
    check_qkv(q, k, v, 4)
    options = Options(
        "_flash_attn_forward", dropout_p, softmax_scale, causal, (window_size_left, window_size_right),
        softcap, alibi_slopes, return_attn_probs=return_softmax, return_lse=True, is_training=True,
    )  # fmt: skip
    return _forward(q, k, v, options)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False, block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None, zero_tensors: bool = False,
) -> Forward:  # fmt: skip
    """(out [t_q, h, d], softmax_lse float32 [h, t_q], S_dmask, rng_state int64 [2]).

    leftpad_k: int32 [b], rows at the start of each sequence's keys that do not count; not with a block_table.
    seqused_k: int32 [b], how many rows of each (leftpad_k's among them) are used.
    zero_tensors: rows of no sequence are 0 with or without it.
    """
    check_qkv(q, k, v, 3, pages=block_table is not None)
    options = Options(
        "_flash_attn_varlen_forward", dropout_p, softmax_scale, causal, (window_size_left, window_size_right),
        softcap, alibi_slopes, return_attn_probs=return_softmax, return_lse=True,
        is_training=block_table is None,
    )  # fmt: skip
    keys = (block_table, leftpad_k, seqused_k)
    return _forward(q, k, v, options, Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *keys))


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fills dq, dk and dv (each may be None); returns softmax_d, sum(out * dout), [b, h, ceil128(s_q)]."""
    check_qkv(q, k, v, 4)
    options = Options(
        "_flash_attn_backward", dropout_p, softmax_scale, causal, (window_size_left, window_size_right),
        softcap, alibi_slopes, deterministic, return_lse=True, is_training=True, adapt="never",
    )  # fmt: skip
    merged = MergedResult(out, softmax_lse, dout)
    rows = _backward((q, k, v), merged, (dq, dk, dv), options, None, rng_state).transpose(1, 2)
    return torch.nn.functional.pad(rows, (0, -rows.shape[2] % 128))


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Fills dq, dk and dv; returns softmax_d [h, t_q + 128 b], sequence m from cu_seqlens_q[m] + 128 m on.

    ``softmax_lse`` is [h, t_q]. zero_tensors: gradients of rows of no sequence are 0 with or without it.
    """
    check_qkv(q, k, v, 3)
    options = Options(
        "_flash_attn_varlen_backward", dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, deterministic,
        return_lse=True, is_training=True, adapt="never",
    )  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    merged = MergedResult(out, softmax_lse, dout)
    rows = _backward((q, k, v), merged, (dq, dk, dv), options, lengths, rng_state)
    at = torch.arange(q.shape[0], device=q.device)
    at += 128 * torch.searchsorted(cu_seqlens_q[1:], at.to(torch.int32), right=True)
    batch = cu_seqlens_q.shape[0] - 1
    softmax_d = torch.zeros(q.shape[1], q.shape[0] + 128 * batch, dtype=torch.float32, device=q.device)
    softmax_d[:, at.clamp(max=softmax_d.shape[1] - 1)] = rows.T
    return softmax_d


# ---- shared by dense and packed ---------------------------------------------------------------------


def _forward(q: Tensor, k: Tensor, v: Tensor, options: Options, lengths: Lengths | None = None) -> Forward:
    if options.return_attn_probs and not options.dropout_p:
        refuse("return_softmax", True, "needs dropout_p above 0")
    rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)  # (seed, 0)
    seed = None
    if options.dropout_p:
        rng_state[0] = draw_seed(q.device)
        seed = rng_state[0]
    with torch.no_grad():
        out, lse, s_dmask = forward(q, k, v, options, lengths, seed)
    return out, lse, s_dmask, rng_state


def _backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    merged: MergedResult,
    grads: Gradients,
    options: Options,
    lengths: Lengths | None,
    rng_state: Tensor | None,
) -> Tensor:
    """Fills ``grads``; returns the sums of out * dout over head_dim, [b, s_q, h] or packed [t_q, h]."""
    cfg, extras = config_and_extras(qkv[0], qkv[1], options, lengths)
    if cfg.attention_dropout:
        if rng_state is None:
            allowed = "must be the forward's with dropout_p above 0: the backward drops the same"
            refuse("rng_state", None, allowed)
        extras = extras._replace(dropout_seed=rng_state[0])
    _check_backward(qkv, merged, grads)
    q, k, v, out, dout = (maybe_contiguous(t.detach()) for t in (*qkv, merged.out, merged.dout))
    lse = merged.lse.float().masked_fill(merged.lse == torch.inf, -torch.inf).contiguous()
    merged = MergedResult(out, lse, dout)
    with torch.no_grad():
        try:
            if cfg.attention_dropout:
                with seeded_dropout():
                    made = merged_gradients(cfg, q, k, v, extras, merged)
            else:
                made = merged_gradients(cfg, q, k, v, extras, merged)
        except InvalidInput as error:
            raise renamed(error) from error
        for grad, value in zip(grads, made[:3], strict=True):
            if grad is not None:
                grad.copy_(value)
        return (out.float() * dout.float()).sum(-1)


def _check_backward(qkv: tuple[Tensor, Tensor, Tensor], merged: MergedResult, grads: Gradients) -> None:
    q = qkv[0]
    for name, t in (("out", merged.out), ("dout", merged.dout)):
        if t.shape != q.shape or t.dtype != q.dtype:
            refuse(name, f"{t.dtype} {tuple(t.shape)}", f"must be q's, {q.dtype} {tuple(q.shape)}")
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    if tuple(merged.lse.shape) != rows:
        refuse("softmax_lse.shape", tuple(merged.lse.shape), f"must be {list(rows)}")
    for name, grad, t in zip(("dq", "dk", "dv"), grads, qkv, strict=True):
        if grad is not None and grad.shape != t.shape:
            refuse(f"{name}.shape", tuple(grad.shape), f"must be {list(t.shape)}")


# Where torch.library has custom operators the package calls its private functions through these.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def round_multiple(x: int, m: int) -> int:
    """``x`` rounded up to a multiple of ``m``."""
    return (x + m - 1) // m * m


__all__ = [
    "USE_TRITON_ROCM",
    "FlashAttentionError",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

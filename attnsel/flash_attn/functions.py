"""FlashAttention-2's six functions on whole batches: every argument, on any GPU and on the CPU.

Each call goes through attnsel's selector: ``ATTNSEL_DEBUG=1`` says what ran and why. Shape letters as in
``arguments.py``; in all of them query head n reads key/value head n // (h // g), and

causal, window_size
    aligned to the bottom right: row i of s_q sees key j of s_k iff
    ``i + s_k - s_q - left <= j <= i + s_k - s_q + right``, -1 for no bound; ``causal`` is right = 0. A bound
    may be a 0-d tensor. (As in the package, beside a left bound an open right side is s_k keys wide, which
    shows where s_q > s_k + 1.)
softmax_scale
    1 / sqrt(head_dim) if None.
softcap
    softcap * tanh(score / softcap) when above 0; unlike in the package, together with dropout too.
alibi_slopes
    float32 [h] or [b, h]: -slope * |i + s_k - s_q - j| is added to the score.
dropout_p
    dropout takes place whenever it is above 0; reproducible by torch.manual_seed, entry by entry other than
    the package's.
deterministic
    a backward that gives the same bits run after run.
return_attn_probs
    also return softmax_lse (float32, natural logarithm, +inf where a row sees no key; [b, h, s_q], packed
    [h, t_q]) and S_dmask (see ``probabilities.py``; empty without dropout). Neither is differentiable.

Rows that see no key give 0. Raises FlashAttentionError (a RuntimeError and a ValueError) naming the argument,
NoBackendError with every reason where nothing can run the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.flash_attn.arguments import (
    call,
    check_lengths,
    check_pages,
    check_qkv,
    empty_rows_are_plus_inf,
    plan,
    refuse,
    rows_contiguous,
    unpacked,
)
from attnsel.flash_attn.probabilities import Lengths, signed_probabilities
from attnsel.runtime.call import NO_EXTRAS, Config, Extras
from attnsel.runtime.directions import draw_seed, seeded_dropout

Window = Any  # two ints, or 0-d tensors


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [b, s_q, h, d], k and v [b, s_k, g, d] -> out [b, s_q, h, d]."""
    check_qkv(q, k, v, 4)
    return _dense(
        "flash_attn_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [b, s_q, h, d], kv [b, s_k, 2, g, d] -> out [b, s_q, h, d]. Nothing is copied."""
    k, v = unpacked("kv", kv, 5, 2)
    check_qkv(q, k, v, 4, names="q kv kv")
    return _dense(
        "flash_attn_kvpacked_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv [b, s, 3, h, d] -> out [b, s, h, d]. Nothing is copied."""
    q, k, v = unpacked("qkv", qkv, 5, 3)
    check_qkv(q, k, v, 4, names="qkv qkv qkv")
    return _dense(
        "flash_attn_qkvpacked_func", q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """q [t_q, h, d], k and v [t_k, g, d], cu_seqlens int32 [b + 1] -> out [t_q, h, d].

    block_table: int32 [b, n]; k and v are then pools of pages, [pages, page_size, g, d] with page_size a
    multiple of 256, and cu_seqlens_k says how many rows of its pages each sequence has. Without a gradient
    and without dropout the pages are read where they lie; else those of each sequence are copied side by
    side first ([b * n * page_size, g, d]), and the gradient goes back to the pages.
    """
    check_qkv(q, k, v, 3, pages=block_table is not None)
    return _varlen(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        block_table,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [t_q, h, d], kv [t_k, 2, g, d] -> out [t_q, h, d]."""
    k, v = unpacked("kv", kv, 4, 2)
    check_qkv(q, k, v, 3, names="q kv kv")
    return _varlen(
        "flash_attn_varlen_kvpacked_func", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv [t, 3, h, d] -> out [t, h, d]."""
    q, k, v = unpacked("qkv", qkv, 4, 3)
    check_qkv(q, k, v, 3, names="qkv qkv qkv")
    return _varlen(
        "flash_attn_varlen_qkvpacked_func", q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


# ---- dense ------------------------------------------------------------------------------------------


def _dense(
    label: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
) -> Any:
    rows, keys = q.shape[1], k.shape[1]
    cfg, bounds = plan(
        label,
        "bshd",
        rows,
        keys,
        window_size,
        softmax_scale,
        softcap,
        dropout_p,
        causal=causal,
        alibi=alibi_slopes is not None,
        lengths=False,
        same_lengths=rows == keys,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    extras = NO_EXTRAS if alibi_slopes is None else Extras(alibi_slopes=alibi_slopes)
    if not return_attn_probs:
        return call(cfg, q, k, v, extras)
    return with_probabilities(cfg, q, k, v, extras, bounds, None, None)


def with_probabilities(
    cfg: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    bounds: tuple[int, int],
    lengths_q: Lengths | None,
    lengths_k: Lengths | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask) of a call whose ``cfg`` returns the log-sum-exp."""
    if not cfg.attention_dropout:
        out, lse = call(cfg, q, k, v, extras)
        return out, empty_rows_are_plus_inf(lse), q.new_empty(0)
    if extras.dropout_seed is None:
        extras = extras._replace(dropout_seed=draw_seed(q.device))
    with seeded_dropout():
        out, lse = call(cfg, q, k, v, extras)
    s_dmask = signed_probabilities(cfg, q, k, extras, bounds, lengths_q, lengths_k)
    return out, empty_rows_are_plus_inf(lse), s_dmask


# ---- packed -----------------------------------------------------------------------------------------


def _varlen(
    label: str,
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
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
) -> Any:
    max_q, max_k = check_varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    cfg, bounds = plan(
        label,
        "thd",
        max_q,
        max_k,
        window_size,
        softmax_scale,
        softcap,
        dropout_p,
        causal=causal,
        alibi=alibi_slopes is not None,
        lengths=True,
        same_lengths=cu_seqlens_q is cu_seqlens_k and block_table is None,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    extras = Extras(
        alibi_slopes=alibi_slopes,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_k,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_k,
    )
    return packed_call(cfg, q, k, v, extras, bounds, block_table, return_attn_probs)


def check_varlen(
    cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[int, int]:
    """The longest sequences as ints."""
    entries = check_lengths("cu_seqlens_q", cu_seqlens_q)
    check_lengths("cu_seqlens_k", cu_seqlens_k, entries)
    if entries < 2:
        refuse("cu_seqlens_q.shape", (entries,), "must be [batch + 1] with a batch size above 0")
    longest = []
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        try:
            longest.append(int(value))
        except (TypeError, ValueError):
            refuse(name, value, "must be an int")
        if longest[-1] < 0:
            refuse(name, longest[-1], "must be at least 0")
    return longest[0], longest[1]


def packed_call(
    cfg: Config,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extras: Extras,
    bounds: tuple[int, int],
    block_table: Tensor | None,
    return_attn_probs: bool,
) -> Any:
    """A packed call, with keys in pages and tensors longer than their sequences as the kernels want them."""
    assert extras.cu_seqlens_q is not None
    if block_table is not None:
        check_pages(block_table, k, extras.cu_seqlens_q.shape[0] - 1)
        recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if recorded or cfg.attention_dropout:
            k, v, extras = _pages_side_by_side(k, v, block_table, extras)
        else:
            extras = extras._replace(block_table=block_table)
    rows = q.shape[0]
    q, k, v = _without_tail(q, k, v, extras)
    if not return_attn_probs:
        return _with_tail(call(cfg, q, k, v, extras), rows)
    out, lse, s_dmask = with_probabilities(
        cfg,
        q,
        k,
        v,
        extras,
        bounds,
        Lengths(extras.cu_seqlens_q, extras.cu_seqlens_q_padded, extras.max_seqlen_q or 0),
        Lengths(extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, extras.max_seqlen_kv or 0),
    )
    if lse.shape[1] != rows:
        lse = torch.nn.functional.pad(lse, (0, rows - lse.shape[1]), value=torch.inf)
    return _with_tail(out, rows), lse, s_dmask


def _pages_side_by_side(k: Tensor, v: Tensor, table: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Extras]:
    """k and v [b * n * page_size, g, d], each sequence's pages in order, and where the sequences start."""
    pages = table.long().clamp(0, k.shape[0] - 1).flatten()  # entries that are not used may hold anything
    room = table.shape[1] * k.shape[1]
    starts = torch.arange(0, (table.shape[0] + 1) * room, room, dtype=torch.int32, device=k.device)
    extras = extras._replace(cu_seqlens_q_padded=extras.cu_seqlens_q, cu_seqlens_kv_padded=starts)
    return k.index_select(0, pages).flatten(0, 1), v.index_select(0, pages).flatten(0, 1), extras


def _without_tail(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention takes packed tensors that are longer than their sequences.

    The kernels do as well; attnsel's check of lengths that lie on the CPU does not, so they are cut there.
    """
    cu_q, cu_k = extras.cu_seqlens_q, extras.cu_seqlens_kv
    if torch.compiler.is_compiling() or extras.cu_seqlens_kv_padded is not None:
        return q, k, v
    assert cu_q is not None
    assert cu_k is not None
    if type(cu_q) is Tensor and cu_q.device.type == "cpu" and 0 <= (end := int(cu_q[-1])) < q.shape[0]:
        q = q[:end]
    if extras.block_table is None and type(cu_k) is Tensor and cu_k.device.type == "cpu":
        end = int(cu_k[-1])
        if 0 <= end < k.shape[0]:
            k, v = k[:end], v[:end]
    return q, k, v


def _with_tail(out: Tensor, rows: int) -> Tensor:
    """The rows of no sequence again, 0."""
    if out.shape[0] == rows:
        return out
    return torch.cat([out, out.new_zeros(rows - out.shape[0], *out.shape[1:])])

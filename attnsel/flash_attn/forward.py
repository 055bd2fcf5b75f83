"""The forward behind flash_attn's functions, public and private, dense and packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.errors import InvalidInput
from attnsel.flash_attn.arguments import check_lengths, check_pages, renamed, rows_contiguous
from attnsel.flash_attn.options import Lengths, Options, config_and_extras
from attnsel.flash_attn.probabilities import signed_probabilities
from attnsel.runtime.bind import draw_seed
from attnsel.runtime.call import NO_EXTRAS, Config, Extras
from attnsel.runtime.dispatch import attend
from attnsel.runtime.explicit_backward import seeded_dropout

Keys = tuple[Tensor, Tensor, Extras]  # k, v, and where their sequences lie


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    lengths: Lengths | None = None,
    dropout_seed: Tensor | None = None,
) -> Any:
    """out; (out, softmax_lse, S_dmask) where ``options`` ask for the log-sum-exp.

    S_dmask is empty without dropout or return_attn_probs. q, k and v have passed ``check_qkv``, packed with
    ``lengths``; ``dropout_seed``: int64 scalar, drawn if None. Raises FlashAttentionError, NoBackendError.
    """
    cfg, extras = config_and_extras(q, k, options, lengths, dropout_seed)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    if lengths is None:
        return _with_lse(cfg, q, k, v, extras, options) if cfg.return_lse else call(cfg, q, k, v, extras)
    if lengths.leftpad_k is not None or lengths.seqused_k is not None:
        k, v, extras = _used_keys(k, v, extras, lengths)
    if lengths.block_table is not None:
        check_pages(lengths.block_table, k, lengths.cu_seqlens_q.shape[0] - 1)
        recorded = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        if recorded or cfg.attention_dropout:
            k, v, extras = _gathered_pages(k, v, extras, lengths.block_table)
        else:
            extras = extras._replace(block_table=lengths.block_table)
    rows = q.shape[0]
    q, k, v = _without_tail(q, k, v, extras)
    if not cfg.return_lse:
        return _with_tail(call(cfg, q, k, v, extras), rows)
    out, lse, s_dmask = _with_lse(cfg, q, k, v, extras, options)
    if lse.shape[1] != rows:
        lse = torch.nn.functional.pad(lse, (0, rows - lse.shape[1]), value=torch.inf)
    return _with_tail(out, rows), lse, s_dmask


def _with_lse(
    cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, softmax_lse, S_dmask) of a call whose ``cfg`` returns the log-sum-exp."""
    if not cfg.attention_dropout:
        out, lse = call(cfg, q, k, v, extras)
        return out, empty_rows_are_plus_inf(lse), q.new_empty(0)
    if extras.dropout_seed is None:
        extras = extras._replace(dropout_seed=draw_seed(q.device))
    with seeded_dropout():
        out, lse = call(cfg, q, k, v, extras)
    s_dmask = signed_probabilities(cfg, q, k, extras) if options.return_attn_probs else q.new_empty(0)
    return out, empty_rows_are_plus_inf(lse), s_dmask


def call(cfg: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras = NO_EXTRAS) -> Any:
    """``attend`` in q's dtype, also under autocast, with its errors under flash_attn's names.

    Raises FlashAttentionError, NoBackendError.
    """
    if torch.compiler.is_compiling():
        return attend(cfg, q, k, v, extras)
    device = q.device.type
    try:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != q.dtype:
            with torch.autocast(device, enabled=False):
                return attend(cfg, q, k, v, extras)
        return attend(cfg, q, k, v, extras)
    except InvalidInput as error:
        raise renamed(error) from error


def empty_rows_are_plus_inf(lse: Tensor) -> Tensor:
    """FlashAttention's LSE of a row that sees no key is +inf, so that exp(score - lse) is 0."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


# ---- packed keys and their pages --------------------------------------------------------------------


def _used_keys(k: Tensor, v: Tensor, extras: Extras, lengths: Lengths) -> Keys:
    """Lengths and starts of the keys between ``leftpad_k`` and ``seqused_k``."""
    cu, leftpad, used = lengths.cu_seqlens_k, lengths.leftpad_k, lengths.seqused_k
    for name, t in (("leftpad_k", leftpad), ("seqused_k", used)):
        if t is not None:
            check_lengths(name, t, cu.shape[0] - 1, what="batch")
    starts, used = cu[:-1], cu[1:] - cu[:-1] if used is None else used
    if leftpad is not None:
        starts, used = starts + leftpad, used - leftpad
    extras = extras._replace(cu_seqlens_kv=torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0)))
    if lengths.block_table is not None:
        return k, v, extras
    starts = torch.cat([starts, cu[-1:]])
    if starts.device.type == "cpu" and (first := int(starts[0])):  # attnsel: the first is 0
        k, v, starts = k[first:], v[first:], starts - first
    return k, v, extras._replace(cu_seqlens_q_padded=extras.cu_seqlens_q, cu_seqlens_kv_padded=starts)


def _gathered_pages(k: Tensor, v: Tensor, extras: Extras, table: Tensor) -> Keys:
    """k and v [b * n * page_size, g, d], each sequence's pages in order, and where the sequences start."""
    pages = table.long().clamp(0, k.shape[0] - 1).flatten()  # entries that are not used may hold anything
    room = table.shape[1] * k.shape[1]
    starts = torch.arange(0, (table.shape[0] + 1) * room, room, dtype=torch.int32, device=k.device)
    extras = extras._replace(cu_seqlens_q_padded=extras.cu_seqlens_q, cu_seqlens_kv_padded=starts)
    return k.index_select(0, pages).flatten(0, 1), v.index_select(0, pages).flatten(0, 1), extras


# ---- rows after the last sequence -------------------------------------------------------------------


def _without_tail(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention takes packed tensors that are longer than their sequences.

    So do the kernels, but attnsel's check of lengths on the CPU does not: there the tensors are cut.
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
    """``out`` with its rows after the last sequence, which are 0."""
    if out.shape[0] == rows:
        return out
    return torch.cat([out, out.new_zeros(rows - out.shape[0], *out.shape[1:])])

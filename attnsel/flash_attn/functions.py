"""FlashAttention-2's six functions on whole batches: every argument, on any GPU and on the CPU.

Each call goes through attnsel's selector: ``ATTNSEL_DEBUG=1`` prints what ran and why. Shape letters as in
``options.py``; query head n always reads key/value head n // (h // g).

causal, window_size
    aligned to the bottom right: row i of s_q sees key j of s_k iff
    ``i + s_k - s_q - left <= j <= i + s_k - s_q + right``, -1 for no bound; ``causal`` is right = 0. A bound
    may be a 0-d tensor. (As in the package, beside a left bound no right bound means s_k keys, which is a
    bound where s_q > s_k + 1.)
softmax_scale
    1 / sqrt(head_dim) if None.
softcap
    softcap * tanh(score / softcap) when above 0; unlike in the package, together with dropout too.
alibi_slopes
    float32 [h] or [b, h]: -slope * |i + s_k - s_q - j| is added to the score.
dropout_p
    applied whenever it is above 0; reproducible by torch.manual_seed, but other entries are dropped than by
    the package.
deterministic
    a backward that gives the same bits in every run.
return_attn_probs
    also return softmax_lse (float32, natural logarithm, +inf where a row sees no key; [b, h, s_q], packed
    [h, t_q]) and S_dmask (see ``signed_probabilities``; empty without dropout). Neither is differentiable.

Rows that see no key give 0. Raises FlashAttentionError (a RuntimeError and a ValueError) naming the argument,
NoBackendError with every reason where nothing can run the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled.kernel import score_matrix
from attnsel.errors import InvalidInput
from attnsel.flash_attn.options import (
    Lengths,
    Options,
    Window,
    check_lengths,
    check_pages,
    check_qkv,
    config_and_extras,
    renamed,
    rows_contiguous,
    unpacked,
)
from attnsel.params import default_softmax_scale
from attnsel.runtime.bind import draw_seed
from attnsel.runtime.call import NO_EXTRAS, Config, Extras
from attnsel.runtime.dispatch import attend, seeded_dropout

# ---- S_dmask: the probabilities of a call with dropout, for tests and inspection -----------------------
# FlashAttention's contract: [b, h, ceil128(s_q), ceil128(s_k)] in q's dtype; negative where dropout dropped
# the entry; not normalised: exp(score - m) with m the running maximum of the row over blocks of
# ``_get_block_size_n`` keys, from the last block to the first, which is what the package's own
# normalisation expects. Zero outside the sequences. Needs O(b h s_q s_k) memory in float32.


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys per block of FlashAttention-2's forward on this device.

    Source: flash_attn/flash_attn_interface.py, 2.8. Every device but an NVIDIA GPU counts as sm80.
    """
    assert head_dim <= 256
    capability = (8, 0)
    if torch.device(device).type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    consumer_ampere = capability[0] == 8 and capability[1] > 0  # sm86, sm89
    if head_dim <= 32 or (head_dim <= 64 and not is_dropout):
        return 128
    if 96 < head_dim <= 128 and (is_dropout or (consumer_ampere and not is_causal)):
        return 32
    return 64


def signed_probabilities(cfg: Config, q: Tensor, k: Tensor, extras: Extras) -> Tensor:
    """S_dmask of a call that dropped by ``extras.dropout_seed``.

    q [b, s_q, h, d] and k [b, s_k, g, d], or packed with their lengths in ``extras``.
    """
    assert extras.dropout_seed is not None
    with torch.no_grad():
        q, rows = _dense(q, extras.cu_seqlens_q, extras.cu_seqlens_q_padded, extras.max_seqlen_q)
        k, keys = _dense(k, extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, extras.max_seqlen_kv)
        left, right = cfg.window_size or (-1, -1)
        scale = cfg.softmax_scale
        spec = Spec(
            softmax_scale=default_softmax_scale(q.shape[-1]) if scale is None else scale,
            window_left=left,
            window_right=right,
            bottom_right=True,
            softcap=cfg.softcap,
            dropout_p=cfg.attention_dropout,
        )
        inputs = Inputs(
            q, k, k, alibi_slopes=extras.alibi_slopes, seqlens_q=rows, seqlens_kv=keys,
            dropout_seed=extras.dropout_seed,
        )  # fmt: skip
        x, kept = score_matrix(spec, inputs)
        assert kept is not None
        block = _get_block_size_n(q.device, q.shape[-1], True, "causal" in cfg.attn_mask_type)
        p = (x - _running_peak(x, block)).exp()
        batch, heads, s_q, s_k = x.shape
        result = q.new_zeros(batch, heads, -(-s_q // 128) * 128, -(-s_k // 128) * 128)
        result[:, :, :s_q, :s_k] = torch.where(kept, p, -p).to(q.dtype)
        return result


def _dense(
    t: Tensor, cu_seqlens: Tensor | None, starts: Tensor | None, longest: int | None
) -> tuple[Tensor, Tensor]:
    """[b, heads, s, d] and the rows of each sequence, int64 [b].

    starts: int32 [b + 1], where packed sequences start in memory, if not at ``cu_seqlens``.
    """
    if cu_seqlens is None:
        return t.transpose(1, 2), torch.full((t.shape[0],), t.shape[1], device=t.device)
    first = cu_seqlens if starts is None else starts
    index = first[:-1, None].long() + torch.arange(longest or 0, device=t.device)
    t = t if t.shape[0] else t.new_zeros(1, *t.shape[1:])  # of no sequence: nobody's row is read
    dense = t.index_select(0, index.clamp(max=t.shape[0] - 1).flatten()).unflatten(0, index.shape)
    return dense.transpose(1, 2), cu_seqlens.diff().long()


def _running_peak(x: Tensor, block: int) -> Tensor:
    """The largest score of each row in its block of keys and all later ones; 0 where nothing is visible."""
    columns = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -columns % block), value=-torch.inf).unflatten(-1, (-1, block))
    peak = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)
    return peak.repeat_interleave(block, dim=-1)[..., :columns].nan_to_num(neginf=0.0)


# ---- The forward behind flash_attn's functions, public and private, dense and packed -------------------


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


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [b, s_q, h, d], k and v [b, s_k, g, d] -> out [b, s_q, h, d]."""
    check_qkv(q, k, v, 4)
    options = Options(
        "flash_attn_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    return forward(q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [b, s_q, h, d], kv [b, s_k, 2, g, d] -> out [b, s_q, h, d]. Nothing is copied."""
    k, v = unpacked("kv", kv, 5, 2)
    check_qkv(q, k, v, 4, names="q kv kv")
    options = Options(
        "flash_attn_kvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    return forward(q, k, v, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv [b, s, 3, h, d] -> out [b, s, h, d]. Nothing is copied."""
    q, k, v = unpacked("qkv", qkv, 5, 3)
    check_qkv(q, k, v, 4, names="qkv qkv qkv")
    options = Options(
        "flash_attn_qkvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    return forward(q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """q [t_q, h, d], k and v [t_k, g, d], cu_seqlens int32 [b + 1] -> out [t_q, h, d].

    block_table: int32 [b, n]; k and v are then pools of pages, [pages, page_size, g, d] with page_size a
    multiple of 256, and cu_seqlens_k counts the rows that each sequence has in its pages. Without a gradient
    and without dropout the pages are read where they lie; else those of each sequence are copied side by
    side first ([b * n * page_size, g, d]), and the gradient goes back to the pages.
    """
    check_qkv(q, k, v, 3, pages=block_table is not None)
    options = Options(
        "flash_attn_varlen_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    return forward(q, k, v, options, lengths)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """q [t_q, h, d], kv [t_k, 2, g, d] -> out [t_q, h, d]."""
    k, v = unpacked("kv", kv, 4, 2)
    check_qkv(q, k, v, 3, names="q kv kv")
    options = Options(
        "flash_attn_varlen_kvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    return forward(q, k, v, options, Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """qkv [t, 3, h, d] -> out [t, h, d]."""
    q, k, v = unpacked("qkv", qkv, 4, 3)
    check_qkv(q, k, v, 3, names="qkv qkv qkv")
    options = Options(
        "flash_attn_varlen_qkvpacked_func", dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
    return forward(q, k, v, options, Lengths(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen))

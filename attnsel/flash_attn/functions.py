"""FlashAttention-2's six functions on whole batches: every argument, on any GPU and on the CPU.

Each call goes through attnsel's selector: ``ATTNSEL_DEBUG=1`` prints what ran and why. Shape letters as in
``arguments.py``; query head n always reads key/value head n // (h // g).

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
    [h, t_q]) and S_dmask (see ``probabilities.py``; empty without dropout). Neither is differentiable.

Rows that see no key give 0. Raises FlashAttentionError (a RuntimeError and a ValueError) naming the argument,
NoBackendError with every reason where nothing can run the call.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attnsel.flash_attn.arguments import check_qkv, unpacked
from attnsel.flash_attn.forward import forward
from attnsel.flash_attn.options import Lengths, Options, Window


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

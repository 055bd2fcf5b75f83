"""``attnsel.attention``: one call, no module."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from attnsel.base.suggestions import arguments_of, unknown_argument
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config, mask_name, torch_mask, unpack, window_pair
from attnsel.runtime.dispatch import attend, attend_again, attend_anew


def attention(
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    qkv_layer: Tensor | None = None,
    kv_layer: Tensor | None = None,
    qkv_interleave_dim: int = -3,
    qkv_format: str = "bshd",
    attn_mask_type: str = "no_mask",
    attention_mask: Any = None,
    window_size: tuple[int, int] | None = None,
    bottom_right_diagonal: bool | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    attention_dropout: float = 0.0,
    core_attention_bias_type: str = "no_bias",
    core_attention_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    block_table: Tensor | None = None,
    is_training: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logit: bool = False,
    backend: str | None = None,
    adapt: str | None = None,
    attn_mask: Any = None,
    **unknown: NoReturn,
) -> Any:
    """Scaled dot-product attention by the best kernel that can run exactly this call.

    ``q`` is [b, s_q, h, d] (``bshd``), [s_q, b, h, d] (``sbhd``), [b, h, s_q, d] (``bhsd``) or packed
    [t_q, h, d] (``thd``); ``k`` and ``v`` alike with g kv heads, g dividing h, and head dimension e for v.
    The result has q's format with head dimension e. Any strides will do.

    qkv_layer, kv_layer: one buffer instead of q, k and v, or of k and v, as TransformerEngine packs them:
        [.., 3, h, d] and [.., 2, g, d]; with qkv_interleave_dim -2 [.., h, 3, d] and [.., g, 2, d]. Not with
        ``bhsd``. They are read where they lie, and get a gradient of their own shape.
    attn_mask_type: no_mask, causal, padding, padding_causal, causal_bottom_right,
        padding_causal_bottom_right or arbitrary. ``causal`` starts at the top left corner.
    attn_mask: a mask as F.sdpa takes it: bool, True = takes part, or floating, added to the scores. It says
        all that is visible, so attn_mask_type is left out, or a padding type beside [b, 1, 1, s].
    attention_mask: bool, True = masked OUT, as in TransformerEngine; one of the two. With padding types
        [b, 1, 1, s] (a pair for q and kv when they differ); with ``arbitrary`` anything that broadcasts to
        [b, h, s_q, s_kv].
    window_size: (left, right) keys around the diagonal, inclusive, -1 for no bound.
    softmax_scale: 1 / sqrt(d) if None.
    core_attention_bias: with core_attention_bias_type pre_scale_bias or post_scale_bias, broadcastable to
        [b, h, s_q, s_kv]; gets a gradient if it requires one. ``alibi`` takes alibi_slopes, float32 [h] or
        [b, h], and computes them if None.
    softmax_type: ``off-by-one`` adds a zero logit to the denominator, ``learnable`` adds softmax_offset [h].
    cu_seqlens_*: int32 [b + 1], real lengths; *_padded: where sequences start when there are gaps. Rows past
        a length may hold anything, NaN included: it reaches no other row and no gradient; their output is 0
        (on cudnn unproven: docs/how-to/run.md).
    max_seqlen_*: for ``thd``; on a GPU an upper bound is used if None, since reading it would wait.
    block_table: int32 [b, n]; k and v are then pools of pages, [pages, page_size, g, d] and [.., e], whatever
        q's format (``bshd``, ``sbhd`` or ``thd``), and row j of sequence m is row j % page_size of page
        block_table[m, j // page_size]. Takes a padding mask type and cu_seqlens_kv, for the lengths; no
        gradient. Entries past a sequence's length are not read.
    attention_dropout: applied whenever it is above 0: pass 0 outside training.
    is_training: whether a backward will be needed; None: whether some input requires a gradient.
    return_lse, return_max_logit: also return the log-sum-exp ([b, h, s_q], packed [h, t_q], float32, natural
        logarithm, not differentiable; float64 for float64) and the largest score per head ([h]).
    backend: run this candidate or raise. adapt: "auto" or "never".

    Raises InvalidInput naming the argument, NoBackendError with every reason when nothing can run.
    """
    if unknown:
        raise unknown_argument("attention", next(iter(unknown)), arguments_of(attention))
    said = ""
    if attn_mask is not None:
        said, kind = "mask", mask_name(attn_mask_type)
        read = torch_mask(attn_mask, attention_mask, kind, core_attention_bias_type, core_attention_bias)
        attn_mask_type, core_attention_bias_type, attention_mask, core_attention_bias = read
    given = (
        qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softmax_scale, softcap,
        attention_dropout, softmax_type, core_attention_bias_type, is_training, deterministic,
        return_lse, return_max_logit, backend, adapt, said,
    )  # fmt: skip
    compiling = torch.compiler.is_compiling()
    try:
        static = _static_side(*given) if compiling else _known_side(*given)
    except TypeError:  # what cannot be hashed
        static = _static_side(*given)
    interleaved = type(qkv_interleave_dim) is not int or qkv_interleave_dim != -3
    packed = interleaved or qkv_layer is not None or kv_layer is not None
    if packed or q is None or k is None or v is None:
        paged = block_table is not None
        q, k, v = unpack(q, k, v, qkv_layer, kv_layer, qkv_interleave_dim, qkv_format, paged)
    if (
        attention_mask is None
        and core_attention_bias is None
        and alibi_slopes is None
        and softmax_offset is None
        and cu_seqlens_q is None
        and cu_seqlens_kv is None
        and cu_seqlens_q_padded is None
        and cu_seqlens_kv_padded is None
        and max_seqlen_q is None
        and max_seqlen_kv is None
        and block_table is None
    ):
        extras = NO_EXTRAS
    else:
        extras = Extras(
            attention_mask,
            core_attention_bias,
            alibi_slopes,
            softmax_offset,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            max_seqlen_q,
            max_seqlen_kv,
            block_table,
        )
    if compiling:
        return attend(static, q, k, v, extras)
    result = attend_again(static, q, k, v, extras)
    return attend_anew(static, q, k, v, extras) if result is None else result


_STATIC = (
    *("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal", "softmax_scale", "softcap"),
    *("attention_dropout", "softmax_type", "bias_type", "is_training", "deterministic"),
    *("return_lse", "return_max_logit", "backend", "adapt", "said"),
)


def _static_side(*given: Any) -> Config:
    """The Config of the arguments ``_STATIC``, as they were given."""
    named = dict(zip(_STATIC, given, strict=True))
    named["attn_mask_type"] = mask_name(named["attn_mask_type"])
    named["window_size"] = window_pair(named["window_size"])
    if named["is_training"] is None:
        dropout = named["attention_dropout"]
        named["is_training"] = isinstance(dropout, (int, float)) and dropout > 0.0
    return config(**named)


_known_side = lru_cache(maxsize=4096, typed=True)(_static_side)

"""One call of a flash_attn function as two values, its options and its lengths, and attnsel's view of them.

Shape letters as in ``arguments.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.flash_attn.arguments import check_lengths, flag, length, number, refuse, window
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config

Window = Any  # two ints, or 0-d tensors


class Options(NamedTuple):
    """How a call attends: flash_attn's arguments as they were given, and what its caller needs back."""

    function: str  # the function of flash_attn that was called
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool = False
    return_attn_probs: bool = False  # the log-sum-exp and S_dmask
    return_lse: bool = False  # the log-sum-exp alone
    is_training: bool = False  # besides what needs a gradient
    adapt: str | None = None


class Lengths(NamedTuple):
    """Where the sequences of packed tensors lie. int32: cu_seqlens_* [b + 1], *_k [b], block_table [b, n]."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None = None  # keys and values are pools of pages
    leftpad_k: Tensor | None = None  # rows at the start of each sequence's keys that do not count
    seqused_k: Tensor | None = None  # how many rows of each count, those of leftpad_k among them

    @property
    def equal(self) -> bool:
        """Whether queries and keys are known to have the same lengths."""
        whole = self.block_table is None and self.leftpad_k is None and self.seqused_k is None
        return whole and self.cu_seqlens_q is self.cu_seqlens_k


class _Static(NamedTuple):
    """Everything about a call that is not a tensor, checked. Hashable: a cache key."""

    function: str
    qkv_format: str
    rows: int  # of the longest sequence
    keys: int
    window: tuple[int, int]
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    causal: bool
    alibi: bool
    padding: bool
    equal_lengths: bool
    deterministic: bool
    return_lse: bool
    is_training: bool
    adapt: str | None


def config_and_extras(
    q: Tensor, k: Tensor, options: Options, lengths: Lengths | None = None, dropout_seed: Tensor | None = None
) -> tuple[Config, Extras]:
    """attnsel's view of a call: dense q [b, s_q, h, d] and k [b, s_k, g, d], or packed ones with ``lengths``.

    Raises FlashAttentionError.
    """
    slopes = options.alibi_slopes
    if lengths is None:
        rows, keys = q.shape[1], k.shape[1]
        cfg = config_of(options, "bshd", rows, keys, padding=False, equal_lengths=rows == keys)
        if slopes is None and dropout_seed is None:
            return cfg, NO_EXTRAS
        return cfg, Extras(alibi_slopes=slopes, dropout_seed=dropout_seed)
    rows, keys = _check_packed(lengths)
    cfg = config_of(options, "thd", rows, keys, padding=True, equal_lengths=lengths.equal)
    return cfg, Extras(
        alibi_slopes=slopes,
        cu_seqlens_q=lengths.cu_seqlens_q,
        cu_seqlens_kv=lengths.cu_seqlens_k,
        max_seqlen_q=rows,
        max_seqlen_kv=keys,
        dropout_seed=dropout_seed,
    )


def _check_packed(lengths: Lengths) -> tuple[int, int]:
    """The longest sequences of queries and keys."""
    entries = check_lengths("cu_seqlens_q", lengths.cu_seqlens_q)
    check_lengths("cu_seqlens_k", lengths.cu_seqlens_k, entries)
    if entries < 2:
        refuse("cu_seqlens_q.shape", (entries,), "must be [batch + 1] with a batch size above 0")
    longest = length("max_seqlen_q", lengths.max_seqlen_q), length("max_seqlen_k", lengths.max_seqlen_k)
    if lengths.block_table is not None and lengths.leftpad_k is not None:
        refuse("leftpad_k", "a tensor", "must be None with a block_table")
    return longest


def config_of(
    options: Options, qkv_format: str, rows: int, keys: int, *, padding: bool, equal_lengths: bool
) -> Config:
    """The static side of a call, cached. Its ``window_size`` is the one that flash_attn applies.

    rows, keys: of the longest sequences. padding: sequences have lengths of their own. equal_lengths: those
    of queries and keys are known to be equal, so that top left and bottom right are the same corner. Raises
    FlashAttentionError.
    """
    scale = options.softmax_scale
    static = _Static(
        options.function,
        qkv_format,
        rows,
        keys,
        window(options.window_size),
        None if scale is None else number("softmax_scale", scale),
        number("softcap", options.softcap),
        number("dropout_p", options.dropout_p),
        flag("causal", options.causal),
        options.alibi_slopes is not None,
        padding,
        equal_lengths,
        flag("deterministic", options.deterministic),
        flag("return_softmax_lse", options.return_lse) | flag("return_attn_probs", options.return_attn_probs),
        options.is_training,
        options.adapt,
    )
    return _make_config(static) if torch.compiler.is_compiling() else _cached_config(static)


def _make_config(static: _Static) -> Config:
    if not 0.0 <= static.dropout_p < 1.0:
        refuse("dropout_p", static.dropout_p, "must be at least 0 and below 1")
    if static.softcap < 0.0:
        refuse("softcap", static.softcap, "must be above 0, or 0 for none")
    bounds = _applied_window(static)
    kind = "padding" if static.padding else "no_mask"
    if bounds[1] == 0:
        kind = "padding_causal" if static.padding else "causal"
        kind += "" if static.equal_lengths else "_bottom_right"
    return config(
        qkv_format=static.qkv_format,
        attn_mask_type=kind,
        window_size=None if bounds == (-1, -1) else bounds,
        softmax_scale=static.softmax_scale,
        softcap=static.softcap,
        attention_dropout=static.dropout_p,
        bias_type="alibi" if static.alibi else "no_bias",
        is_training=static.is_training or static.dropout_p > 0.0,
        deterministic=static.deterministic,
        return_lse=static.return_lse,
        adapt=static.adapt,
        label=static.function,
    )


_cached_config = lru_cache(maxsize=4096)(_make_config)


def _applied_window(static: _Static) -> tuple[int, int]:
    """(left, right) as the package's kernel applies them, -1 for no bound.

    Source: csrc/flash_attn/flash_api.cpp of FlashAttention 2.8. ``causal`` sets right = 0, except for a
    single row without ALiBi; a bound as wide as the keys is none; beside a left bound, no right bound becomes
    right = keys, which hides keys from rows further above the diagonal.
    """
    rows, keys = static.rows, static.keys
    left, right = static.window
    if static.causal and (rows != 1 or static.alibi):
        right = 0
    left = -1 if left < 0 or left >= keys else left
    right = -1 if right < 0 or right >= keys > 0 else right
    if left >= 0 and right < 0 and rows > keys + 1:
        right = keys
    return left, right

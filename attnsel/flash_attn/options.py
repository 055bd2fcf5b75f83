"""One call of a flash_attn function as two values, its options and its lengths, and attnsel's view of them.

Shape letters stand below.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from attnsel.base import model as _scalars
from attnsel.errors import InvalidInput
from attnsel.runtime.call import NO_EXTRAS, Config, Extras, config
from attnsel.runtime.inputs import check_dense_tensor

# ---- FlashAttention-2's arguments, checked as the package checks them, under the package's names -------
# Shape letters: b batch, s_q / s_k rows, t_q / t_k packed rows, h query heads, g key/value heads, d head_dim.


HALF_DTYPES = (torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256  # csrc/flash_attn/flash_api.cpp of FlashAttention 2.8

_FLASH_NAMES = {
    "query_layer": "q",
    "key_layer": "k",
    "value_layer": "v",
    "cu_seqlens_kv": "cu_seqlens_k",
    "cu_seqlens_kv_padded": "cu_seqlens_k",
    "cu_seqlens_q_padded": "cu_seqlens_q",
    "max_seqlen_kv": "max_seqlen_k",
    "attention_dropout": "dropout_p",
    "attn_mask_type": "causal",
}


class FlashAttentionError(InvalidInput, RuntimeError):
    """An invalid argument, under flash_attn's name for it.

    A RuntimeError because flash_attn's checks raise that, and a ValueError because attnsel's do.
    """


def refuse(field: str, value: Any, allowed: str) -> NoReturn:
    raise FlashAttentionError(field, value, allowed)


def renamed(error: InvalidInput) -> FlashAttentionError:
    """The same error, under the name that flash_attn gives the argument."""
    head, dot, rest = error.field.partition(".")
    name, bracket, index = head.partition("[")
    return FlashAttentionError(
        f"{_FLASH_NAMES.get(name, name)}{bracket}{index}{dot}{rest}", error.value, error.allowed
    )


# ---- queries, keys and values -----------------------------------------------------------------------


def check_qkv(q: Any, k: Any, v: Any, rank: int, *, names: str = "q k v", pages: bool = False) -> None:
    """Types and shapes of queries, keys and values, dense (rank 4) or packed (rank 3).

    ``pages``: keys and values are pools of pages, of rank 4. Unequal batches and devices are left to the
    checks of the call itself. Raises FlashAttentionError.
    """
    if not (_is_dense(q) and _is_dense(k) and _is_dense(v)):
        _refuse_qkv(q, k, v, rank, names, pages)
    shape, keys = q.shape, k.shape
    if not (
        q.dtype in HALF_DTYPES
        and k.dtype == q.dtype == v.dtype
        and keys == v.shape
        and len(shape) == rank
        and len(keys) == (4 if pages else rank)
        and 0 < shape[-1] == keys[-1] <= MAX_HEAD_DIM
        and keys[-2] != 0
        and shape[-2] % keys[-2] == 0
        and (rank == 3 or shape[0] != 0)
    ):
        _refuse_qkv(q, k, v, rank, names, pages)


def _is_dense(t: Any) -> bool:
    return isinstance(t, Tensor) and not t.is_nested and t.layout is torch.strided


def check_dense(name: str, t: Any) -> None:
    """That ``t`` is a tensor with a shape and strides. Raises FlashAttentionError."""
    check_dense_tensor(name, t, FlashAttentionError)


def _refuse_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int, names: str, pages: bool) -> None:
    """Raises for the first condition of ``check_qkv`` that is not met."""
    for name, t in zip(names.split(), (q, k, v), strict=True):
        check_dense(name, t)
        dims = 4 if pages and t is not q else rank
        if t.dim() != dims:
            refuse(f"{name}.shape", tuple(t.shape), f"must have {dims} dimensions")
    kv_names = names.split()[1:]
    if q.dtype not in HALF_DTYPES:
        refuse("q.dtype", str(q.dtype), "FlashAttention takes float16 and bfloat16")
    for name, t in zip(kv_names, (k, v), strict=True):
        if t.dtype != q.dtype:
            refuse(f"{name}.dtype", str(t.dtype), f"must be q's, {q.dtype}")
        if t.shape[-1] != q.shape[-1]:
            refuse(f"{name}.shape", tuple(t.shape), f"must have q's head_dim, {q.shape[-1]}")
    if v.shape != k.shape:
        refuse(f"{kv_names[1]}.shape", tuple(v.shape), f"must be {kv_names[0]}'s, {tuple(k.shape)}")
    if not 0 < q.shape[-1] <= MAX_HEAD_DIM:
        refuse("head_dim", q.shape[-1], f"must be 1 to {MAX_HEAD_DIM}")
    heads, groups = q.shape[-2], k.shape[-2]
    if groups == 0 or heads % groups:
        refuse(
            f"{kv_names[0]}.shape", tuple(k.shape), f"its number of heads, {groups}, must divide q's {heads}"
        )
    if rank == 4 and q.shape[0] == 0:
        refuse("q.shape", tuple(q.shape), "must have a batch size above 0")


def unpacked(name: str, t: Tensor, rank: int, parts: int) -> tuple[Tensor, ...]:
    """The views of a packed tensor [..., parts, heads, head_dim]. Their gradients come back in one copy."""
    check_dense(name, t)
    if t.dim() != rank or t.shape[-3] != parts:
        where = "b, s" if rank == 5 else "total"
        refuse(f"{name}.shape", tuple(t.shape), f"must be [{where}, {parts}, heads, head_dim]")
    return t.unbind(-3)


def rows_contiguous(t: Tensor) -> Tensor:
    """``t`` with a contiguous last dimension, copied if need be, as flash_attn does."""
    return t if t.stride(-1) == 1 else t.contiguous()


# ---- lengths and pages ------------------------------------------------------------------------------


def check_lengths(name: str, t: Any, batch: int | None = None, *, what: str = "batch + 1") -> int:
    """An int32 vector of lengths; returns how many entries it has."""
    check_dense(name, t)
    if t.dtype != torch.int32:
        refuse(f"{name}.dtype", str(t.dtype), "must be torch.int32")
    if t.dim() != 1 or (batch is not None and t.shape[0] != batch):
        refuse(f"{name}.shape", tuple(t.shape), f"must be [{what}]" + (f" = [{batch}]" if batch else ""))
    return int(t.shape[0])


def check_pages(block_table: Any, k: Tensor, batch: int) -> None:
    """A block table, and pages of a size that FlashAttention-2 takes."""
    check_dense("block_table", block_table)
    if block_table.dtype != torch.int32:
        refuse("block_table.dtype", str(block_table.dtype), "must be torch.int32")
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        refuse("block_table.shape", tuple(block_table.shape), f"must be [batch, pages] with batch = {batch}")
    if k.shape[1] == 0 or k.shape[1] % 256:
        refuse("page size", k.shape[1], "must be a multiple of 256")


# ---- numbers ----------------------------------------------------------------------------------------


def number(name: str, value: Any) -> float:
    """A finite float from a number or a 0-d tensor."""
    if isinstance(value, Tensor) and value.dim() == 0 and (value.is_floating_point() or _is_integer(value)):
        value = value.item()
    return _scalars.number(name, value, FlashAttentionError)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    return _scalars.flag(name, value, FlashAttentionError)


def whole(name: str, value: Any) -> int:
    """An int from an integer, also of NumPy, or a 0-d tensor of integers."""
    if isinstance(value, Tensor) and not (value.dim() == 0 and _is_integer(value)):
        refuse(name, value, "must be an int")
    return _scalars.whole(name, value, FlashAttentionError)


def _is_integer(t: Tensor) -> bool:
    return t.dtype in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def length(name: str, value: Any) -> int:
    """An int of at least 0 from a number or a 0-d tensor."""
    result = whole(name, value)
    if result < 0:
        refuse(name, result, "must be at least 0")
    return result


def window(window_size: Any) -> tuple[int, int]:
    """(left, right) as ints. Tensors are read: a cache key may not hold what can change in place."""
    try:
        left, right = window_size
    except Exception:
        refuse("window_size", window_size, "must be two ints, (left, right)")
    return whole("window_size", left), whole("window_size", right)


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
    plain = Options(
        options.function,
        number("dropout_p", options.dropout_p),
        None if scale is None else number("softmax_scale", scale),
        flag("causal", options.causal),
        window(options.window_size),
        number("softcap", options.softcap),
        None,
        flag("deterministic", options.deterministic),
        False,
        flag("return_softmax_lse", options.return_lse) | flag("return_attn_probs", options.return_attn_probs),
        options.is_training,
        options.adapt,
    )
    make = _make_config if torch.compiler.is_compiling() else _cached_config
    return make(plain, qkv_format, rows, keys, options.alibi_slopes is not None, padding, equal_lengths)


def _make_config(
    plain: Options, qkv_format: str, rows: int, keys: int, alibi: bool, padding: bool, equal_lengths: bool
) -> Config:
    """``plain``: options without a tensor, whose types are checked. All of it can be hashed: a cache key."""
    if not 0.0 <= plain.dropout_p < 1.0:
        refuse("dropout_p", plain.dropout_p, "must be at least 0 and below 1")
    if plain.softcap < 0.0:
        refuse("softcap", plain.softcap, "must be above 0, or 0 for none")
    bounds = _applied_window(rows, keys, plain.window_size, plain.causal, alibi)
    kind = "padding" if padding else "no_mask"
    if bounds[1] == 0:
        kind = "padding_causal" if padding else "causal"
        kind += "" if equal_lengths else "_bottom_right"
    return config(
        qkv_format=qkv_format,
        attn_mask_type=kind,
        window_size=None if bounds == (-1, -1) else bounds,
        softmax_scale=plain.softmax_scale,
        softcap=plain.softcap,
        attention_dropout=plain.dropout_p,
        bias_type="alibi" if alibi else "no_bias",
        is_training=plain.is_training or plain.dropout_p > 0.0,
        deterministic=plain.deterministic,
        return_lse=plain.return_lse,
        adapt=plain.adapt,
        label=plain.function,
    )


_cached_config = lru_cache(maxsize=4096)(_make_config)


def _applied_window(
    rows: int, keys: int, window_size: tuple[int, int], causal: bool, alibi: bool
) -> tuple[int, int]:
    """(left, right) as the package's kernel applies them, -1 for no bound.

    Source: csrc/flash_attn/flash_api.cpp of FlashAttention 2.8. ``causal`` sets right = 0, except for a
    single row without ALiBi; a bound as wide as the keys is none; beside a left bound, no right bound becomes
    right = keys, which hides keys from rows further above the diagonal.
    """
    left, right = window_size
    if causal and (rows != 1 or alibi):
        right = 0
    left = -1 if left < 0 or left >= keys else left
    right = -1 if right < 0 or right >= keys > 0 else right
    if left >= 0 and right < 0 and rows > keys + 1:
        right = keys
    return left, right

"""How large a call is: batch, heads, lengths and head dimensions, from tensors held against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from attnsel.base.scalars import flag
from attnsel.errors import InvalidInput
from attnsel.params.layout import FORMATS
from attnsel.runtime.call import Call, Config, Extras

if TYPE_CHECKING:
    from torch import Tensor


class Sizes(NamedTuple):
    """b, h, g, s_q, s_kv, d, e of one call; s_q and s_kv are the longest sequences of a packed batch."""

    batch: int
    heads: int
    groups: int
    seqlen_q: int
    seqlen_kv: int
    head_dim_qk: int
    head_dim_v: int


def sizes_of(call: Call) -> Sizes:
    """Raises InvalidInput where the tensors or their lengths contradict each other."""
    config, q, k, v, extras = call[:5]
    if extras.block_table is not None:
        return _paged_sizes(config, q, k, v, extras)
    if config.qkv_format == "thd":
        return _packed_sizes(q, k, v, extras)
    sizes = _dense_sizes(config.qkv_format, q, k, v)
    _check_dense_lengths(config, sizes, extras)
    return sizes


def lengths_of(cu_seqlens: Tensor) -> Tensor:
    """int32 [b] from int32 [b + 1], where it lies."""
    return cu_seqlens[1:] - cu_seqlens[:-1]


def packed_starts(gaps: bool, lengths: tuple[Any, ...], padded: tuple[Any, ...]) -> tuple[Any, Any]:
    """*_padded as ``pad_between_seqs`` says: needed for gaps; without any they say what the lengths say.

    Raises InvalidInput where the two contradict each other, as far as that can be seen without waiting.
    """
    if flag("pad_between_seqs", gaps):
        if padded[0] is None or padded[1] is None:
            raise InvalidInput("pad_between_seqs", True, "needs cu_seqlens_q_padded and cu_seqlens_kv_padded")
        return padded[0], padded[1]
    for name, cu, starts in zip(("cu_seqlens_q", "cu_seqlens_kv"), lengths, padded, strict=True):
        readable = all(type(t) is torch.Tensor and t.device.type == "cpu" for t in (cu, starts))
        if readable and not torch.equal(cu, starts):
            raise InvalidInput("pad_between_seqs", False, f"must be True: {name}_padded leaves gaps")
    return None, None


def _check_head_dim(q: Tensor, k: Tensor) -> None:
    if q.shape[-1] != k.shape[-1]:
        raise InvalidInput(
            "key_layer.shape", tuple(k.shape), f"must have query_layer's head dimension, {q.shape[-1]}"
        )


def _dense_sizes(fmt: str, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    form = FORMATS[fmt]
    b, h, s = form.batch, form.heads, form.rows
    assert b is not None
    for name, tensor in (("key_layer", k), ("value_layer", v)):
        if tensor.shape[b] != q.shape[b]:
            raise InvalidInput(
                f"{name}.shape", tuple(tensor.shape), f"must have query_layer's batch size, {q.shape[b]}"
            )
    if v.shape[h] != k.shape[h] or v.shape[s] != k.shape[s]:
        raise InvalidInput(
            "value_layer.shape",
            tuple(v.shape),
            f"must have key_layer's {k.shape[h]} heads and {k.shape[s]} rows",
        )
    _check_head_dim(q, k)
    return Sizes(q.shape[b], q.shape[h], k.shape[h], q.shape[s], k.shape[s], q.shape[-1], v.shape[-1])


def _packed_sizes(q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Sizes:
    _check_head_dim(q, k)
    if v.shape[:2] != k.shape[:2]:
        raise InvalidInput(
            "value_layer.shape",
            tuple(v.shape),
            f"must have key_layer's tokens and heads, {tuple(k.shape[:2])}",
        )
    cu_q, cu_kv = extras.cu_seqlens_q, extras.cu_seqlens_kv
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_kv", cu_kv)):
        if cu is None:
            raise InvalidInput(name, None, "must be given with qkv_format 'thd': int32 [batch + 1]")
    assert cu_q is not None
    assert cu_kv is not None
    batch = _check_cu_seqlens(extras)
    if (extras.cu_seqlens_q_padded is None) != (extras.cu_seqlens_kv_padded is None):
        raise InvalidInput("cu_seqlens_q_padded", "one of two", "must be given for q and kv, or for neither")
    return Sizes(
        batch,
        q.shape[1],
        k.shape[1],
        _longest(cu_q, extras.max_seqlen_q, q.shape[0]),
        _longest(cu_kv, extras.max_seqlen_kv, k.shape[0]),
        q.shape[-1],
        v.shape[-1],
    )


def _paged_sizes(config: Config, q: Tensor, k: Tensor, v: Tensor, extras: Extras) -> Sizes:
    """k and v are pools [pages, page_size, g, d or e]; a block table says whose pages they are."""
    fmt, table, cu_q = config.qkv_format, extras.block_table, extras.cu_seqlens_q
    assert table is not None
    if fmt == "bhsd":
        raise InvalidInput("qkv_format", fmt, "must be bshd, sbhd or thd with a block_table")
    for name in ("attention_mask", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if getattr(extras, name) is not None:
            raise InvalidInput(name, "a tensor", "must be left out with a block_table")
    if "padding" not in config.attn_mask_type:
        raise InvalidInput(
            "attn_mask_type", config.attn_mask_type, "must be a padding type with a block_table"
        )
    if extras.cu_seqlens_kv is None:
        raise InvalidInput("cu_seqlens_kv", None, "must be given with a block_table: int32 [batch + 1]")
    if fmt == "thd" and cu_q is None:
        raise InvalidInput("cu_seqlens_q", None, "must be given with qkv_format 'thd': int32 [batch + 1]")
    batch = _check_cu_seqlens(extras)
    form = FORMATS[fmt]
    if form.batch is not None and q.shape[form.batch] != batch:
        raise InvalidInput(
            "cu_seqlens_kv.shape", (batch + 1,), f"must be [batch + 1] = [{q.shape[form.batch] + 1}]"
        )
    if v.shape[:3] != k.shape[:3]:
        raise InvalidInput(
            "value_layer.shape", tuple(v.shape), f"must have key_layer's pages, {tuple(k.shape[:3])}"
        )
    _check_head_dim(q, k)
    if k.shape[0] == 0 or k.shape[1] == 0:
        raise InvalidInput("key_layer.shape", tuple(k.shape), "must hold at least one page of one row")
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != batch:
        raise InvalidInput(
            "block_table", f"{table.dtype} {tuple(table.shape)}", f"must be int32 [{batch}, n]"
        )
    room = table.shape[1] * k.shape[1]
    if fmt == "thd":
        assert cu_q is not None
        rows = _longest(cu_q, extras.max_seqlen_q, q.shape[0])
    else:
        rows = q.shape[form.rows]
    longest = room if extras.max_seqlen_kv is None else min(room, extras.max_seqlen_kv)
    return Sizes(batch, q.shape[-2], k.shape[2], rows, longest, q.shape[-1], v.shape[-1])


def lengths_read(config: Config, extras: Extras) -> tuple[int | None, ...]:
    """The longest sequences of a packed call as far as ``sizes_of`` reads them from contents.

    They are part of what a call is remembered by: the next one may hold longer sequences.
    """
    if config.qkv_format != "thd":
        return ()
    asked = [(extras.cu_seqlens_q, extras.max_seqlen_q)]
    if extras.block_table is None:  # pages have room for as many rows as there are
        asked.append((extras.cu_seqlens_kv, extras.max_seqlen_kv))
    return tuple(_longest(cu, None, 0) if given is None and _is_readable(cu) else None for cu, given in asked)


def _is_readable(cu: Tensor | None) -> TypeGuard[Tensor]:
    return type(cu) is torch.Tensor and cu.device.type == "cpu" and cu.dim() == 1 and cu.numel() >= 2


def _longest(cu: Tensor, given: int | None, tokens: int) -> int:
    """The longest sequence: as given, read on the CPU, else bounded by the tokens so as not to wait."""
    if given is not None:
        return int(given)
    if not _is_readable(cu):
        return tokens
    return max(0, int(lengths_of(cu).max()))


def _check_cu_seqlens(extras: Extras) -> int:
    """Types and shapes of the length tensors; the batch size they say."""
    lengths = [
        (name, getattr(extras, name))
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        if getattr(extras, name) is not None
    ]
    first_name, first = lengths[0]
    for name, cu in lengths:
        if cu.dtype != torch.int32:
            raise InvalidInput(f"{name}.dtype", str(cu.dtype), "must be torch.int32")
        if cu.dim() != 1 or cu.numel() < 2:
            raise InvalidInput(f"{name}.shape", tuple(cu.shape), "must be [batch + 1]")
        if cu.shape != first.shape:
            raise InvalidInput(
                f"{name}.shape", tuple(cu.shape), f"must be {first_name}'s shape, {tuple(first.shape)}"
            )
    return int(first.numel()) - 1


def _check_dense_lengths(config: Config, sizes: Sizes, extras: Extras) -> None:
    """cu_seqlens beside dense tensors say how many rows of each sequence are real."""
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if getattr(extras, name) is not None:
            raise InvalidInput(name, "a tensor", "must be left out unless qkv_format is 'thd'")
    given = [extras.cu_seqlens_q is not None, extras.cu_seqlens_kv is not None]
    padding = "padding" in config.attn_mask_type
    if any(given):
        if not all(given):
            missing = "cu_seqlens_q" if given[1] else "cu_seqlens_kv"
            raise InvalidInput(missing, None, "must be given together with its sibling")
        if not padding:
            raise InvalidInput(
                "attn_mask_type", config.attn_mask_type, "must be a padding type when cu_seqlens are given"
            )
        if extras.attention_mask is not None:
            raise InvalidInput("attention_mask", "a tensor", "must be left out when cu_seqlens are given")
        sequences = _check_cu_seqlens(extras)
        if sequences != sizes.batch:
            raise InvalidInput(
                "cu_seqlens_q.shape", (sequences + 1,), f"must be [batch + 1] = [{sizes.batch + 1}]"
            )
    elif padding and extras.attention_mask is None:
        raise InvalidInput(
            "attn_mask_type",
            config.attn_mask_type,
            "needs cu_seqlens_q and cu_seqlens_kv, or an attention_mask",
        )

"""Tensors checked, and turned into the question they ask. Runs once per call signature.

Every complaint names the argument, what it is and what it must be, before anything is launched.
"""

from __future__ import annotations

import math
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from attnsel.backends.rows import wrong_page
from attnsel.base.model import flag
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors, TensorSpec, read_dtype
from attnsel.params.layout import FORMATS
from attnsel.runtime.call import Call, Config, Extras, is_noted, known_to_be_trivial, misaligned

if TYPE_CHECKING:
    from torch import Tensor


# --------------------------------------------------------------------------------------------------------
# How large a call is: batch, heads, lengths and head dimensions, from tensors held against each other.


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


_BIAS_SHAPES = {  # which of [b, h] are not 1
    (True, True): "bhss",
    (False, True): "1hss",
    (True, False): "b1ss",
    (False, False): "11ss",
}


def check_tensors(call: Call) -> Sizes:
    """Shapes, types and devices against each other. Raises InvalidInput; returns the sizes they have."""
    config, q, k, v, extras = call[:5]
    fmt, paged = config.qkv_format, call.paged
    for name, tensor in (("query_layer", q), ("key_layer", k), ("value_layer", v)):
        check_dense_tensor(name, tensor)
        pool = paged and tensor is not q
        rank = 4 if pool else FORMATS[fmt].rank
        if tensor.dim() != rank:
            given = "a block_table: [pages, page_size, g, d]" if pool else f"qkv_format {fmt!r}"
            raise InvalidInput(
                f"{name}.shape", tuple(tensor.shape), f"must have {rank} dimensions with {given}"
            )
    for name, tensor in (("key_layer", k), ("value_layer", v)):
        if tensor.dtype != q.dtype:
            raise InvalidInput(f"{name}.dtype", str(tensor.dtype), f"must be query_layer's, {q.dtype}")
    _check_extras(extras)
    for name, tensor in (("key_layer", k), ("value_layer", v), *_other_tensors(extras)):
        if tensor.device != q.device:
            raise InvalidInput(f"{name}.device", str(tensor.device), f"must be query_layer's, {q.device}")
    if not q.dtype.is_floating_point:
        raise InvalidInput("query_layer.dtype", str(q.dtype), "must be a floating-point type")
    sizes = sizes_of(call)
    if sizes.heads == 0 or sizes.groups == 0 or sizes.heads % sizes.groups:
        raise InvalidInput(
            "key_layer.shape",
            tuple(k.shape),
            f"must have a number of heads that divides query_layer's {sizes.heads}, not {sizes.groups}",
        )
    _check_promises(config, sizes, q, k, v)
    if sizes.head_dim_qk == 0 or sizes.head_dim_v == 0:
        raise InvalidInput("value_layer.shape", tuple(v.shape), "must have a head dimension above 0")
    _check_mask(config, sizes, extras)
    _check_scores(config, sizes, extras)
    return sizes


def params_of(call: Call) -> AttentionParams:
    """The question a call asks. Raises InvalidInput, also for what contradicts itself."""
    sizes = check_tensors(call)
    config, q, k, v, extras = call[:5]
    training = call.training
    bias, slopes = extras.core_attention_bias, extras.alibi_slopes
    fields: dict[str, Any] = {
        "attn_mask_type": config.attn_mask_type,
        "window_size": config.window_size,
        "core_attention_bias_type": config.bias_type,
        "softmax_type": config.softmax_type,
    }
    if bias is not None:
        pair = (bias.dim() == 4 and bias.shape[0] > 1, bias.dim() >= 3 and bias.shape[-3] > 1)
        fields["core_attention_bias_shape"] = _BIAS_SHAPES[pair]
        fields["core_attention_bias_requires_grad"] = bool(training and bias.requires_grad)
    if slopes is not None:
        fields["alibi_slopes_shape"] = tuple(max(1, n) for n in slopes.shape)  # as the batch size below
    if extras.cu_seqlens_q_padded is not None:
        fields["pad_between_seqs"] = True
    layout = config.qkv_format
    if extras.block_table is not None:
        if training:
            raise InvalidInput(
                "block_table", "a tensor", "must be left out where a backward is needed: a cache has none"
            )
        layout = f"paged_kv_{layout}_bshd_bshd"
        fields |= {"kv_cache": "paged", "page_size": k.shape[1]}
    if sizes.batch == 0:  # no sequences: the question counts at least one, of no rows
        sizes = sizes._replace(batch=1, seqlen_q=0, seqlen_kv=0)
    return AttentionParams(
        dtype=read_dtype(q.dtype),
        qkv_layout=layout,
        batch_size=sizes.batch,
        num_heads=sizes.heads,
        num_gqa_groups=sizes.groups,
        max_seqlen_q=sizes.seqlen_q,
        max_seqlen_kv=sizes.seqlen_kv,
        head_dim_qk=sizes.head_dim_qk,
        head_dim_v=sizes.head_dim_v,
        bottom_right_diagonal=config.bottom_right_diagonal,
        softcap=config.softcap,
        attention_dropout=config.attention_dropout,
        is_training=training,
        deterministic=config.deterministic or torch.are_deterministic_algorithms_enabled(),
        return_lse=config.return_lse,
        return_max_logit=config.return_max_logit,
        tensors=Tensors(
            q=_spec(q),
            k=_spec(k),
            v=_spec(v),
            mask=_mask_spec(config, extras.attention_mask),
            mask_hides_nothing=(
                extras.attention_mask is not None and known_to_be_trivial(extras.attention_mask)
            ),
            ragged=layout == "thd" and _ragged(sizes, q, k),
            lengths_apart=_lengths_apart(config, extras),
        ),
        **fields,
    )


def _lengths_apart(config: Config, extras: Extras) -> bool:
    """Whether two tensors say how long queries and keys are. That they hold the same is not looked up."""
    if not config.has_padding and config.qkv_format != "thd":
        return False
    if extras.cu_seqlens_q is not None or extras.cu_seqlens_kv is not None:
        return extras.cu_seqlens_q is not extras.cu_seqlens_kv
    masks = mask_pair(extras)
    return bool(masks) and masks[0] is not masks[-1]


def _ragged(sizes: Sizes, q: Tensor, k: Tensor) -> bool:
    """Whether a padded batch would have more than twice the rows of these packed sequences.

    The longest sequence counts as it is known; on a GPU without max_seqlen_* that is all tokens.
    """
    padded = sizes.batch * max(sizes.seqlen_q, 1), sizes.batch * max(sizes.seqlen_kv, 1)
    return padded[0] > 2 * q.shape[0] or padded[1] > 2 * k.shape[0]


def check_dense_tensor(name: str, tensor: Any, error: type[InvalidInput] = InvalidInput) -> None:
    """That ``tensor`` has a shape and strides, and is all there. Raises ``error``."""
    if not isinstance(tensor, torch.Tensor):
        raise error(name, type(tensor).__name__, "must be a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        found = "nested" if tensor.is_nested else str(tensor.layout)
        raise error(f"{name}.layout", found, "must be dense and strided")
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        raise error(
            name,
            "a DTensor",
            "must be this rank's own tensor: run attention inside "
            "torch.distributed.tensor.experimental.local_map where batch or heads are sharded, and with "
            "cp_group= where rows are",
        )


def _check_extras(extras: Extras) -> None:
    """That each of the other arguments is of its kind at all."""
    for name, value in zip(Extras._fields, extras, strict=True):
        if value is None:
            continue
        if name.startswith("max_seqlen"):
            # A tensor would have to be read back, and its value is not part of the call's signature.
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidInput(name, value, "must be an int, at least 0")
            continue
        items = value if name == "attention_mask" and isinstance(value, (tuple, list)) else (value,)
        for item in items:
            check_dense_tensor(name, item)


def _check_promises(config: Config, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The heads and head dimensions that a module was built for."""
    for field, found, name, t in (
        ("num_attention_heads", sizes.heads, "query_layer", q),
        ("num_gqa_groups", sizes.groups, "key_layer", k),
        ("head_dim_qk", sizes.head_dim_qk, "query_layer", q),
        ("head_dim_v", sizes.head_dim_v, "value_layer", v),
    ):
        promised = getattr(config, field)
        if promised is not None and found != promised:
            raise InvalidInput(
                f"{name}.shape", tuple(t.shape), f"must have {field} = {promised}, not {found}"
            )


def mask_pair(extras: Extras) -> tuple[Tensor, ...]:
    """The padding masks of q and kv; the same one twice for self attention; empty without a mask."""
    mask = extras.attention_mask
    if mask is None:
        return ()
    return tuple(mask) if isinstance(mask, (tuple, list)) else (mask, mask)


def lengths_if_given(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else lengths_of(cu_seqlens)


def real_lengths(extras: Extras) -> tuple[Tensor | None, Tensor | None]:
    """int32 [b] real rows of q and kv, on their device and without reading them back."""
    if extras.cu_seqlens_q is not None:
        lengths_q = lengths_if_given(extras.cu_seqlens_q)
        if extras.cu_seqlens_kv is extras.cu_seqlens_q:
            return lengths_q, lengths_q
        return lengths_q, lengths_if_given(extras.cu_seqlens_kv)
    masks = mask_pair(extras)
    lengths = [(~mask).flatten(1).sum(1, dtype=torch.int32) for mask in dict.fromkeys(masks)]
    return lengths[0], lengths[-1]


# ---- masks, bias, sinks -----------------------------------------------------------------------------


def _check_mask(config: Config, sizes: Sizes, extras: Extras) -> None:
    mask, kind = extras.attention_mask, config.attn_mask_type
    if mask is None:
        if kind == "arbitrary":
            raise InvalidInput("attention_mask", None, "must be given with attn_mask_type 'arbitrary'")
        return
    if kind != "arbitrary" and ("padding" not in kind or config.qkv_format == "thd"):
        raise InvalidInput(
            "attention_mask",
            "a tensor",
            f"must be left out with attn_mask_type {kind!r} and qkv_format {config.qkv_format!r}",
        )
    full = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_kv)
    if kind == "arbitrary":
        if isinstance(mask, (tuple, list)):
            raise InvalidInput(
                "attention_mask", f"{len(mask)} tensors", "must be one tensor when 'arbitrary'"
            )
        masks: tuple[Any, ...] = (mask,)
        wanted = [full]
    else:
        masks = mask_pair(extras)
        if len(masks) != 2:
            raise InvalidInput(
                "attention_mask", f"{len(masks)} tensors", "must be one mask, or one for q and one for kv"
            )
        if not isinstance(mask, (tuple, list)) and sizes.seqlen_q != sizes.seqlen_kv:
            raise InvalidInput(
                "attention_mask", "one tensor", "must be a pair (q, kv) when their lengths differ"
            )
        wanted = [(sizes.batch, 1, 1, sizes.seqlen_q), (sizes.batch, 1, 1, sizes.seqlen_kv)]
    for tensor, shape in zip(masks, wanted, strict=True):
        if tensor.dtype != torch.bool:
            raise InvalidInput(
                "attention_mask.dtype", str(tensor.dtype), "must be torch.bool, True = masked out"
            )
        fits = tuple(tensor.shape) == shape if "padding" in kind else _broadcasts(tensor.shape, shape)
        if not fits:
            how = "be" if "padding" in kind else "broadcast to"
            raise InvalidInput("attention_mask.shape", tuple(tensor.shape), f"must {how} {list(shape)}")


def _check_scores(config: Config, sizes: Sizes, extras: Extras) -> None:
    """Bias, ALiBi slopes and sinks against the call and against what its types announce."""
    bias, slopes, offset = extras.core_attention_bias, extras.alibi_slopes, extras.softmax_offset
    announced = config.bias_type in ("pre_scale_bias", "post_scale_bias")
    if announced and bias is None:
        raise InvalidInput(
            "core_attention_bias", None, f"must be given with core_attention_bias_type {config.bias_type!r}"
        )
    if bias is not None and not announced:
        raise InvalidInput(
            "core_attention_bias_type",
            config.bias_type,
            "must be pre_scale_bias or post_scale_bias with a bias",
        )
    full = (sizes.batch, sizes.heads, sizes.seqlen_q, sizes.seqlen_kv)
    if bias is not None:
        if not _broadcasts(bias.shape, full):
            raise InvalidInput(
                "core_attention_bias.shape", tuple(bias.shape), f"must broadcast to {list(full)}"
            )
        if not bias.dtype.is_floating_point:
            raise InvalidInput("core_attention_bias.dtype", str(bias.dtype), "must be a floating-point type")
        if config.bias_type == "pre_scale_bias" and config.softcap:
            raise InvalidInput(
                "core_attention_bias_type",
                config.bias_type,
                "must be post_scale_bias with softcap: no kernel adds a bias inside the cap",
            )
    if slopes is not None:
        if config.bias_type != "alibi":
            raise InvalidInput(
                "core_attention_bias_type", config.bias_type, "must be 'alibi' with alibi_slopes"
            )
        if (
            tuple(slopes.shape) not in ((sizes.heads,), (sizes.batch, sizes.heads))
            or slopes.dtype != torch.float32
        ):
            raise InvalidInput(
                "alibi_slopes",
                f"{slopes.dtype} {tuple(slopes.shape)}",
                f"must be float32 [{sizes.heads}] or [{sizes.batch}, {sizes.heads}]",
            )
        if slopes.requires_grad and torch.is_grad_enabled():
            raise InvalidInput(
                "alibi_slopes.requires_grad", True, "must be False: no kernel gives their gradient"
            )
    if (config.softmax_type == "learnable") != (offset is not None):
        raise InvalidInput(
            "softmax_offset",
            None if offset is None else tuple(offset.shape),
            "must be given exactly when softmax_type is 'learnable'",
        )
    if offset is not None and offset.numel() != sizes.heads:
        raise InvalidInput(
            "softmax_offset.shape", tuple(offset.shape), f"must hold one value per head, [{sizes.heads}]"
        )
    if offset is not None and not offset.dtype.is_floating_point:
        raise InvalidInput("softmax_offset.dtype", str(offset.dtype), "must be a floating-point type")


def _broadcasts(shape: Any, full: tuple[int, ...]) -> bool:
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    return len(shape) <= len(full) and all(a in (1, b) for a, b in zip(padded, full, strict=True))


def _other_tensors(extras: Extras) -> list[tuple[str, Tensor]]:
    named: list[tuple[str, Tensor]] = []
    for name, value in zip(Extras._fields, extras, strict=True):
        items = value if isinstance(value, (tuple, list)) else (value,)
        named += [(name, item) for item in items if isinstance(item, torch.Tensor)]
    return named


# ---- specs ------------------------------------------------------------------------------------------


def _spec(t: Tensor) -> TensorSpec | None:
    """How a tensor lies in memory; None when it is dense and aligned, which asks nothing of a kernel."""
    alignment = math.gcd(misaligned(t), 16)
    if t.is_contiguous() and alignment == 16:
        return None
    return TensorSpec(
        shape=tuple(t.shape),
        stride=tuple(t.stride()),
        dtype=read_dtype(t.dtype),
        alignment=alignment,
        requires_grad=t.requires_grad,
    )


def _mask_spec(config: Config, mask: Any) -> TensorSpec | None:
    if config.attn_mask_type != "arbitrary" or not isinstance(mask, torch.Tensor):
        return None
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    stride = (0,) * (4 - mask.dim()) + tuple(mask.stride())
    return TensorSpec(shape=shape, stride=stride, dtype="bool")


# --------------------------------------------------------------------------------------------------------
# What the numbers in length tensors and padding masks must be. To read them may wait for a GPU.


def check_contents(config: Config, sizes: Sizes, q: Tensor, k: Tensor, extras: Extras) -> None:
    """Raises InvalidInput. Reads the tensors, so: for CPU tensors, or on request."""
    for name, cu, padded, rows in (
        ("cu_seqlens_q", extras.cu_seqlens_q, extras.cu_seqlens_q_padded, q.shape[0]),
        ("cu_seqlens_kv", extras.cu_seqlens_kv, extras.cu_seqlens_kv_padded, k.shape[0]),
    ):
        if cu is None:
            continue
        values = cu.tolist()
        _check_ascending(name, values)
        longest = sizes.seqlen_q if name == "cu_seqlens_q" else sizes.seqlen_kv
        lengths = [b - a for a, b in pairwise(values)]
        if max(lengths, default=0) > longest:
            raise InvalidInput(name, values, f"must not hold a sequence longer than {longest} rows")
        if config.qkv_format != "thd" or (name == "cu_seqlens_kv" and extras.block_table is not None):
            continue
        if padded is None:
            if values[-1] != rows:
                raise InvalidInput(name, values, f"must end at the number of tokens, {rows}")
            continue
        starts = padded.tolist()
        _check_ascending(f"{name}_padded", starts)
        room = [b - a for a, b in pairwise(starts)]
        if starts[-1] > rows:
            raise InvalidInput(f"{name}_padded", starts, f"must not end beyond the number of tokens, {rows}")
        if any(length > space for length, space in zip(lengths, room, strict=True)):
            raise InvalidInput(name, values, f"must fit into the room that {name}_padded gives, {starts}")
    if extras.block_table is not None and extras.cu_seqlens_kv is not None:
        rows_kv = lengths_of(extras.cu_seqlens_kv)
        wrong = wrong_page(extras.block_table, rows_kv, page_size=k.shape[1], pages=k.shape[0])
        if wrong is not None:
            sequence, entry, page = wrong
            raise InvalidInput(
                f"block_table[{sequence}, {entry}]",
                page,
                f"must be a page of the pool, 0 to {k.shape[0] - 1}",
            )
    for mask in dict.fromkeys(mask_pair(extras)):
        if is_noted(mask) and bool(mask.any()):
            raise InvalidInput("attention_mask", tuple(mask.shape), "must hide nothing, as was said of it")
    if config.attn_mask_type != "arbitrary":
        for name, mask in zip(("attention_mask (q)", "attention_mask (kv)"), mask_pair(extras), strict=False):
            rows_masked = mask.flatten(1)
            if bool((rows_masked[:, :-1] & ~rows_masked[:, 1:]).any()):
                raise InvalidInput(
                    name, tuple(mask.shape), "must mask the end of each sequence (True = masked out); for "
                    "another pattern use attn_mask_type 'arbitrary'"
                )  # fmt: skip


def _check_ascending(name: str, values: list[int]) -> None:
    if values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise InvalidInput(name, values, "must start at 0 and never descend")

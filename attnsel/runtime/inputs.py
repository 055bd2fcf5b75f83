"""Tensors checked, and turned into the question they ask. Runs once per call signature.

Every complaint names the argument, what it is and what it must be, before anything is launched.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch

from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams, Tensors, TensorSpec, read_dtype
from attnsel.params.layout import FORMATS
from attnsel.runtime.call import Call, Config, Extras, misaligned
from attnsel.runtime.sizes import Sizes, lengths_of, sizes_of
from attnsel.runtime.trivial_mask import known_to_be_trivial

if TYPE_CHECKING:
    from torch import Tensor

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

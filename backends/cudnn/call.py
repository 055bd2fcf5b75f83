"""What a cuDNN attention graph is made of, without data: both the planner and the runtime can write it down.

``planned`` makes a :class:`Call` from ``AttentionParams``; whoever has tensors fills in the same fields from
their shapes and strides. Equal calls give equal graphs (``graph``), so a plan may be kept by its call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from attnsel.backends.strides import Four, Strided, dense, layouts
from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams


class Pages(NamedTuple):
    """A paged cache: k and v are pools [pages, g, page_size, d], read through two tables [b, 1, n, 1]."""

    per_sequence: int
    max_seqlen_kv: int


class Fp8(NamedTuple):
    """Scaled FP8. ``out_dtype`` and ``grad_dtype``: what o and the gradients are written in.

    ``block``: elements that share a scale, 32 for MXFP8; 0 is one scale for the whole tensor.
    """

    out_dtype: str
    dout_dtype: str
    grad_dtype: str
    block: int = 0


@dataclass(frozen=True, slots=True)
class GraphCall:
    """One attention call. Windows as in ``contract.Spec``: bounds are inclusive, -1 is none, causal is 0.

    Gradients lie like their inputs, and dout like out, unless their own layouts are given.
    """

    dtype: str  # of q, k, v: bf16, fp16, fp32, fp8_e4m3, …
    q: Strided
    k: Strided
    v: Strided
    out: Strided
    softmax_scale: float
    packed_q: bool = False  # thd: ragged offsets say where sequences begin
    packed_kv: bool = False
    offset_dtype: str = "int32"  # of ragged offsets: int64 where a buffer has more than 2^31 - 1 elements
    padding: bool = False  # seq_len_q and seq_len_kv are given
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    bias: Strided | None = None  # [b|1, h|1, s_q|1, s_kv]
    bias_dtype: str = ""  # dtype if empty
    bias_grad: bool = False
    alibi: bool = False
    dropout: float = 0.0
    sink: bool = False
    sink_grad: bool = False
    pages: Pages | None = None
    need_lse: bool = False
    need_grad: bool = False  # a backward will follow
    max_logit: bool = False
    deterministic: bool = False
    dout: Strided | None = None
    dq: Strided | None = None
    dk: Strided | None = None
    dv: Strided | None = None
    fp8: Fp8 | None = None


_INT32 = 2**31 - 1
_NOT_THERE = {
    "softcap": "soft-capped scores",
    "alibi_slopes_shape": "slopes of one's own; they follow from the number of heads",
}


def planned(p: AttentionParams) -> GraphCall:
    """The call that ``p`` describes; strides from ``p.tensors``, else dense in ``p.qkv_layout``.

    Raises UnsupportedArgument for what no input of cuDNN's attention can express.
    """
    for field, what in _NOT_THERE.items():
        if getattr(p, field):
            raise UnsupportedArgument(f"{field}: cuDNN attention has no {what}")
    if p.attn_mask_type == "arbitrary":
        raise UnsupportedArgument("attn_mask_type: cuDNN attention has no mask tensor")
    if p.core_attention_bias_type == "pre_scale_bias":
        raise UnsupportedArgument("core_attention_bias_type: cuDNN adds a bias after the scale only")
    if p.context_parallel:
        raise UnsupportedArgument("cp_size: a graph knows one rank only")
    q, k, v = layouts(p)
    packed_q = p.layout.q_format == "thd"
    packed_kv = p.layout.kv_format == "thd" and not p.layout.paged
    left, right = p.window_size
    # Without any bound there is no diagonal to anchor.
    anchored = p.bottom_right_diagonal is True and (left >= 0 or right >= 0)
    fp8 = _fp8(p)
    bias = _bias(p) if p.has_bias else None
    return GraphCall(
        dtype=p.dtype if fp8 is None or p.dtype.startswith("fp8") else "fp8_e4m3",
        q=q,
        k=k,
        v=v,
        out=own_memory(q, packed_q, p.head_dim_v),
        softmax_scale=1.0 / math.sqrt(p.head_dim_qk),
        packed_q=packed_q,
        packed_kv=packed_kv,
        offset_dtype="int64" if max(map(_elements, (q, k, v))) > _INT32 else "int32",
        padding=p.padding,
        window_left=left,
        window_right=right,
        bottom_right=anchored,
        bias=bias,
        bias_grad=p.is_training and p.core_attention_bias_requires_grad,
        alibi=p.core_attention_bias_type == "alibi",
        dropout=p.attention_dropout if p.dropout else 0.0,
        sink=p.softmax_type != "vanilla",
        sink_grad=p.softmax_type == "learnable" and p.is_training,
        pages=_pages(p),
        need_lse=p.return_lse,
        need_grad=p.is_training,
        max_logit=p.return_max_logit,
        deterministic=p.deterministic,
        dq=own_memory(q, packed_q),
        dk=own_memory(k, packed_kv),
        dv=own_memory(v, packed_kv),
        fp8=fp8,
    )


def own_memory(like: Strided, packed: bool, width: int | None = None) -> Strided:
    """Dense memory for as many rows as ``like`` has, of ``width``, dimensions in the order of ``like``'s."""
    b, h, s, d = like.dims
    dims = (b, h, s, d if width is None else width)
    if packed:
        return dense(dims, "thd")
    order = sorted(zip("bhs", like.strides, strict=False), key=lambda pair: pair[1], reverse=True)
    return dense(dims, "".join(letter for letter, _ in order) + "d")


def _elements(tensor: Strided) -> int:
    """One more than the largest index: an upper bound for packed buffers."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.dims, tensor.strides, strict=True))


def _bias(p: AttentionParams) -> Strided:
    shape = p.core_attention_bias_shape or "1hss"
    dims: Four = (
        p.batch_size if shape[0] == "b" else 1,
        p.num_heads if shape[1] == "h" else 1,
        1 if shape == "111s" else p.max_seqlen_q,
        p.max_seqlen_kv,
    )
    return dense(dims, "bhsd")


def _pages(p: AttentionParams) -> Pages | None:
    if p.page_size is None:
        return None
    return Pages(-(-p.max_seqlen_kv // p.page_size), p.max_seqlen_kv)


_MXFP8_BLOCK = 32  # OCP Microscaling Formats (MX) v1.0, table 1
_NOT_IN_MXFP8 = {
    "dropout": ("attention_dropout", "dropout"),
    "return_max_logit": ("return_max_logit", "largest score"),
    "page_size": ("kv_cache", "paged cache"),
}


def _fp8(p: AttentionParams) -> Fp8 | None:
    """How TransformerEngine's recipes ask: delayed scaling writes FP8, the others half precision.

    Gradients come in, and under delayed scaling go out, in E5M2, unless the recipe's format is E4M3.
    """
    if not p.fp8_attention:
        return None
    recipe = p.recipe
    kind = getattr(recipe, "kind", None)
    if recipe is None or kind not in ("delayed", "current", "mxfp8"):
        raise UnsupportedArgument(
            f"fp8_meta: cuDNN attention has no recipe {kind!r}; allowed: delayed, current, mxfp8"
        )
    if not recipe.attention_in_fp8:
        raise UnsupportedArgument("fp8_meta: the tensors are FP8, and the recipe leaves attention alone")
    if p.has_bias:
        raise UnsupportedArgument("core_attention_bias_type: FP8 attention of cuDNN has no bias")
    if p.core_attention_bias_type == "alibi" and (p.is_training or kind == "mxfp8"):
        raise UnsupportedArgument("core_attention_bias_type: this FP8 attention of cuDNN has no ALiBi")
    half = "bf16" if p.dtype.startswith("fp8") else p.dtype
    gradient = "fp8_e5m2" if recipe.fp8_format == "HYBRID" else "fp8_e4m3"
    if kind == "delayed":
        return Fp8("fp8_e4m3", gradient, gradient)
    if kind == "current":
        return Fp8(half, gradient, half)
    if recipe.fp8_mha:
        raise UnsupportedArgument("fp8_meta: block-scaled FP8 attention of cuDNN has no FP8 output (fp8_mha)")
    for field, (stated, what) in _NOT_IN_MXFP8.items():
        if getattr(p, field):
            raise UnsupportedArgument(f"{stated}: block-scaled FP8 attention of cuDNN has no {what}")
    return Fp8(half, gradient, half, _MXFP8_BLOCK)

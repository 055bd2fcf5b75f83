"""What a cuDNN attention graph is made of, without data: both the planner and the runtime can write it down.

``planned`` makes a :class:`Call` from ``AttentionParams``; whoever has tensors fills in the same fields from
their shapes and strides. Equal calls give equal graphs (``graph``), so a plan may be kept by its call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams, TensorSpec

Four = tuple[int, int, int, int]


class Strided(NamedTuple):
    """A logical [b, h, s, d] tensor. Packed ones (thd) have s = the longest sequence, and a batch stride
    that nobody reads."""

    dims: Four
    strides: Four


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
    q, k, v = _layouts(p)
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


def dense(dims: Four, order: str) -> Strided:
    """Dense memory in the order of the letters: "bshd", "sbhd", "bhsd" or "thd" (read as bshd)."""
    size = dict(zip("bhsd", dims, strict=True))
    stride: dict[str, int] = {}
    step = 1
    for letter in reversed("bshd" if order == "thd" else order):
        stride[letter] = step
        step *= size[letter]
    return Strided(dims, (stride["b"], stride["h"], stride["s"], stride["d"]))


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


def _layouts(p: AttentionParams) -> tuple[Strided, Strided, Strided]:
    """q, k and v as the layout's name says, each replaced by its spec where there is one."""
    b, h, g = p.batch_size, p.num_heads, p.num_gqa_groups
    d, e = p.head_dim_qk, p.head_dim_v
    layout = p.layout
    dims_q: Four = (b, h, p.max_seqlen_q, d)
    dims_k: Four = (b, g, p.max_seqlen_kv, d)
    dims_v: Four = (b, g, p.max_seqlen_kv, e)
    kv_order = layout.kv_format
    if p.page_size is not None:
        count = b * -(-p.max_seqlen_kv // p.page_size)
        dims_k, dims_v = (count, g, p.page_size, d), (count, g, p.page_size, e)
        kv_order = "bshd"  # pages are [page_size, g, d] whatever the sequences are
    q, k, v = dense(dims_q, layout.q_format), dense(dims_k, kv_order), dense(dims_v, kv_order)
    if layout.group == "3hd":
        q, k, v = (_beside(t, layout.q_format, h * d + g * d + g * e) for t in (q, k, v))
    elif layout.group == "hd_2hd":
        k, v = (_beside(t, layout.kv_format, g * d + g * e) for t in (k, v))
    elif layout.group == "h3d":
        if g != h:
            raise UnsupportedArgument("qkv_layout: heads in threes have no strides when they share keys")
        q, k, v = (_between(t, layout.q_format, 2 * d + e) for t in (q, k, v))
    elif layout.group == "hd_h2d":
        k, v = (_between(t, layout.kv_format, d + e) for t in (k, v))
    return (
        _given(p.tensors.q, layout.q_format, q),
        _given(p.tensors.k, kv_order, k),
        _given(p.tensors.v, kv_order, v),
    )


def _beside(tensor: Strided, order: str, width: int) -> Strided:
    """All heads of one tensor, then all of the next: ``width`` elements for each token."""
    b, _, s, _ = tensor.dims
    step_s, step_b = (b * width, width) if order == "sbhd" else (width, s * width)
    return Strided(tensor.dims, (step_b, tensor.strides[1], step_s, tensor.strides[3]))


def _between(tensor: Strided, order: str, width: int) -> Strided:
    """Head by head one row of each tensor: ``width`` elements for each head."""
    step_b, _, step_s, step_d = _beside(tensor, order, tensor.dims[1] * width).strides
    return Strided(tensor.dims, (step_b, width, step_s, step_d))


def _given(spec: TensorSpec | None, order: str, otherwise: Strided) -> Strided:
    """A spec's strides in [b, h, s, d] order."""
    if spec is None:
        return otherwise
    if len(spec.stride) != len(order):
        raise UnsupportedArgument(f"tensors: {len(order)} strides are needed for {order}: {spec.stride}")
    stride = dict(zip(order, spec.stride, strict=True))
    token = stride.get("s", stride.get("t", 0))
    batch = stride.get("b", otherwise.dims[2] * token)
    return Strided(otherwise.dims, (batch, stride["h"], token, stride["d"]))


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

"""Where q, k and v of a call lie in memory that is only described: their strides as the layout says, or as
the tensors' own specs do."""

from __future__ import annotations

from typing import NamedTuple

from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams, TensorSpec

Four = tuple[int, int, int, int]


class Strided(NamedTuple):
    """A logical [b, h, s, d] tensor. Packed ones (thd) have s = the longest sequence, and a batch stride
    that nobody reads."""

    dims: Four
    strides: Four


def dense(dims: Four, order: str) -> Strided:
    """Dense memory in the order of the letters: "bshd", "sbhd", "bhsd" or "thd" (read as bshd)."""
    size = dict(zip("bhsd", dims, strict=True))
    stride: dict[str, int] = {}
    step = 1
    for letter in reversed("bshd" if order == "thd" else order):
        stride[letter] = step
        step *= size[letter]
    return Strided(dims, (stride["b"], stride["h"], stride["s"], stride["d"]))


def layouts(p: AttentionParams) -> tuple[Strided, Strided, Strided]:
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

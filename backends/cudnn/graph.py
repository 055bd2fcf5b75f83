"""A cuDNN attention graph as plain values: which tensors, which options. No cuDNN and no torch in here.

``forward`` and ``backward`` turn a :class:`Call` into a :class:`Graph`; ``build`` hands that to the frontend.
Tensors are logical [b, h, s, d]; the layout is in the strides. Their names are the keywords of the
frontend's sdpa functions, and a name's uid is the same in every graph.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from attnsel.backends.cudnn.candidate import round_up
from attnsel.base.records import json_fields, to_json
from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams, TensorSpec, default_softmax_scale

# --------------------------------------------------------------------------------------------------------
# Where q, k and v of a call lie in memory that is only described: their strides as the layout says, or as the
# tensors' own specs do.


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


# --------------------------------------------------------------------------------------------------------
# What a cuDNN attention graph is made of, without data: both the planner and the runtime can write it down.
#
# ``planned`` makes a :class:`Call` from ``AttentionParams``; whoever has tensors fills in the same fields
# from their shapes and strides. Equal calls give equal graphs (``graph``), so a plan may be kept by its
# call.


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
        softmax_scale=default_softmax_scale(p.head_dim_qk),
        packed_q=packed_q,
        packed_kv=packed_kv,
        offset_dtype=offset_dtype(q, k, v),
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


def offset_dtype(*tensors: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """Of ragged offsets into tensors of these dimensions and strides: an upper bound for packed buffers."""
    extents = (sum((n - 1) * step for n, step in zip(*tensor, strict=True)) for tensor in tensors)
    return "int64" if max(extents) >= _INT32 else "int32"


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


Option = bool | int | float | str

_NAMES = (
    *("q", "k", "v", "o", "stats", "score_max", "score_sum_exp"),
    *("dO", "dQ", "dK", "dV", "bias", "dBias", "seq_len_q", "seq_len_kv", "seed", "offset"),
    *("paged_attention_k_table", "paged_attention_v_table", "sink_token", "dSink_token"),
    *("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o", "amax_s", "amax_o"),
    *("descale_o", "descale_dO", "descale_dP", "scale_dQ", "scale_dK", "scale_dV", "scale_dP"),
    *("amax_dQ", "amax_dK", "amax_dV", "amax_dP"),
    *("q_T", "k_T", "dO_T", "o_f16", "dO_f16", "descale_q_T", "descale_k_T", "descale_dO_T"),
)
UIDS: dict[str, int] = {name: number for number, name in enumerate(_NAMES, start=1)}
FIRST_RAGGED_UID = 100


class Tensor(NamedTuple):
    """One tensor of a graph. ``ragged`` names the tensor that says where each sequence begins in it;
    ``reordering`` is F8_128x4 for block scales: the order in which the matrix unit reads them."""

    name: str
    uid: int
    dims: Four
    strides: Four
    dtype: str
    ragged: str = ""
    reordering: str = ""


class Ragged(NamedTuple):
    """Offsets [b+1, 1, 1, 1] in elements: the cu_seqlens of one side times ``unit``, the token's stride."""

    name: str
    uid: int
    side: str  # q or kv
    unit: int
    dtype: str  # int32 or int64
    entries: int


@json_fields(
    "node", "io_dtype", "inputs", "outputs", "ragged", ("options", lambda graph: dict(graph.options))
)
@dataclass(frozen=True, slots=True)
class Graph:
    """One node and its tensors. Hashable, and written as JSON and back without loss."""

    node: str  # sdpa, sdpa_fp8 or sdpa_mxfp8, and each with _backward
    io_dtype: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    ragged: tuple[Ragged, ...]
    options: tuple[tuple[str, Option], ...]

    def tensor(self, name: str) -> Tensor:
        """A tensor by name. Raises KeyError."""
        for tensor in (*self.inputs, *self.outputs):
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Graph:
        return cls(
            data["node"],
            data["io_dtype"],
            tuple(_tensor(entry) for entry in data["inputs"]),
            tuple(_tensor(entry) for entry in data["outputs"]),
            tuple(Ragged(**entry) for entry in data["ragged"]),
            tuple(sorted(data["options"].items())),
        )

    def key(self) -> str:
        """A digest that differs when anything at all differs."""
        text = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _tensor(entry: dict[str, Any]) -> Tensor:
    return Tensor(**{**entry, "dims": tuple(entry["dims"]), "strides": tuple(entry["strides"])})


class _Draft:
    """Tensors of a graph in the making; ragged offsets are shared by tensors with equal token strides."""

    def __init__(self, call: GraphCall) -> None:
        self.call = call
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.ragged: dict[tuple[str, int], Ragged] = {}

    def offsets(self, side: str, unit: int) -> str:
        found = self.ragged.get((side, unit))
        if found is None:
            uid = FIRST_RAGGED_UID + len(self.ragged)
            entries = self.call.q.dims[0] + 1
            found = Ragged(f"ragged_{side}_{unit}", uid, side, unit, self.call.offset_dtype, entries)
            self.ragged[side, unit] = found
        return found.name

    def block_scales(self, name: str, of: Strided, along: str) -> None:
        """Read one E8M0 scale per block of ``of`` along d or s, padded to whole tiles of 128 rows by 4
        scales, as the reordered layout stores them."""
        assert self.call.fp8 is not None
        b, h, s, d = of.dims
        block = self.call.fp8.block
        rows, columns = round_up(s, 128), round_up(-(-d // block), 4)
        if along == "s":
            rows, columns = round_up(-(-s // block), 4), round_up(d, 128)
        shape = dense((b, h, rows, columns), "bhsd")
        self.inputs.append(Tensor(name, UIDS[name], *shape, "fp8_e8m0", reordering="F8_128x4"))

    def make(self, name: str, shape: Strided, dtype: str, side: str = "") -> Tensor:
        packed = {"q": self.call.packed_q, "kv": self.call.packed_kv}.get(side, False)
        ragged = self.offsets(side, shape.strides[2]) if packed else ""
        return Tensor(name, UIDS[name], shape.dims, shape.strides, dtype, ragged)

    def read(self, name: str, shape: Strided, dtype: str, side: str = "") -> None:
        self.inputs.append(self.make(name, shape, dtype, side))

    def write(self, name: str, shape: Strided, dtype: str, side: str = "") -> None:
        self.outputs.append(self.make(name, shape, dtype, side))

    def scalars(self, *names: str, write: bool = False) -> None:
        for name in names:
            (self.write if write else self.read)(name, _ONE, "fp32")

    def finish(self, node: str, options: dict[str, Option]) -> Graph:
        return Graph(
            node,
            self.call.dtype,
            tuple(self.inputs),
            tuple(self.outputs),
            tuple(self.ragged.values()),
            tuple(sorted(options.items())),
        )


_ONE = dense((1, 1, 1, 1), "bhsd")


def forward(call: GraphCall) -> Graph:
    """The forward graph. Stats (the log-sum-exp) are written when a backward or the caller needs them.

    With ``max_logit`` score_max and score_sum_exp take their place: the library gives them together, and
    not beside stats; stats = score_max + log(score_sum_exp).
    """
    draft = _Draft(call)
    _read_qkv(draft)
    options = _read_features(draft)
    fp8 = call.fp8
    if fp8 is not None and fp8.block:
        draft.block_scales("descale_q", call.q, "d")
        draft.block_scales("descale_k", call.k, "d")
        draft.block_scales("descale_v", call.v, "s")
    elif fp8 is not None:
        draft.scalars("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    if call.pages is not None:
        b = call.q.dims[0]
        table = dense((b, 1, call.pages.per_sequence, 1), "bhsd")
        draft.read("paged_attention_k_table", table, "int32")
        draft.read("paged_attention_v_table", table, "int32")
        options["max_seq_len_kv"] = call.pages.max_seqlen_kv
    draft.write("o", call.out, call.dtype if fp8 is None else fp8.out_dtype, "q")
    options["generate_stats"] = (call.need_lse or call.need_grad) and not call.max_logit
    if call.max_logit:
        draft.write("score_max", rows(call), "fp32")
        draft.write("score_sum_exp", rows(call), "fp32")
    elif options["generate_stats"]:
        draft.write("stats", rows(call), "fp32")
    if fp8 is not None:
        draft.scalars(*(("amax_o",) if fp8.block else ("amax_s", "amax_o")), write=True)
    return draft.finish(_node(fp8), options)


def backward(call: GraphCall) -> Graph:
    """The backward graph: from dO and the forward's stats to dQ, dK, dV and, where asked, dBias and
    dSink_token.

    max_total_seq_len_q and _kv stay unset for packed sequences. The library, asked with and without them,
    takes the same calls with the same engines; they only make the workspace smaller (on sm90 and sm100), and
    a plan is kept for batches that may hold more tokens than the first (NVIDIA/cudnn-frontend#462).
    """
    draft = _Draft(call)
    fp8 = call.fp8
    _read_qkv(draft)
    if fp8 is not None and fp8.block:
        _read_block_scaled(draft, fp8)
    else:
        draft.read("o", call.out, call.dtype if fp8 is None else fp8.out_dtype, "q")
        draft.read("dO", call.dout or call.out, call.dtype if fp8 is None else fp8.dout_dtype, "q")
    draft.read("stats", rows(call), "fp32")
    options = _read_features(draft)
    if fp8 is not None and not fp8.block:
        draft.scalars("descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s")
        draft.scalars("descale_dP", "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP")
    grad = call.dtype if fp8 is None else fp8.grad_dtype
    draft.write("dQ", call.dq or call.q, grad, "q")
    draft.write("dK", call.dk or call.k, grad, "kv")
    draft.write("dV", call.dv or call.v, grad, "kv")
    if call.bias is not None and call.bias_grad:
        draft.write("dBias", call.bias, call.bias_dtype or call.dtype)
    if call.sink_grad:
        draft.write("dSink_token", _sink(call), "fp32")
    if fp8 is not None:
        draft.scalars("amax_dQ", "amax_dK", "amax_dV", *(() if fp8.block else ("amax_dP",)), write=True)
    options["deterministic"] = call.deterministic
    return draft.finish(f"{_node(fp8)}_backward", options)


def _node(fp8: Fp8 | None) -> str:
    if fp8 is None:
        return "sdpa"
    return "sdpa_mxfp8" if fp8.block else "sdpa_fp8"


def _read_block_scaled(draft: _Draft, fp8: Fp8) -> None:
    """What a block-scaled backward reads beside q, k and v. A product sums over d or over s, and the blocks
    must lie along that dimension: q, k and dO come in twice, scaled along d and (``_T``) along s. The rows'
    sums of dO times o are taken in half precision."""
    call = draft.call
    dout = call.dout or call.out
    draft.read("q_T", call.q, call.dtype, "q")
    draft.read("k_T", call.k, call.dtype, "kv")
    draft.read("o_f16", call.out, fp8.out_dtype, "q")
    draft.read("dO_f16", dout, fp8.out_dtype, "q")
    draft.read("dO", dout, fp8.dout_dtype, "q")
    draft.read("dO_T", dout, fp8.dout_dtype, "q")
    for name, of in (("q", call.q), ("k", call.k), ("v", call.v), ("dO", dout)):
        draft.block_scales(f"descale_{name}", of, "d")
        if name != "v":
            draft.block_scales(f"descale_{name}_T", of, "s")


def rows(call: GraphCall) -> Strided:
    """Stats: one float32 per query row, dense [b, h, s_q, 1], padded for packed sequences too (sm8x and
    sm12x take no packed ones)."""
    b, h, s_q, _ = call.q.dims
    return dense((b, h, s_q, 1), "bhsd")


def _sink(call: GraphCall) -> Strided:
    return dense((1, call.q.dims[1], 1, 1), "bhsd")


def _read_qkv(draft: _Draft) -> None:
    call = draft.call
    draft.read("q", call.q, call.dtype, "q")
    draft.read("k", call.k, call.dtype, "kv")
    draft.read("v", call.v, call.dtype, "kv")


def _read_features(draft: _Draft) -> dict[str, Option]:
    """What both directions share. cuDNN's left bound counts the diagonal, ours does not."""
    call = draft.call
    options: dict[str, Option] = {"attn_scale": call.softmax_scale}
    if call.bias is not None:
        draft.read("bias", call.bias, call.bias_dtype or call.dtype)
    if call.alibi:
        options["alibi"] = True
    if call.padding:
        lengths = dense((call.q.dims[0], 1, 1, 1), "bhsd")
        draft.read("seq_len_q", lengths, "int32")
        draft.read("seq_len_kv", lengths, "int32")
        options["padding"] = True
    if call.window_left >= 0:
        options["left_bound"] = call.window_left + 1
    if call.window_right >= 0:
        options["right_bound"] = call.window_right
    if call.bottom_right:
        options["bottom_right"] = True
    if call.dropout:
        options["dropout"] = call.dropout
        draft.read("seed", _ONE, "int64")
        draft.read("offset", _ONE, "int64")
    if call.sink:
        draft.read("sink_token", _sink(call), "fp32")
    return options

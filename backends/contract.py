"""What a kernel is: the one contract every backend of attnsel implements.

A backend is two plain functions with no autograd in them, so that whoever calls them (the runtime,
context parallelism, a decode loop) decides how gradients flow and how partial results are merged::

    forward(spec, inputs)                                -> Result(out, lse, max_logit, saved)
    backward(spec, inputs, result, dout, dlse=None)      -> Grads(q, k, v, bias, softmax_offset)

Shape letters used in every backend
    b batch, h query heads, g key/value heads (``num_gqa_groups``), s_q / s_kv rows,
    t_q / t_kv packed rows, d head_dim_qk, e head_dim_v.

Dense tensors arrive as ``[b, h, s, d]`` *views* of whatever memory the caller has (strides are part
of the input); packed ones (``thd``) as ``[t, h, d]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spec:
    """Everything about one attention call that is not a tensor. Hashable: a cache key.

    Visibility. With ``i = q_offset + row`` and ``j = kv_offset + column`` (both counted from the
    start of the row's own sequence) and ``shift = len_kv - len_q`` of that sequence when
    ``bottom_right`` else ``0``, a query sees a key iff both are inside their sequence and::

        -window_left <= j - i - shift <= window_right        (a bound of -1 means no bound)

    so causal is ``window_right == 0``. A row that sees no key gives 0 and an LSE of -inf (with sinks: the
    sink's logit). Lengths count rows of the tensors given, without offsets.

    Score of a visible pair, in float32 or better::

        x = softmax_scale * q.k ;  x = softcap * tanh(x / softcap) if softcap
        x = x + bias - alibi_slope * |j - i - shift|
    """

    packed: bool = False  # thd: q [t_q, h, d], cu_seqlens_* say where sequences lie
    softmax_scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    bottom_right: bool = False
    softcap: float = 0.0
    softmax_type: str = "vanilla"  # vanilla | off-by-one | learnable
    dropout_p: float = 0.0
    q_offset: int = 0
    kv_offset: int = 0
    head_offset: int = 0  # for dropout alone: which head of the whole model query head 0 is (``tiled``)
    deterministic: bool = False
    return_max_logit: bool = False
    need_lse: bool = False
    need_grad: bool = False  # a backward will follow: save what it needs


class Inputs(NamedTuple):
    """The tensors of one call. Everything but q, k, v may be None.

    ``bias.requires_grad`` decides whether its gradient is made; ``alibi_slopes`` get none. Packed calls use
    of a mask or bias what lies inside each sequence's own lengths. Rows beyond a sequence's length,
    whatever they hold (NaN and inf included), reach no other row and no gradient; their own are 0.

    Dropout keeps the pair (query i, key j) of head n in sequence m iff the 32-bit word j % 4 of
    philox4x32-10(counter = (j // 4, i, n, m), key = seed XOR rotl64(offset, 32)) is at least
    round(dropout_p * 2^32), n counted from ``head_offset``: any split of a sequence drops the same entries,
    on every backend that says so.
    """

    q: Tensor  # [b, h, s_q, d]   or [t_q, h, d]
    k: Tensor  # [b, g, s_kv, d]  or [t_kv, g, d]; h % g == 0, query head n reads kv head n // (h // g)
    v: Tensor  # [b, g, s_kv, e]  or [t_kv, g, e]; with a block_table both are pools [pages, g, page_size, .]
    attn_mask: Tensor | None = None  # bool, True = masked OUT, broadcastable to [b, h, s_q, s_kv]
    bias: Tensor | None = None  # added after the scale; broadcastable to [b, h, s_q, s_kv]
    alibi_slopes: Tensor | None = None  # float32 [h] or [b, h]
    softmax_offset: Tensor | None = None  # [h]; the sink logit of softmax_type "learnable"
    seqlens_q: Tensor | None = None  # int32 [b]: real rows of a dense, padded batch
    seqlens_kv: Tensor | None = None
    cu_seqlens_q: Tensor | None = None  # int32 [b+1]: packed only, real lengths (differences)
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None  # packed only: where each sequence starts in memory
    cu_seqlens_kv_padded: Tensor | None = None
    dropout_seed: Tensor | None = None  # int64 scalar tensors (CUDA graphs and recompute replay them)
    dropout_offset: Tensor | None = None
    max_seqlen_q: int | None = None  # packed only: longest sequence, given so that nothing is read back
    max_seqlen_kv: int | None = None
    # int32 [b, n], rows contiguous: row j of sequence m lies in page block_table[m, j // page_size] at
    # j % page_size. Then seqlens_kv is required, q is dense or packed, there is no backward, and entries
    # past a length are not read.
    block_table: Tensor | None = None


class Result(NamedTuple):
    """What a forward gives back.

    ``lse`` is natural-log, float32 (float64 for float64 inputs), ``[b, h, s_q]`` (packed: ``[h, t_q]``),
    sinks included; it may be None where ``need_lse`` is not set. ``max_logit`` is ``[h]`` of that type, the
    largest score any visible pair had, sinks not counted, -inf where there is none. ``saved`` is the
    backend's own and goes back to its backward untouched.

    A backward may also be given an ``out`` and ``lse`` that were merged, or that another kernel's forward
    gave, with nothing saved: where a kernel gives ``lse``, its backward starts from these two alone (but for
    dropout that a generator decided).
    """

    out: Tensor
    lse: Tensor | None = None
    max_logit: Tensor | None = None
    saved: tuple[Any, ...] = ()


class Grads(NamedTuple):
    """Gradients in the shapes and dtypes of the inputs they belong to; None where not needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    softmax_offset: Tensor | None = None


class Steps(NamedTuple):
    """What a kernel's ``bind`` gives for a dense call of q, k and v alone that is differentiated: both
    directions, with all that calls like it have in common found out once.

    ``forward(q, k, v) -> out, lse``; ``backward(q, k, v, out, lse, dout) -> dq, dk, dv``. Whoever wraps them
    keeps tensors in between, and may hand them back with other strides (saved-tensor hooks do).
    """

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]

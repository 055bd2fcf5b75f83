"""Exact changes of a call that let a candidate run it: what they turn the question into, what they cost.

Each is a pure function on the question. The engine asks the rules again about what comes out, so an
adaptation never vouches for a candidate: the rules do. The backend that lists an adaptation carries it
out (``backends/``), and its tests hold the result against the unadapted reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attnsel.params import ITEMSIZE, AttentionParams, TensorSpec
from attnsel.verdict import Adaptation, Reason

if TYPE_CHECKING:
    from attnsel.params import DType


_MASK = TensorSpec(shape=(1, 1, 1, 1), stride=(1, 1, 1, 1))

Applied = tuple[AttentionParams, Adaptation] | None


class Adapter(NamedTuple):
    """``fields``: objections to these can be met; ``apply``: the question after the change, or None."""

    name: str
    fields: frozenset[str]
    apply: Callable[[AttentionParams], Applied]


def _contiguous(p: AttentionParams) -> Applied:
    """Copy q, k and v into dense memory.

    Exact: a copy holds the same numbers; gradients are copied back through the same indices.
    """
    if p.tensors.q is None and p.tensors.k is None and p.tensors.v is None:
        return None
    rows_q = p.batch_size * p.max_seqlen_q * p.num_heads * p.head_dim_qk
    rows_kv = p.batch_size * p.max_seqlen_kv * p.num_gqa_groups * (p.head_dim_qk + p.head_dim_v)
    size = (rows_q + rows_kv) * ITEMSIZE[p.dtype]
    changed = p.derive(tensors=p.tensors.derive(q=None, k=None, v=None))
    return changed, Adaptation("contiguous", "copies q, k, v into dense memory", size)


def _expand_gqa(p: AttentionParams) -> Applied:
    """Repeat each key/value head for the query heads of its group.

    Exact: query head n reads kv head n // (h // g) either way; the gradient of a kv head is the sum over
    its copies, which autograd forms.
    """
    if not p.gqa:
        return None
    per_head = p.batch_size * p.max_seqlen_kv * (p.head_dim_qk + p.head_dim_v)
    size = p.num_heads * per_head * ITEMSIZE[p.dtype]
    changed = p.derive(num_gqa_groups=p.num_heads, tensors=p.tensors.derive(k=None, v=None))
    text = f"repeats {p.num_gqa_groups} kv heads to {p.num_heads}"
    return changed, Adaptation("expand_gqa", text, size)


def folded_mask_shape(p: AttentionParams) -> tuple[int, int, int, int]:
    """The smallest [b|1, h|1, s_q, s_kv] that holds everything about visibility and bias.

    Padding differs per sequence; ALiBi differs per head (and per sequence with slopes of [b, h]).
    """
    batch = heads = 1
    if p.padding:
        batch = p.batch_size
    if p.has_bias:
        shape = p.core_attention_bias_shape or "1hss"
        batch = p.batch_size if shape[0] == "b" else batch
        heads = p.num_heads if shape[1] == "h" else heads
    if p.core_attention_bias_type == "alibi":
        heads = p.num_heads
        batch = p.batch_size if len(p.alibi_slopes_shape or ()) == 2 else batch
    mask = p.tensors.mask
    if mask is not None and len(mask.shape) == 4:
        batch, heads = max(batch, mask.shape[0]), max(heads, mask.shape[1])
    return batch, heads, p.max_seqlen_q, p.max_seqlen_kv


def _fold_mask(p: AttentionParams) -> Applied:
    """Write windows, diagonals, padding, ALiBi and bias into one additive mask.

    Exact: softmax(x + m) with m = -inf where a pair is hidden and the bias elsewhere is the same sum; rows
    that see no key give 0 in both. The gradient of a bias is the gradient of m summed over broadcast
    dimensions.
    """
    if p.qkv_format == "thd":
        return None  # packed sequences have no [b, h, s_q, s_kv] to mask
    shape = folded_mask_shape(p)
    batch, heads, rows, columns = shape
    stride = (heads * rows * columns, rows * columns, columns, 1)
    dtype: DType = p.dtype
    spec = _MASK.derive(
        shape=shape, stride=stride, dtype=dtype, requires_grad=p.core_attention_bias_requires_grad
    )
    size = batch * heads * rows * columns * ITEMSIZE[p.dtype]
    changed = p.derive(
        attn_mask_type="arbitrary",
        window_size=(-1, -1),
        bottom_right_diagonal=None,
        core_attention_bias_type="no_bias",
        core_attention_bias_shape=None,
        core_attention_bias_requires_grad=False,
        alibi_slopes_shape=None,
        tensors=p.tensors.derive(mask=spec),
    )
    folded = ", ".join(_what_is_folded(p))
    return changed, Adaptation("fold_mask", f"folds {folded} into a mask", size, quadratic=True)


def _what_is_folded(p: AttentionParams) -> list[str]:
    words: list[str] = []
    if p.attn_mask_type not in ("no_mask", "arbitrary"):
        words.append(p.attn_mask_type)
    if p.windowed:
        words.append(f"window {p.window_size}")
    if p.core_attention_bias_type != "no_bias":
        words.append(p.core_attention_bias_type)
    return words or ["the mask"]


ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Adapter("contiguous", frozenset({"tensors.q", "tensors.k", "tensors.v"}), _contiguous),
        Adapter("expand_gqa", frozenset({"num_gqa_groups"}), _expand_gqa),
        Adapter(
            "fold_mask",
            frozenset({"attn_mask_type", "window_size", "core_attention_bias_type", "bottom_right_diagonal"}),
            _fold_mask,
        ),
    )
}


def adapt_to(
    names: tuple[str, ...],
    p: AttentionParams,
    reasons: list[Reason],
    ask: Callable[[AttentionParams], list[Reason]],
    memo: dict[tuple[str, AttentionParams], Applied],
) -> tuple[tuple[Adaptation, ...], list[Reason]]:
    """Apply what is listed until nothing is refused or nothing helps.

    ``ask`` returns the reasons against a changed question; ``memo`` shares changed questions between the
    candidates of one selection. Returns what was applied and the reasons that remain; when some remain,
    nothing is to be applied.
    """
    refused = {reason.field for reason in reasons if not reason.unknown}
    if not refused <= _within_reach(names):
        return (), reasons  # something stays refused whatever is adapted
    applied: list[Adaptation] = []
    left = list(names)
    while left and refused:
        for name in left:
            if not ADAPTERS[name].fields & refused:
                continue
            if (name, p) not in memo:
                memo[name, p] = ADAPTERS[name].apply(p)
            changed = memo[name, p]
            if changed is not None:
                break
        else:
            break
        left.remove(name)
        p, adaptation = changed
        applied.append(adaptation)
        reasons = ask(p)
        refused = {reason.field for reason in reasons if not reason.unknown}
    return tuple(applied), reasons


@lru_cache(maxsize=64)
def _within_reach(names: tuple[str, ...]) -> frozenset[str]:
    """The fields that these adaptations can do something about."""
    return frozenset().union(*(ADAPTERS[name].fields for name in names))

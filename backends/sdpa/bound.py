"""The fast path: one kernel bound to one call signature, gradients by PyTorch's own formula."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from attnsel.backends.contract import Inputs, Spec

from .guards import check_call
from .masks import fold, without_padding
from .ops import FLASH_CPU, FLASH_CUDA, MATH, above_zero, forward_op, resolve, shielded_math_op
from .plan import MaskPlan, Traits, plan_mask


def bind(kernel: str, spec: Spec, inputs: Inputs) -> Callable[..., Tensor]:
    """A call for every later call with the shapes, strides, alignment, dtypes and None-ness of ``inputs``.

    Returns ``call(q, k, v, attn_mask=None, bias=None, alibi_slopes=None, seqlens_q=None, seqlens_kv=None)
    -> out [b, h, s_q, e]``, arguments as in ``Inputs`` (attn_mask: True = masked OUT), differentiable in
    q, k, v and, for math and efficient, bias. Nothing is checked again but which arguments are given.

    Raises ValueError for an unknown kernel, an inexpressible spec or tensors the kernel cannot take.
    """
    traits = resolve(kernel, inputs.q.device.type)
    check_call(traits, spec, inputs)
    plan = plan_mask(traits, spec, inputs)
    raw = _raw(traits, spec, plan, inputs)
    if plan.shape is None and not plan.q_lengths and not plan.same_lengths:
        return _no_mask_call(raw)
    return _mask_call(traits, spec, plan, raw, inputs)


def _raw(traits: Traits, spec: Spec, plan: MaskPlan, inputs: Inputs) -> Callable[..., Tensor]:
    """``raw(q, k, v, mask=None) -> out``: the op with everything static filled in."""
    op, dropout_p = forward_op(traits), spec.dropout_p
    factor, scale = above_zero(traits, spec.softmax_scale)
    is_causal, want_lse = plan.is_causal, spec.need_grad

    if traits is FLASH_CPU:

        def raw(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]

    elif traits is MATH:
        gqa, op = inputs.q.shape[1] != inputs.k.shape[1], shielded_math_op(inputs.q.device.type)

        def raw(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return op(q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=gqa)[0]

    elif traits is FLASH_CUDA:

        def raw(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return op(q, k, v, dropout_p, is_causal, False, scale=scale)[0]

    else:  # efficient, cuDNN

        def raw(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            return op(q, k, v, mask, want_lse, dropout_p, is_causal, scale=scale)[0]

    if factor == 1.0:
        return raw

    def signed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return raw(q * factor, k, v, mask)

    return signed


def _no_mask_call(raw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``raw`` that refuses the mask it was not bound for."""

    def call(q: Tensor, k: Tensor, v: Tensor, attn_mask: None = None) -> Tensor:
        if attn_mask is not None:
            raise ValueError("this call was bound without attn_mask")
        return raw(q, k, v)

    return call


def _mask_call(
    traits: Traits, spec: Spec, plan: MaskPlan, raw: Callable[..., Tensor], bound: Inputs
) -> Callable[..., Tensor]:
    """A call that folds its mask, runs ``raw`` and zeroes the rows that see nothing."""
    padded = bound.seqlens_q is not None or bound.seqlens_kv is not None
    given = [t is None for t in bound[3:6]] + [t is None for t in bound[7:9]]

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        seqlens_q: Tensor | None = None,
        seqlens_kv: Tensor | None = None,
    ) -> Tensor:
        if [t is None for t in (attn_mask, bias, alibi_slopes, seqlens_q, seqlens_kv)] != given:
            raise ValueError("other arguments are given than this call was bound with")
        if plan.same_lengths and seqlens_q is not seqlens_kv:
            raise ValueError("this call was bound with one tensor for seqlens_q and seqlens_kv")
        inputs = Inputs(q, k, v, attn_mask, bias, alibi_slopes, seqlens_q=seqlens_q, seqlens_kv=seqlens_kv)
        mask, dead_rows = fold(traits, plan, spec, inputs)
        if padded:
            q, k, v = without_padding(inputs)[:3]
        out = raw(q, k, v, mask)
        return out if dead_rows is None else out.masked_fill(dead_rows, 0.0)

    return call

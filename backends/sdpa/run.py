"""The contract's forward and backward, by the explicit backward ops.

For callers that merge partial results (context parallelism) or differentiate through lse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnsel.backends import checks as alignment
from attnsel.backends.checks import Five, added, check_gradients, sum_is_lost, with_lse_gradient
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.sdpa.guards import check_call
from attnsel.backends.sdpa.masks import alone, fold, without_padding
from attnsel.backends.sdpa.ops import (
    FLASH_CPU,
    FLASH_CUDA,
    HEAD_DIM_MULTIPLE,
    MATH,
    NAMES,
    Forward,
    above_zero,
    forward_op,
    op_lse,
    plain_lse,
    resolve,
    run_backward,
    run_forward,
    shielded_math_op,
)
from attnsel.backends.sdpa.plan import MaskPlan, Traits, plan_mask
from attnsel.backends.tiled import kernel as tiled
from attnsel.backends.tiled.tiles import four_dims


def forward(kernel: str, spec: Spec, inputs: Inputs) -> Result:
    """The contract's forward. ``lse`` is float32 (float64 for float64 inputs), None from math.

    Raises ValueError as ``bind`` does.
    """
    traits = resolve(kernel, inputs.q.device.type)
    check_call(traits, spec, inputs)
    plan = plan_mask(traits, spec, inputs)
    if traits is MATH and spec.need_grad:
        return _math_forward(spec, plan, inputs)
    want_lse = traits.returns_lse and (spec.need_lse or spec.need_grad)
    with torch.no_grad():
        inputs = without_padding(inputs)
        folded = fold(traits, plan, spec, inputs, want_lse=want_lse)
        out, lse, rng = run_forward(
            traits,
            *inputs[:3],
            folded.mask,
            is_causal=plan.is_causal,
            scale=spec.softmax_scale,
            dropout_p=spec.dropout_p,
            want_lse=want_lse,
        )
        lse = plain_lse(lse, inputs.q.shape[2]) if want_lse and lse is not None else None
        if folded.dead_rows is not None:
            out = out.masked_fill(folded.dead_rows, 0.0)
            if lse is not None:
                lse = lse.masked_fill(folded.dead_rows.squeeze(3), -torch.inf)
    return Result(out, lse, None, rng)


def backward(
    kernel: str, spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None = None
) -> Grads:
    """The contract's backward, from ``result.out`` and ``result.lse`` (which may be merged ones).

    ``dlse`` [b, h, s_q] is the gradient of lse; it costs copies of q, k, v, out and dout, head_dim widened,
    or a second backward where the kernel has no wider head_dim.

    Raises ValueError for math without a forward under need_grad, for math with ``dlse``, and for dropout
    without the forward's ``saved``, which names the entries.
    """
    traits = resolve(kernel, inputs.q.device.type)
    if traits is MATH:
        return _math_backward(spec, inputs, result, dout, dlse)
    if result.lse is None:
        raise ValueError("the forward gave no lse: it needs need_lse or need_grad")
    check_call(traits, spec, inputs)
    check_gradients(spec, inputs, result, dout, dlse)
    if traits is FLASH_CPU and inputs.bias is not None and dlse is None and sum_is_lost(result.lse):
        # See _by_math_where_lost. Here autograd may be off, in an operator's backward, and math needs it.
        again = tiled.forward(replace(spec, need_grad=True), inputs)
        if torch.allclose(again.out.float(), result.out.float(), rtol=0.05, atol=0.05):  # no merged ones
            return tiled.backward(spec, inputs, again, dout)
    rng = result.saved
    if not rng and traits.device == "cuda":
        if spec.dropout_p:
            raise ValueError("dropout: the backward needs what its own forward saved")
        rng = (inputs.q.new_empty(2, dtype=torch.int64),) * 2  # arguments that nobody reads
    plan = plan_mask(traits, spec, inputs)
    needs_bias = inputs.bias is not None and traits.mask_grad and inputs.bias.requires_grad
    with torch.no_grad():
        inputs = without_padding(inputs)
        folded = fold(traits, plan, spec, inputs, want_lse=True)
        out, lse = result.out, result.lse
        if folded.dead_rows is not None:
            dout = dout.masked_fill(folded.dead_rows, 0.0)
            dlse = None if dlse is None else dlse.masked_fill(folded.dead_rows.squeeze(3), 0.0)
        # A dead row's probabilities are exp(score - lse): +inf makes them 0 where -inf would make NaN.
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        five = Five(*inputs[:3], out, dout)
        parts: list[tuple[Any, ...]] = []
        for q, k, v, out, dout in with_lse_gradient(
            five,
            dlse,
            multiple=1 if traits is FLASH_CPU else HEAD_DIM_MULTIPLE,
            room=traits.head_dim_room,
            equal_head_dims=traits.equal_head_dims,
        ):
            out, dout = alike(traits, readable(traits, out), readable(traits, dout))
            part = run_backward(
                traits,
                dout,
                q,
                k,
                v,
                folded.mask,
                Forward(out, op_lse(traits, lse), rng),
                is_causal=plan.is_causal,
                scale=spec.softmax_scale,
                dropout_p=spec.dropout_p,
                mask_grad=needs_bias,
            )
            parts.append(part)
        dq, dk, dv, dmask = added(parts)
        dbias = None
        if needs_bias and dmask is not None:
            assert inputs.bias is not None
            dbias = dmask.float().sum_to_size(inputs.bias.shape).to(inputs.bias.dtype)
    if dlse is not None:  # without the columns that carried it
        d, e = inputs.q.shape[3], inputs.v.shape[3]
        dq, dk, dv = dq.narrow(-1, 0, d), dk.narrow(-1, 0, d), dv.narrow(-1, 0, e)
    return Grads(dq, dk, dv, dbias)


def alike(traits: Traits, out: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """An out and its gradient; for cuDNN with the same strides.

    A torch built with cuDNN below 9.5.1 asserts it, and only mends it for an out that is dense: not for a
    part of one, as ranks have (run_cudnn_SDP_bprop, MHA.cpp; pytorch#176915).
    """
    if traits.kernel != "sdpa.cudnn" or out.stride() == dout.stride():
        return out, dout
    return out.contiguous(), dout.contiguous()


def readable(traits: Traits, t: Tensor) -> Tensor:
    """``t``, an out or its gradient, or a copy where the op's kernel cannot read its rows.

    With another stride than 1 in a row flash on CPU gives garbage. On CUDA rows are read 16 bytes at once;
    flash's and efficient's ops copy some of what lies otherwise, cuDNN's only rows of another stride.
    """
    if traits.device != "cuda" and t.stride(-1) == 1:
        return t
    return alignment.readable(t)


def _math_forward(spec: Spec, plan: MaskPlan, inputs: Inputs) -> Result:
    """Math has no backward op: its graph, from detached inputs, is what is saved."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs[:3]]
        bias = inputs.bias
        if bias is not None and bias.requires_grad:
            bias = bias.detach().requires_grad_()
            leaves.append(bias)
        inputs = inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2], bias=bias)
        mask, dead_rows = fold(MATH, plan, spec, inputs)
        out, _, _ = run_forward(
            MATH,
            *without_padding(inputs)[:3],
            mask,
            is_causal=plan.is_causal,
            scale=spec.softmax_scale,
            dropout_p=spec.dropout_p,
        )
        if dead_rows is not None:
            out = out.masked_fill(dead_rows, 0.0)
    return Result(out.detach(), None, None, (out, tuple(leaves)))


def _math_backward(spec: Spec, inputs: Inputs, result: Result, dout: Tensor, dlse: Tensor | None) -> Grads:
    if dlse is not None:
        raise ValueError("dlse: sdpa.math gives no lse")
    if not result.saved:
        raise ValueError("sdpa.math ran without need_grad: there is nothing to differentiate")
    out, leaves = result.saved
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return Grads(*grads)


# ---- The fast path: one kernel bound to one call signature, gradients by PyTorch's own formula ---------


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
    one = alone(traits, plan, inputs)
    call = _mask_call_of_one(one, plan, raw) if one else _mask_call(traits, spec, plan, raw, inputs)
    if _may_lose_the_sum(traits, spec, inputs):
        return _by_math_where_lost(call, bind("sdpa.math", spec, inputs))
    return call


class _SumIsLost(Exception):
    """See _by_math_where_lost."""


def _may_lose_the_sum(traits: Traits, spec: Spec, inputs: Inputs) -> bool:
    return traits is FLASH_CPU and spec.need_grad and inputs.bias is not None


def _by_math_where_lost(flash: Callable[..., Tensor], math: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``flash``, and ``math`` where flash would give wrong gradients: rows hidden by a large finite number.

    Flash's backward takes exp(score - lse). Beside scores of finfo.min or -1e9 the logarithm of the sum is
    rounded away in lse = peak + log(sum), and every hidden key counts 1 and not 1/n. Math keeps the
    probabilities themselves. (Source: seen with torch 2.13 on a CPU, in F.sdpa too.)
    """

    def call(*given: Any, **named: Any) -> Tensor:
        try:
            return flash(*given, **named)
        except _SumIsLost:
            return math(*given, **named)

    return call


def _raw(traits: Traits, spec: Spec, plan: MaskPlan, inputs: Inputs) -> Callable[..., Tensor]:
    """``raw(q, k, v, mask=None) -> out``: the op with everything static filled in."""
    op, dropout_p = forward_op(traits), spec.dropout_p
    factor, scale = above_zero(traits, spec.softmax_scale)
    is_causal, want_lse = plan.is_causal, spec.need_grad

    if _may_lose_the_sum(traits, spec, inputs):

        def raw(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
            out, lse = op(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
            if sum_is_lost(lse):
                raise _SumIsLost
            return out

    elif traits is FLASH_CPU:

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


_OTHERS = "other arguments are given than this call was bound with"


def _mask_call_of_one(one: str, plan: MaskPlan, raw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``_mask_call`` where there is one tensor beside q, k and v: see ``alone``."""
    with_bias, shape = one == "bias", plan.shape or ()

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        bias: Tensor | None = None,
        *others: None,
    ) -> Tensor:
        given, left_out = (bias, attn_mask) if with_bias else (attn_mask, bias)
        if given is None or left_out is not None or any(other is not None for other in others):
            raise ValueError(_OTHERS)
        if not with_bias:
            given = q.new_zeros(shape).masked_fill_(given, -torch.inf)
        elif given.dim() < 4:
            given = four_dims(given)
        return raw(q, k, v, given)

    return call


def _mask_call(
    traits: Traits, spec: Spec, plan: MaskPlan, raw: Callable[..., Tensor], bound: Inputs
) -> Callable[..., Tensor]:
    """A call that folds its mask, runs ``raw`` and zeroes the rows that see nothing."""
    padded = bound.seqlens_q is not None or bound.seqlens_kv is not None
    given = (*[t is None for t in bound[3:6]], *[t is None for t in bound[7:9]])

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
        left_out = (
            attn_mask is None,
            bias is None,
            alibi_slopes is None,
            seqlens_q is None,
            seqlens_kv is None,
        )
        if left_out != given:
            raise ValueError(_OTHERS)
        if plan.same_lengths and seqlens_q is not seqlens_kv:
            raise ValueError("this call was bound with one tensor for seqlens_q and seqlens_kv")
        inputs = Inputs(q, k, v, attn_mask, bias, alibi_slopes, seqlens_q=seqlens_q, seqlens_kv=seqlens_kv)
        mask, dead_rows = fold(traits, plan, spec, inputs)
        if padded:
            q, k, v = without_padding(inputs)[:3]
        out = raw(q, k, v, mask)
        return out if dead_rows is None else out.masked_fill(dead_rows, 0.0)

    return call


# ---- The four as kernels of the contract ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SdpaKernel:
    """``bind`` gives a differentiable call of the op itself; it does not give the log-sum-exp."""

    name: str
    forward: Callable[[Spec, Inputs], Result]
    backward: Callable[..., Grads]  # (spec, inputs, result, dout, dlse=None)
    bind: Callable[[Spec, Inputs], Callable[..., Tensor]]


KERNELS = {
    name: SdpaKernel(name, partial(forward, name), partial(backward, name), partial(bind, name))
    for name in NAMES
}
FLASH_KERNEL, EFFICIENT_KERNEL, CUDNN_KERNEL, MATH_KERNEL = KERNELS.values()

"""The contract's forward and backward, by the explicit backward ops.

For callers that merge partial results (context parallelism) or differentiate through lse.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnsel.backends import alignment
from attnsel.backends.checks import check_gradients
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.lse_gradient import Five, added

from .guards import check_call
from .masks import fold, without_padding
from .ops import MATH, Forward, resolve, run_backward, run_forward
from .plan import MaskPlan, Traits, plan_mask
from .shapes import op_lse, plain_lse, with_lse_gradient


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
        for q, k, v, out, dout in [five] if dlse is None else with_lse_gradient(traits, five, dlse):
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

"""Gradients around a kernel of the contract: autograd wraps it once, whichever kernel it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.runtime.kernels import Kernel


class Attend(torch.autograd.Function):
    """``Attend.apply(kernel, spec, inputs, q, k, v, bias, softmax_offset) -> (out, lse, max_logit)``.

    ``inputs`` carries everything; the five differentiable tensors are repeated because autograd sees
    arguments only. lse and max_logit are not differentiable through this function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        spec: Spec,
        inputs: Inputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        softmax_offset: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = kernel.forward(spec, inputs)
        # Tensors go through save_for_backward so that saved-tensor hooks and checkpointing see them.
        flat: list[Tensor | None] = []
        layout: list[Any] = []
        for value in (*inputs, result.out, result.lse, *result.saved):
            is_tensor = isinstance(value, Tensor)
            layout.append(None if is_tensor else (value,))
            flat.append(value if is_tensor else None)
        ctx.save_for_backward(*flat)
        ctx.layout = layout
        ctx.kernel, ctx.spec = kernel, spec
        ctx.set_materialize_grads(False)
        extra = [t for t in (result.lse, result.max_logit) if t is not None]
        ctx.mark_non_differentiable(*extra)
        return result.out, result.lse, result.max_logit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 8
        values = [
            tensor if kept is None else kept[0]
            for tensor, kept in zip(ctx.saved_tensors, ctx.layout, strict=True)
        ]
        n = len(Inputs._fields)
        inputs = Inputs(*values[:n])
        result = Result(values[n], values[n + 1], None, tuple(values[n + 2 :]))
        grads = ctx.kernel.backward(ctx.spec, inputs, result, dout)
        return (None, None, None, grads.q, grads.k, grads.v, grads.bias, grads.softmax_offset)

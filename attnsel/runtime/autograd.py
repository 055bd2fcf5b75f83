"""Gradients around a kernel of the contract: autograd wraps it once, whichever kernel it is.

A kernel gives first derivatives. Those of its gradients are computed when they are asked for, from the same
attention over whole score matrices (``backends/tiled/differentiable.py``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.tiled import differentiable
from attnsel.runtime.kernels import Kernel
from attnsel.settings import current
from attnsel.verdicts.requirements import size

_NAMES = ("q", "k", "v", "bias", "softmax_offset")  # of Inputs and of Grads: what has a gradient


class KernelCall(NamedTuple):
    """A candidate's kernel and all that one call of it takes."""

    name: str
    kernel: Kernel
    spec: Spec
    inputs: Inputs


class Attend(torch.autograd.Function):
    """``Attend.apply(kernel_call, q, k, v, bias, softmax_offset) -> (out, lse, max_logit)``.

    ``kernel_call.inputs`` carries everything; the five differentiable tensors are repeated because autograd
    sees arguments only. lse and max_logit are not differentiable through this function.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: KernelCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        softmax_offset: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        result = call.kernel.forward(call.spec, call.inputs)
        # Tensors go through save_for_backward so that saved-tensor hooks and checkpointing see them, each
        # once: what is one tensor (the lengths of queries and of keys) is one again.
        places: dict[int, int] = {}
        flat: list[Tensor] = []
        layout: list[Any] = []
        for value in (*call.inputs, result.out, result.lse, *result.saved):
            if isinstance(value, Tensor):
                layout.append(places.setdefault(id(value), len(flat)))
                if len(places) > len(flat):
                    flat.append(value)
            else:
                layout.append((value,))
        ctx.save_for_backward(*flat)
        ctx.layout = layout
        ctx.name, ctx.kernel, ctx.spec, _ = (
            call  # without the inputs: hooks could not move what stood here too
        )
        ctx.set_materialize_grads(False)
        extra = [t for t in (result.lse, result.max_logit) if t is not None]
        ctx.mark_non_differentiable(*extra)
        return result.out, result.lse, result.max_logit

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, *unused: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 6
        saved = ctx.saved_tensors
        values = [saved[kept] if isinstance(kept, int) else kept[0] for kept in ctx.layout]
        n = len(Inputs._fields)
        call = KernelCall(ctx.name, ctx.kernel, ctx.spec, Inputs(*values[:n]))
        result = Result(values[n], values[n + 1], None, tuple(values[n + 2 :]))
        if torch.is_grad_enabled():  # create_graph: the gradients may be differentiated
            tensors = (getattr(call.inputs, name) for name in _NAMES)
            return (None, *_Gradients.apply(call, result, dout, *tensors))
        return (None, *_gradients(call, result, dout))


def _gradients(call: KernelCall, result: Result, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads: Grads = call.kernel.backward(call.spec, call.inputs, result, dout)
    return tuple(getattr(grads, name) for name in _NAMES)


class _Gradients(torch.autograd.Function):
    """The kernel's backward as a function of dout and the five tensors; differentiable as often as asked."""

    @staticmethod
    def forward(
        ctx: Any, call: KernelCall, result: Result, dout: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        nothing: dict[str, Any] = dict.fromkeys(_NAMES)
        ctx.call = call._replace(inputs=call.inputs._replace(**nothing))
        ctx.save_for_backward(dout, *tensors)
        ctx.set_materialize_grads(False)
        return _gradients(call, result, dout)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Any, ...]:
        call: KernelCall = ctx.call
        again = torch.is_grad_enabled()
        with torch.enable_grad():
            # Apart from each other, even where q, k and v are one tensor.
            dout, *tensors = (
                None if t is None else t.view_as(t) if again else t.detach().requires_grad_(t.requires_grad)
                for t in ctx.saved_tensors
            )
            leaves: dict[str, Any] = dict(zip(_NAMES, tensors, strict=True))
            inputs = call.inputs._replace(**leaves)
            _check_twice(call, inputs)
            out = differentiable.attend(call.spec, inputs)
            wanted = [t for t in tensors if t is not None and t.requires_grad]
            first = iter(torch.autograd.grad(out, wanted, dout, create_graph=True, allow_unused=True))
            pairs = []
            for t, grad in zip(tensors, outer, strict=True):
                gradient = next(first) if t is not None and t.requires_grad else None
                if gradient is not None and grad is not None and gradient.requires_grad:
                    pairs.append((gradient, grad))
            known = [t for t in (dout, *wanted) if t.requires_grad]
            second: Any = {}
            if pairs and known:
                gradients, outers = zip(*pairs, strict=True)
                found = torch.autograd.grad(gradients, known, outers, create_graph=again, allow_unused=True)
                second = {id(t): grad for t, grad in zip(known, found, strict=True)}
        return (None, None, *(second.get(id(t)) for t in (dout, *tensors)))


class NotTwice(torch.autograd.Function):
    """Gradients as they are; who differentiates them is told why that cannot be.

    ``NotTwice.apply(why, count, *gradients, *tensors)``: ``count`` gradients, and what they depend on, so
    that autograd does not take them for constants.
    """

    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.why = why
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> tuple[Any, ...]:
        raise NotImplementedError(ctx.why)


def _check_twice(call: KernelCall, inputs: Inputs) -> None:
    """Raises NotImplementedError where second derivatives cannot be right, or would take too much memory."""
    if call.spec.dropout_p and CANDIDATES[call.name].dropout != "contract":
        raise NotImplementedError(
            f"second derivatives: which entries {call.name} dropped is not known; use backend='tiled'"
        )
    needed = differentiable.bytes_held(call.spec, inputs)
    limit = current().policy.memory_limit
    if limit is not None and needed > limit:
        raise NotImplementedError(
            f"second derivatives of attention hold whole score matrices, {size(needed)} here, above the "
            f"memory_limit of {size(limit)}: raise it, or differentiate shorter sequences"
        )

"""The kernels behind candidates: imported when they are first chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec, Steps
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.tiled import kernel as differentiable
from attnsel.errors import in_words, short
from attnsel.settings import current
from attnsel.verdicts.record import CandidateRecord
from attnsel.verdicts.requirements import size

# --------------------------------------------------------------------------------------------------------
# What another package's kernel raises and returns, held to the contract (attnsel/backends/contract.py).
#
# An error of whatever kind becomes a refusal, and a result of another kind, shape, type or device becomes an
# error that says so: the next candidate runs where none has run yet, and no wrong tensor goes on.


def with_contract_checks(kernel: Kernel, record: CandidateRecord) -> Kernel:
    """``kernel``, each function of which raises RuntimeError for what it must not return."""
    whose = f"{record.kernel} of {record.distribution}"

    def held(part: str, look: Callable[..., str] = lambda returned, *arguments: "") -> Callable[..., Any]:
        return _held(getattr(kernel, part), look, f"{part} in {whose}")

    return kernel._replace(
        forward=held("forward", _trouble_with_result),
        backward=held("backward", _trouble_with_gradients),
        prepare=kernel.prepare and held("prepare"),
        bind=kernel.bind and _held_bind(kernel.bind, whose),
    )


def _held(function: Callable[..., Any], look: Callable[..., str], what: str) -> Callable[..., Any]:
    """``look(returned, *arguments)`` says what is wrong with a result, or nothing."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            returned = function(*arguments)
        except (KeyboardInterrupt, RuntimeError, ValueError, MemoryError):
            raise
        except BaseException as error:  # SystemExit too
            raise RuntimeError(in_words(error)) from error
        trouble = look(returned, *arguments)
        if trouble:
            raise RuntimeError(f"{what} returned {trouble}")
        return returned

    return call


def _held_bind(bind: Callable[..., Any], whose: str) -> Callable[..., Any]:
    make = _held(bind, _trouble_with_callable, f"bind in {whose}")

    def made(spec: Spec, inputs: Inputs) -> Callable[..., Tensor]:
        return _held(make(spec, inputs), _trouble_with_output, f"what bind in {whose} made")

    return made


def _trouble_with_callable(returned: Any, spec: Spec, inputs: Inputs) -> str:
    return "" if callable(returned) else f"{short(returned)}; allowed: a function"


def _trouble_with_output(out: Any, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> str:
    return _trouble_with("out", out, (*q.shape[:-1], v.shape[-1]), q)


def _trouble_with_result(returned: Any, spec: Spec, inputs: Inputs) -> str:
    if not isinstance(returned, Result):
        return f"{_kind(returned)}; allowed: a Result"
    trouble = _trouble_with_output(returned.out, *inputs[:3])
    if trouble:
        return trouble
    q = inputs.q
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    h = q.shape[1]
    rows = (h, q.shape[0]) if spec.packed else tuple(q.shape[:3])
    for name, shape, needed in (("lse", rows, spec.need_lse), ("max_logit", (h,), spec.return_max_logit)):
        value = getattr(returned, name)
        if value is not None or needed:
            trouble = trouble or _trouble_with(name, value, shape, q, statistics)
    saved: Any = returned.saved
    if not trouble and not isinstance(saved, tuple):
        return f"saved = {_kind(saved)}; allowed: a tuple"
    return trouble


def _trouble_with_gradients(returned: Any, spec: Spec, inputs: Inputs, *more: Any) -> str:
    if not isinstance(returned, Grads):
        return f"{_kind(returned)}; allowed: Grads"
    for name in Grads._fields:
        given, grad = getattr(inputs, name), getattr(returned, name)
        needed = name in ("q", "k", "v") or (given is not None and given.requires_grad)
        if needed or (grad is not None and given is not None):
            trouble = _trouble_with(f"the gradient of {name}", grad, tuple(given.shape), given)
            if trouble:
                return trouble
    return ""


def _trouble_with(
    name: str, t: Any, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> str:
    dtype = dtype or like.dtype
    if isinstance(t, Tensor) and t.shape == shape and t.dtype == dtype and t.device == like.device:
        return ""
    return f"{name} = {_kind(t)}; allowed: {list(shape)} of {_short(dtype)} on {like.device}"


def _kind(value: Any) -> str:
    """A tensor by what it is, anything else by its type; None as it stands."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} of {_short(value.dtype)} on {value.device}"
    return "None" if value is None else f"a {type(value).__name__}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CannotPrepare(Exception):
    """The chosen kernel refuses this call when it is prepared, in these words."""


class Kernel(NamedTuple):
    """A candidate's functions (attnsel/backends/contract.py).

    ``prepare`` raises where a forward or the backward that follows would, and runs nothing. ``bind`` gives a
    call that PyTorch differentiates itself, or, without ``need_grad``, one that raises RuntimeError where a
    transform would want derivatives: ``call(q, k, v, attn_mask, bias, alibi_slopes, seqlens_q, seqlens_kv)
    -> out``; or both directions of its own (Steps). Without one, or where it gives None, autograd is wrapped
    around forward and backward.
    """

    forward: Callable[[Spec, Inputs], Result]
    backward: Callable[..., Grads]
    prepare: Callable[[Spec, Inputs], None] | None = None
    bind: Callable[[Spec, Inputs], Callable[..., torch.Tensor] | Steps | None] | None = None


KERNELS: dict[str, Kernel] = {}  # loaded once; as many as there are candidates


def kernel_of(name: str) -> Kernel:
    """A candidate's kernel. Raises CannotPrepare where it does not load, whatever its module raises; but what
    says that memory or the device is gone as it is."""
    kernel = KERNELS.get(name)
    return KERNELS.setdefault(name, _load(name)) if kernel is None else kernel


def prepare_kernel(kernel: Kernel, spec: Spec, inputs: Inputs) -> None:
    """Forward and backward get ready before the first forward runs: later is too late for another kernel.

    Raises CannotPrepare in the kernel's own words.
    """
    if kernel.prepare is not None:
        refusing(kernel.prepare, spec, inputs)


def refusing(function: Callable[[Spec, Inputs], Any], spec: Spec, inputs: Inputs) -> Any:
    """``function(spec, inputs)``. Raises CannotPrepare in the words of the kernel whose function it is."""
    try:
        return function(spec, inputs)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise_if_no_refusal(error)
        raise CannotPrepare(str(error)) from error


def raise_if_no_refusal(error: BaseException) -> None:
    """Raise ``error`` again where it says nothing about the kernel: memory, or the device itself, is gone."""
    if not is_kernel_refusal(error):
        raise error


def is_kernel_refusal(error: BaseException) -> bool:
    """Whether an error of a kernel's is a refusal of this call, which another kernel may well take."""
    if isinstance(error, (torch.OutOfMemoryError, _DEVICE_ERROR)):
        return False
    text = str(error)
    # Before torch 2.8 a lost device is a RuntimeError; every later call on it fails in the same words.
    if isinstance(error, RuntimeError) and text.startswith(("CUDA error", "HIP error")):
        return False
    # Triton's launcher hands on the driver's words about a kernel, and about the device.
    return not (text.startswith("Triton Error [") and any(words in text for words in _DEVICE_WORDS))


_DEVICE_ERROR: type[BaseException] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)
# cuGetErrorString of CUDA_ERROR_OUT_OF_MEMORY and of the errors after which a context cannot be used.
_DEVICE_WORDS = (
    "out of memory",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable ECC error",
)


def _no_backward(*arguments: Any) -> Grads:
    """In the place of what a kernel that takes no training need not have."""
    raise NotImplementedError("its record lists no training")


def _load(name: str) -> Kernel:
    record = CANDIDATES[name]
    module, _, attribute = record.kernel.partition(":")
    try:
        held: Any = import_module(module)
        if attribute:
            held = getattr(held, attribute)
        trains = not record.plugin or "training" in record.takes
        functions = [held.forward, held.backward if trains else getattr(held, "backward", _no_backward)]
        functions += [getattr(held, part, None) for part in ("prepare", "bind")]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever another package's module raises, SystemExit included
        if isinstance(error, (RuntimeError, _DEVICE_ERROR)):
            raise_if_no_refusal(error)
        whose = f" of {record.distribution}" if record.plugin else ""
        text = str(error) if isinstance(error, ImportError) and not record.plugin else ""
        raise CannotPrepare(text or f"{record.kernel}{whose}: {in_words(error)}") from error
    kernel = Kernel(*functions)
    return with_contract_checks(kernel, record) if record.plugin else kernel


# ---- Gradients around a kernel of the contract: autograd wraps it once, whichever kernel it is ---------
# A kernel gives first derivatives. Those of its gradients are computed when they are asked for, from the same
# attention over whole score matrices (``backends/tiled/kernel.py``).


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


class BoundSteps(NamedTuple):
    """A kernel that has bound both directions.

    ``enter``: q, k and v in the contract's dimensions; ``leave``: its output in the caller's format;
    ``enter_dout`` and ``leave_grad``: the same of gradients.
    """

    name: str
    kernel: Kernel
    spec: Spec
    steps: Steps
    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]
    enter_dout: Callable[[Tensor], Tensor]
    leave_grad: Callable[[Tensor], Tensor]


class AttendAgain(torch.autograd.Function):
    """``AttendAgain.apply(bound_steps, q, k, v) -> out``: ``Attend`` with what a repeated call need not do.

    Formats change inside: outside each view would be a node of the graph, which costs its thread more than a
    launch does.
    """

    @staticmethod
    def forward(ctx: Any, bound: BoundSteps, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        enter = bound.enter
        out, lse = bound.steps.forward(enter(q), enter(k), enter(v))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.bound = bound
        ctx.set_materialize_grads(False)
        return bound.leave(out).detach()  # in place it may be changed, which a view of ours could not

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * 4
        bound: BoundSteps = ctx.bound
        *given, out, lse = ctx.saved_tensors
        q, k, v = map(bound.enter, given)
        dout = bound.enter_dout(dout)
        if torch.is_grad_enabled():  # create_graph: the gradients may be differentiated
            call = KernelCall(*bound[:3], Inputs(q, k, v))
            grads = _Gradients.apply(call, Result(out, lse), dout, q, k, v, None, None)[:3]
        else:
            grads = bound.steps.backward(q, k, v, out, lse, dout)
        return (None, *map(bound.leave_grad, grads))


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

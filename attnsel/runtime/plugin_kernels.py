"""What another package's kernel raises and returns, held to the contract (attnsel/backends/contract.py).

An error of whatever kind becomes a refusal, and a result of another kind, shape, type or device becomes an
error that says so: the next candidate runs where none has run yet, and no wrong tensor goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.errors import in_words, short
from attnsel.verdicts.record import CandidateRecord

if TYPE_CHECKING:
    from attnsel.runtime.kernels import Kernel


def held_to_the_contract(kernel: Kernel, record: CandidateRecord) -> Kernel:
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

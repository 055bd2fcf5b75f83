"""What is checked, with no GPU, of a kernel's calls on CUDA: torch's shape functions and schemas run them.

A backend brings a ``Family`` for each kernel, and a ``test_cuda_matrix.py`` that parametrizes ``check_*`` by
its families (tests/backends/sdpa). They hold the kernel to the contract, and each call of an op to what its
CUDA kernel needs of the tensors it is handed.

Forward and explicit backward take fake tensors of device cuda. What builds an autograd graph takes meta
tensors: graph nodes ask for the device of their tensors, and a torch that finds no GPU ends the process
there (2.6 to 2.8, and CPU builds) or raises. Shape functions, schemas and derivatives are the same for both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel.backends.contract import Inputs, Result, Spec
from cuda_calls import FEATURES, FORMS, Call, Feature

ALIGNMENT = 16  # bytes: the fused kernels read 128 bits at once
STATE = ("philox_seed", "philox_offset", "rng_state", "unused")  # arguments, by the release


@dataclass(frozen=True)
class OpCall:
    """One call of an aten op by the names of its schema; ``results`` in order."""

    op: str
    arguments: dict[str, Any]
    results: tuple[Any, ...]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class Recorder(TorchDispatchMode):
    """The calls of some aten ops made inside, on tensors of ``device``."""

    def __init__(self, ops: set[str], device: str) -> None:
        super().__init__()
        self.ops, self.device, self.seen = ops, device, list[OpCall]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in self.ops and args[0].device.type == self.device:
            named = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
            named |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            self.seen.append(OpCall(name, named, tuple(results)))
        return results


@dataclass(frozen=True)
class Family:
    """A kernel of the contract, the ops it calls on CUDA, and what their CUDA kernels need.

    ``state``: where among the results of its forward op the random state lies. ``refuses`` says by which
    words a call must be refused, None where it must run: written anew, so that a kernel that refuses
    everything does not pass. ``check`` raises AssertionError for a call of an op.
    """

    kernel: Any  # name, forward, backward, and bind where it has one
    ops: tuple[str, ...]  # forward, backward; empty where the kernel has no op of its own
    refuses: Callable[[Call], str | None]
    check: Callable[[OpCall, Call], None]
    state: tuple[int, ...] = ()
    bias_gradient: bool = False
    gives_lse: bool = True
    saves_graph: bool = False  # its forward under need_grad builds an autograd graph
    # Lets meta tensors be taken for CUDA ones.
    on_meta: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def inputs(self, call: Call, device: str) -> Inputs:
        """The call's inputs; without a gradient of the bias where this kernel gives none."""
        inputs = call.inputs(device)
        if inputs.bias is not None and not self.bias_gradient:
            inputs = inputs._replace(bias=inputs.bias.detach())
        return inputs

    def turns(self, feature: Feature, every: bool, refused: bool = False) -> list[Call]:
        """The feature in every form that runs, or in one of them, another one for the next feature."""
        calls = [Call(feature, form) for form in FORMS]
        found = [call for call in calls if (self.refuses(call) is not None) == refused]
        turn = FEATURES.index(feature)
        return found if every else (found[turn % len(found) :][:1] if found else [])

    @contextlib.contextmanager
    def recording(self, device: str) -> Iterator[Recorder]:
        recorder = Recorder(set(self.ops), device)
        shapes: AbstractContextManager[Any] = FakeTensorMode() if device == "cuda" else self.on_meta()
        with shapes, recorder, _CONTIGUOUS:
            yield recorder

    def check_seen(self, seen: list[OpCall], call: Call, backwards: range) -> None:
        """One forward and as many backwards, each with tensors its kernel can read."""
        if not self.ops:
            return
        assert [one.op for one in seen] == [*self.ops[:1], *self.ops[1:] * (len(seen) - 1)]
        assert len(seen) - 1 in backwards
        for one in seen:
            self.check(one, call)
        for backward in seen[1:]:
            self._check_pair(seen[0], backward)

    def _check_pair(self, forward: OpCall, backward: OpCall) -> None:
        """A backward is given what its own forward gave: lse as it lay in memory, and the random state."""
        given, lse = backward["logsumexp"], forward.results[1]
        assert (given.shape, given.stride(), given.dtype) == (lse.shape, lse.stride(), lse.dtype)
        states = [backward[name] for name in STATE if name in backward.arguments]
        assert len(states) == len(self.state)
        for state, i in zip(states, self.state, strict=True):
            assert (state.shape, state.dtype) == (forward.results[i].shape, forward.results[i].dtype)


# Tensor's own method looks for the device before it calls the op, which a CPU build of torch does not have.
_CONTIGUOUS = mock.patch.object(Tensor, "contiguous", lambda t: torch.ops.aten.contiguous.default(t))


def aligned(t: Tensor) -> bool:
    """Whether a kernel may read 16 bytes at any row of ``t``: side by side, from aligned addresses."""
    size = t.element_size()
    steps = [stride for n, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    return t.stride(-1) == 1 and not any(n * size % ALIGNMENT for n in (t.storage_offset(), *steps))


def check_refused(family: Family, call: Call) -> None:
    """Forward and binding raise ValueError that names the reason."""
    words = family.refuses(call)
    with family.recording("cuda"), torch.no_grad():
        inputs = family.inputs(call, "cuda")
        for ask in (family.kernel.forward, family.kernel.bind):
            with pytest.raises(ValueError, match=words):
                ask(call.spec(), inputs)


def check_forward(family: Family, call: Call, *, need_lse: bool, need_grad: bool) -> None:
    """The contract's forward: the op is called once and the result has its shapes and dtypes."""
    device = "meta" if family.saves_graph and need_grad else "cuda"
    spec = call.spec(need_lse=need_lse, need_grad=need_grad)
    with family.recording(device) as recorder, torch.no_grad():
        inputs = family.inputs(call, device)
        result = family.kernel.forward(spec, inputs)
        family.check_seen(recorder.seen, call, range(1))
        _check_result(spec, inputs, result, lse=family.gives_lse and (need_lse or need_grad))


def check_backward(family: Family, call: Call, *, dlse: bool, dout: str = "as out") -> None:
    """The contract's backward of its own forward."""
    device = "meta" if family.saves_graph else "cuda"
    spec = call.spec(need_grad=True)
    with family.recording(device) as recorder, torch.no_grad():
        inputs = family.inputs(call, device)
        result = family.kernel.forward(spec, inputs)
        grads = family.kernel.backward(
            spec,
            inputs,
            result,
            _laid(result.out, dout),
            torch.empty_like(result.lse) if dlse else None,
        )
        family.check_seen(recorder.seen, call, range(1, 2 + dlse))
    of = [*inputs[:3]] + ([inputs.bias] if inputs.bias is not None and inputs.bias.requires_grad else [])
    for grad, one in zip([g for g in grads if g is not None], of, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (one.shape, one.dtype, one.device)


def check_bound(family: Family, call: Call) -> None:
    """The differentiable call, its gradients by torch's own formula."""
    with family.recording("meta") as recorder:
        inputs = family.inputs(call, "meta")
        leaves = [t.requires_grad_() for t in inputs[:3]]
        if inputs.bias is not None and inputs.bias.requires_grad:
            leaves.append(inputs.bias)
        others = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
        bound = family.kernel.bind(call.spec(need_grad=True), inputs)
        if bound is None:  # its way is forward and backward
            return
        out = bound(*inputs[:3], **others)
        grads = torch.autograd.grad(out, leaves, torch.empty_like(out))
        family.check_seen(recorder.seen, call, range(1, 2))
    assert (out.shape, out.dtype) == ((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


def check_bound_forward(family: Family, call: Call) -> None:
    """The same call without gradients, as inference makes it."""
    with family.recording("cuda") as recorder, torch.no_grad():
        inputs = family.inputs(call, "cuda")
        others = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
        bound = family.kernel.bind(call.spec(), inputs)
        if bound is None:
            return
        out = bound(*inputs[:3], **others)
        family.check_seen(recorder.seen, call, range(1))
        assert (out.shape, out.dtype) == ((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype)


def _check_result(spec: Spec, inputs: Inputs, result: Result, lse: bool) -> None:
    out = result.out
    assert tuple(out.shape) == (*inputs.q.shape[:-1], inputs.v.shape[-1])
    assert (out.dtype, out.device) == (inputs.q.dtype, inputs.q.device)
    assert not out.requires_grad
    assert (result.lse is not None) == lse
    if lse:
        rows = tuple(inputs.q.shape[:-1])
        assert tuple(result.lse.shape) == (rows[::-1] if spec.packed else rows)
        assert (result.lse.dtype, result.lse.device) == (torch.float32, inputs.q.device)
    assert result.max_logit is None


def _laid(out: Tensor, how: str) -> Tensor:
    """A gradient of ``out`` as some caller's autograd may leave it in memory."""
    *rows, e = out.shape
    if how == "expanded":
        return out.new_empty(()).expand(out.shape)
    if how == "columns":
        return out.new_empty(*rows[:-1], e, rows[-1]).mT
    if how == "unaligned":
        return out.new_empty(*rows, e + 1).narrow(-1, 1, e)
    return torch.empty_like(out)

"""Every call of PyTorch's kernels on CUDA, forward and backward, against this torch's schemas and shape
functions, and what is handed to each op against what its CUDA kernel needs (tests/proof/cuda_calls.py). No
GPU; other releases of torch: ``benchmarks/torch_versions.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from attnsel.backends.contract import Result
from cuda_calls import FAMILIES, FEATURES, FORMS, Call, Family

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kernel.name)


@pytest.fixture(params=[False, True], ids=["one form", "every form"])
def every(request: pytest.FixtureRequest) -> bool:
    """Whether each feature is asked in all its forms, or in one, by turns."""
    return bool(request.param)


def failures(calls: Iterable[Call], check: Callable[[Call, int], None]) -> dict[str, str]:
    """What goes wrong in which call; the number of a call decides what else is varied."""
    wrong: dict[str, str] = {}
    for number, call in enumerate(calls):
        try:
            check(call, number)
        except Exception as error:
            wrong[f"{call.feature.name}; {call.form.name}"] = f"{type(error).__name__}: {error}"
    return wrong


@families
def test_what_a_kernel_cannot_do_is_refused(family: Family, every: bool) -> None:
    def check(call: Call, number: int) -> None:
        words = family.refuses(call)
        with family.recording("cuda", call, range(0)) as inputs, torch.no_grad():
            for ask in (family.kernel.forward, family.kernel.bind):
                with pytest.raises(ValueError, match=words):
                    ask(call.spec(), inputs)

    assert not failures(family.turns(every, refused=True), check)


def check_forward(family: Family, call: Call, *, need_lse: bool, need_grad: bool) -> None:
    """The contract's forward: the op is called once and the result has its shapes and dtypes."""
    device = "meta" if family.is_math and need_grad else "cuda"
    with family.recording(device, call, range(1)) as inputs, torch.no_grad():
        result = family.kernel.forward(call.spec(need_lse=need_lse, need_grad=need_grad), inputs)
    out, rows = result.out, tuple(inputs.q.shape[:-1])
    assert tuple(out.shape) == (*rows, inputs.v.shape[-1])
    assert (out.dtype, out.device, out.requires_grad) == (inputs.q.dtype, inputs.q.device, False)
    assert result.max_logit is None
    assert (result.lse is not None) == (not family.is_math and (need_lse or need_grad))
    if result.lse is not None:
        assert tuple(result.lse.shape) == (rows[::-1] if call.packed else rows)
        assert (result.lse.dtype, result.lse.device) == (torch.float32, inputs.q.device)


def check_backward(family: Family, call: Call, *, dlse: bool, dout: str = "as out") -> None:
    """The contract's backward of its own forward."""
    spec, device = call.spec(need_grad=True), "meta" if family.is_math else "cuda"
    with family.recording(device, call, range(1, 2 + dlse)) as inputs, torch.no_grad():
        result: Result = family.kernel.forward(spec, inputs)
        given = _laid(result.out, dout), torch.empty_like(result.lse) if dlse else None
        grads = family.kernel.backward(spec, inputs, result, *given)
    of = [*inputs[:3]] + ([inputs.bias] if inputs.bias is not None and inputs.bias.requires_grad else [])
    for grad, one in zip([g for g in grads if g is not None], of, strict=True):
        assert (grad.shape, grad.dtype, grad.device) == (one.shape, one.dtype, one.device)


def check_bound(family: Family, call: Call, need_grad: bool) -> None:
    """The differentiable call, its gradients by torch's own formula; or none, as inference makes it."""
    device = "meta" if need_grad else "cuda"
    with (
        family.recording(device, call, range(int(need_grad), 1 + need_grad)) as inputs,
        torch.set_grad_enabled(need_grad),
    ):
        leaves = [t.requires_grad_() for t in inputs[:3]] if need_grad else []
        if need_grad and inputs.bias is not None and inputs.bias.requires_grad:
            leaves.append(inputs.bias)
        bound = family.kernel.bind(call.spec(need_grad=need_grad), inputs)
        if bound is None:  # its way is forward and backward
            assert family.kernel.name == "sdpa.varlen"
            with torch.no_grad():
                result = family.kernel.forward(call.spec(need_grad=need_grad), inputs)
                if need_grad:
                    family.kernel.backward(call.spec(need_grad=True), inputs, result, result.out)
            return
        others = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
        out = bound(*inputs[:3], **others)
        grads = torch.autograd.grad(out, leaves, torch.empty_like(out)) if need_grad else []
    assert (out.shape, out.dtype) == ((*inputs.q.shape[:-1], inputs.v.shape[-1]), inputs.q.dtype)
    for grad, leaf in zip(grads, leaves, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)


@families
def test_all_else_runs_by_the_contract(family: Family, every: bool) -> None:
    calls, lse = family.turns(every), not family.is_math
    assert len(calls) >= 10

    def check(call: Call, number: int) -> None:
        for n in range(4) if every else [number % 4]:
            check_forward(family, call, need_lse=lse and n > 1, need_grad=bool(n % 2))
        for dlse in (False, True)[: 1 + lse] if every else [lse and number % 2 == 0]:
            check_backward(family, call, dlse=dlse)
        for need_grad in (False, True) if every else [number % 2 == 0]:
            check_bound(family, call, need_grad)

    assert not failures(calls, check)


@families
def test_a_gradient_of_the_result_may_lie_anyhow(family: Family) -> None:
    for number, dout in enumerate(("expanded", "columns", "unaligned")):
        runs = [Call(FEATURES[0], form) for form in FORMS if family.refuses(Call(FEATURES[0], form)) is None]
        check_backward(family, runs[number % len(runs)], dlse=False, dout=dout)


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


def test_every_feature_and_form_runs_somewhere() -> None:
    ran = [(a, b) for a in FEATURES for b in FORMS if any(f.refuses(Call(a, b)) is None for f in FAMILIES)]
    assert {feature for feature, _ in ran} == set(FEATURES)
    assert {form for _, form in ran} == set(FORMS)

"""Random calls of ``attnsel.scaled_dot_product_attention`` against F.sdpa in float64, with gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias

from attnsel import scaled_dot_product_attention
from f_sdpa_calls import RandomCall, a_call

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def results(function: Any, call: RandomCall, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """out and the gradient of each argument that has one; in ``dtype``, where one is given."""
    made = {}
    for name, t in call.tensors.items():
        made[name] = t
        if t is not None and not isinstance(t, CausalBias):
            as_given = dtype is None or t.dtype == torch.bool
            made[name] = t.detach().to(t.dtype if as_given else dtype).requires_grad_(t.requires_grad)
    out = RandomCall(made, call.options).run(function)
    if out.requires_grad:
        out.double().sin().sum().backward()
    grads = {f"d{name}": t.grad for name, t in made.items() if t is not None and t.grad is not None}
    return {"out": out.detach(), **grads}


def check(seed: int) -> None:
    call = a_call(random.Random(seed))
    with sdpa_kernel(SDPBackend.MATH):  # its flash kernel for CPUs gives NaN for causal with a negative scale
        wanted = results(F.scaled_dot_product_attention, call, torch.float64)
    plain = results(F.scaled_dot_product_attention, call)
    found = results(scaled_dot_product_attention, call)
    assert found.keys() == plain.keys() == wanted.keys()
    for name, one in found.items():
        assert (one.shape, one.dtype) == (plain[name].shape, plain[name].dtype), (seed, name)
        scale = max(1.0, wanted[name].abs().max().item())
        error = (one.double() - wanted[name]).abs().max().item() / scale
        theirs = (plain[name].double() - wanted[name]).abs().max().nan_to_num(0.0).item() / scale
        tolerance = max(TOLERANCE[call.tensors["query"].dtype], TOLERANCE[one.dtype])
        assert error <= max(tolerance, 2 * theirs), (seed, name, error, theirs)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seeds", [range(90), pytest.param(range(1000, 4000), marks=pytest.mark.slow)])
def test_random_calls(seeds: range) -> None:
    for seed in seeds:
        check(seed)

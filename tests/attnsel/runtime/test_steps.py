"""A kernel that binds both directions: gradients of gradients, formats, hooks, what is left in the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import attnsel
from attnsel.backends.contract import Inputs, Result, Spec, Steps
from attnsel.runtime import dispatch, kernels
from tables import each

SIZES = {"bshd": (2, 4, 3, 2), "sbhd": (4, 2, 3, 2), "bhsd": (2, 3, 4, 2)}


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``tiled`` binds its two functions; the list says which ran."""
    kernel, taken = kernels.kernel_of("tiled"), list[str]()

    def bind(spec: Spec, inputs: Inputs) -> Steps | None:
        def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any]:
            taken.append("forward")
            return kernel.forward(spec, Inputs(q, k, v))[:2]

        def backward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Any:
            taken.append("backward")
            return kernel.backward(spec, Inputs(q, k, v), Result(out, lse), dout)[:3]

        return Steps(forward, backward) if spec.need_grad else None

    dispatch.clear_cache()
    monkeypatch.setitem(kernels.KERNELS, "tiled", kernel._replace(bind=bind))
    yield taken
    dispatch.clear_cache()


def tensors(qkv_format: str = "bshd") -> list[Tensor]:
    make = torch.Generator().manual_seed(3)
    shape = SIZES[qkv_format]
    return [torch.randn(shape, dtype=torch.float64, generator=make).requires_grad_() for _ in range(3)]


@each("qkv_format", SIZES)
def test_first_and_second_derivatives_are_right(qkv_format: str, taken: list[str]) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnsel.attention(q, k, v, qkv_format=qkv_format, attn_mask_type="causal", backend="tiled")

    given = tensors(qkv_format)
    assert torch.autograd.gradcheck(call, given)
    assert torch.autograd.gradgradcheck(call, given)
    assert {"forward", "backward"} <= set(taken)
    assert all(edge is None or "Accumulate" in edge.name() for edge, _ in call(*given).grad_fn.next_functions)


def test_a_module_flattens_heads(taken: list[str]) -> None:
    q, k, v = tensors("sbhd")
    outs = [attnsel.DotProductAttention(3, 2, backend=name)(q, k, v) for name in ("tiled", "sdpa.math")]
    found, wanted = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs)
    assert taken[-1] == "backward"
    torch.testing.assert_close(found, wanted)


def test_what_changes_the_output_after_it_was_saved_is_an_error() -> None:
    q, k, v = tensors()
    out = attnsel.attention(q, k, v, backend="tiled")
    with torch.no_grad():
        out.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(torch.ones_like(out))


def test_hooks_may_hand_back_other_strides(taken: list[str]) -> None:
    q, k, v = tensors()
    dout = torch.randn_like(q)

    def moved(t: Tensor) -> Tensor:
        return t.detach().transpose(0, -1).contiguous().transpose(0, -1)

    wanted = torch.autograd.grad(attnsel.attention(q, k, v, backend="tiled"), (q, k, v), dout)
    with saved_tensors_hooks(moved, lambda t: t):
        out = attnsel.attention(q, k, v, backend="tiled")
    for one, another in zip(torch.autograd.grad(out, (q, k, v), dout), wanted, strict=True):
        torch.testing.assert_close(one, another)

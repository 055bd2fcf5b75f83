"""Gradients beside rows that a large finite number hides, of every way to a kernel on a CPU.

torch's own flash backward counts each key of such a row 1 and not 1/n: exp(score - lse), where the logarithm
of the sum is rounded away in lse. F.sdpa's numbers with its math kernel are what is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnsel

LOWEST = torch.finfo(torch.float32).min
FILLS = (LOWEST, -1e9, -1e5, torch.finfo(torch.float16).min)
SHAPES = {
    "4-D": ((2, 2, 6, 8), (1, 1, 6, 6)),
    "3-D": ((4, 6, 8), (6, 6)),
    "padding": ((2, 2, 6, 8), (2, 1, 1, 6)),
}


def mask_of(shape: tuple[int, ...], fill: float) -> Tensor:
    """Left padding: the first keys are hidden from all, and all keys from the first row or sequence."""
    mask = torch.zeros(shape)
    mask[..., :2] = fill
    if shape[-2] == 1:
        mask[0] = fill
    else:
        mask[..., 0, :] = fill
    return mask


def results(run: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=made).to(dtype).requires_grad_() for _ in range(3))
    out = run(q, k, v)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), (q, k, v))]


def ways(mask: Tensor, kernel: str) -> dict[str, Callable[..., Any]]:
    def drop_in(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attnsel.override(backend=kernel):
            return attnsel.scaled_dot_product_attention(q, k, v, mask)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [(t if t.dim() == 4 else t[None]).transpose(1, 2) for t in (q, k, v)]
        bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": mask}
        return attnsel.attention(*heads, backend=kernel, **bias).transpose(1, 2).reshape(q.shape)

    return {"drop-in": drop_in, "attention": attention}


@pytest.mark.parametrize("kernel", ["sdpa.flash", "sdpa.math", "tiled"])
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("fill", FILLS)
def test_they_are_those_of_math(fill: float, kind: str, kernel: str) -> None:
    shape, mask_shape = SHAPES[kind]
    mask = mask_of(mask_shape, fill)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = results(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), shape, torch.float32)
    for run in ways(mask, kernel).values():
        for one, right in zip(results(run, shape, torch.float32), wanted, strict=True):
            torch.testing.assert_close(one, right, atol=2e-5, rtol=1e-3)


@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_compiled_calls_have_them_too() -> None:
    mask = mask_of((1, 1, 6, 6), LOWEST)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnsel.scaled_dot_product_attention(q, k, v, mask)

    compiled = torch.compile(run, backend="aot_eager")
    wanted, found = (results(one, (2, 2, 6, 8), torch.float32) for one in (run, compiled))
    for one, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, right, atol=2e-5, rtol=1e-3)


def test_a_bias_of_usual_size_stays_with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnsel.backends.sdpa import run as kernels

    def refuses(*given: Any) -> Any:
        raise AssertionError("math ran")

    monkeypatch.setattr(kernels, "_SumIsLost", refuses)
    for mask in (torch.randn(6, 6), torch.full((6, 6), -torch.inf).triu(1), mask_of((6, 6), -1000.0)):
        results(ways(mask, "sdpa.flash")["drop-in"], (4, 6, 8), torch.float32)

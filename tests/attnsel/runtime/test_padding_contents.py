"""What lies in padded rows never reaches a real row or a gradient, whichever candidate runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attnsel import attention

FILLS = (math.nan, math.inf, -math.inf, 1e38)
LENGTHS = torch.tensor([0, 3, 7], dtype=torch.int32)  # 3 and 4 of 6 rows
STARTS = torch.tensor([0, 6, 12], dtype=torch.int32)


def results(backend: str, fill: float, dtype: Any, **arguments: Any) -> list[Any]:
    """out and the gradients of q, k and v where padded rows of all three hold ``fill``."""
    torch.manual_seed(1)
    tensors = [torch.randn(2, 6, 2, 16).to(dtype) for _ in range(3)]
    for t in tensors:
        t[0, 3:] = t[1, 4:] = fill
    if arguments["qkv_format"] == "thd":
        tensors = [t.flatten(0, 1) for t in tensors]
        arguments |= {"cu_seqlens_q_padded": STARTS, "cu_seqlens_kv_padded": STARTS}
    leaves = [t.requires_grad_() for t in tensors]
    out = attention(*leaves, backend=backend, cu_seqlens_q=LENGTHS, cu_seqlens_kv=LENGTHS, **arguments)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize(
    ("backend", "qkv_format"),
    [
        ("sdpa.flash", "bshd"),
        ("sdpa.math", "bshd"),
        ("tiled", "bshd"),
        ("triton", "bshd"),
        ("tiled", "thd"),
        ("triton", "thd"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_padded_rows_reach_nothing(backend: str, qkv_format: str, mask: str, dtype: Any) -> None:
    if backend == "triton" and (mask != "padding_causal" or dtype != torch.float32):
        pytest.skip("interpreted: one case of each format")
    arguments = {"qkv_format": qkv_format, "attn_mask_type": mask}
    wanted = results(backend, 0.0, dtype, **arguments)
    for fill in FILLS:
        for one, other in zip(results(backend, fill, dtype, **arguments), wanted, strict=True):
            assert torch.equal(one, other), f"{fill} reached a result"


@pytest.mark.parametrize("backend", ["sdpa.flash", "tiled"])
@pytest.mark.filterwarnings("ignore")
def test_padded_rows_reach_no_lse_and_no_explicit_gradient(backend: str) -> None:
    found = []
    for fill in (0.0, math.nan):
        torch.manual_seed(1)
        q, k, v = (torch.randn(2, 6, 2, 16) for _ in range(3))
        for t in (q, k, v):
            t[0, 3:] = t[1, 4:] = fill
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, lse = attention(
            *leaves, attn_mask_type="padding", cu_seqlens_q=LENGTHS, cu_seqlens_kv=LENGTHS, backend=backend,
            return_lse=True,
        )  # fmt: skip
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(out.sum(), leaves)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)

"""What lies in padded rows never reaches a real row or a gradient, whichever candidate runs."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from attnsel import attention

WITH_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
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


@pytest.mark.parametrize(
    ("backend", "qkv_format", "mask", "dtype"),
    [
        ("sdpa.flash", "bshd", "padding_causal", torch.float32),
        ("sdpa.math", "bshd", "padding", torch.bfloat16),
        ("tiled", "bshd", "padding_causal_bottom_right", torch.bfloat16),
        ("tiled", "thd", "padding", torch.float32),
        pytest.param("triton", "bshd", "padding_causal", torch.float32, marks=WITH_TRITON),
        pytest.param("triton", "thd", "padding_causal", torch.float32, marks=WITH_TRITON),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_padded_rows_reach_nothing(backend: str, qkv_format: str, mask: str, dtype: Any) -> None:
    arguments = {"qkv_format": qkv_format, "attn_mask_type": mask}
    wanted = results(backend, 0.0, dtype, **arguments)
    for fill in FILLS[:2] if backend == "triton" else FILLS:
        for one, other in zip(results(backend, fill, dtype, **arguments), wanted, strict=True):
            assert torch.equal(one, other), f"{fill} reached a result"

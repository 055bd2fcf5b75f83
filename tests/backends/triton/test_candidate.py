"""The Triton candidate through the public API, on CPU tensors: interpreted when forced, never by itself."""

from __future__ import annotations

import pytest
import torch

from attnsel import DotProductAttention, attention
from tables import each

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensors():
    """[b, s, h, d]"""
    torch.manual_seed(0)
    return [torch.randn(2, 20, heads, 16, requires_grad=True) for heads in (2, 1, 1)]


@each(
    "arguments",
    [
        {"attn_mask_type": "causal", "window_size": (7, 0), "softcap": 5.0},
        {"softmax_type": "off-by-one", "core_attention_bias_type": "alibi", "attention_dropout": 0.3},
    ],
)
def test_forced_on_cpu_tensors_it_gives_what_tiled_gives(arguments):
    results = []
    for backend in ("triton", "tiled"):
        q, k, v = tensors()
        torch.manual_seed(1)
        out = attention(q, k, v, backend=backend, **arguments)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_on_cpu_tensors_it_is_never_chosen_by_itself():
    q, k, v = tensors()
    module = DotProductAttention(2, 16, 1, qkv_format="bshd", softcap=5.0)
    module(q, k, v)
    assert module.last_selection.backend == "tiled"
    assert [reason.code for reason in module.last_selection["triton"].reasons] == ["TRITON007"]

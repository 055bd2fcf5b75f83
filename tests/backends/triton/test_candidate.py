"""The Triton candidate through the public API, on CPU tensors: interpreted when forced, never by itself."""

from __future__ import annotations

import pytest
import torch

from attnsel import DotProductAttention, NoBackendError, attention

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensors(heads=2, groups=1, rows=20, width=16):
    torch.manual_seed(0)
    return [
        torch.randn(2, rows, n, width, requires_grad=True) for n in (heads, groups, groups)
    ]  # [b, s, h, d]


def both(**arguments):
    results = []
    for backend in ("triton", "tiled"):
        q, k, v = tensors()
        torch.manual_seed(1)
        out = attention(q, k, v, backend=backend, **arguments)
        out.square().sum().backward()
        results.append((out, q.grad, k.grad, v.grad))
    return zip(*results, strict=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask_type": "causal", "window_size": (7, 0), "softcap": 5.0},
        {"softmax_type": "off-by-one", "core_attention_bias_type": "alibi", "attention_dropout": 0.3},
    ],
    ids=["window and softcap", "sink, alibi and dropout"],
)
def test_forced_on_cpu_tensors_it_gives_what_tiled_gives(arguments):
    for ours, theirs in both(**arguments):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_on_cpu_tensors_it_is_never_chosen_by_itself():
    q, k, v = tensors()
    module = DotProductAttention(2, 16, 1, qkv_format="bshd", softcap=5.0)
    module(q, k, v)
    assert module.last_selection.backend == "tiled"
    assert [reason.code for reason in module.last_selection["triton"].reasons] == ["TRITON007"]


def test_a_spread_out_head_dimension_is_copied_and_said():
    q, k, v = tensors(width=32)
    q, k, v = q[..., ::2], k[..., ::2], v[..., ::2]
    module = DotProductAttention(2, 16, 1, qkv_format="bshd", backend="triton")
    out = module(q, k, v)
    torch.testing.assert_close(out, DotProductAttention(2, 16, 1, qkv_format="bshd")(q, k, v))
    assert [a.name for a in module.last_selection["triton"].adaptations] == ["contiguous"]
    with pytest.raises(NoBackendError, match="TRITON008"):
        attention(q, k, v, backend="triton", adapt="never")


def test_it_compiles_without_a_graph_break():
    q, k, v = tensors()
    module = DotProductAttention(2, 16, 1, qkv_format="bshd", backend="triton")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v)
    out.sum().backward()
    torch.testing.assert_close(out, module(q, k, v))
    assert q.grad is not None

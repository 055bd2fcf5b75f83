"""The modes PyTorch code runs in: autocast, no gradients, tensors without data, recomputation, copies."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from attnsel import DotProductAttention, attention, clear_cache

torch.set_num_threads(1)


def qkv(
    *shape: int, seed: int = 0, grad: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(shape or (2, 6, 4, 8), generator=gen, dtype=dtype).requires_grad_(grad) for _ in "qkv"
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
    """F.scaled_dot_product_attention on [b, s, h, d]."""
    out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), **arguments)
    return out.transpose(1, 2)


def lengths(*values: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32)


# Every kind of way a call is run: the bare op, a folded mask, copies, our own autograd.
WAYS: dict[str, dict[str, Any]] = {
    "bare": {},
    "causal": {"attn_mask_type": "causal"},
    "folded": {"window_size": (2, 1)},
    "alibi": {"core_attention_bias_type": "alibi"},
    "padding": {"attn_mask_type": "padding", "cu_seqlens_q": lengths(6, 3), "cu_seqlens_kv": lengths(6, 3)},
    "tiled": {"softcap": 2.0},
    "tiled alibi": {"softcap": 2.0, "core_attention_bias_type": "alibi"},
    "lse": {"return_lse": True},
}
ways = pytest.mark.parametrize("way", WAYS)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def test_autocast_gives_the_type_and_numbers_of_f_sdpa() -> None:
    for given in (torch.float32, torch.float16, torch.float64):  # float64 it leaves as it is
        tensors = [t.to(given) for t in qkv()]
        for causal in (True, False):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = attention(
                    *tensors, attn_mask_type="causal" if causal else "no_mask", backend="sdpa.flash"
                )
                wanted = sdpa(*tensors, is_causal=causal)
                with torch.autocast("cpu", enabled=False):
                    assert attention(*tensors).dtype == given
            assert out.dtype == wanted.dtype
            assert torch.equal(out, wanted)
            assert attention(*tensors).dtype == given


# Without gradients


@ways
def test_gradients_work_before_and_after_inference_mode(way: str) -> None:
    clear_cache()  # whatever is kept must be usable in the other mode
    wanted = None
    for _ in range(2):
        with torch.inference_mode():
            inside = first(attention(*qkv(), **WAYS[way]))
            assert inside.is_inference()
        with torch.no_grad():
            assert not first(attention(*qkv(grad=True), **WAYS[way])).requires_grad
        q, k, v = qkv(grad=True)
        out = first(attention(q, k, v, **WAYS[way]))
        assert out.requires_grad
        out.square().sum().backward()
        assert q.grad is not None
        assert wanted is None or torch.equal(q.grad, wanted)
        wanted = q.grad
        torch.testing.assert_close(out.detach(), inside.clone(), rtol=0, atol=1e-6)


# Tensors without data


@ways
def test_meta_tensors_give_the_shape_and_type(way: str) -> None:
    arguments = {n: t.to("meta") if isinstance(t, Tensor) else t for n, t in WAYS[way].items()}
    q, k, v = (t.to("meta", torch.bfloat16).requires_grad_() for t in qkv())
    out = first(attention(q, k, v, **arguments))
    assert (out.shape, out.dtype, out.device.type) == ((2, 6, 4, 8), torch.bfloat16, "meta")
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("way", ["folded", "padding", "tiled alibi"])
def test_fake_tensors_give_the_shape_type_and_device(way: str, device: str) -> None:
    clear_cache()
    real = first(attention(*qkv(grad=True), **WAYS[way])).detach()  # its closure is not for fakes
    # Without CUDA, torch 2.13 itself aborts at the first view of a fake CUDA tensor that requires a gradient.
    grad = device == "cpu" or torch.cuda.is_available()
    with FakeTensorMode() as mode:

        def fake(t: Tensor) -> Tensor:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

        arguments = {n: fake(t) if isinstance(t, Tensor) else t for n, t in WAYS[way].items()}
        q, k, v = (fake(t).requires_grad_(grad) for t in qkv())
        out = first(attention(q, k, v, **arguments))
        assert isinstance(out, FakeTensor)
        assert out.fake_mode is mode
        assert (out.shape, out.dtype, out.device.type) == (real.shape, real.dtype, device)
        if grad:
            out.sum().backward()
            assert q.grad is not None
            assert (q.grad.shape, q.grad.device.type) == (q.shape, device)
    # Nothing that was made of fakes stays behind.
    assert torch.equal(first(attention(*qkv(), **WAYS[way])), real)


# Recomputation

WITH_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize(
    ("arguments", "reentrant"),
    [
        (WAYS["padding"], False),
        (WAYS["lse"], True),
        ({"attention_dropout": 0.4, "backend": "tiled"}, True),
        ({"attention_dropout": 0.4}, False),
        pytest.param({"attention_dropout": 0.4, "backend": "triton"}, False, marks=WITH_TRITON),
    ],
)
def test_checkpointing_changes_no_number(arguments: dict[str, Any], reentrant: bool) -> None:
    def run(*inputs: Tensor) -> Tensor:
        return first(attention(*inputs, **arguments))

    results = []
    for wrapped in (False, True):
        inputs = qkv(grad=True)
        torch.manual_seed(3)
        out = checkpoint(run, *inputs, use_reentrant=reentrant) if wrapped else run(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs)])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


# State


def test_state_dict_holds_the_learnable_offset_alone() -> None:
    def build(softmax_type: str) -> DotProductAttention:
        return DotProductAttention(4, 8, qkv_format="bshd", softmax_type=softmax_type)

    assert build("vanilla").state_dict() == build("off-by-one").state_dict() == {}
    module, other = build("learnable"), build("learnable")
    nn.init.normal_(module.softmax_offset, generator=torch.Generator().manual_seed(1))
    assert list(module.state_dict()) == ["softmax_offset"]
    assert not torch.equal(other(*qkv()), module(*qkv()))
    other.load_state_dict(module.state_dict())
    assert torch.equal(other(*qkv()), module(*qkv()))

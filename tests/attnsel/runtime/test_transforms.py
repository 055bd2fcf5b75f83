"""Transforms of PyTorch's around a call: right, or an error; and nothing learnt about plain calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnsel import DotProductAttention, attention, clear_cache
from attnsel.runtime.refusals import evidence

BACKENDS = ("sdpa.flash", "sdpa.math", "tiled", None)


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    clear_cache()
    yield
    clear_cache()


def ours(backend: str | None) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, attn_mask_type="causal", backend=backend)


def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2)


def qkv(*lead: int) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(*lead, 2, 5, 2, 8, dtype=torch.float64) for _ in "qkv"]


def right_or_refused(call: Callable[[], Any], wanted: Any) -> bool:
    """Whether it was right; False for an error. Wrong numbers fail the test."""
    try:
        got = call()
    except (RuntimeError, NotImplementedError):
        return False
    torch.testing.assert_close(got, wanted)
    return True


# What each candidate does today: True right, False an error.
JVP = {"sdpa.flash": False, "sdpa.math": True, "tiled": False, None: True}
VMAP = {"sdpa.flash": True, "sdpa.math": True, "tiled": False, None: True}
GRAD = {"sdpa.flash": True, "sdpa.math": True, "tiled": False, None: True}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_jvp(backend: str | None) -> None:
    tensors, tangents = tuple(qkv()), tuple(qkv())
    wanted = torch.func.jvp(definition, tensors, tangents)
    for _ in range(2):  # the second time, a plain call has been made in between
        assert (
            right_or_refused(lambda: torch.func.jvp(ours(backend), tensors, tangents), wanted) is JVP[backend]
        )
        ours(backend)(*tensors)
    assert evidence().refusals == ()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_vmap(backend: str | None) -> None:
    tensors = qkv(3)
    wanted = definition(*tensors)
    assert right_or_refused(lambda: torch.vmap(ours(backend))(*tensors), wanted) is VMAP[backend]
    assert evidence().refusals == ()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore")
def test_functional_gradients(backend: str | None) -> None:
    tensors = qkv()

    def loss(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v: call(q, k, v).pow(2).sum()

    wanted = torch.func.grad(loss(definition))(*tensors)
    assert right_or_refused(lambda: torch.func.grad(loss(ours(backend)))(*tensors), wanted) is GRAD[backend]
    assert evidence().refusals == ()


def test_a_hook_that_raises_is_the_callers_affair() -> None:
    def refuse(t: Tensor) -> Tensor:
        raise RuntimeError("not this one")

    q, k, v = (t.requires_grad_() for t in qkv())
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda t: t),
        pytest.raises(RuntimeError, match="not this one"),
    ):
        attention(q, k, v, attn_mask_type="causal")
    assert evidence().refusals == ()


def test_a_mode_that_raises_is_the_callers_affair() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoAttention(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in str(func):
                raise RuntimeError("no attention here")
            return func(*args, **(kwargs or {}))

    with NoAttention(), pytest.raises(RuntimeError, match="no attention here"):
        attention(*qkv(), attn_mask_type="causal")
    assert evidence().refusals == ()


def test_functional_call_copies_and_pickles() -> None:
    module = DotProductAttention(2, 8, qkv_format="bshd", softmax_type="learnable").double()
    tensors = qkv()
    wanted = module(*tensors)
    with torch.no_grad():
        moved = {"softmax_offset": module.softmax_offset + 1.0}
    assert not torch.equal(torch.func.functional_call(module, moved, tuple(tensors)), wanted)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*tensors), wanted)


def test_autocast() -> None:
    q, k, v = (t.float() for t in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, attn_mask_type="causal")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), definition(q, k, v), rtol=2e-2, atol=2e-2)

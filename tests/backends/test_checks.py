"""Kernels called without the module: the same checks, and strides taken or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnsel import DotProductAttention, NoBackendError, attention
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.sdpa import run as sdpa
from attnsel.backends.tiled import kernel as tiled
from layout_cases import BACKENDS, HAS_TRITON, B, S, assert_rounding, reference
from tables import each

torch.set_num_threads(1)


def direct(backend: str) -> tuple[Callable[..., Result], Callable[..., Any]]:
    if backend == "triton":
        from attnsel.backends.triton import run as triton

        return triton.forward, triton.backward
    if backend == "tiled":
        return tiled.forward, tiled.backward
    return sdpa.KERNELS[backend].forward, sdpa.KERNELS[backend].backward


X = torch.randn(2, 4, 6, 8)
LENGTHS = torch.tensor([3, 6], dtype=torch.int32)
# One of each kind of tensor: all that is refused is recorded/tensors.txt.
UNFIT: list[dict[str, Any]] = [
    {"k": X[..., :7]},
    {"k": X.to("meta")},
    {"bias": torch.zeros(3, 1, 6, 6)},
    {"seqlens_kv": LENGTHS.float()},
]


@each("backend", BACKENDS)
def test_a_kernel_called_directly_checks_what_the_module_checks(backend: str) -> None:
    forward, backward = direct(backend)
    result = Result(X, X[..., 0].contiguous(), None, ())
    for change in UNFIT:
        spec, inputs = Spec(need_grad=True), Inputs(X, X, X)._replace(**change)
        with pytest.raises(ValueError, match=r"\w"):
            forward(spec, inputs)
        with pytest.raises(ValueError, match=r"\w"):
            backward(spec, inputs, result, X)


@pytest.mark.parametrize("backend", ["tiled", "sdpa.flash", *(["triton"] if HAS_TRITON else [])])
def test_a_backward_checks_what_comes_back(backend: str) -> None:
    forward, backward = direct(backend)
    spec = Spec(need_grad=True)
    result = forward(spec, Inputs(X, X, X))
    assert result.lse is not None
    whole = {"out": result.out, "lse": result.lse, "dout": X, "dlse": result.lse}
    for wrong in whole:
        given = {**whole, wrong: whole[wrong][:1]}
        changed = result._replace(out=given["out"], lse=given["lse"])
        with pytest.raises(ValueError, match=rf"{wrong} must be \[2, 4, 6"):
            backward(spec, Inputs(X, X, X), changed, given["dout"], given["dlse"])


@pytest.mark.parametrize("backend", ["sdpa.flash", *(["triton"] if HAS_TRITON else [])])
def test_a_stride_that_a_kernel_cannot_take_is_refused_or_copied_and_counted(backend: str) -> None:
    q = torch.randn(B, S, 4, 16)[..., ::2]
    with pytest.raises(ValueError, match=r"stride.* 1.*got 2|stride of q is 2"):
        direct(backend)[0](Spec(), Inputs(*[q.transpose(1, 2)] * 3))
    with pytest.raises(NoBackendError) as caught:
        attention(q, q, q, backend=backend, adapt="never")
    assert {reason.code for reason in caught.value.selection[backend].reasons} & {"SDPA020", "TRITON008"}
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask", backend=backend)
    assert_rounding(core(q, q, q), reference("bshd", q.double(), q.double(), q.double(), {}).flatten(-2))
    assert core.last_selection is not None
    (copy,) = core.last_selection[backend].adaptations
    assert (copy.name, copy.bytes) == ("contiguous", 3 * q.numel() * 4)

"""What guards refuse beyond the record (tests/backends/recorded/sdpa.txt), and the dangers themselves. That
what they let through is attention: the fuzz target ``numbers``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.sdpa import ops
from attnsel.backends.sdpa.guards import check_call, violations
from attnsel.backends.sdpa.ops import resolve
from attnsel.backends.sdpa.run import bind
from tables import each

torch.set_num_threads(1)

CUDA = (ops.FLASH_CUDA, ops.EFFICIENT, ops.CUDNN)
ALL = ops.TRAITS


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(
    q: tuple[int, ...] = (2, 4, 6, 8),
    k: tuple[int, ...] = (2, 4, 8, 8),
    v: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float16,
) -> Inputs:
    return Inputs(normal(*q, dtype=dtype), normal(*k, dtype=dtype), normal(*(v or k), dtype=dtype))


def broken(traits: ops.Traits, inputs: Inputs, **spec: Any) -> set[str]:
    """Names of the guards a call breaks."""
    return {line.partition(":")[0] for line in violations(traits, Spec(**spec), inputs)}


BASE = qkv()
WITH_GRAD = BASE._replace(q=BASE.q.clone().requires_grad_())
BIAS = normal(1, 4, 6, 8, dtype=torch.float16)


def test_what_is_no_danger_breaks_nothing() -> None:
    for traits in ALL:
        assert resolve(CANDIDATES[traits.kernel].name, traits.device) is traits
        assert broken(traits, BASE) == set()
    with torch.no_grad():
        assert broken(ops.EFFICIENT, WITH_GRAD) == set()
    inputs = BASE._replace(q=normal(2, 3, 6, 8, dtype=torch.float16)[:, :1], k=BASE.k[:, :1], v=BASE.v[:, :1])
    odd = inputs.q.as_strided(inputs.q.shape, (144, 3, 8, 1))  # a dimension of size 1 may have any stride
    assert broken(ops.EFFICIENT, inputs._replace(q=odd)) == set()


def test_deterministic_is_met_by_torchs_setting_but_never_by_cudnn() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        met = {t.kernel for t in CUDA if not broken(t, BASE, deterministic=True, need_grad=True)}
    finally:
        torch.use_deterministic_algorithms(False)
    assert met == {"sdpa.flash", "sdpa.efficient"}


def test_all_broken_guards_are_named_with_kernel_and_argument() -> None:
    inputs = BASE._replace(q=normal(2, 4, 6, 16, dtype=torch.float16)[..., ::2])
    with pytest.raises(ValueError, match=r"sdpa\.flash on cpu: last_stride: q\..*dropout: dropout_p"):
        check_call(resolve("sdpa.flash", "cpu"), Spec(dropout_p=0.1), inputs)
    masked = BASE._replace(attn_mask=torch.zeros(6, 8, dtype=torch.bool), bias=BIAS)
    check_call(ops.MATH, Spec(softmax_scale=0.1, dropout_p=0.5), masked)
    with pytest.raises(ValueError, match="attn_mask must be bool"):
        check_call(ops.MATH, Spec(), BASE._replace(attn_mask=BIAS))


def test_fake_tensors_are_checked_by_their_offset() -> None:
    with FakeTensorMode():
        flat = torch.empty(385, dtype=torch.float16, device="cuda")
        q = flat.as_strided((2, 4, 6, 8), (192, 48, 8, 1), 1)
        k = torch.empty(2, 4, 8, 8, dtype=torch.float16, device="cuda")
        assert broken(ops.FLASH_CUDA, Inputs(q, k, k)) == {"alignment"}
        assert broken(ops.FLASH_CUDA, Inputs(flat.as_strided(q.shape, q.stride(), 0), k, k)) == set()


def test_flash_writes_rows_into_a_result_that_has_none_where_strides_of_q_tie() -> None:
    q, k = normal(4).as_strided((1, 1, 2, 3), (1, 2, 1, 1)), normal(1, 1, 2, 3)
    truth = F.scaled_dot_product_attention(q.contiguous(), k, k)
    wrong = (F.scaled_dot_product_attention(q, k, k) - truth).abs().max()
    assert not wrong <= 0.1, "what torch leaves unwritten is any memory, NaN too"
    assert broken(ops.FLASH_CPU, Inputs(q, k, k)) == {"result_rows"}
    sliding = normal(20).as_strided((1, 1, 2, 3), (9, 9, 2, 1))  # overlaps, and no stride ties
    assert broken(ops.FLASH_CPU, Inputs(sliding, k, k)) == set()


@each(
    "q, k",
    [
        ((2, 4, 0, 8), (2, 4, 6, 8)),
        ((2, 4, 6, 8), (2, 4, 0, 8)),
        ((0, 4, 6, 8), (0, 4, 6, 8)),
        ((2, 0, 6, 8),) * 2,
    ],
)
def test_math_takes_every_empty_shape(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    inputs = Inputs(*(t.requires_grad_() for t in qkv(q, k, dtype=torch.float32)[:3]))
    out = bind("sdpa.math", Spec(need_grad=True), inputs)(*inputs[:3])
    assert out.shape == q
    assert not out.any()
    for gradient, of in zip(torch.autograd.grad(out.sum(), inputs[:3]), inputs[:3], strict=True):
        assert gradient.shape == of.shape
        assert not gradient.any()

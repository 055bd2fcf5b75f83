"""The public calls at the edges: other types, nothing to compute, results beside the output. That a feature
reaches every kernel: test_nothing_dropped.py; numbers of any call: the fuzz target ``numbers``."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnsel import NoBackendError, attention
from call_cases import (
    BACKENDS,
    Call,
    assert_close,
    by_name,
)

torch.set_num_threads(1)


def check(call: Call, backend: str | None) -> None:
    if backend is not None and call.refused(backend):
        with pytest.raises(NoBackendError) as caught:
            attention(*call.qkv, **call.arguments, backend=backend)
        selection = caught.value.selection
        assert selection.backend is None
        assert selection[backend].reasons
        assert all(reason.code in str(caught.value) for reason in selection[backend].reasons)
        return
    result = attention(*call.qkv, **call.arguments, backend=backend)
    out = result[0] if isinstance(result, tuple) else result
    actual = {"out": out.detach(), **call.gradients(out)}
    if call.arguments.get("return_lse"):
        actual["lse"] = result[1]
    if call.arguments.get("return_max_logit"):
        actual["max_logit"] = result[-1]
    assert out.dtype == call.case.dtype
    assert_close(actual, call.expected(), call.case.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_lower_precision_agrees_within_its_rounding(backend: str, dtype: torch.dtype) -> None:
    for name in ("gqa", "padding_causal, cross", "bias with gradient", "alibi slopes", "softcap"):
        check(Call(replace(by_name[name], dtype=dtype), "bshd"), backend)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_lse_is_the_natural_log_of_the_softmax_denominator(backend: str | None) -> None:
    for name, fmt in (
        ("causal_bottom_right, rows without keys", "sbhd"), ("padding_causal, cross", "bhsd"),
        ("learnable", "bshd"), ("packed, cross", "thd"),
    ):  # fmt: skip
        case = by_name[name]
        check(Call(replace(case, asks={**case.asks, "return_lse": True}), fmt), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_keys_give_exact_zeros(backend: str, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, s, 2, 8, dtype=dtype, requires_grad=True) for s in (6, 4, 4))
    out = attention(q, k, v, attn_mask_type="causal_bottom_right", backend=backend)
    out.sum().backward()
    assert (out[:, :2] == 0).all()
    assert q.grad is not None
    assert (q.grad[:, :2] == 0).all()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize(
    "sizes",
    [(0, 5, 5, 2), (2, 0, 5, 2), (2, 5, 0, 2)],
    ids=["no sequence", "no query", "no key"],
)
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_empty_tensors_give_empty_or_zero_results(sizes: tuple[int, ...]) -> None:
    b, s_q, s_kv, h = sizes
    q = torch.randn(b, s_q, h, 8, requires_grad=True)
    k, v = torch.randn(2, b, s_kv, h, 8, requires_grad=True).unbind(0)
    out = attention(q, k, v)
    assert out.shape == q.shape
    assert (out == 0).all()
    out.sum().backward()
    assert q.grad is not None
    assert (q.grad == 0).all()


NOTHING = torch.zeros(3, dtype=torch.int32)  # two sequences without a row


@pytest.mark.parametrize("backend", [None, "sdpa.math", "tiled"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_a_padded_batch_may_have_no_query(mask: str, backend: str | None) -> None:
    """sdpa.math failed inside: a mask of shape [b, 1, 0, 1] was taken for one row."""
    q = torch.randn(2, 0, 2, 8, requires_grad=True)
    k, v = torch.randn(2, 2, 1, 2, 8).unbind(0)
    lengths = {"cu_seqlens_q": NOTHING, "cu_seqlens_kv": NOTHING.clone()}
    out = attention(q, k, v, attn_mask_type=mask, **lengths, backend=backend)
    assert out.shape == q.shape
    assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(("rows", "longest"), [(2, None), (0, 3)], ids=["gaps alone", "no row at all"])
@pytest.mark.parametrize("backend", [None, "tiled"])
@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_packed_sequences_may_all_be_empty(backend: str | None, rows: int, longest: int | None) -> None:
    """Unpacking them took a row where there was none."""
    starts = torch.tensor([0, 0, rows], dtype=torch.int32)
    q, k, v = (torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3))
    out = attention(
        q, k, v, qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=NOTHING, cu_seqlens_kv=NOTHING,
        cu_seqlens_q_padded=starts, cu_seqlens_kv_padded=starts, max_seqlen_q=longest,
        max_seqlen_kv=longest, backend=backend,
    )  # fmt: skip
    assert out.shape == q.shape
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_no_sequence_may_have_slopes_of_its_own() -> None:
    q = torch.randn(0, 3, 2, 8)
    slopes = torch.ones(0, 2)
    assert attention(q, q, q, core_attention_bias_type="alibi", alibi_slopes=slopes).shape == q.shape


@pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
def test_the_sign_of_the_scale_is_nothing_against_a_kernel() -> None:
    """sdpa.flash refused scales below 0 under a causal mask, and was passed over for other scales then."""
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind(0)
    for scale in (-0.5, 0.0, 0.5):
        out = attention(q, k, v, attn_mask_type="causal", softmax_scale=scale, backend="sdpa.flash")
        wanted = attention(q, k, v, attn_mask_type="causal", softmax_scale=scale, backend="tiled")
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)

"""Calls of other types, and the reasons of those that a kernel has no argument for. That a feature reaches
every kernel: test_nothing_dropped.py; numbers of any call, empty ones too: the fuzz target ``numbers``."""

from __future__ import annotations

import pytest
import torch

from attention_calls import carried_out, complaint, make
from attnsel import NoBackendError, attention
from call_cases import Row, case_of
from tables import each

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("error::attnsel.debug.FallbackWarning")
ON_A_CPU = (None, "sdpa.flash", "sdpa.math", "tiled")


@each("dtype", ["float32", "float16", "bfloat16"])
@each("row, refuse", [
    ({"heads": (2, 2), "results": "lse"}, "sdpa.math"),
    ({"band": "causal", "batch": "cu_seqlens", "rows": "fewer queries"}, ""),
    ({"band": "causal, bottom right", "rows": "more queries", "results": "lse", "fmt": "sbhd"}, "sdpa.math"),
    ({"scores": "bias of keys"}, "sdpa.flash"),
    ({"scores": "alibi slopes", "fmt": "bhsd"}, ""),
    ({"scores": "softcap"}, "sdpa.math sdpa.flash"),
    ({"softmax": "learnable", "results": "lse"}, "sdpa.math sdpa.flash"),
    ({"batch": "packed", "rows": "fewer queries", "results": "lse"}, "sdpa.math"),
])  # fmt: skip
def test_a_call_agrees_within_its_rounding_or_says_why_not(row: Row, refuse: str, dtype: str) -> None:
    """``refuse``: the candidates that have no argument for it."""
    for backend in ON_A_CPU:
        problem = make(case_of(row, dtype=dtype, backend=backend))
        if backend is None or backend not in refuse:
            assert complaint(problem, carried_out(problem)) == "", backend
            continue
        with pytest.raises(NoBackendError) as caught:
            carried_out(problem)
        selection = caught.value.selection
        assert selection.backend is None
        assert selection[backend].reasons
        assert all(reason.code in str(caught.value) for reason in selection[backend].reasons)


@each("backend", ON_A_CPU[1:])
def test_rows_without_keys_give_exact_zeros(backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(1, s, 2, 8, dtype=dtype, requires_grad=True) for s in (6, 4, 4))
        out = attention(q, k, v, attn_mask_type="causal_bottom_right", backend=backend)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert (out[:, :2] == 0).all()
        assert (grads[0][:, :2] == 0).all()
        assert all(grad.isfinite().all() for grad in grads)


def test_the_sign_of_the_scale_is_nothing_against_a_kernel() -> None:
    """sdpa.flash refused scales below 0 under a causal mask, and was passed over for other scales then."""
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind(0)
    for scale in (-0.5, 0.0, 0.5):
        asked = {"attn_mask_type": "causal", "softmax_scale": scale}
        out, wanted = (attention(q, k, v, **asked, backend=name) for name in ("sdpa.flash", "tiled"))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)

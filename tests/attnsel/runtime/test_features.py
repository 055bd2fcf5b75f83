"""The public calls at the edges: other types, nothing to compute, results beside the output. That a feature
reaches every kernel: test_nothing_dropped.py; numbers of any call: the fuzz target ``numbers``."""

from __future__ import annotations

from typing import Any

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


NOTHING = torch.zeros(3, dtype=torch.int32)  # two sequences without a row
NO_ROWS = {"cu_seqlens_q": NOTHING, "cu_seqlens_kv": NOTHING.clone()}


def packed(rows: int, longest: int | None) -> dict[str, Any]:
    """Unpacking them took a row where there was none. ``rows``: of no sequence."""
    starts = torch.tensor([0, 0, rows], dtype=torch.int32)
    gaps = {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}
    most = {"max_seqlen_q": longest, "max_seqlen_kv": longest}
    return {"qkv_format": "thd", "attn_mask_type": "padding", **NO_ROWS, **gaps, **most}


@each(
    "backends, q, kv, arguments",
    [
        ([None], (0, 5, 2, 8), (0, 5, 2, 8), {}),
        ([None], (2, 0, 2, 8), (2, 5, 2, 8), {}),
        ([None], (2, 5, 2, 8), (2, 0, 2, 8), {}),
        # sdpa.math failed inside: a mask of shape [b, 1, 0, 1] was taken for one row.
        *[
            ([None, "sdpa.math", "tiled"], (2, 0, 2, 8), (2, 1, 2, 8), {"attn_mask_type": kind, **NO_ROWS})
            for kind in ("padding", "padding_causal", "padding_causal_bottom_right")
        ],
        ([None, "tiled"], (2, 2, 8), (2, 2, 8), packed(2, None)),
        ([None, "tiled"], (0, 2, 8), (0, 2, 8), packed(0, 3)),
        ([None], (0, 3, 2, 8), (0, 3, 2, 8), {"core_attention_bias_type": "alibi",
                                              "alibi_slopes": torch.ones(0, 2)}),
    ],
)  # fmt: skip
def test_nothing_to_compute_gives_empty_or_zero_results(
    backends: Any, q: Any, kv: Any, arguments: Any
) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for shape in (q, kv, kv)]
    for backend in backends:
        out = attention(*leaves, **arguments, backend=backend)
        assert out.shape == leaves[0].shape
        assert (out == 0).all()
        assert (torch.autograd.grad(out.sum(), leaves[0])[0] == 0).all()


def test_the_sign_of_the_scale_is_nothing_against_a_kernel() -> None:
    """sdpa.flash refused scales below 0 under a causal mask, and was passed over for other scales then."""
    q, k, v = torch.randn(3, 2, 6, 2, 8).unbind(0)
    for scale in (-0.5, 0.0, 0.5):
        asked = {"attn_mask_type": "causal", "softmax_scale": scale}
        out, wanted = (attention(q, k, v, **asked, backend=name) for name in ("sdpa.flash", "tiled"))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)

"""The private forward and backward: results, ring attention made of them, and a backward that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flash_calls import Problem, make, wrong_in
from torch import Tensor

import attnsel
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import FallbackWarning, SelfCheckWarning
from attnsel.environment import Environment
from attnsel.flash_attn import functions as forward
from attnsel.flash_attn.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from attnsel.runtime import dispatch, kernels, selfcheck
from flash_reference import cumulative
from tables import each

SIZES = {"r": 2, "d": 16, "lens_q": [11, 11], "lens_k": [14, 14]}
PACKED = SIZES | {"function": "flash_attn_varlen_func", "lens_q": [7, 0, 12], "lens_k": [15, 4, 9]}
CASES: list[dict[str, Any]] = [
    SIZES,
    SIZES | {"window": (4, 2), "softcap": 1.4, "scale": 0.3},
    SIZES | {"alibi": "h", "causal": True},
    SIZES | {"drop": 0.3},
    PACKED | {"alibi": "h", "causal": True},
    PACKED | {"drop": 0.3, "window": (4, 2), "softcap": 1.4},
]


def tail(
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> list[Any]:
    """dropout_p to alibi_slopes, by position."""
    return [dropout_p, softmax_scale, causal, *window_size, softcap, alibi_slopes]


def halves(p: Problem) -> dict[str, Tensor]:
    """The results of a call from its forward and backward, whose other results are looked at here."""
    q, k, v = (p.leaves[name].detach() for name in "qkv")
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    forward, backward = _flash_attn_forward, _flash_attn_backward
    if p.packed:
        forward, backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward
    call = [*(p.arguments[name] for name in names if p.packed), *tail(**p.arguments)]
    dropout = p.case["drop"] > 0
    out, lse, s_dmask, rng_state = forward(q, k, v, *call, return_softmax=dropout)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)
    assert s_dmask.shape == ((len(p.case["lens_q"]), q.shape[-2], 128, 128) if dropout else (0,))
    if dropout:
        p.keep = ~torch.signbit(s_dmask)
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    softmax_d = backward(p.dout, q, k, v, out, lse, *grads, *call, False, rng_state)
    rows = (out.float() * p.dout.float()).sum(-1).mT
    if p.packed:
        assert softmax_d.shape == (2, 19 + 3 * 128)
        torch.testing.assert_close(softmax_d[:, :7], rows[:, :7])
        torch.testing.assert_close(softmax_d[:, 7 + 256 : 19 + 256], rows[:, 7:])
    else:
        assert softmax_d.shape == (2, 2, 128)
        torch.testing.assert_close(softmax_d[..., :11], rows)
    return {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))


def test_forward_and_backward() -> None:
    for case in CASES:
        p = make(case)
        assert wrong_in(p, halves(p)) == "", case


def test_rows_without_keys_and_gradients_that_are_none() -> None:
    """A row without keys has an lse of +inf, and the backward takes it; what has no memory is not written."""
    q, k = torch.randn(1, 4, 2, 16).half(), torch.randn(1, 2, 2, 16).half()
    how = tail(causal=True)
    out, lse, _, rng_state = _flash_attn_forward(q, k, k, *how, False)
    assert (lse[..., :2] == torch.inf).all()
    grads = [torch.full_like(t, torch.nan) for t in (q, k, k)]
    _flash_attn_backward(q, q, k, k, out, lse, *grads, *how, True, rng_state)
    assert (grads[0][:, :2] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)
    dv = torch.zeros_like(k)
    _flash_attn_backward(q, q, k, k, out, lse, None, None, dv, *how, False)
    torch.testing.assert_close(dv, grads[2])


def test_s_dmask_is_computed_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes [b, h, s_q, s_k] in memory, which training with dropout must not pay for."""
    monkeypatch.delattr(forward, "signed_probabilities")
    q = torch.randn(1, 4, 2, 16).half()
    assert _flash_attn_forward(q, q, q, *tail(dropout_p=0.3), False)[2].shape == (0,)


@each("pads, ends", [([2, 3], None), (None, [7, 8]), ([2, 3], [7, 8])])
def test_keys_that_are_not_there(pads: list[int] | None, ends: list[int] | None) -> None:
    """leftpad_k drops rows at the start of each sequence's keys, seqused_k gives the end of those used."""
    case = PACKED | {"lens_q": [5, 6], "lens_k": [9, 8], "causal": True, "grads": False}
    p = make(case)
    values = {"leftpad_k": pads, "seqused_k": ends}
    more = {name: torch.tensor(t, dtype=torch.int32) for name, t in values.items() if t is not None}
    q, k, v = (p.leaves[name] for name in "qkv")
    out, lse, _, _ = _flash_attn_varlen_forward(
        q, k, v, cumulative([5, 6]), cumulative([9, 8]), 6, 9, *tail(causal=True), **more
    )
    pads, ends = pads or [0, 0], ends or [9, 8]
    kept = [*range(pads[0], ends[0]), *range(9 + pads[1], 9 + ends[1])]
    rest = make(case | {"lens_k": [ends[0] - pads[0], ends[1] - pads[1]]})
    rest.leaves |= {"q": q, "k": k[kept], "v": v[kept]}
    assert wrong_in(rest, {"out": out, "lse": lse}) == ""


# ---- a backward that is wrong, or refuses ----------------------------------------------------------------

Backward = Callable[..., Any]
HOW = tail(causal=True)


def gradients(packed: bool, tensors: list[Tensor] | None = None) -> list[Tensor]:
    """dq, dk and dv of a forward of tiled; of random q, k, v and dout [33, 2, 16] where none are given."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = tensors or [torch.randn(33, 2, 16, generator=generator).half() for _ in range(4)]
    lengths: list[Any] = [cumulative([24, 9]), cumulative([24, 9]), 24, 24]
    forward, backward = _flash_attn_varlen_forward, _flash_attn_varlen_backward
    if not packed:
        q, k, v, dout = (t.unflatten(0, (3, 11)) for t in (q, k, v, dout))
        lengths, forward, backward = [], _flash_attn_forward, _flash_attn_backward
    with attnsel.override(backend="tiled"):
        out, lse, *_ = forward(q, k, v, *lengths, *HOW, return_softmax=False)
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    backward(dout, q, k, v, out, lse, *grads, *lengths, *HOW, False)
    return grads


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Backward], list[Any]]]:
    """``stand_in(backward)``: tiled's forward and this backward are the Triton kernel, which ranks first.
    Gives a list of its calls."""
    monkeypatch.setattr(dispatch, "environment_of", lambda q: Environment.describe("H100", cudnn=None))

    def put(backward: Backward) -> list[Any]:
        calls: list[Any] = []

        def counted(*arguments: Any) -> Any:
            calls.append(arguments)
            return backward(*arguments)

        attnsel.clear_cache()
        monkeypatch.setitem(kernels.KERNELS, "triton", kernels.Kernel(tiled.forward, counted))
        return calls

    with attnsel.override(selfcheck="all", allow=("triton", "tiled")):
        yield put
    attnsel.clear_cache()


def spoilt(name: str, by: float) -> Backward:
    def backward(*arguments: Any) -> Any:
        made = tiled.backward(*arguments)
        return made._replace(**{name: getattr(made, name) * by})

    return backward


@each("packed, name, by", [(False, "k", 0.0), (True, "q", 1.5), (True, "v", -1.0)])
def test_a_wrong_backward_is_refused_and_the_next_candidate_runs(
    stand_in: Callable[[Backward], list[Any]], packed: bool, name: str, by: float
) -> None:
    calls = stand_in(spoilt(name, by))
    words = f"triton gave other numbers than tiled: in fp16 d{name} is off by"
    with pytest.warns(FallbackWarning, match=words):
        found = gradients(packed)
    assert len(calls) == 1  # the check alone
    with attnsel.override(backend="tiled"):
        wanted = gradients(packed)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    gradients(packed)
    assert len(calls) == 1  # it is not tried again
    with attnsel.override(backend="triton"), pytest.raises(attnsel.NoBackendError, match="RUNTIME002"):
        gradients(packed)


def test_a_right_backward_is_checked_once_and_one_that_raises_is_refused(
    stand_in: Callable[[Backward], list[Any]],
) -> None:
    calls = stand_in(tiled.backward)
    for count in (2, 3):
        gradients(True)
        assert len(calls) == count

    def raising(*arguments: Any) -> Any:
        raise RuntimeError("no plan for this problem")

    stand_in(raising)
    with attnsel.override(selfcheck="0"):
        with pytest.warns(FallbackWarning, match="no plan for this problem"):
            found = gradients(True)
        assert all(grad.isfinite().all() for grad in found)
        with attnsel.override(backend="triton"), pytest.raises(attnsel.NoBackendError, match="no plan for"):
            gradients(True)


@each("kind", ["zeros of a warm-up", "inference tensors", "a capture, and then a call"])
def test_nothing_hides_a_wrong_backward(
    stand_in: Callable[[Backward], list[Any]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    stand_in(spoilt("v", -1.0))
    if "capture" in kind:
        monkeypatch.setattr(selfcheck, "capturing", lambda q: True)
        with pytest.warns(SelfCheckWarning, match="CUDA graph is being captured"):
            gradients(True)
        monkeypatch.setattr(selfcheck, "capturing", lambda q: False)
    tensors = [torch.zeros(33, 2, 16).half() for _ in range(4)] if "zeros" in kind else None
    with torch.inference_mode("inference" in kind), pytest.warns(FallbackWarning, match="dv is off by"):
        gradients(True, tensors)

"""The private forward and backward: their results, and ring attention made of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import attnsel
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import FallbackWarning, SelfCheckWarning
from attnsel.environment import Environment
from attnsel.flash_attn import forward
from attnsel.flash_attn.interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from attnsel.runtime import dispatch, kernels, selfcheck
from flash_reference import Problem, cumulative

triton = pytest.param(
    "triton",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is missing"),
    ],
)
backends = pytest.mark.parametrize("backend", [None, triton])
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (4, 2), "softcap": 1.4},
    "alibi, causal": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
    "dropout": {"dropout_p": 0.3},
}


def tail(args: dict[str, Any]) -> list[Any]:
    """dropout_p to alibi_slopes, by position."""
    return [
        args.get("dropout_p", 0.0),
        16**-0.5,
        args.get("causal", False),
        *args.get("window_size", (-1, -1)),
        args.get("softcap", 0.0),
        args.get("alibi_slopes"),
    ]


@backends
@pytest.mark.parametrize("args", FEATURES.values(), ids=FEATURES)
def test_dense_forward_and_backward(args: dict[str, Any], backend: str | None) -> None:
    p = Problem([11, 11], [14, 14], heads=2, groups=1, args=args)
    q, k, v, dout = (t.unflatten(0, (2, -1)) for t in (p.q, p.k, p.v, p.dout))
    dropout = bool(args.get("dropout_p"))
    with attnsel.override(backend=backend):
        out, lse, s_dmask, rng_state = _flash_attn_forward(q, k, v, *tail(args), dropout)
        assert (lse.shape, lse.dtype, rng_state.shape) == ((2, 2, 11), torch.float32, (2,))
        assert s_dmask.shape == ((2, 2, 128, 128) if dropout else (0,))
        grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
        softmax_d = _flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail(args), False, rng_state)
    assert softmax_d.shape == (2, 2, 128)
    rows = (out.float() * dout.float()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d[..., :11], rows)
    flat = [t.flatten(0, 1) for t in (out, *grads)]
    actual = {"out": flat[0], "lse": lse.transpose(0, 1).flatten(1)}
    actual |= dict(zip(("dq", "dk", "dv"), flat[1:], strict=True))
    p.compare(actual, ~torch.signbit(s_dmask) if dropout else None)


@backends
@pytest.mark.parametrize("name", ["alibi, causal", "dropout"])
def test_packed_forward_and_backward(name: str, backend: str | None) -> None:
    args = FEATURES[name]
    p = Problem([7, 0, 12], [15, 4, 9], heads=2, groups=1, args=args)
    lengths = (cumulative(p.lengths_q), cumulative(p.lengths_k), 12, 15)
    dropout = bool(args.get("dropout_p"))
    with attnsel.override(backend=backend):
        out, lse, s_dmask, rng_state = _flash_attn_varlen_forward(
            p.q, p.k, p.v, *lengths, *tail(args), dropout
        )
        grads = [torch.full_like(t, torch.nan) for t in (p.q, p.k, p.v)]
        softmax_d = _flash_attn_varlen_backward(
            p.dout, p.q, p.k, p.v, out, lse, *grads, *lengths, *tail(args), False, rng_state
        )
    rows = (out.float() * p.dout.float()).sum(-1).T
    assert softmax_d.shape == (2, 19 + 3 * 128)
    torch.testing.assert_close(softmax_d[:, :7], rows[:, :7])
    torch.testing.assert_close(softmax_d[:, 7 + 256 : 19 + 256], rows[:, 7:])
    actual = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
    p.compare(actual, ~torch.signbit(s_dmask) if dropout else None)


def merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """out [b, s, h, d] and lse [b, h, s] of all keys from those of parts; +inf is a part without keys."""
    parts = torch.stack(lses).masked_fill(torch.stack(lses) == torch.inf, -torch.inf)
    lse = parts.logsumexp(0)
    weights = (parts - lse).exp().transpose(-1, -2)[..., None]
    return (weights * torch.stack(outs).float()).sum(0).to(outs[0].dtype), lse


@backends
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool, backend: str | None) -> None:
    """Each rank has a part of the rows, and sees the other ranks' keys one after the other."""
    ranks, rows = 2 if backend == "triton" else 4, 8
    p = Problem([ranks * rows] * 2, [ranks * rows] * 2, heads=2, groups=1, args={"causal": causal})
    q, k, v, dout = (t.unflatten(0, (2, -1)) for t in (p.q, p.k, p.v, p.dout))
    of = [slice(r * rows, (r + 1) * rows) for r in range(ranks)]
    dq, dk, dv = (torch.zeros(t.shape) for t in (q, k, v))
    outs, lses = [], []

    def arguments(rank: int, part: int) -> list[Any]:
        return tail({"causal": causal and rank == part})

    with attnsel.override(backend=backend):
        for rank in range(ranks):
            parts = range(rank + 1) if causal else range(ranks)
            made = [
                _flash_attn_forward(
                    q[:, of[rank]], k[:, of[part]], v[:, of[part]], *arguments(rank, part), False
                )
                for part in parts
            ]
            out, lse = merge([each[0] for each in made], [each[1] for each in made])
            outs.append(out)
            lses.append(lse)
            for part in parts:
                tensors = (q[:, of[rank]], k[:, of[part]], v[:, of[part]])
                grads = [torch.empty_like(t) for t in tensors]
                _flash_attn_backward(
                    dout[:, of[rank]], *tensors, out, lse, *grads, *arguments(rank, part), False
                )
                for total, grad, where in zip(
                    (dq, dk, dv), grads, (of[rank], of[part], of[part]), strict=True
                ):
                    total[:, where] += grad
    actual = {"out": torch.cat(outs, 1), "dq": dq, "dk": dk, "dv": dv}
    actual = {name: t.flatten(0, 1).to(p.dtype) for name, t in actual.items()}
    actual["lse"] = torch.cat(lses, 2).transpose(0, 1).flatten(1)
    p.compare(actual)


def test_a_part_without_keys_changes_nothing() -> None:
    """Its log-sum-exp is +inf, and the backward takes it."""
    q, k = torch.randn(1, 4, 2, 16).half(), torch.randn(1, 2, 2, 16).half()
    out, lse, _, rng_state = _flash_attn_forward(q, k, k, *tail({"causal": True}), False)
    assert (lse[..., :2] == torch.inf).all()
    grads = [torch.full_like(t, torch.nan) for t in (q, k, k)]
    _flash_attn_backward(q, q, k, k, out, lse, *grads, *tail({"causal": True}), True, rng_state)
    assert (grads[0][:, :2] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


def test_s_dmask_is_computed_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes [b, h, s_q, s_k] in memory, which training with dropout must not pay for."""
    monkeypatch.delattr(forward, "signed_probabilities")
    q = torch.randn(1, 4, 2, 16).half()
    assert _flash_attn_forward(q, q, q, *tail({"dropout_p": 0.3}), False)[2].shape == (0,)


def test_gradients_that_are_none_are_not_written() -> None:
    q = torch.randn(1, 4, 2, 16).half()
    out, lse, _, _ = _flash_attn_forward(q, q, q, *tail({}), False)
    dv = torch.zeros_like(q)
    _flash_attn_backward(q, q, q, q, out, lse, None, None, dv, *tail({}), False)
    assert dv.abs().sum() > 0


@pytest.mark.parametrize("given", [("leftpad_k",), ("seqused_k",), ("leftpad_k", "seqused_k")])
def test_keys_that_are_not_there(given: tuple[str, ...]) -> None:
    """leftpad_k drops rows at the start of each sequence's keys, seqused_k gives the end of those used."""
    p = Problem([5, 6], [9, 8], heads=2, groups=1, args={"causal": True})
    pads = [2, 3] if "leftpad_k" in given else [0, 0]
    ends = [7, 8] if "seqused_k" in given else [9, 8]
    values = {"leftpad_k": pads, "seqused_k": ends}
    more = {name: torch.tensor(values[name], dtype=torch.int32) for name in given}
    out, lse, _, _ = _flash_attn_varlen_forward(
        p.q, p.k, p.v, cumulative([5, 6]), cumulative([9, 8]), 6, 9, *tail(p.args), **more
    )
    kept = [*range(pads[0], ends[0]), *range(9 + pads[1], 9 + ends[1])]
    rest = Problem([5, 6], [ends[0] - pads[0], ends[1] - pads[1]], heads=2, groups=1, args=p.args)
    rest.q, rest.k, rest.v = p.q, p.k[kept], p.v[kept]
    rest.compare({"out": out, "lse": lse})


# ---- a backward that is wrong, or refuses ----------------------------------------------------------------

Backward = Callable[..., Any]
LENGTHS = (cumulative([24, 9]), cumulative([24, 9]), 24, 24)


def dense_gradients(tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = (t.unflatten(0, (3, 11)) for t in tensors)
    with attnsel.override(backend="tiled"):
        out, lse, _, _ = _flash_attn_forward(q, k, v, *tail({"causal": True}), False)
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    _flash_attn_backward(dout, q, k, v, out, lse, *grads, *tail({"causal": True}), False)
    return grads


def packed_gradients(tensors: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = tensors
    with attnsel.override(backend="tiled"):
        out, lse, _, _ = _flash_attn_varlen_forward(q, k, v, *LENGTHS, *tail({"causal": True}))
    grads = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    _flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, *LENGTHS, *tail({"causal": True}), False
    )  # fmt: skip
    return grads


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Backward], None]]:
    """``stand_in(backward)``: tiled's forward and this backward are the Triton kernel, which ranks first."""
    monkeypatch.setattr(dispatch, "environment_of", lambda q: Environment.describe("H100", cudnn=None))

    def put(backward: Backward) -> None:
        monkeypatch.setitem(kernels.KERNELS, "triton", kernels.Kernel(tiled.forward, backward))

    attnsel.clear_cache()
    with attnsel.override(selfcheck="all", allow=("triton", "tiled")):
        yield put
    attnsel.clear_cache()


def tensors() -> list[Tensor]:
    """q, k, v and dout [33, 2, 16]"""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(33, 2, 16, generator=generator).half() for _ in range(4)]


WRONG: dict[str, Backward] = {
    "dq's scale": lambda g: g._replace(q=g.q * 1.5),
    "dk lost": lambda g: g._replace(k=torch.zeros_like(g.k)),
    "dv's sign": lambda g: g._replace(v=-g.v),
}


@pytest.mark.parametrize(
    ("gradients", "change"),
    [(dense_gradients, "dk lost"), (packed_gradients, "dq's scale"), (packed_gradients, "dv's sign")],
)
def test_a_wrong_backward_is_refused_and_the_next_candidate_runs(
    stand_in: Callable[[Backward], None], gradients: Any, change: str
) -> None:
    calls = []

    def wrong(*arguments: Any) -> Any:
        calls.append(arguments)
        return WRONG[change](tiled.backward(*arguments))

    stand_in(wrong)
    with pytest.warns(FallbackWarning, match="triton gave other numbers than tiled: in fp16 d.* is off by"):
        found = gradients(tensors())
    assert len(calls) == 1  # the check alone
    with attnsel.override(backend="tiled"):
        wanted = gradients(tensors())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
    gradients(tensors())
    assert len(calls) == 1  # it is not tried again
    with attnsel.override(backend="triton"), pytest.raises(attnsel.NoBackendError, match="RUNTIME002"):
        gradients(tensors())


def test_a_right_backward_is_checked_once_and_runs(stand_in: Callable[[Backward], None]) -> None:
    calls = []

    def right(*arguments: Any) -> Any:
        calls.append(arguments)
        return tiled.backward(*arguments)

    stand_in(right)
    packed_gradients(tensors())
    assert len(calls) == 2
    packed_gradients(tensors())
    assert len(calls) == 3


def test_a_backward_that_raises_is_refused_with_its_message(stand_in: Callable[[Backward], None]) -> None:
    def raising(*arguments: Any) -> Any:
        raise RuntimeError("no plan for this problem")

    stand_in(raising)
    with attnsel.override(selfcheck="0"):
        with pytest.warns(FallbackWarning, match="no plan for this problem"):
            found = packed_gradients(tensors())
        assert all(grad.isfinite().all() for grad in found)
        with attnsel.override(backend="triton"), pytest.raises(RuntimeError, match="no plan for") as caught:
            packed_gradients(tensors())
    assert isinstance(caught.value, attnsel.NoBackendError)


def test_zeros_of_a_warm_up_prove_no_backward(stand_in: Callable[[Backward], None]) -> None:
    stand_in(lambda *arguments: WRONG["dv's sign"](tiled.backward(*arguments)))
    with pytest.warns(FallbackWarning, match="other numbers than tiled: in fp16 dv is off by"):
        packed_gradients([torch.zeros_like(t) for t in tensors()])


def test_a_backward_under_capture_is_checked_when_it_comes_again(
    stand_in: Callable[[Backward], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(lambda *arguments: WRONG["dv's sign"](tiled.backward(*arguments)))
    monkeypatch.setattr(selfcheck, "_capturing", lambda q: True)
    with pytest.warns(SelfCheckWarning, match="CUDA graph is being captured"):
        packed_gradients(tensors())
    monkeypatch.setattr(selfcheck, "_capturing", lambda q: False)
    with pytest.warns(FallbackWarning, match="dv is off by"):
        packed_gradients(tensors())


def test_inference_tensors_hide_no_wrong_backward(stand_in: Callable[[Backward], None]) -> None:
    stand_in(lambda *arguments: WRONG["dv's sign"](tiled.backward(*arguments)))
    with torch.inference_mode(), pytest.warns(FallbackWarning, match="dv is off by"):
        packed_gradients([t.clone() for t in tensors()])

"""PyTorch's flash op with lengths, windows and pages: what attnsel makes of it, on a CPU stand-in for the op
(tests/support/flash_op.py) against the definition of attention."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    CASES,
    CAUSAL,
    DROPOUT,
    Case,
    assert_matches,
    carried_out,
    expected,
    int32,
    spoilt,
    upstream,
    with_garbage,
)
from attnsel.backends.contract import Spec
from attnsel.backends.sdpa import guards as conditions
from attnsel.backends.sdpa import ops, varlen
from flash_op import FlashOp
from forward_checks import pages_of
from reference import attention_reference
from tables import each
from varlen_cases import USED, made

torch.set_num_threads(1)


@pytest.fixture(params=["now", "torch 2.6"])
def op(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashOp:
    """The stand-in where the op is called, for float64 too."""
    made = FlashOp(old=request.param != "now", pages=request.param == "now")
    monkeypatch.setattr(varlen, "forward_op", lambda: made.forward)
    monkeypatch.setattr(varlen, "backward_op", lambda: made.backward)
    monkeypatch.setattr(varlen, "_lse_by_sequence", lambda: made.old)
    monkeypatch.setattr(varlen, "_one_random_state", lambda: not made.old)
    monkeypatch.setitem(conditions._DTYPES, ops.VARLEN, (torch.float16, torch.bfloat16, torch.float64))
    return made


NAMED = {case.name: case for case in USED}


@each("case", USED)
def test_numbers(op: FlashOp, case: Case) -> None:
    op.calls = 0
    for dlse in (False, True):
        spec, inputs = made(case)
        actual, dout, into_lse = carried_out(varlen.forward, varlen.backward, spec, inputs, dlse)
        wanted = expected(spec, inputs, dout, into_lse)
        del wanted["max_logit"]
        assert_matches(actual, wanted)
    assert op.calls == 2


@each("name", ["padding", "self lengths, causal", "packed: gaps, bottom-right"])
def test_what_lies_in_padding_reaches_nothing(op: FlashOp, name: str) -> None:
    """NaN in every row of no sequence, of q, k, v, and dout: the same numbers, and zeros there."""
    spec, inputs = made(NAMED[name])
    result = varlen.forward(spec, inputs)
    dout, _ = upstream(result)
    grads = varlen.backward(spec, inputs, result, dout)
    other = with_garbage(spec, inputs)
    again = varlen.forward(spec, other)
    spoilt_grads = varlen.backward(spec, other, again, spoilt(spec, inputs, dout, "q"))
    for one, two in zip(
        (result.out, result.lse, *grads[:3]), (again.out, again.lse, *spoilt_grads[:3]), strict=True
    ):
        assert torch.equal(one, two)


@each("name", ["plain", "padding", "packed: plain"])
def test_dropout_is_replayed_by_the_backward(op: FlashOp, name: str) -> None:
    """The gradients are those of the very entries that the forward dropped, by finite differences."""
    spec, inputs = made(NAMED[name])
    spec = dataclasses.replace(spec, dropout_p=0.4)
    torch.manual_seed(3)
    result = varlen.forward(spec, inputs)
    dout, _ = upstream(result)
    grads = varlen.backward(spec, inputs, result, dout)
    step = torch.randn(inputs.q.shape, dtype=torch.float64) * 1e-6

    def at(sign: int) -> Tensor:
        torch.manual_seed(3)
        return (varlen.forward(spec, inputs._replace(q=inputs.q + sign * step)).out * dout).sum()

    assert torch.allclose((at(1) - at(-1)) / 2, (grads.q * step).sum(), rtol=1e-4)
    with pytest.raises(ValueError, match="random numbers"):
        varlen.backward(spec, inputs, result._replace(saved=()), dout)
    # For results merged from parts: dropout aside, the state is not read.
    plain = dataclasses.replace(spec, dropout_p=0.0)
    result = varlen.forward(plain, inputs)
    merged, whole = (varlen.backward(plain, inputs, one, dout) for one in (result._replace(saved=()), result))
    assert all(torch.equal(a, b) for a, b in zip(merged[:3], whole[:3], strict=True))


APART = {"seqlens_q", "seqlens_kv", "seqlens"}
DENSE = [case for case in USED if not case.spec.get("packed") and not APART & set(case.tensors)]


@each("case", DENSE)
def test_the_call_that_pytorch_differentiates(op: FlashOp, case: Case) -> None:
    spec, inputs = made(case)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    call = varlen.bind(spec, inputs._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    assert call is not None
    out = call(*leaves)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    wanted = expected(spec, inputs, dout, None)
    actual = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
    assert_matches(actual, {name: wanted[name] for name in actual})
    with pytest.raises(ValueError, match="alone"):
        call(*leaves, torch.zeros(1))
    for name in ("padding", "packed: plain"):
        assert varlen.bind(*made(NAMED[name])) is None


PAGED = (
    "causal bottom-right",
    "padding, bottom-right",
    "packed: causal bottom-right",
    "one query row, padded keys",
)


@each("name", PAGED)
def test_pages(op: FlashOp, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = made(NAMED[name])
    rows_first = lambda pool: pool.transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    paged = pages_of(spec, inputs, 256, rows_first)
    if op.old:
        monkeypatch.setattr(varlen, "_names_of", lambda name: frozenset({"query"}))
        with pytest.raises(ValueError, match="takes no pages"):
            varlen.forward(*paged)
        return
    result = varlen.forward(*paged)
    out, lse, _ = attention_reference(spec, inputs)
    assert_matches({"out": result.out, "lse": result.lse}, {"out": out, "lse": lse})
    apart = math.prod(paged[1].v.shape[1:]) + 1  # elements of 8 bytes from page to page
    odd = paged[1].v.new_zeros(len(paged[1].v) * apart)
    odd = odd.as_strided(paged[1].v.shape, (apart, *paged[1].v.stride()[1:]))
    with pytest.raises(ValueError, match="v: pages must begin at multiples of 16 bytes"):
        varlen.forward(paged[0], paged[1]._replace(v=odd))
    with pytest.raises(ValueError, match="a page must have a multiple of 256 rows; got 16"):
        varlen.forward(*pages_of(spec, inputs, 16, rows_first))


DEFAULT = made(CASES[0])[1]
LENGTHS = int32([20, 11])
# One of each kind: the guards of the op are recorded (tests/backends/recorded/sdpa.txt), its windows too
# (tests/attnsel/recorded_calls/sdpa.txt).
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("from the top left", CAUSAL, {}),
    ("one tensor for the lengths", CAUSAL, {"seqlens_q": LENGTHS, "seqlens_kv": LENGTHS.clone()}),
    ("one tensor for the lengths", {"window_left": 4}, {"seqlens_kv": LENGTHS}),
    ("alibi_slopes: the op has no argument", {}, {"alibi_slopes": torch.zeros(4)}),
    ("q_offset, kv_offset", {"q_offset": 3}, {}),
    ("where the one before ends", {}, {"q": DEFAULT.q.contiguous(), "seqlens_q": LENGTHS}),
    ("dropout_seed", {**DROPOUT}, {"dropout_seed": torch.tensor(3)}),
    ("deterministic", {"deterministic": True}, {}),
]


@each("words, spec, tensors", REFUSED)
def test_what_is_refused(op: FlashOp, words: str, spec: dict[str, Any], tensors: dict[str, Any]) -> None:
    whole = Spec(**{"softmax_scale": 0.4, "need_lse": True, "need_grad": True, **spec})
    for function in (varlen.prepare, varlen.forward):
        with pytest.raises(ValueError, match=words):
            function(whole, DEFAULT._replace(**tensors))
    assert op.calls == 0
    if spec.get("deterministic"):
        torch.use_deterministic_algorithms(True)
        try:
            varlen.prepare(whole, DEFAULT)
        finally:
            torch.use_deterministic_algorithms(False)


def test_nothing_is_copied(op: FlashOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops are handed q, k, v, out and its gradient where they lie, of padded batches too."""
    seen: list[int] = []

    def watched(run: Any, count: int) -> Any:
        def call(*given: Any, **keywords: Any) -> Any:
            seen.extend(t.data_ptr() for t in given[:count])
            return run(*given, **keywords)

        return lambda: call

    monkeypatch.setattr(varlen, "forward_op", watched(op.forward, 3))
    monkeypatch.setattr(varlen, "backward_op", watched(op.backward, 5))
    for name in ("plain", "padding", "packed: plain", "packed: gaps, bottom-right", "self lengths, causal"):
        spec, inputs = made(NAMED[name])
        seen.clear()
        result = varlen.forward(spec, inputs)
        dout = torch.randn_like(result.out)
        varlen.backward(spec, inputs, result, dout)
        handed = (*inputs[:3], dout, *inputs[:3], result.out)
        assert seen == [t.data_ptr() for t in handed], name

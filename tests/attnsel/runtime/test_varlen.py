"""``sdpa.varlen`` on every way of a call, its op carried out on the CPU (tests/support/flash_op.py) while the
question is asked of a described H100: rules, adaptations, the first call's comparison, gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import DotProductAttention, Environment, NoBackendError, attention, override
from attnsel.backends.sdpa import varlen
from attnsel.runtime import dispatch
from call_cases import CASES, PACKED, Call, Case, assert_close, by_name
from flash_op import FlashOp

torch.set_num_threads(1)

TORCH_ALONE = Environment.describe("H100", cudnn_frontend=None, triton=None)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashOp]:
    made = FlashOp()
    monkeypatch.setattr(varlen, "forward_op", lambda: made.forward)
    monkeypatch.setattr(varlen, "backward_op", lambda: made.backward)
    monkeypatch.setattr(varlen, "_lse_by_sequence", lambda: False)
    monkeypatch.setattr(dispatch, "environment_of", lambda q: TORCH_ALONE)
    dispatch.clear_cache()
    yield made
    dispatch.clear_cache()


def dense(call: Call) -> tuple[Tensor, ...]:
    """q, k, v of a call, dense in its format as a program's are."""
    return tuple(t.contiguous() for t in call.qkv)


# Of the shared cases, those that the op has no argument for, or whose diagonal it does not have.
ELSEWHERE = {
    "arbitrary",
    "bias",
    "pre_scale_bias",
    "alibi",
    "softcap",
    "off-by-one",
    "learnable",
    "max logit",
}
CROSS_TOP_LEFT = {
    "causal, fewer queries",
    "window, rows without keys",
    "window, top left",
    "padding_causal, cross",
    "packed, gaps",
}
ELSEWHERE |= {"packed, sinks", "packed, alibi", "packed, bias"}


def taken(case: Case) -> bool:
    name = case.name
    return not any(name.startswith(other) for other in ELSEWHERE) and name not in CROSS_TOP_LEFT


def test_every_call_gives_the_definition_or_says_why_not(op: FlashOp) -> None:
    found: dict[str, str] = {}
    for number, case in enumerate(CASES + PACKED):
        fmt = "thd" if case in PACKED else ("bshd", "sbhd", "bhsd")[number % 3]
        try:
            honoured(op, case, fmt, number % 2 == 1)
        except (AssertionError, pytest.fail.Exception, NoBackendError) as error:
            found[case.name] = str(error).partition("\n")[0]
    assert found == {}


def honoured(op: FlashOp, case: Case, fmt: str, return_lse: bool) -> None:
    before = op.calls
    call = Call(dataclasses.replace(case, dtype=torch.float16), fmt)
    arguments: dict[str, Any] = {**call.arguments, "backend": "sdpa.varlen", "return_lse": return_lse}
    if "cross" not in str(case.tensors.get("lengths")):  # as programs have it: one tensor for both
        for name in ("cu_seqlens_kv", "cu_seqlens_kv_padded"):
            if name in arguments:
                arguments[name] = arguments[name.replace("kv", "q")]
    if not taken(case):
        with pytest.raises(NoBackendError, match=r"SDPA\d"):
            attention(*dense(call), **arguments)
        return
    result = attention(*dense(call), **arguments)
    out = result[0] if return_lse else result
    actual = {"out": out.detach(), **call.gradients(out)}
    if return_lse:
        actual["lse"] = result[1]
    assert_close(actual, call.expected(), torch.float16)
    assert op.calls > before


def test_it_is_chosen_and_compared_on_its_first_call(op: FlashOp) -> None:
    call = Call(dataclasses.replace(by_name["padding_causal"], dtype=torch.float16), "bshd")
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="padding_causal")
    extras = {name: t for name, t in call.arguments.items() if name.startswith("cu_seqlens")}
    extras["cu_seqlens_kv"] = extras["cu_seqlens_q"]
    core(*dense(call), **extras)
    assert core.last_selection.backend == "sdpa.varlen"
    assert core.last_selection.chosen.adaptations == ()
    before = op.calls
    core(*dense(call), **extras)
    assert op.calls == before + 1  # the first one ran twice: once for the comparison


def test_a_wrong_kernel_is_not_used(op: FlashOp, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers the op on this machine: numbers that are not attention's are found, and said."""
    forward = op.forward

    def wrong(*given: Any, **keywords: Any) -> Any:
        out, *others = forward(*given, **keywords)
        return (out * 1.1, *others)

    monkeypatch.setattr(varlen, "forward_op", lambda: wrong)
    call = Call(dataclasses.replace(by_name["padding"], dtype=torch.float16), "bshd")
    with pytest.warns(UserWarning, match=r"sdpa\.varlen"):
        out = attention(*dense(call), **call.arguments)
    assert_close({"out": out.detach()}, {"out": call.expected()["out"]}, torch.float16)


def test_two_tensors_of_lengths_are_not_taken_for_one(op: FlashOp) -> None:
    """They may differ; the kernel would put the diagonal elsewhere. With one tensor it runs."""
    call = Call(dataclasses.replace(by_name["padding_causal"], dtype=torch.float16), "bshd")
    cu = call.arguments["cu_seqlens_q"]
    arguments = {**call.arguments, "backend": "sdpa.varlen"}
    with pytest.raises(NoBackendError, match="SDPA602"):
        attention(*dense(call), **{**arguments, "cu_seqlens_q": cu, "cu_seqlens_kv": cu.clone()})
    attention(*dense(call), **{**arguments, "cu_seqlens_q": cu, "cu_seqlens_kv": cu})


def test_dropout_is_drawn_anew_and_replayed_by_the_backward(op: FlashOp) -> None:
    q = torch.randn(1, 9, 2, 8, dtype=torch.float16, requires_grad=True)
    with override(selfcheck=False):
        outs = [
            attention(q, q, q, attn_mask_type="no_mask", window_size=(3, 3), attention_dropout=0.5,
                      backend="sdpa.varlen")
            for _ in range(2)
        ]  # fmt: skip
    assert not torch.equal(*outs)
    assert torch.autograd.grad(outs[0].float().sum(), q)[0].isfinite().all()


def test_lengths_are_one_tensor_still_where_what_is_saved_is_moved(op: FlashOp) -> None:
    """Offloading makes tensors anew; two for what was one would be lengths that may differ."""
    call = Call(dataclasses.replace(by_name["packed, causal, gqa"], dtype=torch.float16), "thd")
    arguments: dict[str, Any] = {**call.arguments, "backend": "sdpa.varlen"}
    arguments["cu_seqlens_kv"] = arguments["cu_seqlens_q"]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        out = attention(*dense(call), **arguments)
    assert_close({"out": out.detach(), **call.gradients(out)}, call.expected(), torch.float16)


@pytest.mark.parametrize("name", ["padding mask", "packed, causal, gqa"])
def test_a_compiled_step_is_the_eager_one_with_one_forward(op: FlashOp, name: str) -> None:
    case = by_name[name]
    call = Call(dataclasses.replace(case, dtype=torch.float16), "thd" if case in PACKED else "bshd")
    arguments: dict[str, Any] = {**call.arguments, "backend": "sdpa.varlen"}
    if "cu_seqlens_q" in arguments:
        arguments["cu_seqlens_kv"] = arguments["cu_seqlens_q"]
    leaves = [t.detach().contiguous().requires_grad_() for t in call.qkv]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, **arguments)

    with override(selfcheck=False):
        eager = step(*leaves)
        wanted = torch.autograd.grad(eager.float().square().sum(), leaves)
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        compiled(*leaves)
        before = op.calls
        out = compiled(*leaves)
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
    assert op.calls == before + 1
    assert torch.equal(out, eager)
    for one, two in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=5e-3)

"""A training step under torch.compile: one forward, and a backward that starts from what it gave."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnsel import NoBackendError, attention, clear_cache, override
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.tiled import kernel as tiled
from attnsel.environment import Environment
from attnsel.runtime import compiled, dispatch, kernels
from attnsel.runtime import recompute as replay
from attnsel.runtime.call import config

torch.set_num_threads(1)


class Counted:
    """``tiled``, with what it was called for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.saved: list[tuple[Any, ...]] = []
        self.wrong_without_saved = False

    def forward(self, spec: Spec, inputs: Inputs) -> Result:
        self.calls.append("forward")
        return tiled.forward(spec, inputs)._replace(saved=("its own",))

    def backward(self, spec: Spec, inputs: Inputs, result: Result, dout: Tensor) -> Grads:
        self.calls.append("backward")
        self.saved.append(result.saved)
        grads = tiled.backward(spec, inputs, result, dout)
        return grads._replace(q=2 * grads.q) if self.wrong_without_saved and not result.saved else grads


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    torch._dynamo.reset()
    clear_cache()
    kernel = Counted()
    monkeypatch.setitem(kernels.KERNELS, "tiled", kernels.Kernel(kernel.forward, kernel.backward))
    yield kernel
    clear_cache()
    torch._dynamo.reset()


def lengths(*values: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32)


def qkv(
    shape: tuple[int, ...] = (2, 6), g: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    made = [torch.randn(*shape, n, 8, generator=gen, dtype=torch.float64) for n in (4, g, g)]
    return [t.to(dtype).requires_grad_() for t in made]


def stepped(run: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Results and gradients of a step; dropout the same each time."""
    torch.manual_seed(3)
    given = run(*tensors)
    results = list(given) if isinstance(given, tuple) else [given]
    grads = torch.autograd.grad(results[0].square().sum(), tensors)
    return [*(t.detach() for t in results), *grads]


def through_the_compiler(run: Any, **how: Any) -> Any:
    return torch.compile(run, fullgraph=True, backend="aot_eager", **how)


PADDED = {"attn_mask_type": "padding", "cu_seqlens_q": lengths(6, 3), "cu_seqlens_kv": lengths(6, 3)}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (2, 0)},
    "padding": PADDED,
    "rows that see no key": {
        "attn_mask_type": "arbitrary",
        "attention_mask": torch.arange(6)[:, None] < torch.tensor([6, 2, 0, 6, 1, 3]),
    },
    "alibi": {"core_attention_bias_type": "alibi"},
    "softcap": {"softcap": 1.5},
    "off-by-one": {"softmax_type": "off-by-one"},
    "dropout": {"attention_dropout": 0.4},
    "dropout and padding": PADDED | {"attention_dropout": 0.4},
    "lse": {"return_lse": True},
    "lse and largest score": {"return_lse": True, "return_max_logit": True},
    "largest score": {"return_max_logit": True},
}


CALLED = [*((name, 4) for name in FEATURES), ("causal", 2), ("padding", 1)]


@pytest.mark.parametrize("number", range(len(CALLED)), ids=lambda number: "-".join(map(str, CALLED[number])))
def test_a_training_step_runs_one_forward_and_has_eagers_bits(number: int, counted: Counted) -> None:
    (name, g), dynamic = CALLED[number], number % 2 == 1

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, backend="tiled", **FEATURES[name])

    actual = stepped(through_the_compiler(call, dynamic=dynamic), qkv(g=g))
    assert counted.calls == ["forward", "backward"]
    assert counted.saved == [()]
    for a, w in zip(actual, stepped(call, qkv(g=g)), strict=True):
        assert (a.dtype, torch.equal(a, w)) == (w.dtype, True)


def test_the_log_sum_exp_is_of_the_type_that_its_backward_wants(counted: Counted) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="tiled", softcap=2.0)

    actual = stepped(through_the_compiler(call), qkv(dtype=torch.bfloat16))
    assert counted.calls == ["forward", "backward"]
    for a, w in zip(actual, stepped(call, qkv(dtype=torch.bfloat16)), strict=True):
        assert torch.equal(a, w)


def test_packed_sequences_too(counted: Counted) -> None:
    cu = lengths(4, 5)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(
            q, k, v, qkv_format="thd", attn_mask_type="padding_causal", cu_seqlens_q=cu, cu_seqlens_kv=cu,
            backend="tiled",
        )  # fmt: skip

    actual = stepped(through_the_compiler(call), qkv((9,), g=2))
    assert counted.calls == ["forward", "backward"]
    for a, w in zip(actual, stepped(call, qkv((9,), g=2)), strict=True):
        assert torch.equal(a, w)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "learnable"])
def test_the_gradients_of_a_bias_and_of_sinks_too(kind: str, counted: Counted) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, more: Tensor) -> Tensor:
        given: dict[str, Any] = {"core_attention_bias_type": kind, "core_attention_bias": more}
        if kind == "learnable":
            given = {"softmax_type": kind, "softmax_offset": more}
        return attention(q, k, v, backend="tiled", **given)

    shape = (1, 4, 1, 1) if kind == "learnable" else (1, 4, 6, 6)
    more = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    actual = stepped(through_the_compiler(call), [*qkv(), more])
    assert counted.calls == ["forward", "backward"]
    for a, w in zip(actual, stepped(call, [*qkv(), more]), strict=True):
        assert torch.equal(a, w)


def test_a_checkpoint_adds_its_own_forward_and_no_other(counted: Counted) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, softcap=2.0, attention_dropout=0.3, backend="tiled")

    def checkpointed(*tensors: Tensor) -> Any:
        return checkpoint(call, *tensors, use_reentrant=False)

    actual = stepped(through_the_compiler(checkpointed), qkv())
    assert counted.calls == ["forward", "forward", "backward"]
    for a, w in zip(actual, stepped(call, qkv()), strict=True):
        torch.testing.assert_close(a, w)


def test_no_gradient_no_log_sum_exp() -> None:
    asked = config(softcap=2.0)
    extras = (None,) * 13
    for need_grad, shape in ((False, (0,)), (True, (2, 4, 6))):
        q, k, v = (t.detach() for t in qkv())
        _, lse, _ = torch.ops.attnsel.attend2(q, k, v, *extras, asked.text, need_grad)
        assert lse.shape == shape


@pytest.mark.parametrize(
    ("first", "then"), [("sdpa.flash", "tiled"), ("tiled", "sdpa.flash"), ("triton", "sdpa.flash")]
)
def test_the_backward_may_be_another_kernels(first: str, then: str) -> None:
    """Settings, or what refused, may have changed since."""
    if first == "triton":
        pytest.importorskip("triton")
    torch._dynamo.reset()
    exact = first != "triton"
    call = through_the_compiler(lambda *t: attention(*t, attn_mask_type="causal"), dynamic=True)
    tensors = qkv(dtype=torch.float64 if exact else torch.float32)
    with override(backend=first):
        out = call(*tensors)
    with override(backend=then):
        grads = torch.autograd.grad(out.square().sum(), tensors)
    wanted = stepped(lambda *t: attention(*t, attn_mask_type="causal", backend="tiled"), tensors)
    for a, w in zip([out.detach(), *grads], wanted, strict=True):
        torch.testing.assert_close(a, w, rtol=0, atol=1e-12 if exact else 1e-5)


def test_carrying_asks_the_question_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which candidate runs may depend on whether a log-sum-exp is asked for."""
    asked: list[Any] = []
    select = dispatch.select
    monkeypatch.setattr(dispatch, "select", lambda p, *a, **kw: asked.append(p) or select(p, *a, **kw))
    clear_cache()
    torch._dynamo.reset()
    stepped(through_the_compiler(lambda *t: attention(*t, softcap=2.0)), qkv())
    assert asked
    assert not any(p.return_lse for p in asked)


# ---- where the forward is run again ---------------------------------------------------------------------


def test_without_a_log_sum_exp_the_forward_is_run_again(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = CANDIDATES["tiled"]
    takes = [word for word in record.takes if word != "lse"]
    monkeypatch.setitem(CANDIDATES, "tiled", dataclasses.replace(record, takes=takes))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="tiled", softcap=2.0)

    actual = stepped(through_the_compiler(call), qkv())
    assert counted.calls == ["forward", "forward", "backward"]
    assert counted.saved == [("its own",)]
    for a, w in zip(actual, stepped(call, qkv()), strict=True):
        assert torch.equal(a, w)


H100 = Environment.describe("H100", cudnn="9.10.0", cudnn_frontend="1.20.0")
NO_FRONTEND = H100.replace(cudnn_frontend=None)


@pytest.mark.parametrize(
    ("env", "asks", "carries"),
    [
        (H100, {}, True),
        (H100, {"attention_dropout": 0.1}, False),  # cudnn's generator is its own
        (H100, {"attention_dropout": 0.1, "backend": "cudnn"}, True),
        (H100, {"attention_dropout": 0.1, "backend": "triton"}, True),
        (NO_FRONTEND, {"attention_dropout": 0.1}, True),
        (Environment.describe("cpu"), {"attention_dropout": 0.1}, True),
    ],
    ids=str,
)
def test_dropout_is_carried_where_all_drop_the_same_entries(
    env: Environment, asks: dict[str, Any], carries: bool
) -> None:
    asked = config(**asks, is_training=True, replayable=True)
    assert replay.carries_lse(asked, "bf16", env) is carries


def test_what_a_forward_without_a_gradient_gave_is_not_started_from(counted: Counted) -> None:
    """The operator itself, called with need_grad False on tensors that require one."""
    text = config(softcap=2.0, backend="tiled").text
    tensors = qkv()
    out, lse, _ = torch.ops.attnsel.attend2(*tensors, *(None,) * 13, text, False)
    assert lse.shape == (0,)
    torch.autograd.grad(out.sum(), tensors)
    assert counted.calls == ["forward", "forward", "backward"]


# ---- what is compared before it counts -------------------------------------------------------------------


def test_the_self_check_starts_from_a_log_sum_exp_as_the_call_does(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backward that is right only with what its own forward saved: caught, as nothing is saved here."""
    from attnsel.runtime import selfcheck

    monkeypatch.setattr(selfcheck, "REFERENCE", "nobody")
    counted.wrong_without_saved = True

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, backend="tiled", softcap=2.0)

    with override(selfcheck="all"):
        stepped(call, qkv())  # eager: it is given what was saved
        out = through_the_compiler(call)(*qkv())
        with pytest.raises(NoBackendError, match="dq is off by"):
            out.sum().backward()


@pytest.mark.parametrize("name", ["padding", "dropout"])
def test_both_operators_pass_opcheck_as_a_step_calls_them(name: str) -> None:
    given = {
        {"core_attention_bias_type": "bias_type"}.get(key, key): value
        for key, value in FEATURES[name].items()
    }
    operands = compiled.Arguments._fields
    tensors = {key: given.pop(key) for key in list(given) if key in operands}
    q, k, v = (t.detach() for t in qkv())
    seed = torch.tensor(5) if name == "dropout" else None
    values = {"q": q, "k": k, "v": v, **tensors, "seed": seed, "config": config(**given).text}
    arguments = tuple((values | {"need_grad": True}).get(field) for field in operands)
    torch.library.opcheck(torch.ops.attnsel.attend2.default, arguments)
    out, lse, _ = torch.ops.attnsel.attend2(*arguments)
    torch.library.opcheck(
        torch.ops.attnsel.attend2_backward.default, (torch.ones_like(out), out, lse, False, *arguments)
    )


def test_another_schema_has_another_name() -> None:
    """Compilers' caches on disk know operators by name: an older graph would call this one with its own
    arguments. With another digest, raise the number in both names."""
    ops = (torch.ops.attnsel.attend2, torch.ops.attnsel.attend2_backward)
    schemas = "".join(str(op.default._schema) for op in ops)
    assert hashlib.sha256(schemas.encode()).hexdigest()[:16] == "6ce3ebd0af8be928"

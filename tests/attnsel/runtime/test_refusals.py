"""What a kernel's error means, on every way of a call: a refusal leads to the next candidate and is learnt;
anything else reaches the caller as it is, and teaches nothing."""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import NoBackendError, attention, clear_cache, override
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import FallbackWarning
from attnsel.environment import Environment
from attnsel.runtime import dispatch, kernels, refusals, selfcheck
from attnsel.runtime.call import NO_EXTRAS, config
from attnsel.runtime.refusals import evidence

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore::attnsel.debug.SlowPathWarning"),
]

WORDS = "no plan for this problem"
CAUSAL = {"attn_mask_type": "causal"}


class StandIn:
    """In the place of the Triton kernel, which ranks first: tiled's numbers, but ``error`` if it ``fails``.

    ``attempts``: how often it got there. ``ran_after``: what the other candidate was asked to do since then.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.fails = ""
        self.error: BaseException | None = None
        self.attempts = 0
        self.raised = False
        self.ran_after: list[str] = []
        other = kernels.Kernel(self.watched("forward"), self.watched("backward"))
        monkeypatch.setitem(kernels.KERNELS, "tiled", other)

    def watched(self, part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.raised:
                self.ran_after.append(part)
            return getattr(tiled, part)(*arguments, **named)

        return call

    def put(self, fails: str, error: BaseException | None) -> None:
        self.fails, self.error = fails, error
        self.raised = False
        if fails == "load":
            # A table of its own: what loads here must not be the kernel of every test that follows.
            others = {name: kernel for name, kernel in kernels.KERNELS.items() if name != "triton"}
            self.monkeypatch.setattr(kernels, "KERNELS", others)
            self.monkeypatch.setattr(kernels, "import_module", self.load)
            return
        bind = self.bind if fails in ("bind", "bound call") else None
        kernel = kernels.Kernel(self.forward, self.backward, self.prepare, bind)
        self.monkeypatch.setitem(kernels.KERNELS, "triton", kernel)

    def reach(self, place: str) -> None:
        if place == self.fails:
            self.attempts += 1
            if self.error is not None:
                self.raised = True
                raise self.error

    def load(self, module: str) -> Any:
        if module != CANDIDATES["triton"].kernel:
            return import_module(module)
        self.reach("load")
        return kernels.Kernel(self.forward, self.backward)

    def prepare(self, spec: Any, inputs: Any) -> None:
        self.reach("prepare")

    def forward(self, spec: Any, inputs: Any) -> Any:
        self.reach("forward of a backward" if spec.need_grad else "forward")
        return tiled.forward(spec, inputs)

    def backward(self, spec: Any, inputs: Any, result: Any, dout: Any) -> Any:
        self.reach("backward")
        return tiled.backward(spec, inputs, result, dout)

    def bind(self, spec: Any, inputs: Any) -> Callable[..., Tensor]:
        self.reach("bind")

        def call(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            self.reach("bound call")
            return tiled.forward(spec, inputs._replace(q=q, k=k, v=v)).out

        return call


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(dispatch, "environment_of", lambda q: Environment.describe("H100", cudnn=None))
    torch._dynamo.reset()
    clear_cache()
    with override(selfcheck="0", allow=("triton", "tiled")):
        yield StandIn(monkeypatch)
    clear_cache()
    torch._dynamo.reset()


# ---- the ways of a call ----------------------------------------------------------------------------------


def tensors(s: int = 6) -> list[Tensor]:
    """q, k, v and the output's gradient, [2, s, 4, 8]."""
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(2, s, 4, 8, generator=gen) for _ in range(4)]


def eager(s: int = 6) -> list[Tensor]:
    q, k, v, _ = tensors(s)
    return [attention(q, k, v, **CAUSAL)]


def trained(run: Callable[..., Tensor] = attention) -> list[Tensor]:
    q, k, v, dout = tensors()
    leaves = [t.requires_grad_() for t in (q, k, v)]
    return list(torch.autograd.grad(run(*leaves, **CAUSAL), leaves, dout))


def compiled() -> list[Tensor]:
    q, k, v, _ = tensors()
    return [torch.compile(attention, fullgraph=True, backend="eager")(q, k, v, **CAUSAL)]


def compiled_training() -> list[Tensor]:
    return trained(torch.compile(attention, fullgraph=True, backend="eager"))


def recompute() -> list[Tensor]:
    """What the backward of a compiled call runs."""
    q, k, v, dout = tensors()
    static = config(**CAUSAL, is_training=True, replayable=True)
    return list(dispatch.gradients(static, q, k, v, NO_EXTRAS, dout)[:3])


def explicit() -> list[Tensor]:
    q, k, v, dout = tensors()
    with override(backend="tiled"):
        out, lse = attention(q, k, v, **CAUSAL, return_lse=True)
    static = config(**CAUSAL, is_training=True, return_lse=True, adapt="never")
    merged = dispatch.MergedResult(out, lse, dout)
    return list(dispatch.merged_gradients(static, q, k, v, NO_EXTRAS, merged)[:3])


Way = Callable[[], list[Tensor]]
PLACES: list[tuple[Way, str]] = [
    (eager, "load"), (eager, "prepare"), (eager, "forward"), (eager, "bind"), (eager, "bound call"),
    (trained, "prepare"), (trained, "forward of a backward"),
    (compiled, "load"), (compiled, "prepare"), (compiled, "forward"),
    (compiled_training, "forward of a backward"), (compiled_training, "backward"),
    (recompute, "load"), (recompute, "prepare"), (recompute, "forward of a backward"),
    (recompute, "backward"),
    (explicit, "load"), (explicit, "prepare"), (explicit, "backward"),
]  # fmt: skip
SOME = [(eager, "forward"), (trained, "prepare"), (recompute, "backward"), (explicit, "backward")]
on_some_ways = pytest.mark.parametrize(("way", "place"), SOME)


def agrees(found: list[Tensor], way: Way) -> None:
    with override(backend="tiled"):
        wanted = way()
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def error_of(way: Way) -> BaseException:
    """What the caller gets; where it comes while a graph is traced, what Dynamo wraps."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - it is looked at by who asks
        way()
    error = caught.value
    while isinstance(error, torch._dynamo.exc.TorchDynamoException) and (
        inner := error.__cause__ or error.__context__
    ):
        error = inner
    return error


# ---- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "place"), PLACES, ids=[f"{way.__name__}-{place}" for way, place in PLACES])
def test_the_next_candidate_runs_and_the_refusal_is_learnt_once_and_shown(
    stand_in: StandIn, way: Way, place: str
) -> None:
    stand_in.put(place, RuntimeError(WORDS))
    with pytest.warns(FallbackWarning, match=f"triton refused when it ran: .*{WORDS}") as caught:
        found = way()
    assert [each.category for each in caught].count(FallbackWarning) == 1
    agrees(found, way)
    (learnt,) = evidence().refusals
    assert learnt.candidate == "triton"
    assert WORDS in learnt.message
    agrees(way(), way)  # and warns no more
    with override(backend="triton"):
        error = error_of(way)
    assert isinstance(error, NoBackendError)
    (reason,) = error.selection["triton"].reasons
    assert (reason.code, reason.evidence) == ("RUNTIME001", "runtime")
    assert WORDS in reason.observed
    assert WORDS in " ".join(str(error).split())
    assert stand_in.attempts == 1
    assert evidence().refusals == (learnt,)


@on_some_ways
def test_a_refusal_teaches_nothing_where_no_other_candidate_runs(
    stand_in: StandIn, way: Way, place: str
) -> None:
    stand_in.put(place, RuntimeError(WORDS))
    with override(backend="triton"):
        error = error_of(way)
    assert isinstance(error, NoBackendError)
    assert WORDS in " ".join(str(error).split())
    assert WORDS in str(error.__cause__)
    assert evidence().refusals == ()
    stand_in.error = None
    agrees(way(), way)
    assert stand_in.attempts > 1, "it is tried again"


@pytest.mark.parametrize(("way", "place"), [*SOME, (trained, "backward")])
def test_a_refusal_in_the_self_check_is_one(stand_in: StandIn, way: Way, place: str) -> None:
    """It finds a backward that refuses, too, before its forward counts."""
    stand_in.put(place, RuntimeError(WORDS))
    with override(selfcheck="all"):
        with pytest.warns(FallbackWarning, match=WORDS):
            found = way()
        agrees(found, way)
    assert [refusal.code for refusal in evidence().refusals] == ["RUNTIME001"]


def test_a_refusal_is_of_one_question_until_the_cache_is_cleared(stand_in: StandIn) -> None:
    stand_in.put("forward", RuntimeError(WORDS))
    for s in (6, 7):  # other shapes are asked afresh
        with pytest.warns(FallbackWarning):
            eager(s)
    stand_in.error = None
    eager()
    assert stand_in.attempts == 2
    clear_cache()
    eager()
    assert stand_in.attempts == 3


def test_what_is_learnt_stays_bounded(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MOST_REFUSALS", 3)
    stand_in.put("forward", RuntimeError(WORDS))
    for s in range(2, 9):
        with pytest.warns(FallbackWarning):
            eager(s)
    assert [refusal.params.max_seqlen_q for refusal in evidence().refusals] == [6, 7, 8]


# What refuses: three exceptions of every kernel's, and those that a record names.
KINDS = [ValueError, RuntimeError, NotImplementedError, decimal.Inexact]


@pytest.mark.parametrize(
    ("kind", "way", "place"), [(kind, *way) for kind, way in zip(KINDS, SOME, strict=True)]
)
def test_the_exceptions_that_a_record_names_refuse_beside_the_usual_ones(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, way: Way, place: str, kind: type[Exception]
) -> None:
    named = dataclasses.replace(CANDIDATES["triton"], refusals=("no.such.module:Error", "decimal:Inexact"))
    monkeypatch.setitem(CANDIDATES, "triton", named)
    stand_in.put(place, kind(WORDS))
    with pytest.warns(FallbackWarning, match=WORDS):
        agrees(way(), way)


def test_what_triton_says_of_one_kernel_is_a_refusal(stand_in: StandIn) -> None:
    stand_in.put("prepare", RuntimeError("Triton Error [CUDA]: device kernel image is invalid"))
    with pytest.warns(FallbackWarning, match="image is invalid"):
        agrees(eager(), eager)


# ---- what is no refusal ----------------------------------------------------------------------------------

ILLEGAL = "an illegal memory access was encountered"
LOST = getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: {ILLEGAL}")
ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), LOST, KeyboardInterrupt()]
MORE_ERRORS = [
    RuntimeError(f"CUDA error: {ILLEGAL}"),  # before torch 2.8
    RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel err"),
    RuntimeError(f"HIP error: {ILLEGAL}"),
    RuntimeError(f"Triton Error [CUDA]: {ILLEGAL}"),
    RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    KeyError("block"),  # a mistake in the kernel's own code
]


def reaches_the_caller(stand_in: StandIn, way: Way, place: str, error: BaseException) -> None:
    stand_in.put(place, error)
    assert error_of(way) is error
    assert stand_in.ran_after == [], "no other candidate is tried"
    assert evidence().refusals == ()
    if way is not compiled_training:  # its forward is a call of its own, and was right
        assert not selfcheck._passed.items, "nothing is taken for checked"
    before, stand_in.error, stand_in.raised = stand_in.attempts, None, False
    agrees(way(), way)
    assert stand_in.attempts > before, "the same kernel runs the next call"


@pytest.mark.parametrize(
    ("way", "place", "error"),
    [
        *[(way, place, ERRORS[number % 3]) for number, (way, place) in enumerate(PLACES)],
        *[(*SOME[number % 4], error) for number, error in enumerate(MORE_ERRORS)],
        # Under autograd its forward has run: there is no way back to another kernel.
        (trained, "backward", RuntimeError(WORDS)),
        (trained, "backward", LOST),
    ],
)
def test_what_says_nothing_about_the_kernel_reaches_the_caller(
    stand_in: StandIn, way: Way, place: str, error: BaseException
) -> None:
    reaches_the_caller(stand_in, way, place, error)


@on_some_ways
def test_a_device_that_is_lost_in_the_self_check_reaches_the_caller(
    stand_in: StandIn, way: Way, place: str
) -> None:
    """The self-check runs the kernel first, and takes other errors of its for refusals."""
    with override(selfcheck="all"):
        reaches_the_caller(stand_in, way, place, LOST)


def test_a_device_that_is_lost_in_a_backward_of_pytorchs_reaches_the_caller(stand_in: StandIn) -> None:
    """Of a kernel that PyTorch differentiates itself: the error comes out of autograd."""

    def bind(spec: Any, inputs: Any) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            hidden = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
            scores = (q @ k.transpose(-1, -2) * spec.softmax_scale).masked_fill(hidden, float("-inf"))
            out = scores.softmax(-1) @ v
            out.register_hook(lambda gradient: stand_in.reach("gradient"))
            return out

        return call

    stand_in.put("gradient", LOST)
    kernel = kernels.Kernel(stand_in.forward, stand_in.backward, stand_in.prepare, bind)
    stand_in.monkeypatch.setitem(kernels.KERNELS, "triton", kernel)
    assert error_of(trained) is LOST
    assert stand_in.ran_after == []
    assert evidence().refusals == ()
    stand_in.error, stand_in.raised = None, False
    agrees(trained(), trained)
    assert stand_in.attempts == 2


def test_a_kernel_that_ran_once_is_not_given_up(stand_in: StandIn) -> None:
    stand_in.put("bound call", None)
    eager()
    stand_in.error = RuntimeError(WORDS)
    assert error_of(eager) is stand_in.error
    assert evidence().refusals == ()
    stand_in.error = None
    eager()
    assert stand_in.attempts == 3


def test_inference_tensors_in_a_graph_are_the_callers_error() -> None:
    with torch.inference_mode():
        q, k, v, _ = tensors()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        attention(q, k.clone().requires_grad_(), v)
    assert evidence().refusals == ()

"""What is remembered of a kernel that refused, for which calls and how long; what is the caller's own error.
That the next candidate runs, and what is said then: test_refusals.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from attnsel import DotProductAttention, NoBackendError, clear_cache
from attnsel.debug import FallbackWarning
from attnsel.runtime import kernels

torch.set_num_threads(1)

WORDS = "mha_graph.execute: no plan for this problem"


def qkv(s: int = 6, grad: bool = False) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, s, 4, 8, generator=gen).requires_grad_(grad) for _ in "qkv")


@pytest.fixture(autouse=True)
def nothing_learnt() -> Iterator[None]:
    clear_cache()
    yield
    clear_cache()


@pytest.fixture
def module() -> DotProductAttention:
    return DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask")


Refuse = Callable[..., list[str]]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """``refuse(kernel, error)``: it raises when first run. Returns its attempts."""

    def install(kernel: str, error: Exception) -> list[str]:
        attempts: list[str] = []
        loaded = kernels.kernel_of(kernel)
        original = loaded.bind
        assert original is not None

        def refusing(spec: Any, inputs: Any) -> Any:
            original(spec, inputs)

            def launch(*arguments: Any) -> Tensor:
                attempts.append(kernel)
                raise error

            return launch

        monkeypatch.setitem(kernels.KERNELS, kernel, loaded._replace(bind=refusing))
        return attempts

    return install


def test_refusal_is_remembered_and_said_once(refuse: Refuse, module: DotProductAttention) -> None:
    attempts = refuse("sdpa.flash", RuntimeError(WORDS))
    with pytest.warns(FallbackWarning):
        module(*qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(*qkv())
        # Another signature with the same question: strides and formats aside, it is the same call.
        DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="no_mask", name="other")(*qkv())
    assert attempts == ["sdpa.flash"]


def test_other_shapes_are_asked_afresh(refuse: Refuse, module: DotProductAttention) -> None:
    attempts = refuse("sdpa.flash", RuntimeError(WORDS))
    for s in (6, 7):
        with pytest.warns(FallbackWarning):
            module(*qkv(s))
    assert len(attempts) == 2


def test_clear_cache_forgets_refusals(
    refuse: Refuse, module: DotProductAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse("sdpa.flash", RuntimeError(WORDS))
    with pytest.warns(FallbackWarning):
        module(*qkv())
    monkeypatch.undo()
    clear_cache()
    module(*qkv())
    assert module.last_selection is not None
    assert module.last_selection.backend == "sdpa.flash"


def refuse_all_but(kept: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*given: Any) -> Any:
        raise RuntimeError("out of resources")

    for name in ("sdpa.flash", "sdpa.math", "tiled"):
        if name != kept:
            loaded = kernels.kernel_of(name)
            bind = None if loaded.bind is None else refusing
            monkeypatch.setitem(kernels.KERNELS, name, loaded._replace(bind=bind, forward=refusing))


def test_two_refusals_leave_the_third(module: DotProductAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_all_but("tiled", monkeypatch)
    with pytest.warns(FallbackWarning) as caught:
        module(*qkv())
    assert [str(w.message).split()[0] for w in caught] == ["sdpa.flash", "sdpa.math"]
    assert module.last_selection is not None
    assert module.last_selection.backend == "tiled"


# What is no refusal


def fail_when(name: str, error: Exception, times: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """That kernel raises ``error`` on the calls numbered in ``times``; returns the count of its calls."""
    loaded, calls = kernels.kernel_of(name), [0]
    original = loaded.bind
    assert original is not None

    def binding(spec: Any, inputs: Any) -> Any:
        call = original(spec, inputs)

        def launch(*arguments: Any) -> Tensor:
            calls[0] += 1
            if calls[0] in times:
                raise error
            return call(*arguments)

        return launch

    monkeypatch.setitem(kernels.KERNELS, name, loaded._replace(bind=binding))
    return calls


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_ran_once_is_not_given_up(
    module: DotProductAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_when("sdpa.flash", RuntimeError("misfortune"), [2], monkeypatch)
    module(*qkv())
    with pytest.raises(RuntimeError, match="misfortune"):
        module(*qkv())
    module(*qkv())
    assert module.last_selection is not None
    assert module.last_selection.backend == "sdpa.flash"


@pytest.mark.filterwarnings("error")
def test_a_call_that_no_candidate_can_run_teaches_nothing(
    module: DotProductAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        refuse_all_but(None, broken)
        with pytest.raises(NoBackendError, match="out of resources") as caught:
            module(*qkv())
        assert all(
            "RUNTIME001" in [r.code for r in caught.value.selection[name].reasons]
            for name in kernels.KERNELS
            if name in ("sdpa.flash", "sdpa.math", "tiled")
        )
    module(*qkv())
    assert module.last_selection is not None
    assert module.last_selection.backend == "sdpa.flash"


@pytest.mark.filterwarnings("error")
def test_inference_tensors_in_a_graph_are_the_callers_error(module: DotProductAttention) -> None:
    with torch.inference_mode():
        q, k, v = qkv()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        module(q, k.clone().requires_grad_(), v)
    module(qkv()[0], qkv(grad=True)[1], qkv()[2]).sum().backward()
    assert module.last_selection is not None
    assert module.last_selection.backend == "sdpa.flash"


def test_evidence_stays_bounded(module: DotProductAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnsel.runtime import refusals

    monkeypatch.setattr(refusals, "_MOST_REFUSALS", 3)
    fail_when("sdpa.flash", RuntimeError(WORDS), list(range(100)), monkeypatch)
    for s in range(2, 9):
        with pytest.warns(FallbackWarning):
            module(*qkv(s))
    assert len(refusals.evidence().refusals) == 3
    assert refusals.evidence().refusals[-1].params.max_seqlen_q == 8

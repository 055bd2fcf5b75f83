"""A kernel that refuses or is wrong on one rank: every rank takes the next candidate, and knows why."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import attnsel
import context_parallel_cases as cases
import ranks
from attnsel.backends.tiled import kernel as tiled
from attnsel.debug import FallbackWarning
from attnsel.errors import ContextParallelError, NoBackendError
from attnsel.runtime import kernels
from attnsel.runtime.refusals import evidence
from tables import each

torch.set_num_threads(1)

CAUSAL = cases.Case("causal", backend=None)
WORDS = "no plan for this problem"
BOTH = (0, 1)


class Trouble(NamedTuple):
    """On these ``ranks`` the ``kernel`` raises ``error`` in its ``part``; without one its numbers are wrong.

    ``runs``: the next candidate.
    """

    part: str
    ranks: tuple[int, ...]
    error: Callable[[], BaseException] | None = lambda: RuntimeError(WORDS)
    comm: str = "p2p"
    selfcheck: str = "0"
    backend: str | None = None
    kernel: str = "sdpa.flash"
    prepares: bool = True
    runs: str = "tiled"


def lost() -> BaseException:
    return RuntimeError("CUDA error: an illegal memory access was encountered")


def no_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory")


OTHERS_RUN = {  # the next candidate runs on all ranks, and the evidence says (code, words)
    "prepare on one rank": Trouble("prepare", (1,)),
    "backward in the self-check": Trouble("backward", (1,), selfcheck="all"),
    # A kernel that cannot say no in advance is tried before anything is exchanged.
    "forward": Trouble("forward", (1,), prepares=False),
    "backward, a2a": Trouble("backward", (1,), comm="a2a", prepares=False, runs="sdpa.math"),
    "wrong forward on one rank": Trouble("forward", (0,), None, selfcheck="all"),
    "wrong backward on both": Trouble("backward", BOTH, None, selfcheck="all"),
}
ERRORS = {
    "forced, on one rank": Trouble("prepare", (1,), backend="sdpa.flash"),
    "lost device, prepare": Trouble("prepare", (1,), lost),
    "lost device, self-check": Trouble("forward", (1,), lost, selfcheck="all"),
    "interrupt, prepare": Trouble("prepare", BOTH, KeyboardInterrupt),
    "memory, step": Trouble("forward", BOTH, no_memory, comm="all_gather"),
}


class Found(NamedTuple):
    """``numbers`` of a call, or its error; what ran, and what was attempted, warned of and learnt."""

    numbers: Any
    error: tuple[str, str, bool] | None  # its type, its text and whether it is the kernel's own
    ran: str | None
    attempts: int
    warned: list[str]
    learnt: list[tuple[str, str, str]]
    reasons: list[tuple[str, str]]  # code and message of those against the kernel in trouble


@contextmanager
def troubled(trouble: Trouble, rank: int) -> Iterator[tuple[list[int], BaseException | None]]:
    """tiled's numbers stand in for the kernel's; the calls of the part that is in trouble are counted."""
    calls: list[int] = []
    error = None if trouble.error is None else trouble.error()

    def reach(part: str, value: Any) -> Any:
        if rank not in trouble.ranks or part != trouble.part:
            return value
        calls.append(1)
        if error is not None:
            raise error
        return value._replace(**{name: 1.5 * getattr(value, name) for name in value._fields[:1]})

    stand_in = kernels.Kernel(
        lambda spec, inputs: reach("forward", tiled.forward(spec, inputs)),
        lambda *given: reach("backward", tiled.backward(*given)),
        (lambda spec, inputs: reach("prepare", None)) if trouble.prepares else None,
    )
    kernels.kernel_of(trouble.kernel)  # it is loaded before another takes its place
    with mock.patch.dict(kernels.KERNELS, {trouble.kernel: stand_in}):
        yield calls, error


def attempt(module: Any, trouble: Trouble, rank: int, calls: list[int], error: BaseException | None) -> Found:
    numbers = told = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            numbers = cases.compute(CAUSAL, module, cases.make(CAUSAL), rank, 2)
        except BaseException as raised:
            told = type(raised).__name__, str(raised), raised is error
    selection = module.last_selection
    against = [] if selection is None else selection[trouble.kernel].reasons
    return Found(
        numbers,
        told,
        None if numbers is None else selection.backend,
        len(calls),
        [str(w.message) for w in caught if w.category is FallbackWarning],
        [(refusal.candidate, refusal.code, refusal.message) for refusal in evidence().refusals],
        [(reason.code, reason.message) for reason in against],
    )


def attempts(rank: int, trouble: Trouble) -> list[Found]:
    """The call, the same again with a new module, and once more after everything is forgotten and mended."""
    attnsel.clear_cache()
    group = ranks.groups_of(trouble.comm, rank, 2, {})

    def module() -> Any:
        return CAUSAL.make_module(cp_group=group, cp_comm_type=trouble.comm)

    with attnsel.override(selfcheck=trouble.selfcheck, backend=trouble.backend):
        with troubled(trouble, rank) as (calls, error):
            found = [attempt(module(), trouble, rank, calls, error) for _ in range(2)]
        attnsel.clear_cache()
        found.append(attempt(module(), trouble, rank, [], None))
    return found


def job(rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {name: attempts(rank, trouble) for name, trouble in (OTHERS_RUN | ERRORS).items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(job, 2, tmp_path_factory.mktemp("refusals"))


def agree(parts: Iterable[dict[str, torch.Tensor]]) -> None:
    cases.check(CAUSAL, list(parts), backend="tiled")


@each(("name", "trouble"), OTHERS_RUN.items())
def test_all_ranks_take_the_next_candidate_and_show_the_reason(
    found: list[dict[str, Any]], name: str, trouble: Trouble
) -> None:
    code, words = ("RUNTIME001", WORDS) if trouble.error else ("RUNTIME002", "is off by")
    first, second, mended = zip(*(part[name] for part in found), strict=True)
    for call in (first, second):
        assert [one.error for one in call] == [None, None]
        assert [one.ran for one in call] == [trouble.runs] * 2
        agree(one.numbers for one in call)
    for rank, (once, again) in enumerate(zip(first, second, strict=True)):
        assert [(name, kind) for name, kind, _ in once.learnt] == [("sdpa.flash", code)]
        assert words in once.learnt[0][2]
        assert again.learnt == once.learnt, "it is learnt once"
        assert again.attempts == once.attempts, "it is not tried again"
        assert (once.attempts > 0) == (rank in trouble.ranks)
        assert [kind for kind, _ in once.reasons] == [code]
        assert words in once.reasons[0][1]
        assert again.warned == []
    assert sum(len(one.warned) for one in first) == 1, "one rank speaks"
    assert [one.ran for one in mended] == ["sdpa.flash"] * 2


@each(("name", "trouble"), ERRORS.items())
def test_what_says_nothing_about_the_kernel_or_leaves_no_other_reaches_the_callers(
    found: list[dict[str, Any]], name: str, trouble: Trouble
) -> None:
    assert trouble.error is not None
    error = trouble.error()
    own = NoBackendError.__name__ if trouble.backend else type(error).__name__
    for rank, (*calls, mended) in enumerate(part[name] for part in found):
        for one in calls:
            kind, text, is_the_kernels = one.error
            assert (one.learnt, one.warned) == ([], [])
            if rank in trouble.ranks:
                assert (kind, is_the_kernels) == (own, not trouble.backend)
                assert str(error) in " ".join(text.split())
                assert ("RUNTIME001" in text) == bool(trouble.backend)
            else:
                assert kind == ContextParallelError.__name__
                said = "" if trouble.backend else error
                assert text.startswith(f"rank 1 of the context parallel group: {own}: {said}")
        if trouble.backend:
            assert (calls[1].attempts > calls[0].attempts) == (rank in trouble.ranks), "it is tried again"
        assert mended.ran == "sdpa.flash"
    agree(part[name][-1].numbers for part in found)

"""An error on one rank is every rank's error, at once, and the call after it is right again.

No clock says so: groups wait so long that a rank which waits for its timeout is found to hang (ranks.LIMIT).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import attnsel
import context_parallel_cases as cases
import ranks
from attnsel.context_parallel import run
from attnsel.errors import ContextParallelError
from attnsel.runtime import kernels
from ranks import Told, told

torch.set_num_threads(1)

FAILS = 1  # the rank
WORDS = "no plan for this problem"
SIZES = {"p2p": 2, "all_gather": 2, "a2a": 2, "a2a+p2p": 4}
LAST_STEP = {"p2p": 2, "all_gather": 1, "a2a": 1, "a2a+p2p": 2}  # the kernel call of rank 1 that fails


def batch(number: int) -> cases.Case:
    """Batches of the same shapes and of other contents."""
    return cases.Case("causal" + " again" * number)


class Rank(NamedTuple):
    rank: int
    size: int
    comm: str
    group: Any

    @property
    def fails(self) -> bool:
        return self.rank == FAILS

    def module(self, **arguments: Any) -> Any:
        return cases.Case("", arguments).make_module(cp_group=self.group, cp_comm_type=self.comm)

    def run(self, module: Any, number: int, **more: Any) -> dict[str, torch.Tensor]:
        whole = cases.make(batch(number))
        whole.arguments.update(more)
        return cases.compute(batch(number), module, whole, self.rank, self.size)


@contextmanager
def failing(part: str, at: int, error: type[BaseException] = RuntimeError) -> Iterator[None]:
    """tiled raises in the ``at``-th call of its forward or backward."""
    loaded, calls = kernels.kernel_of("tiled"), []
    function = getattr(loaded, part)

    def reached(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise error(WORDS)
        return function(*arguments)

    kernels.KERNELS["tiled"] = loaded._replace(**{part: reached})
    try:
        yield
    finally:
        kernels.KERNELS["tiled"] = loaded


# ---- what goes wrong: each returns the module to go on with, and what this rank was told --------------


def no_keys(me: Rank) -> tuple[Any, Told]:
    module = me.module()
    q, k, v = torch.randn(3, 2, 32 // me.size, 4, 8, dtype=torch.float64)
    return module, told(lambda: module(q, None if me.fails else k, v))


def an_unknown_argument(me: Rank) -> tuple[Any, Told]:
    module = me.module()
    return module, told(lambda: me.run(module, 1, **({"colour": "red"} if me.fails else {})))


def no_backend(me: Rank) -> tuple[Any, Told]:
    """The candidate that rank 1 insists on takes no float64."""
    module = cases.Case("", backend=None).make_module(cp_group=me.group, cp_comm_type=me.comm)
    with attnsel.override(backend="sdpa.efficient" if me.fails else "tiled"):
        found = told(lambda: me.run(module, 1))
    return module, found


def the_tracker(me: Rank) -> tuple[Any, Told]:
    """The caller's random state raises when it is entered."""

    @contextmanager
    def fork() -> Iterator[None]:
        if me.fails and not entered:
            entered.append(1)
            raise KeyError("no state of this name")
        yield

    entered: list[int] = []
    tracker = type("Tracker", (), {"fork": staticmethod(fork)})
    module = me.module(attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    found = told(lambda: me.run(module, 1))
    return module.eval(), found


def a_kernel(me: Rank, part: str, at: int) -> tuple[Any, Told]:
    module = me.module()
    if not me.fails:
        return module, told(lambda: me.run(module, 1))
    with failing(part, at):
        return module, told(lambda: me.run(module, 1))


def the_first_step(me: Rank) -> tuple[Any, Told]:
    return a_kernel(me, "forward", 1)


def the_last_step(me: Rank) -> tuple[Any, Told]:
    return a_kernel(me, "forward", LAST_STEP[me.comm])


def the_last_backward(me: Rank) -> tuple[Any, Told]:
    return a_kernel(me, "backward", LAST_STEP[me.comm])


def an_interrupt(me: Rank) -> tuple[Any, Told]:
    """In a kernel, when keys are on their way."""
    module = me.module()
    with failing("forward", 1 if me.fails else 0, KeyboardInterrupt):
        return module, told(lambda: me.run(module, 1))


def a_step_with_all_it_has(me: Rank) -> tuple[Any, Told]:
    """The largest scores and the seed of the dropout are exchanged as well."""
    module = me.module(return_max_logit=True, softmax_type="learnable", attention_dropout=0.5)
    with failing("forward", LAST_STEP[me.comm] if me.fails else 0):
        found = told(lambda: me.run(module, 1))
    return me.module(), found


def what_was_saved(me: Rank) -> tuple[Any, Told]:
    """A hook of the caller's raises when the backward reads what the forward saved."""
    module = me.module()

    def unpack(t: Any) -> Any:
        if me.fails:
            raise RuntimeError(WORDS)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = forward(me, module)()
    return module, told(out.sum().backward)


def all_ranks(me: Rank) -> tuple[Any, Told]:
    """Each rank raises its own error."""
    module = me.module()
    with failing("forward", 1):
        return module, told(lambda: me.run(module, 1))


TROUBLES: dict[Callable[[Rank], tuple[Any, Told]], str] = {  # and what is said
    no_keys: "InvalidInput: key_layer",
    an_unknown_argument: "TypeError: DotProductAttention got an unexpected argument 'colour'",
    no_backend: "NoBackendError: ",
    the_tracker: "KeyError: 'no state of this name'",
    the_first_step: f"RuntimeError: {WORDS}",
    the_last_step: f"RuntimeError: {WORDS}",
    an_interrupt: f"KeyboardInterrupt: {WORDS}",
    a_step_with_all_it_has: f"RuntimeError: {WORDS}",
    the_last_backward: f"RuntimeError: {WORDS}",
    what_was_saved: f"RuntimeError: {WORDS}",
    all_ranks: f"RuntimeError: {WORDS}",
}


# Where a rank fails is seen in every exchange; what fails before any is exchanged is one path, seen in p2p.
IN_EXCHANGES = (no_keys, the_last_step, an_interrupt, a_step_with_all_it_has, the_last_backward, all_ranks)


def job(rank: int, size: int) -> dict[str, Any]:
    """Two ranks in pairs of the four, as the exchange has it; all four for a2a+p2p, on a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    found: dict[str, Any] = {}
    for comm, members in SIZES.items():
        pair = dist.new_group([0, 1])
        group = pair if members == 2 else init_device_mesh("cpu", (2, 2))
        if rank >= members:
            continue
        me = Rank(rank, members, comm, group)
        for trouble in TROUBLES if comm == "p2p" else IN_EXCHANGES:
            module, error = trouble(me)
            found[f"{comm}/{trouble.__name__}"] = error, me.run(module, 2)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[Told, Any]]]:
    return ranks.run(job, 4, tmp_path_factory.mktemp("one_rank"))


@pytest.mark.parametrize("comm", SIZES)
def test_an_error_on_one_rank_is_the_error_of_all_and_the_next_call_is_right(
    found: list[dict[str, tuple[Told, Any]]], comm: str
) -> None:
    case = batch(2)
    for trouble in TROUBLES if comm == "p2p" else IN_EXCHANGES:
        what = f"{comm}/{trouble.__name__}"
        errors, numbers = zip(*(part[what] for part in found[: SIZES[comm]]), strict=True)
        kind, words = TROUBLES[trouble].split(": ", 1)
        for rank, error in enumerate(errors):
            if rank == FAILS or trouble is all_ranks:
                assert error.kind == kind, f"it is raised as it is where it happened: {what}"
                assert error.text.startswith(words), what
            else:
                assert error.kind == ContextParallelError.__name__, (what, error)
                wanted = f"rank {FAILS} of the context parallel group: {TROUBLES[trouble]}"
                assert error.text.startswith(wanted), what
        cases.check(case, numbers, what)


# ---- a call that some ranks left, or never made -------------------------------------------------------


def forward(me: Rank, module: Any) -> Callable[[], Any]:
    q, k, v = torch.randn(3, 2, 32 // me.size, 4, 8, dtype=torch.float64).requires_grad_()
    return lambda: module(q, k, v)


def interrupted(me: Rank) -> list[Told]:
    """Rank 1 leaves the call before it exchanges anything, and makes it once more."""
    module = me.module()
    made = [told(forward(me, module))]
    if me.fails:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run, "make_call", interrupt)
            assert told(forward(me, module)).kind == "KeyboardInterrupt"
    else:
        made.append(told(forward(me, module)))
    made.append(told(forward(me, module)))
    if me.fails:
        made.append(told(forward(me, module)))
    return made


def interrupt(*arguments: Any) -> Any:
    raise KeyboardInterrupt


def a_backward_left_out(me: Rank) -> list[Told]:
    """Rank 1 goes on to the next forward when rank 0 runs its backward."""
    module = me.module()
    made = [told(forward(me, module))]
    out = forward(me, module)()
    made.append(told(forward(me, module) if me.fails else lambda: out.sum().backward()))
    made.append(told(forward(me, module)))
    return made


def two_backwards_in_another_order(me: Rank) -> list[Told]:
    module = me.module()
    outs = [forward(me, module)() for _ in range(2)]
    order = reversed(outs) if me.fails else outs
    return [told(lambda out=out: out.sum().backward()) for out in order]


def another_layer(me: Rank) -> list[Told]:
    """Between two layers rank 1 meets an error of other code, and goes on with the next batch."""
    first = me.module()
    second = copy.deepcopy(first)
    order = (first, first, second) if me.fails else (first, second, first)
    return [told(forward(me, module)) for module in order]


OUT_OF_STEP: dict[Callable[[Rank], list[Told]], tuple[str, str]] = {  # where rank 0 and rank 1 are
    interrupted: ("call 2 (forward of module 1)", "call 3 (forward of module 1)"),
    a_backward_left_out: ("call 2 (backward of module 1)", "call 3 (forward of module 1)"),
    two_backwards_in_another_order: ("call 1 (backward of module 1)", "call 2 (backward of module 1)"),
    another_layer: ("call 2 (forward of module 2)", "call 2 (forward of module 1)"),
}


def out_of_step(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for trouble in OUT_OF_STEP:
        for comm in ("p2p", "all_gather", "a2a"):
            me = Rank(rank, size, comm, dist.new_group())
            found[f"{trouble.__name__} {comm}"] = trouble(me)
    return found


def test_different_calls_never_meet(tmp_path: Path) -> None:
    for part in ranks.run(out_of_step, 2, tmp_path):
        for trouble, (zero, one) in OUT_OF_STEP.items():
            for comm in ("p2p", "all_gather", "a2a"):
                what = f"{trouble.__name__} {comm}"
                *before, found, later = part[what]
                assert all(error.kind == "" for error in before), what
                for error in (found, later):  # nor do they meet in later calls
                    assert error.kind == ContextParallelError.__name__, (what, error)
                    assert f"{zero} on rank 0, {one} on rank 1." in error.text, what

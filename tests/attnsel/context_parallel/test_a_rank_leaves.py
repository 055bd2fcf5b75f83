"""A rank that leaves a pass between two exchanges: the others hear of it at once, and no later call runs.

Found by tests/fuzz/rank_faults.py: the others waited for their timeout, and took what came next for the rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks
from attnsel.context_parallel import comm
from attnsel.errors import ContextParallelError
from ranks import Told, told

torch.set_num_threads(1)

SIZE, LEAVES = 4, 1  # ranks that share no group with rank 1 have to hear of it from others
AGAIN = "start again with a new process group"


class Leaves(NamedTuple):
    """Before which exchange of a forward or backward which error is raised. The first is the consensus."""

    backward: bool
    exchange: int
    error: type[BaseException]


PASSES = {
    "in the consensus": Leaves(False, 1, MemoryError),
    "in a forward": Leaves(False, 2, MemoryError),
    "interrupted in a forward": Leaves(False, 3, KeyboardInterrupt),
    "in the consensus of a backward": Leaves(True, 1, ValueError),
    "in a backward": Leaves(True, 3, KeyError),
}


@contextmanager
def failing(exchange: int, error: type[BaseException]) -> Iterator[None]:
    """An exchange, counted from 1, raises before anything is sent."""
    calls: list[int] = []

    def reached(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == exchange:
                raise error("no memory")
            return function(*arguments, **more)

        return call

    with (
        mock.patch.object(comm.Member, "gather", reached(comm.Member.gather)),
        mock.patch.object(comm.Member, "swap", reached(comm.Member.swap)),
        mock.patch.object(comm.Ring, "post", reached(comm.Ring.post)),
    ):
        yield


def leave(rank: int, name: str, leaves: Leaves) -> list[Told]:
    group = ranks.groups_of(name, rank, SIZE, {})
    if name != "a2a+p2p":
        group = dist.new_group()  # the world is to last
    case = cases.Case("causal")
    module = case.make_module(cp_group=group, cp_comm_type=name)
    whole = cases.make(case)
    forward = lambda: cases.forward(case, module, whole, rank, SIZE)  # noqa: E731
    ask = forward().backward if leaves.backward else forward
    if rank == LEAVES:
        with failing(leaves.exchange, leaves.error):
            found = told(ask)
    else:
        found = told(ask)
    return [found, told(forward), told(forward)]


def job(rank: int, size: int) -> dict[str, list[Told]]:
    return {
        f"{name}, {where}": leave(rank, name, leaves)
        for name in cases.COMMS
        for where, leaves in PASSES.items()
    }


def test_all_ranks_hear_of_it_and_no_later_call_runs(tmp_path: Path) -> None:
    """At once: who waits for its group's timeout is found to hang."""
    for rank, part in enumerate(ranks.run(job, SIZE, tmp_path)):
        for name, (first, *later) in part.items():
            what = f"{name}, on rank {rank}"
            if rank == LEAVES:
                own = PASSES[name.split(", ")[1]].error.__name__
                assert first.kind == own, f"its own error is raised as it is: {what}"
            else:
                assert first.kind == ContextParallelError.__name__, (what, first)
                assert "another rank has died, raised an error or is late" in first.text
                assert AGAIN in first.text, what
            for error in later:
                assert error.kind == ContextParallelError.__name__, (what, error)
                assert f"rank {rank} of the context parallel group left call 1 (" in error.text
                assert AGAIN in error.text, what


def dies_and_others_go_on(rank: int, size: int) -> Any:
    """Rank 1 dies; rank 2 does not talk to it, and no other rank's process ends before all are told."""
    case = cases.Case("causal")
    group = ranks.groups_of("a2a+p2p", rank, SIZE, {})
    module = case.make_module(cp_group=group, cp_comm_type="a2a+p2p")
    if rank == LEAVES:
        os._exit(17)
    whole = cases.make(case)
    error = told(lambda: cases.forward(case, module, whole, rank, SIZE))
    ranks.wait_for_all("told", SIZE - 1)
    return error


def test_a_death_reaches_ranks_that_did_not_talk_to_the_dead(tmp_path: Path) -> None:
    every = ranks.run(dies_and_others_go_on, SIZE, tmp_path)
    assert every.pop(LEAVES) is None
    for error in every:
        assert error.kind == ContextParallelError.__name__, error

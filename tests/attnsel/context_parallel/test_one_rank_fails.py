"""An error on one rank is every rank's error, at once, and no later call is wrong or runs out of step.

No clock says so: groups wait so long that a rank which waits for its timeout is found to hang (ranks.LIMIT).
The cases are those of tests/fuzz/rank_faults.py, which draws others, and judges these as well.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import rank_faults
from rank_faults import CPE, SAYS_SO, Step

import ranks

torch.set_num_threads(1)

SIZES = {"p2p": 2, "all_gather": 2, "a2a": 2, "a2a+p2p": 4}
LAST_STEP = {"p2p": 2, "all_gather": 1, "a2a": 1, "a2a+p2p": 2}  # the kernel call of rank 1 that fails


def case(comm: str, features: str = "causal", size: int = 0, /, **fault: Any) -> dict[str, Any]:
    """Three forwards, each with its backward. What fails does so on rank 1."""
    given = {"comm": comm, "ranks": size or SIZES[comm], "features": features, "fails": [1], "layers": 1}
    return given | {"backward": True, "nested": False, "timeout": ranks.TIMEOUT, "fault": fault}


def kernel(
    comm: str, features: str, act: str = "RuntimeError", step: int = 0, event: int = 0
) -> dict[str, Any]:
    return case(comm, features, kind="kernel", act=act, step=step, event=event or LAST_STEP[comm])


STEP_FAILS: dict[str, dict[str, Any]] = {}
for comm in SIZES:
    STEP_FAILS |= {
        f"{comm}: the last step": kernel(comm, "max logit"),
        f"{comm}: an interrupt while keys are on their way": kernel(
            comm, "causal", "KeyboardInterrupt", event=1
        ),
        f"{comm}: the last backward": kernel(comm, "dropout", step=1),
        f"{comm}: each rank its own": kernel(comm, "learnable sinks", event=1)
        | {"fails": [*range(SIZES[comm])]},
        f"{comm}: no keys": case(comm, kind="input", input="no keys", step=2),
    }
# What fails before anything is exchanged is one path, seen in p2p alone.
for name in ("an unknown argument", "an unknown mask"):
    STEP_FAILS[name] = case("p2p", kind="input", input=name, step=0)

LEAVES = {
    f"{comm}: {error} before exchange {event}, step {step}": case(
        comm, "causal", 4, kind="exchange", when="before", act=error, event=event, step=step
    )
    for comm in SIZES
    for error, event, step in [
        ("MemoryError", 1, 0),  # in the consensus
        ("MemoryError", 2, 0),
        ("KeyboardInterrupt", 3, 0),
        ("ValueError", 1, 1),  # in the consensus of a backward
        ("KeyError", 3, 1),
    ]
}
FORWARDS = {"backward": False}
OUT_OF_STEP: dict[str, tuple[dict[str, Any], str, int, str, str]] = {  # calls in which ranks 0 and 1 meet
    "one rank left": (FORWARDS, "is interrupted", 0, "1 (forward of module 1)", "2 (forward of module 1)"),
    "a backward left out": ({}, "leaves one out", 1, "1 (backward of module 1)", "2 (forward of module 1)"),
    "another backward": (
        {"nested": True}, "swaps two", 2, "2 (backward of module 1)", "1 (backward of module 1)",
    ),
    "another layer": (
        FORWARDS | {"layers": 2}, "swaps two", 1, "2 (forward of module 2)", "2 (forward of module 1)",
    ),
}  # fmt: skip
NEVER_MEET = {
    f"{comm}: {name}": case(comm, kind="program", change=change, step=step) | more
    for comm in ("p2p", "all_gather", "a2a")
    for name, (more, change, step, *_) in OUT_OF_STEP.items()
}


def job(rank: int, size: int) -> dict[str, list[Step]]:
    """Two ranks as a pair of the four, where two are enough."""
    found = {}
    for name, one in (STEP_FAILS | LEAVES | NEVER_MEET).items():
        group = dist.new_group([*range(one["ranks"])])  # the world is to last
        if one["comm"] == "a2a+p2p":
            group = ranks.groups_of(one["comm"], rank, size, {})
        if rank < one["ranks"]:
            found[name] = rank_faults.Rank(one, rank, group).work()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Step]]]:
    return ranks.run(job, 4, tmp_path_factory.mktemp("one_rank"))


def judged(
    found: list[dict[str, list[Step]]], name: str, one: dict[str, Any]
) -> tuple[str, list[list[Step]]]:
    steps = [part[name] for part in found[: one["ranks"]]]
    return rank_faults.judge(one, [*steps]).split(": ")[1], steps


def test_an_error_in_a_step_is_the_error_of_all_and_later_calls_are_right(
    found: list[dict[str, list[Step]]],
) -> None:
    for name, one in STEP_FAILS.items():
        word, steps = judged(found, name, one)
        assert word == "told, then right", name
        own = {step.kind for part in steps for step in part if step.struck and "act" in one["fault"]}
        assert own <= {one["fault"].get("act")}, f"it is raised as it is where it happened: {name}"


def test_all_ranks_hear_of_one_that_left_a_pass_and_no_later_call_runs(
    found: list[dict[str, list[Step]]],
) -> None:
    """Ranks that share no group with it have to hear of it from others."""
    for name, one in LEAVES.items():
        word, steps = judged(found, name, one)
        assert word == "told, then refused", name
        for rank, part in enumerate(steps):
            first, *later = [step for step in part if step.kind]
            if rank == 1:
                assert first.kind == one["fault"]["act"], f"its own error is raised as it is: {name}"
            else:
                assert "another rank has died, raised an error or is late" in first.text, name
                assert SAYS_SO in first.text
            assert later
            for step in later:
                assert f"rank {rank} of the context parallel group left call 1 (" in step.text, name


def test_different_calls_never_meet(found: list[dict[str, list[Step]]]) -> None:
    for name, one in NEVER_MEET.items():
        word, steps = judged(found, name, one)
        assert word == "told", name
        *_, zero, other = OUT_OF_STEP[name.split(": ")[1]]
        for part in steps:
            told = [step.text for step in part if step.kind == CPE]
            assert len(told) > 1, name  # nor do they meet in later calls
            for text in told:
                assert f"call {zero} on rank 0, call {other} on rank 1." in text, name

"""Four ranks against one process: outputs and all gradients, in every exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks

torch.set_num_threads(1)
# Each feature meets one exchange, and each exchange every kind of feature; "causal" all of them.
PAIRS = [(case, case.comms[at % len(case.comms)]) for at, case in enumerate(cases.CASES)]
PAIRS += [(cases.CASES[0], comm) for comm in cases.COMMS[1:]]
EVERY_PAIR = [(case, comm) for case in cases.CASES for comm in case.comms]


def computed(rank: int, size: int, pairs: list[tuple[cases.Case, str]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for case, comm in pairs:
        module = case.make_module(cp_group=ranks.groups_of(comm, rank, size, made), cp_comm_type=comm)
        numbers = cases.compute(case, module, cases.make(case), rank, size)
        assert module.last_selection is not None
        found[f"{case.name}/{comm}"] = numbers, module.last_selection.backend
    return found


def some(rank: int, size: int) -> dict[str, Any]:
    return computed(rank, size, PAIRS)


def every(rank: int, size: int) -> dict[str, Any]:
    return computed(rank, size, EVERY_PAIR)


def agree(found: list[dict[str, Any]], pairs: list[tuple[cases.Case, str]]) -> None:
    for case, comm in pairs:
        what = f"{case.name}/{comm}"
        numbers, ran = zip(*(part[what] for part in found), strict=True)
        assert set(ran) == {case.chosen or case.backend}, what
        cases.check(case, numbers, what)


def test_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    agree(ranks.run(some, 4, tmp_path), PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_feature_in_every_exchange(size: int, tmp_path: Path) -> None:
    agree(ranks.run(every, size, tmp_path), EVERY_PAIR)

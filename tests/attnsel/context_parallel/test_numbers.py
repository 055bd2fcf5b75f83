"""Two and four ranks against one process: outputs and all gradients, in every exchange."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks

torch.set_num_threads(1)
PAIRS = [(case, comm) for case in cases.CASES for comm in case.comms]


def job(rank: int, size: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for case, comm in PAIRS:
        try:
            group = ranks.groups_of(comm, rank, size, made)
            module = case.make_module(cp_group=group, cp_comm_type=comm)
            numbers = cases.compute(case, module, cases.make(case), rank, size)
            assert module.last_selection is not None
            found[f"{case.name}/{comm}"] = numbers, module.last_selection.backend
        except Exception as error:
            found[f"{case.name}/{comm}"] = error, None
    return found


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(job, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize(("case", "comm"), PAIRS, ids=[f"{case.name}-{comm}" for case, comm in PAIRS])
def test_ranks_find_what_one_process_finds(found: list[dict[str, Any]], case: cases.Case, comm: str) -> None:
    parts = []
    for part in found:
        assert "crash" not in part, part
        numbers, backend = part[f"{case.name}/{comm}"]
        if isinstance(numbers, Exception):
            raise numbers
        assert backend == (case.chosen or case.backend)
        parts.append(numbers)
    whole = cases.make(case)
    wanted = cases.compute(case, case.make_module(), whole)
    got = cases.together(case, parts, whole)
    assert got.keys() == wanted.keys()
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}[case.dtype]
    for name in wanted:
        torch.testing.assert_close(
            got[name],
            wanted[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )

"""An exchange is a record: one that is added as a line is planned and run by what reads records."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks
from attnsel.params.exchanges import EXCHANGES, CpCommType, ExchangeRecord

NEW = "a2a+all_gather"
NAMES = {
    "causal cross",
    "window",
    "grouped queries",
    "learnable sinks",
    "dropout",
    "padding",
    "packed, alibi",
}
CASES = [case for case in cases.CASES if case.name in NAMES]


def test_every_exchange_that_can_be_asked_for_has_a_record() -> None:
    assert set(EXCHANGES) == set(get_args(CpCommType))


def job(rank: int, size: int) -> dict[str, Any]:
    EXCHANGES[NEW] = ExchangeRecord(swaps_heads=True, keys="gathered")
    group = ranks.groups_of("a2a+p2p", rank, size, {})
    found: dict[str, Any] = {}
    for case in CASES:
        module = case.make_module(cp_group=group, cp_comm_type=NEW)
        numbers = cases.compute(case, module, cases.make(case), rank, size)
        found[case.name] = numbers, module._cp.comm_type, module._cp.layout.gathers
    return found


def test_a_new_exchange_is_one_record(tmp_path: Path) -> None:
    assert len(CASES) == len(NAMES)
    found = ranks.run(job, 4, tmp_path)
    for part in found:
        assert "crash" not in part, part["crash"]
    for case in CASES:
        parts = [part[case.name] for part in found]
        assert {(comm, gathers) for _, comm, gathers in parts} == {(NEW, True)}
        whole = cases.make(case)
        wanted = cases.compute(case, case.make_module(), whole)
        got = cases.together(case, [numbers for numbers, _, _ in parts], whole)
        assert got.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-11, atol=1e-11)

"""Two ranks on FlashAttention's packages, whose stand-ins run the steps, against one with ``tiled``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks
from attnsel import Environment
from attnsel.context_parallel import question
from attnsel.runtime import dispatch
from emulated_flash_attn import installed

torch.set_num_threads(1)

RELEASES = {
    "flash_attn.2": ("flash_attn", "2.8.3"),
    "flash_attn.3": ("flash_attn_3", "3.0.0"),
    "flash_attn.4": ("flash_attn_4", "4.0.0b36"),
}
RING = ("p2p",)
USED = {
    "causal": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "no mask": RING,
    "grouped queries": ("p2p", "a2a"),
    "softcap": RING,
    "packed, one set of lengths": RING,
}
PAIRS = [
    (dataclasses.replace(case, dtype=torch.bfloat16, backend=backend), comm)
    for backend in RELEASES
    for case in cases.CASES
    if case.name in USED
    for comm in USED[case.name]
]


def job(rank: int, size: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for case, comm in PAIRS:
        component, version = RELEASES[case.backend]
        env = Environment.describe("H100", cudnn_frontend=None, triton=None, **{component: version})
        for module in (dispatch, question):
            module.environment_of = lambda q, env=env: env  # type: ignore[attr-defined]
        dispatch.clear_cache()
        with installed(int(case.backend[-1]), version):
            group = ranks.groups_of(comm, rank, size, made)
            module = case.make_module(cp_group=group, cp_comm_type=comm)
            numbers = cases.compute(case, module, cases.make(case), rank, size)
            assert module.last_selection is not None
            found[f"{case.backend}/{case.name}/{comm}"] = numbers, module.last_selection.backend
    return found


def test_two_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    found = ranks.run(job, 2, tmp_path)
    for case, comm in PAIRS:
        what = f"{case.backend}/{case.name}/{comm}"
        numbers, ran = zip(*(part[what] for part in found), strict=True)
        assert set(ran) == {case.backend}, what
        cases.check(case, numbers, what, backend="tiled")

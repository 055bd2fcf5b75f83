"""Several ranks against one process: outputs and all gradients, in every exchange."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("no Gloo", allow_module_level=True)

import context_parallel_cases as cases
import ranks
from attnsel import Environment
from attnsel.runtime import dispatch
from emulated_flash_attn import installed

torch.set_num_threads(1)

Pairs = list[tuple[cases.Case, str]]
# Each feature meets one exchange, and each exchange every kind of feature; "causal" all of them.
PAIRS = [(case, case.comms[at % len(case.comms)]) for at, case in enumerate(cases.CASES)]
PAIRS += [(cases.CASES[0], comm) for comm in cases.COMMS[1:]]
RELEASES = {  # stand-ins of FlashAttention's packages run the steps
    "flash_attn.2": ("flash_attn", "2.8.3"),
    "flash_attn.3": ("flash_attn_3", "3.0.0"),
    "flash_attn.4": ("flash_attn_4", "4.0.0b36"),
}
ON_FLASH = {
    "causal": cases.COMMS,
    "no mask": ("p2p",),
    "grouped queries": ("p2p", "a2a"),
    "softcap": ("p2p",),
    "packed, one set of lengths": ("p2p",),
}
FLASH_PAIRS = [
    (dataclasses.replace(case, dtype=torch.bfloat16, backend=backend), comm)
    for backend in RELEASES
    for case in cases.CASES
    for comm in ON_FLASH.get(case.name, ())
]


def job(rank: int, size: int, pairs: Pairs) -> list[Any]:
    from attnsel.context_parallel import (
        run as question,
    )  # loads Dynamo: a second that collecting need not take

    made: dict[str, Any] = {}
    found: list[Any] = []
    for case, comm in pairs:
        package: Any = nullcontext()
        if case.backend in RELEASES:
            component, version = RELEASES[case.backend]
            env = Environment.describe("H100", cudnn_frontend=None, triton=None, **{component: version})
            for module in (dispatch, question):
                mock.patch.object(module, "environment_of", lambda q, env=env: env).start()
            dispatch.clear_cache()
            package = installed(int(case.backend[-1]), version)
        with package:
            module = case.make_module(cp_group=ranks.groups_of(comm, rank, size, made), cp_comm_type=comm)
            numbers = cases.compute(case, module, cases.make(case), rank, size)
        found.append((numbers, module.last_selection.backend))
    return found


def agree(size: int, pairs: Pairs, folder: Path, backend: str | None = "") -> None:
    found = ranks.run(job, size, folder, pairs)
    for (case, comm), parts in zip(pairs, zip(*found, strict=True), strict=True):
        what = f"{case.name}/{comm}"
        numbers, ran = zip(*parts, strict=True)
        assert set(ran) == {case.chosen or case.backend}, what
        cases.check(case, numbers, what, backend)


def test_four_ranks_find_what_one_process_finds(tmp_path: Path) -> None:
    agree(4, PAIRS, tmp_path)


def test_two_ranks_on_flash_attention_find_what_one_process_finds(tmp_path: Path) -> None:
    agree(2, FLASH_PAIRS, tmp_path, backend="tiled")

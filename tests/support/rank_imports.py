"""What the server imports before it forks ranks (ranks.py): none of them has to."""

from __future__ import annotations

import pytest  # noqa: F401
import torch
import torch.distributed.device_mesh
import torch.distributed.fsdp

import context_parallel_cases as cases

torch.set_num_threads(1)
for backend in (None, "tiled"):  # kernels are loaded and plans made; a backward would forbid forks afterwards
    case = cases.Case("causal", dtype=torch.float32, backend=backend)
    cases.forward(case, case.make_module(), cases.make(case), grad=False)

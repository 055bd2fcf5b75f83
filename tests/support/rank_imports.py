"""What the server imports before it forks ranks (ranks.py): none of them has to."""

from __future__ import annotations

import os
import sys

sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)  # as the session has it, without the folder it is in

import pytest  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.device_mesh  # noqa: E402
import torch.distributed.fsdp  # noqa: E402

import context_parallel_cases as cases  # noqa: E402

torch.set_num_threads(1)
for backend in (None, "tiled"):  # kernels are loaded and plans made; a backward would forbid forks afterwards
    case = cases.Case("causal", dtype=torch.float32, backend=backend)
    cases.forward(case, case.make_module(), cases.make(case), grad=False)

"""The exact graphs that tests/gpu has cuDNN run, forward and backward, a bias's gradient included: planned by
the real libcudnn for GPUs that are not here.

It needs a library, and says where to find one in the environment: CUDNN_FOR_TESTS, a folder as
``pip install --no-deps --target FOLDER nvidia-cudnn-cu12==9.28.0.42 nvidia-cuda-nvrtc-cu12`` leaves it, and
CUDNN_FRONTEND_FOR_TESTS where cudnn-frontend is not installed here. CUDNN_FOR_TESTS_BUILDS=1 has it build
the plans too, half a second each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnsel import Environment
from attnsel.backends.cudnn.ask.client import Library
from attnsel.backends.cudnn.ask.libraries import device_json
from attnsel.backends.cudnn.run import problem
from attnsel.cli.explain_more import by_rules
from cudnn_calls import calls, params_of
from cudnn_cases import FEATURES

GPUS = ("A100", "RTX 4090", "H100", "H200", "B200")
DTYPES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    folder = os.environ.get("CUDNN_FOR_TESTS")
    if not folder:
        pytest.skip("CUDNN_FOR_TESTS names no libcudnn")
    frontend = os.environ.get("CUDNN_FRONTEND_FOR_TESTS")
    cache = Path(tmp_path_factory.mktemp("answers"))
    with Library(folder, frontend=frontend, cache=cache) as one:
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_each_is_planned_or_refused_by_the_rules(gpu: str, library: Library) -> None:
    env = Environment.describe(gpu, **library.versions())
    assert env.arch is not None
    device = device_json(env.arch, env.device.name, env.device.memory, env.device.sm_count)
    build = os.environ.get("CUDNN_FOR_TESTS_BUILDS") == "1"
    wrong, planned = [], 0
    for dtype in DTYPES:
        for name, case, spec, inputs in calls(dtype):
            made = problem(spec, inputs)
            said = {
                graph.node: library.ask(graph, device, build=build)
                for graph in (made.forward, made.backward)
                if graph is not None
            }
            words = [f"{node}: {answer.words}" for node, answer in said.items() if not answer.supported]
            if build:
                words += [
                    f"{n}: no plan: {a.words}" for n, a in said.items() if a.supported and a.workspace is None
                ]
            planned += not words
            p = params_of(case, spec, inputs)
            refused = p is not None and not by_rules(p, env).eligible
            crashed = any(answer.crashed for answer in said.values())
            if (words and not refused and p is not None) or crashed:
                wrong.append((str(dtype), name, words))
    assert not wrong
    assert planned > len(FEATURES)

"""The exact graphs that tests/gpu has cuDNN run, forward and backward, a bias's gradient included: planned by
the real libcudnn for GPUs that are not here.

The last test needs a library, and says where to find one in the environment: CUDNN_FOR_TESTS, a folder as
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
from attnsel.backends.cudnn.ask.device import device_json
from attnsel.backends.cudnn.tensors import problem
from attnsel.cli.library import by_rules
from cudnn_cases import FEATURES, calls, params_of

GPUS = ("A100", "RTX 4090", "H100", "H200", "B200")
DTYPES = (torch.float16, torch.bfloat16)


def test_every_bias_has_its_gradient_planned() -> None:
    with_bias = 0
    for name, case, spec, inputs in calls(torch.float16):
        backward = problem(spec, inputs).backward
        assert backward is not None, name
        written = {tensor.name for tensor in backward.outputs}
        assert ("dBias" in written) == ("bias" in case.tensors), name
        assert ("dSink_token" in written) == (spec.softmax_type == "learnable"), name
        with_bias += "dBias" in written
    assert with_bias >= 6


def test_a_call_is_the_question_it_came_from() -> None:
    unasked = []
    for name, case, spec, inputs in calls(torch.float16):
        p = params_of(case, spec, inputs)
        if p is None:
            unasked.append(name)
            continue
        assert p.is_training
        assert (p.num_heads, p.num_gqa_groups) == (inputs.q.shape[1], inputs.k.shape[1])
        assert p.padding == (spec.packed or "seqlens_kv" in case.tensors), name
        assert p.core_attention_bias_requires_grad == ("bias" in case.tensors), name
    assert unasked == ["bias broadcast over queries", "bias broadcast over keys"]


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

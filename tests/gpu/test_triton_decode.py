"""Short queries and keys in pages on a real device: decode, the merge of its parts, prefill over pages."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from attention_cases import BOTTOM_RIGHT, CASES, Case, build, onto
from forward_checks import check_forward, pages_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.run import forward

pytestmark = pytest.mark.shows("triton")
not_interpreted = pytest.mark.cuda_only("tests/backends/triton/test_decode.py has it")
LONG = pytest.mark.cuda_only("too many tiles there")


@pytest.mark.parametrize("case", [c for c in CASES if c.sizes.get("s_q") != 40], ids=lambda c: c.name)
@not_interpreted
def test_every_feature_decoded(case: Case, device: torch.device) -> None:
    spec, inputs = build(case, torch.float16)
    inputs = onto(device, inputs)
    for splits in (1, 3):
        check_forward(forward(spec, inputs, splits=splits), spec, inputs)


@pytest.mark.shows("triton", "paged")
@pytest.mark.parametrize("page_size", [16, 17, 256])
@pytest.mark.parametrize("s_q", [1, 5, pytest.param(200, marks=LONG)])
@pytest.mark.parametrize(("d", "e"), [(64, 64), (128, 128), pytest.param(576, 512, marks=LONG)])
def test_pages(d: int, e: int, s_q: int, page_size: int, device: torch.device) -> None:
    sizes = {"d": d, "e": e, "h": 8, "g": 1 if d == 576 else 2, "s_q": s_q}
    sizes["s_kv"] = 1500 if device.type == "cuda" else 40
    case = Case("", {**BOTTOM_RIGHT, "need_grad": False}, {"seqlens_kv": "b"}, sizes)
    spec, inputs = build(case, torch.float16)
    paged_spec, paged = pages_of(spec, inputs, page_size)
    result = forward(paged_spec, onto(device, paged))
    check_forward(result._replace(**_on_cpu(result)), spec, inputs)


def _on_cpu(result: object) -> dict[str, torch.Tensor]:
    return {name: getattr(result, name).cpu() for name in ("out", "lse", "max_logit")}


@pytest.mark.shows("triton", "cuda_graph")
@pytest.mark.parametrize("length", [1, 100, 8192])
@LONG
def test_a_graph_replays_other_lengths(length: int, device: torch.device) -> None:
    """How keys are split is fixed when the graph is captured; what they are is read when it runs."""
    sizes = {"d": 128, "e": 128, "h": 8, "g": 2, "s_q": 1, "s_kv": 8192, "b": 2}
    spec, inputs = build(Case("", {"need_grad": False}, {"seqlens_kv": "b"}, sizes), torch.float16)
    inputs = onto(device, inputs)
    forward(spec, inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(spec, inputs)
    assert inputs.seqlens_kv is not None
    inputs.seqlens_kv.fill_(length)
    graph.replay()
    check_forward(result, spec, inputs)

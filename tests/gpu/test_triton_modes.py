"""The Triton candidate as programs use it: graphs, streams, checkpoints, torch.compile, the public API."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_cases import CAUSAL, DROPOUT, Case, build, carried_out, error, onto
from attnsel import DotProductAttention, attention
from attnsel.backends.contract import Grads, Inputs, Result, Spec
from forward_checks import check_hits
from reference import attention_reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.run import backward, forward

pytestmark = pytest.mark.shows("triton")


def qkv(device: torch.device, s: int = 0, dtype: torch.dtype = torch.float16, seed: int = 0) -> list[Tensor]:
    """[b, s, h, d] with a gradient: 300 rows of 64 on a GPU, 20 of 8 on the interpreter."""
    gen = torch.Generator().manual_seed(seed)
    s, d = (s or 300, 64) if device.type == "cuda" else (s or 20, 8)
    made = [torch.randn(2, s, n, d, generator=gen, dtype=torch.float64) for n in (4, 2, 2)]
    return [t.to(device, dtype).requires_grad_() for t in made]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def reference_of(q: Tensor, k: Tensor, v: Tensor, **spec: Any) -> Tensor:
    """[b, s, h * e] in float64."""
    call = Spec(softmax_scale=q.shape[-1] ** -0.5, **spec)
    out = attention_reference(call, Inputs(*[t.detach().transpose(1, 2) for t in (q, k, v)]))[0]
    return out.transpose(1, 2).flatten(2)


def test_forced_it_runs_and_is_right(device: torch.device) -> None:
    q, k, v = qkv(device)
    out = attention(q, k, v, attn_mask_type="causal", backend="triton").flatten(2)
    assert error(out, reference_of(q, k, v, **CAUSAL)) < 1e-2
    assert all(t.isfinite().all() for t in with_gradients(out, [q, k, v]))


def test_repeated_training_calls_are_right(device: torch.device) -> None:
    check_hits("triton", device, *((300, 64) if device.type == "cuda" else (20, 16)))


@pytest.mark.shows("triton", "softcap")
@pytest.mark.cuda_only("it is never chosen by itself there")
def test_chosen_for_what_no_other_fused_kernel_does(device: torch.device) -> None:
    q, k, v = qkv(device)
    module = DotProductAttention(4, q.shape[-1], 2, qkv_format="bshd", attn_mask_type="no_mask", softcap=5.0)
    out = module(q, k, v)
    assert module.last_selection.backend == "triton"
    assert error(out, reference_of(q, k, v, softcap=5.0)) < 1e-2


@pytest.mark.shows("triton", "thd", "padding", "causal", "top_left")
def test_packed_calls(device: torch.device) -> None:
    q, k, v = (t.detach().flatten(0, 1) for t in qkv(device))
    half = q.shape[0] // 2
    cu = torch.tensor([0, half - 3, 2 * half], dtype=torch.int32, device=device)
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "backend": "triton"}
    lengths = {f"cu_seqlens_{side}": cu for side in ("q", "kv")}
    longest = {f"max_seqlen_{side}": half + 3 for side in ("q", "kv")}
    out = attention(q, k, v, **arguments, **lengths, **longest)
    spec = Spec(packed=True, softmax_scale=q.shape[-1] ** -0.5, **CAUSAL)
    wanted = attention_reference(spec, Inputs(q, k, v, **lengths))[0]
    assert error(out, wanted) < 1e-2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_changes_no_number(reentrant: bool, device: torch.device) -> None:
    def run(*inputs: Tensor) -> Any:
        return attention(*inputs, attn_mask_type="causal", attention_dropout=0.4, backend="triton")

    results = []
    for wrapped in (False, True):
        inputs = qkv(device)
        torch.manual_seed(3)
        out = checkpoint(run, *inputs, use_reentrant=reentrant) if wrapped else run(*inputs)
        results.append(out.detach().clone())
        out.float().square().sum().backward()
        results[-1:] = [[results[-1], *(t.grad for t in inputs)]]
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_without_a_graph_break(dynamic: bool, device: torch.device, fresh_dynamo: None) -> None:
    width = qkv(device)[0].shape[-1]
    module = DotProductAttention(
        4, width, 2, qkv_format="bshd", attn_mask_type="causal", backend="triton"
    ).to(device)
    compiler = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=compiler)
    for s in (24, 40, 33) if dynamic else (24,):
        inputs = qkv(device, s)
        eager = with_gradients(module(*inputs), inputs)
        traced = with_gradients(compiled(*inputs), inputs)
        for a, b in zip(traced, eager, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def test_autocast_and_inference_mode(device: torch.device) -> None:
    low = torch.float16 if device.type == "cuda" else torch.bfloat16
    q, k, v = qkv(device, dtype=torch.float32)
    with torch.autocast(device.type, low):
        out = attention(q, k, v, attn_mask_type="causal", backend="triton")
        out.sum().backward()
    assert out.dtype == low
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert error(out.flatten(2), reference_of(q, k, v, **CAUSAL)) < 4e-2
    with torch.inference_mode():
        q, k, v = (t.detach().to(low) for t in (q, k, v))
        assert torch.equal(attention(q, k, v, attn_mask_type="causal", backend="triton"), out)


@pytest.mark.shows("triton", "cuda_graph")
@pytest.mark.cuda_only("graphs are CUDA's")
def test_graph_replays_with_new_inputs_and_a_new_seed(device: torch.device) -> None:
    sizes = {"d": 64, "e": 64}
    spec, inputs = build(Case("", {**CAUSAL, **DROPOUT}, {}, sizes), torch.float16, scale=17)
    inputs = onto(device, inputs)
    assert inputs.dropout_seed is not None
    assert inputs.dropout_offset is not None
    dout = torch.randn_like(inputs.q)

    def step() -> tuple[Result, Grads]:
        result = forward(spec, inputs)
        return result, backward(spec, inputs, result, dout)

    def flat(result: Result, grads: Grads) -> list[Tensor]:
        return [t.clone() for t in (result.out, result.lse, *grads) if t is not None]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seen = []
    for seed, offset in ((1, 0), (2, 0), (2, 9)):
        inputs.dropout_seed.fill_(seed)
        inputs.dropout_offset.fill_(offset)
        inputs.q.copy_(torch.randn_like(inputs.q))
        graph.replay()
        replayed = flat(*captured)
        for a, b in zip(replayed, flat(*step()), strict=True):
            assert torch.equal(a, b)
        seen.append(replayed[0])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.cuda_only("streams are CUDA's")
def test_two_streams_at_once_give_what_one_gives(device: torch.device) -> None:
    calls = []
    for seed in range(2):
        spec, inputs = build(Case("", CAUSAL, {}, {"d": 64, "e": 64}), torch.float16, seed, scale=50)
        calls.append((spec, onto(device, inputs)))
    alone = [carried_out(forward, backward, *call)[0] for call in calls]
    torch.cuda.synchronize()
    for _ in range(5):
        streams, together = [torch.cuda.Stream() for _ in calls], []
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                together.append(carried_out(forward, backward, *call)[0])
        torch.cuda.synchronize()
        for one, other in zip(alone, together, strict=True):
            assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@pytest.mark.cuda_only("the allocator is CUDA's; tests/backends/triton/test_numbers.py holds every tensor")
@pytest.mark.parametrize("case", [Case("causal", CAUSAL), Case("dropout", DROPOUT)], ids=lambda c: c.name)
def test_memory_grows_with_the_sequence_not_its_square(case: Case, device: torch.device) -> None:
    def peak(s: int) -> int:
        sizes = {"b": 1, "h": 2, "g": 2, "s_q": s, "s_kv": s, "d": 64, "e": 64}
        spec, inputs = build(Case("", case.spec, {}, sizes), torch.float16)
        inputs = onto(device, inputs)
        dout = torch.ones_like(inputs.q)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        backward(spec, inputs, forward(spec, inputs), dout)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(8192), peak(16384)
    assert long <= 2.1 * short
    assert long < 16384 * 16384

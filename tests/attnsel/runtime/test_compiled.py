"""Attention under torch.compile: no graph break, few graphs, eager's numbers."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensor

from attnsel import DotProductAttention, InvalidInput, NoBackendError, attention
from attnsel.runtime import compiled as compiled_attention

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def qkv(
    s: int = 6, g: int = 4, seed: int = 0, b: int = 2, grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(b, s, n, 8, generator=gen).requires_grad_(grad) for n in (4, g, g))
    return q, k, v


def lengths(*values: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(values)], dtype=torch.int32)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def gradients(result: Any, tensors: Any) -> list[Tensor]:
    """The result and the gradients of its squares: enough to see every wrong sign and scale."""
    out = first(result)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [t for t in tensors if t.requires_grad])]


def assert_same(actual: list[Tensor], wanted: list[Tensor], atol: float = 2e-6) -> None:
    for a, w in zip(actual, wanted, strict=True):
        assert (a.shape, a.dtype) == (w.shape, w.dtype)
        torch.testing.assert_close(a, w, rtol=1e-5, atol=atol)


HAS_TRITON = importlib.util.find_spec("triton") is not None
WITH_TRITON = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask_type": "causal"},
    "window": {"attn_mask_type": "causal", "window_size": (2, 0)},
    "alibi slopes": {
        "core_attention_bias_type": "alibi",
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.1]),
    },
    "padding": {"attn_mask_type": "padding", "cu_seqlens_q": lengths(6, 3), "cu_seqlens_kv": lengths(6, 3)},
    "mask": {"attn_mask_type": "arbitrary", "attention_mask": torch.eye(6, dtype=torch.bool)},
    "padding masks": {
        "attn_mask_type": "padding",
        "attention_mask": (torch.arange(6)[None, None, None] >= torch.tensor([6, 3])[:, None, None, None],)
        * 2,
    },
    "lse and max logit": {"return_lse": True, "return_max_logit": True},
}


# Triton's kernels are behind the same operator; they are slow to interpret.
BY_TRITON = ("padding", "lse and max logit")


@pytest.mark.parametrize(
    ("number", "name", "backend"),
    [
        *[(number, name, None) for number, name in enumerate(CALLS)],
        *[pytest.param(n, name, "triton", marks=WITH_TRITON) for n, name in enumerate(BY_TRITON)],
    ],
)
def test_compiled_call_equals_eager(number: int, name: str, backend: str | None) -> None:
    groups, dynamic = (4, 2)[number % 2], number % 4 > 1
    arguments = CALLS[name] | {"backend": backend}
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, **arguments), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    tensors = qkv(g=groups)
    result, wanted = compiled(*tensors), attention(*tensors, **arguments)
    if isinstance(wanted, tuple):
        for a, w in zip(result[1:], wanted[1:], strict=True):
            assert not a.requires_grad
            torch.testing.assert_close(a, w)
    assert_same(gradients(result, tensors), gradients(wanted, tensors))
    with torch.no_grad():
        torch.testing.assert_close(first(compiled(*tensors)), first(wanted).detach(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_math_runs_where_the_graph_can_differentiate_it(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, backend="sdpa.math"),
        fullgraph=True,
        dynamic=dynamic,
        backend="aot_eager",
    )
    tensors = qkv()
    wanted = attention(*tensors)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), wanted.detach())
    if dynamic:  # inside an operator nothing records its many operations
        with pytest.raises(NoBackendError, match=r"sdpa\.math"):
            compiled(*tensors)
    else:
        assert_same(gradients(compiled(*tensors), tensors), gradients(wanted, tensors))


@pytest.mark.parametrize(
    ("kind", "shape", "dynamic"),
    [
        ("post_scale_bias", (1, 4, 6, 6), True),
        ("pre_scale_bias", (2, 4, 6, 6), False),
        ("post_scale_bias", (6, 6), False),
    ],
)
def test_bias_gets_its_gradient(kind: str, shape: tuple[int, ...], dynamic: bool) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attention(q, k, v, core_attention_bias_type=kind, core_attention_bias=bias)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    tensors = (*qkv(), bias)
    assert_same(gradients(compiled(*tensors), tensors), gradients(call(*tensors), tensors), atol=1e-5)


def test_module_with_learnable_sinks_equals_eager() -> None:
    module = DotProductAttention(4, 8, qkv_format="sbhd", softmax_type="learnable")
    assert module.softmax_offset is not None
    nn.init.normal_(module.softmax_offset)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    tensors = (*qkv(), module.softmax_offset)
    assert_same(gradients(compiled(*tensors[:3]), tensors), gradients(module(*tensors[:3]), tensors))


class Block(nn.Module):
    """A small transformer layer around the module."""

    def __init__(self, groups: int = 2, **arguments: Any) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 8 * (4 + 2 * groups))
        self.core = DotProductAttention(4, 8, groups, qkv_format="bshd", **arguments)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 8))
        q, k, v = heads.split([4, self.core.num_gqa_groups, self.core.num_gqa_groups], dim=-2)
        return self.out(self.core(q, k, v))


def test_ten_lengths_need_two_graphs() -> None:
    torch.manual_seed(0)
    block, counter = Block(softmax_type="learnable"), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for s in range(3, 23, 2):
        x = torch.randn(2, s, 32)
        actual, wanted = (gradients(run(x), block.parameters()) for run in (compiled, block))
        assert_same(actual, wanted, atol=1e-4)
    assert counter.frame_count <= 2


def test_tracing_allocates_no_second_q_k_v(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnsel.runtime import compiled as runtime

    made: list[type] = []
    prepare = runtime._empty
    monkeypatch.setattr(
        runtime, "_empty", lambda *about: made.append(type(prepare(*about))) or prepare(*about)
    )
    torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend="eager")(*qkv())
    assert made == [FakeTensor] * 3


def test_static_shapes_put_the_kernel_itself_into_the_graph() -> None:
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(lambda q, k, v: attention(q, k, v), fullgraph=True, backend=backend)(*qkv())
    assert any("flash_attention_for_cpu" in target for target in targets)
    assert not any("attnsel" in target for target in targets)


def test_autocast_inside_casts_as_in_eager() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attention(q, k, v, attn_mask_type="causal")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors = qkv()
    out, wanted = compiled(*tensors), call(*tensors)
    assert out.dtype == torch.bfloat16
    assert_same(gradients(out.float(), tensors), gradients(wanted.float(), tensors), atol=2e-2)


def test_strided_views_equal_eager() -> None:
    def call(packed: Tensor) -> Tensor:
        q, k, v = packed.unbind(2)
        return attention(q[..., 1:], k[..., 1:], v[..., 1:], attn_mask_type="causal")

    packed = torch.randn(2, 6, 3, 4, 9, requires_grad=True)
    for dynamic in (False, True):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert_same(gradients(compiled(packed), [packed]), gradients(call(packed), [packed]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_forced_backend_that_cannot_run_says_why(dynamic: bool) -> None:
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, softcap=1.0, backend="sdpa.flash"),
        dynamic=dynamic,
        backend="eager",
    )
    with pytest.raises(Exception, match="SDPA004") as caught:
        compiled(*qkv())
    chain: list[BaseException] = [caught.value]
    while (chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert any(isinstance(error, NoBackendError) for error in chain)


def test_wrong_lengths_are_found_when_the_graph_runs() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return attention(q, k, v, attn_mask_type="padding", cu_seqlens_q=cu, cu_seqlens_kv=cu)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compiled(*qkv(grad=False), lengths(6, 3))
    with pytest.raises(InvalidInput, match="cu_seqlens_q"):
        compiled(*qkv(grad=False), lengths(9, 3))


@pytest.mark.slow
def test_inductor_equals_eager() -> None:
    block, x = Block(), torch.randn(2, 6, 32)
    compiled = torch.compile(block, fullgraph=True)
    actual, wanted = (gradients(run(x), block.parameters()) for run in (compiled, block))
    assert_same(actual, wanted, atol=1e-4)


def test_export_keeps_the_call() -> None:
    block = Block().eval()
    x = torch.randn(2, 6, 32)
    program = torch.export.export(block, (x,), dynamic_shapes=({1: torch.export.Dim("s", min=2, max=64)},))
    for s in (6, 11):
        x = torch.randn(2, s, 32)
        torch.testing.assert_close(program.module()(x), block(x))


# The operators themselves


def op_arguments(**given: Any) -> tuple[Any, ...]:
    from attnsel.runtime.call import config

    cfg = config(**{name: given.pop(name) for name in list(given) if name not in OPERANDS})
    q, k, v = qkv(g=2)
    values = {"q": q, "k": k, "v": v, "config": cfg.text, "need_grad": True, **given}
    return tuple(values.get(name) for name in OPERANDS)


OPERANDS = compiled_attention.Arguments._fields

OPCHECKS: dict[str, dict[str, Any]] = {
    "flattened heads": {"flatten_heads": True, "attn_mask_type": "causal"},
    "lse": {"return_lse": True, "return_max_logit": True},
    "bias": {"bias_type": "post_scale_bias", "bias": torch.randn(1, 4, 6, 6, requires_grad=True)},
    "sinks": {"softmax_type": "learnable", "softmax_offset": torch.randn(1, 4, 1, 1, requires_grad=True)},
    "dropout": {"attention_dropout": 0.3, "seed": torch.tensor(5)},
    "padding": {"attn_mask_type": "padding", "cu_seqlens_q": lengths(6, 3), "cu_seqlens_kv": lengths(6, 3)},
    "pages": {
        "attn_mask_type": "padding",
        "cu_seqlens_kv": lengths(6, 3),
        "q": torch.randn(2, 6, 4, 8),
        "k": torch.randn(4, 3, 2, 8),
        "v": torch.randn(4, 3, 2, 8),
        "block_table": torch.tensor([[2, 0], [3, 1]], dtype=torch.int32),
        "need_grad": False,
    },
}
if HAS_TRITON:
    OPCHECKS["triton, sinks"] = OPCHECKS["sinks"] | {"backend": "triton"}


@pytest.mark.parametrize("name", OPCHECKS)
def test_forward_operator_passes_opcheck(name: str) -> None:
    torch.library.opcheck(torch.ops.attnsel.attend2.default, op_arguments(**OPCHECKS[name]))


@pytest.mark.parametrize("name", ["flattened heads", "bias", "triton, sinks"][: 3 if HAS_TRITON else 2])
def test_backward_operator_passes_opcheck(name: str) -> None:
    arguments = [t.detach() if isinstance(t, Tensor) else t for t in op_arguments(**OPCHECKS[name])]
    dout = torch.randn(2, 6, 32) if "flatten" in name else torch.randn(2, 6, 4, 8)
    torch.library.opcheck(
        torch.ops.attnsel.attend2_backward.default, (dout, None, None, "bias" in name, *arguments)
    )

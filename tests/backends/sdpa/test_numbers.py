"""PyTorch's kernels called by their aten ops: flash and math on CPU against the definition of attention,
and the CUDA ones on fake tensors and on stand-ins that compute what those ops compute."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.sdpa import bound, ops, run, shapes
from attnsel.backends.sdpa.bound import bind
from attnsel.backends.sdpa.kernels import KERNELS
from pairwise import pairwise
from reference import attention_reference

torch.set_num_threads(1)

ON_CPU = ("sdpa.flash", "sdpa.math")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Case:
    """A feature or combination; ``tensors`` gives the optional inputs a shape or, for lengths, values."""

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # over b 2, h 4, g 4, s_q 21, s_kv 27, d 8, e 8


CAUSAL = {"window_right": 0}
B, H, S, T = 2, 4, 21, 27
CASES = [
    Case("plain"),
    Case("grouped heads", sizes={"g": 2}),
    Case("one kv head", CAUSAL, sizes={"g": 1}),
    Case("causal square", CAUSAL, sizes={"s_kv": 21}),
    Case("causal wide", CAUSAL),
    Case("causal tall", CAUSAL, sizes={"s_q": 40}),
    Case("bottom-right wide", {**CAUSAL, "bottom_right": True}),
    Case("bottom-right tall, dead rows", {**CAUSAL, "bottom_right": True}, sizes={"s_q": 40}),
    Case("decode", {**CAUSAL, "bottom_right": True}, sizes={"s_q": 1}),
    Case("sliding window", {"window_left": 5, "window_right": 3}),
    Case("sliding causal, bottom-right", {"window_left": 5, "window_right": 0, "bottom_right": True}),
    Case("left bound only", {"window_left": 4}),
    Case("window of dead rows", {"window_left": 2, "window_right": 2}, sizes={"s_q": 40}),
    Case("offsets", {**CAUSAL, "q_offset": 30, "kv_offset": 20}),
    Case("offsets that cancel", {**CAUSAL, "q_offset": 6, "kv_offset": 6}),
    Case("offset past every key", {**CAUSAL, "kv_offset": 100}),
    Case("lengths of keys", tensors={"seqlens_kv": [27, 9]}),
    Case("lengths of queries", tensors={"seqlens_q": [21, 5]}),
    Case("a length of 0", tensors={"seqlens_q": [21, 5], "seqlens_kv": [27, 0]}),
    Case("causal with lengths", CAUSAL, {"seqlens_q": [21, 5], "seqlens_kv": [9, 0]}),
    Case("causal self lengths", CAUSAL, {"seqlens": [21, 8]}, {"s_kv": 21}),
    Case("bottom-right self lengths", {**CAUSAL, "bottom_right": True}, {"seqlens": [21, 8]}, {"s_kv": 21}),
    Case("bottom-right window, self lengths", {"window_left": 3, "bottom_right": True}, {"seqlens": [21, 8]}),
    Case("full self lengths", {}, {"seqlens": [21, 8]}, {"s_kv": 21}),
    Case(
        "bottom-right lengths",
        {**CAUSAL, "bottom_right": True},
        {"seqlens_q": [3, 20], "seqlens_kv": [27, 9]},
    ),
    Case("bottom-right key lengths", {"window_left": 3, "bottom_right": True}, {"seqlens_kv": [27, 9]}),
    Case("mask of keys", tensors={"attn_mask": (B, 1, 1, T)}),
    Case("causal with mask of keys", CAUSAL, {"attn_mask": (B, 1, 1, T)}),
    Case("mask of queries", tensors={"attn_mask": (B, 1, S, 1)}),
    Case("mask per head", tensors={"attn_mask": (1, H, S, T)}),
    Case("mask of two dimensions", tensors={"attn_mask": (S, T)}),
    Case("mask of three dimensions", tensors={"attn_mask": (H, S, T)}),
    Case("mask with causal", CAUSAL, {"attn_mask": (B, H, S, T)}),
    Case("bias of keys with causal", CAUSAL, {"bias": (1, H, 1, T)}),
    Case("bias", tensors={"bias": (1, H, S, T)}),
    Case("bias of rows", tensors={"bias": (B, 1, S, 1)}),
    Case("bias, mask and window", {"window_left": 9}, {"bias": (B, 1, S, T), "attn_mask": (1, 1, S, T)}),
    Case("alibi", tensors={"alibi_slopes": (H,)}),
    Case("alibi per batch, causal", {**CAUSAL, "bottom_right": True}, {"alibi_slopes": (B, H)}),
    Case("alibi with lengths", {"bottom_right": True}, {"alibi_slopes": (H,), "seqlens_kv": [27, 9]}),
    Case("alibi and bias", {"q_offset": 4}, {"alibi_slopes": (H,), "bias": (1, 1, S, T)}),
    Case("negative scale", {"softmax_scale": -0.3}),
    Case("scale of zero", {"softmax_scale": 0.0}),
    Case("negative scale, causal", {**CAUSAL, "softmax_scale": -0.3}),
    Case("scale of zero, causal", {**CAUSAL, "softmax_scale": 0.0}),
    Case("negative scale and bias", {"softmax_scale": -0.3}, {"bias": (1, H, S, T)}),
]


def make(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> tuple[Spec, Inputs]:
    """The case's spec and random inputs; q, k, v and bias are leaves that require gradients."""
    n = {"b": B, "h": H, "g": H, "s_q": S, "s_kv": T, "d": 8, "e": 8, **case.sizes, **sizes}
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    q = normal(n["b"], n["h"], n["s_q"], n["d"])
    k, v = normal(n["b"], n["g"], n["s_kv"], n["d"]), normal(n["b"], n["g"], n["s_kv"], n["e"])
    optional: dict[str, Tensor] = {}
    for name, value in case.tensors.items():
        if name == "attn_mask":
            optional[name] = torch.rand(value, generator=generator) < 0.4
            optional[name].reshape(-1, value[-1])[0] = True  # one row that sees nothing
        elif name == "bias":
            optional[name] = normal(*value)
        elif name == "alibi_slopes":
            optional[name] = torch.rand(value, generator=generator)
        elif name == "seqlens":
            optional["seqlens_q"] = optional["seqlens_kv"] = torch.tensor(value, dtype=torch.int32)
        else:
            optional[name] = torch.tensor(value, dtype=torch.int32)
    return Spec(**{"softmax_scale": 0.4, "need_grad": True, **case.spec}), Inputs(q, k, v, **optional)


def call(kernel: str, spec: Spec, inputs: Inputs) -> Tensor:
    optional = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
    return bind(kernel, spec, inputs)(inputs.q, inputs.k, inputs.v, **optional)


def leaves(inputs: Inputs) -> list[Tensor]:
    return [t for t in (inputs.q, inputs.k, inputs.v, inputs.bias) if t is not None and t.requires_grad]


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def without_bias_gradient(kernel: str, inputs: Inputs) -> Inputs:
    """The inputs as a kernel takes them: no gradient for the bias where it gives none."""
    if inputs.bias is None or kernel in ("sdpa.math", "sdpa.efficient"):
        return inputs
    return inputs._replace(bias=inputs.bias.detach())


def check_autograd(kernel: str, spec: Spec, inputs: Inputs, tolerance: float) -> None:
    expected, _, _ = attention_reference(spec, inputs)
    out = call(kernel, spec, inputs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    assert out.dtype == inputs.q.dtype
    close(out, expected, tolerance)
    grads = torch.autograd.grad(out, leaves(inputs), dout)
    for grad, exact in zip(grads, torch.autograd.grad(expected, leaves(inputs), dout.double()), strict=True):
        close(grad, exact, tolerance * 4)


def check_explicit(kernel: str, spec: Spec, inputs: Inputs, tolerance: float) -> Result:
    """forward and backward against the reference, with a gradient of lse where the kernel has one."""
    implementation = KERNELS[kernel]
    expected, expected_lse, _ = attention_reference(spec, inputs)
    result = implementation.forward(spec, inputs)
    assert not result.out.requires_grad
    close(result.out, expected, tolerance)
    dout = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(inputs.q.dtype)
    dlse = None
    outputs, douts = [expected], [dout.double()]
    if CANDIDATES[kernel].gives_lse:
        assert result.lse is not None
        close(result.lse, expected_lse, tolerance)
        dlse = torch.randn(expected_lse.shape, generator=torch.Generator().manual_seed(8)).to(
            result.lse.dtype
        )
        outputs.append(expected_lse)
        douts.append(dlse.double().masked_fill(expected_lse == -math.inf, 0.0))
    grads = implementation.backward(spec, inputs, result, dout, dlse)
    actual = [grads.q, grads.k, grads.v] + ([grads.bias] if grads.bias is not None else [])
    assert len(actual) == len(leaves(inputs))
    exact = torch.autograd.grad(outputs, leaves(inputs), douts, allow_unused=True)
    for grad, leaf, one in zip(actual, leaves(inputs), exact, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        close(grad, torch.zeros_like(grad) if one is None else one, tolerance * 4)
    return result


def check_both(case: Case, dtype: torch.dtype) -> None:
    """Each kernel of a CPU, differentiated by PyTorch and through the contract."""
    for kernel in ON_CPU:
        spec, inputs = make(case, dtype)
        inputs = without_bias_gradient(kernel, inputs)
        check_autograd(kernel, spec, inputs, TOLERANCE[dtype])
        result = check_explicit(kernel, spec, inputs, TOLERANCE[dtype])
        if result.lse is not None:
            assert result.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_feature_is_attention(case: Case) -> None:
    check_both(case, torch.float32)


AXES: dict[str, Any] = {
    "band": [
        {},
        CAUSAL,
        {**CAUSAL, "bottom_right": True},
        {"window_left": 5, "window_right": 3},
        {"window_left": 3, "bottom_right": True},
    ],
    "seqlens_q": [None, [18, 5]],
    "seqlens_kv": [None, [15, 9], [9, 0]],
    "attn_mask": [None, (B, 1, 1, T), (1, H, S, T), (S, T)],
    "bias": [None, (1, H, S, T), (B, 1, S, 1), (1, 1, 1, T)],
    "alibi_slopes": [None, (H,), (B, H)],
    "offsets": [{}, {"q_offset": 4}, {"kv_offset": 9}],
    "groups": [H, 2, 1],
    "scale": [0.4, -0.3],
    "dtype": list(TOLERANCE),
}


def test_every_two_features_together_are_attention() -> None:
    wrong = {}
    for row in pairwise(AXES):
        optional = ("attn_mask", "bias", "alibi_slopes", "seqlens_q", "seqlens_kv")
        tensors = {name: row[name] for name in optional if row[name] is not None}
        spec = {**row["band"], **row["offsets"], "softmax_scale": row["scale"]}
        case = Case("", spec, tensors, {"g": row["groups"]})
        try:
            check_both(case, row["dtype"])
        except AssertionError as error:
            wrong[str(row)] = str(error)
    assert not wrong


def test_math_takes_another_head_dim_for_values() -> None:
    spec, inputs = make(Case("e", CAUSAL, sizes={"e": 5}))
    check_autograd("sdpa.math", spec, inputs, 3e-5)
    check_explicit("sdpa.math", spec, inputs, 3e-5)


def views() -> st.SearchStrategy[Callable[[Tensor], Tensor]]:
    """Ways to lay [b, h, s, d] in memory with stride(-1) == 1; each is a copy of its argument."""

    def permuted(order: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
        inverse = [order.index(i) for i in range(4)]
        return lambda t: t.permute(order).contiguous().permute(inverse)

    def in_a_larger_one(t: Tensor) -> Tensor:
        big = torch.full([n + 3 for n in t.shape], math.nan, dtype=t.dtype)
        view = big[1 : 1 + t.shape[0], 2 : 2 + t.shape[1], 1 : 1 + t.shape[2], 3 : 3 + t.shape[3]]
        return view.copy_(t)

    def stepped(t: Tensor) -> Tensor:
        big = torch.full([n * 2 for n in t.shape[:3]] + [t.shape[3]], math.nan, dtype=t.dtype)
        return big[1::2, ::2, 1::2].copy_(t)

    def broadcast(t: Tensor) -> Tensor:
        return t[:, :1].contiguous().expand(-1, t.shape[1], -1, -1)

    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 2, 0, 3)]
    return st.sampled_from([*map(permuted, orders), in_a_larger_one, stepped, broadcast])


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(ON_CPU), st.tuples(views(), views(), views(), views()), st.integers(0, 99))
def test_any_strides(kernel: str, layouts: tuple[Callable[[Tensor], Tensor], ...], seed: int) -> None:
    spec, inputs = make(Case("strides", CAUSAL, {"bias": (B, H, S, T)}), seed=seed)
    q, k, v, bias = (view(t.detach()) for view, t in zip(layouts, (*inputs[:3], inputs.bias), strict=True))
    laid = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), bias=bias)
    check_autograd(kernel, spec, laid, 3e-5)


def test_partial_results_merge_and_differentiate() -> None:
    """Context parallelism's use: halves of k and v, merged by lse, then one backward per half."""
    spec, inputs = make(Case("whole", CAUSAL, sizes={"s_q": 28, "s_kv": 28}), torch.float64)
    kernel = KERNELS["sdpa.flash"]
    expected, expected_lse, _ = attention_reference(spec, inputs)
    halves = []
    for start in (0, 14):
        part = dataclasses.replace(spec, kv_offset=start, q_offset=0)
        halves.append(
            (part, inputs._replace(k=inputs.k[:, :, start:][:, :, :14], v=inputs.v[:, :, start:][:, :, :14]))
        )
    results = [kernel.forward(*half) for half in halves]
    lse = torch.logaddexp(*(r.lse for r in results))
    out = sum(r.out * torch.exp(r.lse - lse)[..., None] for r in results)
    close(out, expected, 1e-12)
    close(lse, expected_lse, 1e-12)
    dout = torch.randn_like(out)  # type: ignore[call-overload]
    grads = [
        kernel.backward(*half, Result(out, lse, None, r.saved), dout)
        for half, r in zip(halves, results, strict=True)
    ]
    dq, dk, dv = torch.autograd.grad(expected, inputs[:3], dout)
    close(grads[0].q + grads[1].q, dq, 1e-12)
    close(torch.cat([g.k for g in grads], 2), dk, 1e-12)
    close(torch.cat([g.v for g in grads], 2), dv, 1e-12)


@pytest.mark.parametrize(
    ("kernel", "name", "explicit"),
    [
        *((kernel, "lengths of queries", explicit) for kernel in ON_CPU for explicit in (False, True)),
        *(("sdpa.flash", name, True) for name in ("bottom-right tall, dead rows", "a length of 0")),
    ],
)
def test_garbage_in_the_gradient_of_a_zeroed_row_goes_nowhere(kernel: str, name: str, explicit: bool) -> None:
    spec, inputs = make(next(c for c in CASES if c.name == name))
    expected, lse, _ = attention_reference(spec, inputs)
    dead = (lse == -math.inf)[..., None]
    dout = torch.randn(expected.shape)
    exact = torch.autograd.grad(expected, inputs[:3], dout.double().masked_fill(dead, 0.0))
    garbage = dout.masked_fill(dead, math.nan)
    if explicit:
        result = KERNELS[kernel].forward(spec, inputs)
        grads = KERNELS[kernel].backward(spec, inputs, result, garbage)[:3]
    else:
        grads = torch.autograd.grad(call(kernel, spec, inputs), inputs[:3], garbage)
    for grad, one in zip(grads, exact, strict=True):
        close(grad, one, 1e-4)


def test_output_gradients_of_any_strides() -> None:
    spec, inputs = make(CASES[0])
    kernel = KERNELS["sdpa.flash"]
    result = kernel.forward(spec, inputs)
    dout = torch.randn_like(result.out)
    expected = kernel.backward(spec, inputs, result, dout)
    for laid in (dout.mT.contiguous().mT, dout.transpose(1, 2).contiguous().transpose(1, 2)):
        for grad, exact in zip(kernel.backward(spec, inputs, result, laid)[:3], expected[:3], strict=True):
            close(grad, exact, 1e-6)
    moved = result._replace(out=result.out.mT.contiguous().mT, lse=result.lse.contiguous())
    for grad, exact in zip(kernel.backward(spec, inputs, moved, dout)[:3], expected[:3], strict=True):
        close(grad, exact, 1e-6)


def test_dropout_of_math_is_that_of_f_sdpa() -> None:
    spec, inputs = make(Case("dropout", {"dropout_p": 0.3}))
    torch.manual_seed(5)
    out = call("sdpa.math", spec, inputs)
    torch.manual_seed(5)
    expected = F.scaled_dot_product_attention(*inputs[:3], dropout_p=0.3, scale=spec.softmax_scale)
    close(out, expected, 1e-6)


def test_backward_of_math_replays_its_dropout() -> None:
    spec, inputs = make(Case("dropout", {"dropout_p": 0.3}))
    torch.manual_seed(5)
    expected = torch.autograd.grad(call("sdpa.math", spec, inputs).sum(), inputs[:3])
    torch.manual_seed(5)
    result = KERNELS["sdpa.math"].forward(spec, inputs)
    for _ in range(2):  # a plain function: a second call gives the same
        grads = KERNELS["sdpa.math"].backward(spec, inputs, result, torch.ones_like(result.out))
        for grad, exact in zip(grads[:3], expected, strict=True):
            close(grad, exact, 1e-6)


def test_math_without_need_grad_has_no_backward() -> None:
    spec, inputs = make(Case("no grad", {"need_grad": False}))
    inputs = Inputs(*(t.detach() for t in inputs[:3]))
    result = KERNELS["sdpa.math"].forward(spec, inputs)
    with pytest.raises(ValueError, match="need_grad"):
        KERNELS["sdpa.math"].backward(spec, inputs, result, result.out)


def test_math_gives_no_lse() -> None:
    assert not CANDIDATES["sdpa.math"].gives_lse
    spec, inputs = make(Case("lse", {"need_lse": True}))
    with pytest.raises(ValueError, match="need_lse"):
        KERNELS["sdpa.math"].forward(spec, inputs)
    spec, inputs = make(CASES[0])
    result = KERNELS["sdpa.math"].forward(spec, inputs)
    assert result.lse is None
    with pytest.raises(ValueError, match="dlse"):
        KERNELS["sdpa.math"].backward(spec, inputs, result, result.out, torch.zeros(B, H, S))


def test_math_under_autocast_multiplies_in_float32() -> None:
    spec, inputs = make(CASES[0])
    plain = call("sdpa.math", spec, inputs)
    bound_call = bind("sdpa.math", spec, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bound_call(*inputs[:3]), plain)
        assert torch.equal(KERNELS["sdpa.math"].forward(spec, inputs).out, plain)


def test_a_bound_call_refuses_what_it_was_not_bound_with() -> None:
    spec, inputs = make(CASES[0])
    with pytest.raises(ValueError, match="attn_mask"):
        bind("sdpa.flash", spec, inputs)(*inputs[:3], torch.zeros(S, T, dtype=torch.bool))
    spec, masked = make(Case("mask", tensors={"attn_mask": (S, T)}))
    with pytest.raises(ValueError, match="other arguments"):
        bind("sdpa.flash", spec, masked)(*masked[:3])
    spec, both = make(next(c for c in CASES if c.name == "causal self lengths"))
    with pytest.raises(ValueError, match="one tensor"):
        bind("sdpa.flash", spec, both)(
            *both[:3], seqlens_q=both.seqlens_q, seqlens_kv=both.seqlens_kv.clone()
        )


def test_unknown_kernels_and_devices_are_refused() -> None:
    spec, inputs = make(CASES[0])
    with pytest.raises(ValueError, match="must be one of"):
        bind("flash", spec, inputs)
    for kernel in ("sdpa.efficient", "sdpa.cudnn"):
        with pytest.raises(ValueError, match="device type 'cpu'"):
            bind(kernel, spec, inputs)


def test_an_op_with_other_arguments_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="does not exist"):
        ops.checked_op("_scaled_dot_product_no_such_attention", [], set())
    with pytest.raises(RuntimeError, match="other arguments"):
        ops.checked_op("_scaled_dot_product_attention_math", ["query", "value"], {"scale"})


# CUDA without a GPU: test_cuda_matrix.py proves the calls, stand-ins prove what surrounds them.

CUDA_KERNELS = ("sdpa.flash", "sdpa.efficient", "sdpa.cudnn")
NEEDS_MASK = {"attn_mask", "bias", "alibi_slopes", "seqlens_kv"}


def runs_on_cuda_flash(case: Case) -> bool:
    """Flash on CUDA has no mask: what is left is full, causal from its own corner, and lengths of queries."""
    if NEEDS_MASK & set(case.tensors) or case.spec.get("window_left", -1) >= 0 or "offset" in case.name:
        return False
    if "seqlens" in case.tensors:
        return "window_right" in case.spec
    return case.name != "causal wide" and "tall" not in case.name and case.name != "one kv head"


def on_cuda(kernel: str) -> list[Case]:
    cases = [c for c in CASES if c.spec.get("softmax_scale", 1) > 0]
    if kernel == "sdpa.efficient":
        return [c for c in cases if "g" not in c.sizes]  # it has no groups: an adaptation repeats kv heads
    return [c for c in cases if kernel != "sdpa.flash" or runs_on_cuda_flash(c)]


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_a_cuda_backward_with_dropout_needs_what_its_forward_saved(kernel: str) -> None:
    with FakeTensorMode(), torch.no_grad():
        q, k, v = (torch.empty(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        spec, inputs = Spec(dropout_p=0.1, need_grad=True), Inputs(q, k, v)
        result = KERNELS[kernel].forward(spec, inputs)
        KERNELS[kernel].backward(spec, inputs, result, q)
        merged = Result(result.out, result.lse)  # of parts, or carried from another forward
        KERNELS[kernel].backward(dataclasses.replace(spec, dropout_p=0.0), inputs, merged, q)
        with pytest.raises(ValueError, match="dropout: "):
            KERNELS[kernel].backward(spec, inputs, result._replace(saved=()), q)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 1, 8, 1)], ids=["before torch 2.9", "since"])
def test_the_cudnn_backward_gets_an_lse_of_the_rank_that_its_forward_gives(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 2.9 it was [b, h, s], to which the backward itself appended a dimension."""
    lse = torch.randn(2, 8, 4).transpose(1, 2)
    monkeypatch.setattr(
        shapes, "forward_op", lambda traits: lambda q, *rest: (q, q.new_empty(shape, dtype=torch.float32))
    )
    shapes.cudnn_lse_dims.cache_clear()
    try:
        given = shapes.op_lse(ops.CUDNN, lse)
    finally:
        shapes.cudnn_lse_dims.cache_clear()
    assert given.shape == (2, 4, 8, *shape[3:])
    assert given.is_contiguous()
    assert torch.equal(given.view(2, 4, 8), lse)


DIFFERENTIABLE_MASK = [(ops.EFFICIENT, True), (ops.CUDNN, False), (ops.FLASH_CPU, False), (ops.MATH, True)]


@pytest.mark.parametrize(("traits", "gives"), DIFFERENTIABLE_MASK, ids=lambda v: getattr(v, "kernel", ""))
def test_which_ops_differentiate_their_mask(traits: ops.Traits, gives: bool) -> None:
    assert traits.mask_grad == gives
    q, k, v, mask = (torch.empty(2, 4, 8, 8, device="meta", requires_grad=True) for _ in range(4))
    if not gives:
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'attn_"):
            ops.run_forward(traits, q, k, v, mask, is_causal=False, scale=1.0)
        return
    out = ops.run_forward(traits, q, k, v, mask, is_causal=False, scale=1.0).out
    assert all(g.shape == (2, 4, 8, 8) for g in torch.autograd.grad(out.sum(), (q, k, v, mask)))


@pytest.mark.parametrize("traits", ops.TRAITS, ids=lambda t: f"{t.kernel} {t.device}")
def test_every_op_differentiates_q_k_and_v_but_no_lse(traits: ops.Traits) -> None:
    q, k, v = (torch.empty(2, 4, 8, 8, device="meta", requires_grad=True) for _ in range(3))
    result = ops.run_forward(traits, q, k, v, None, is_causal=True, scale=1.0)
    assert all(g.shape == (2, 4, 8, 8) for g in torch.autograd.grad(result.out.sum(), (q, k, v)))
    assert traits.returns_lse == (result.lse is not None)
    assert result.lse is None or not result.lse.requires_grad


class StandIn:
    """A CUDA op on CPU tensors: the same arguments, demands, corner of causal, and shape of lse."""

    def __init__(self, traits: ops.Traits) -> None:
        self.traits = traits

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
        b, h, s_q, d = q.shape
        s_kv, group = k.shape[2], h // k.shape[1]
        assert self.traits.native_gqa or group == 1
        assert all(t.stride(-1) == 1 for t in (q, k))
        if self.traits is not ops.EFFICIENT:
            assert d % 8 == 0
        x = scale * (q.double() @ k.double().repeat_interleave(group, 1).mT)
        if mask is not None:
            assert mask.dtype == q.dtype
            assert mask.stride(-1) == 1
            assert torch.isfinite(mask).all()
            if self.traits is ops.EFFICIENT:
                assert mask.shape == (b, h, s_q, s_kv)
                assert all(s % 8 == 0 for s in mask.stride()[:3])
            x = x + mask.double()
        if is_causal:
            corner = s_kv - s_q if self.traits.causal == "bottom_right" else 0
            x = x.masked_fill(torch.ones(s_q, s_kv).triu(1 + corner).bool(), -math.inf)
        return x

    def forward(self, *args: Any, scale: float) -> tuple[Any, ...]:
        if self.traits is ops.FLASH_CUDA:
            q, k, v, dropout_p, is_causal, _debug = args
            mask, want_lse = None, True
            assert q.shape[3] == v.shape[3]
        else:
            q, k, v, mask, want_lse, dropout_p, is_causal = args
        assert dropout_p == 0
        x = self.scores(q, k, mask, is_causal, scale)
        lse = torch.logsumexp(x, -1)
        p = torch.exp(x - lse[..., None])
        out = (p @ v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)).to(q.dtype)
        rng = ("seed", "offset")
        if self.traits is ops.EFFICIENT:
            lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
            return out, (lse if want_lse else lse[..., :0]).float(), *rng
        lse = lse.float() if self.traits is ops.FLASH_CUDA else lse.float()[..., None]
        return out, (lse if want_lse else None), None, None, q.shape[2], k.shape[2], *rng, None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float
    ) -> tuple[Any, ...]:
        s_q, needs_mask = q.shape[2], False
        if self.traits is ops.EFFICIENT:
            mask, out, lse, *rng, _p, needed, is_causal = args
            assert lse.shape[2] % 32 == 0
            assert torch.isinf(lse[..., s_q:]).all()
            lse, needs_mask = lse[..., :s_q], needed[3]
        elif self.traits is ops.CUDNN:
            out, lse, *rng, mask, _cu_q, _cu_k, _max_q, _max_k, _p, is_causal = args
            lse = lse[..., 0]
        else:
            out, lse, _cu_q, _cu_k, _max_q, _max_k, _p, is_causal, *rng = args
            mask = None
        assert rng == ["seed", "offset"]
        assert lse.shape == q.shape[:3]
        assert dout.stride(-1) == out.stride(-1) == 1
        p = torch.exp(self.scores(q, k, mask, is_causal, scale) - lse.double()[..., None])
        dout, out, group = dout.double(), out.double(), q.shape[1] // k.shape[1]
        v_all, k_all = v.double().repeat_interleave(group, 1), k.double().repeat_interleave(group, 1)
        ds = p * (dout @ v_all.mT - (dout * out).sum(-1, keepdim=True))
        dk = (scale * ds.mT @ q.double()).unflatten(1, (-1, group)).sum(2)
        dv = (p.mT @ dout).unflatten(1, (-1, group)).sum(2)
        grads = [(scale * ds @ k_all).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)]
        if self.traits is not ops.EFFICIENT:
            return tuple(grads)
        return (*grads, ds.to(q.dtype) if needs_mask else None)


@pytest.fixture(params=[ops.FLASH_CUDA, ops.EFFICIENT, ops.CUDNN], ids=lambda t: t.kernel)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ops.Traits:
    """The kernel's CUDA path with its ops replaced, CPU tensors let through."""
    traits: ops.Traits = request.param
    fake = StandIn(traits)
    for module in (bound, run):
        monkeypatch.setattr(module, "resolve", lambda kernel, device: traits)
        monkeypatch.setattr(module, "check_call", lambda *args: None)
    for module in (bound, ops):
        monkeypatch.setattr(module, "forward_op", lambda _: fake.forward)
    monkeypatch.setattr(ops, "backward_op", lambda _: fake.backward)
    return traits


def test_what_surrounds_the_cuda_ops_is_attention(stand_in: ops.Traits) -> None:
    for case in on_cuda(stand_in.kernel):
        spec, inputs = make(case, torch.float32)
        inputs = without_bias_gradient(stand_in.kernel, inputs)
        check_autograd(stand_in.kernel, spec, inputs, 3e-5)
        check_explicit(stand_in.kernel, spec, inputs, 3e-5)


@pytest.mark.parametrize("name", ["causal square", "negative scale"])
def test_a_gradient_of_lse_at_the_largest_head_dim(stand_in: ops.Traits, name: str) -> None:
    """No column is left for it in flash's 256 and cuDNN's 128: it is a backward of its own."""
    case = next(c for c in CASES if c.name == name)
    for d in (128, 256):
        spec, inputs = make(case, torch.float32, d=d, e=d)
        spec = dataclasses.replace(spec, softmax_scale=spec.softmax_scale / 8)
        check_explicit(stand_in.kernel, spec, inputs, 3e-5)


@pytest.mark.parametrize("d", [16, 256])
def test_a_gradient_of_lse_survives_bfloat16(stand_in: ops.Traits, d: int) -> None:
    """One bfloat16 column would carry dlse with 8 bits; three carry it whole."""
    spec, inputs = make(CASES[0], torch.bfloat16, d=d, e=d)
    spec = dataclasses.replace(spec, softmax_scale=1.6 / d**0.5)
    kernel = KERNELS[stand_in.kernel]
    result = kernel.forward(spec, inputs)
    dlse = torch.randn(B, H, S) * 30
    grads = kernel.backward(spec, inputs, result, torch.zeros_like(result.out), dlse)
    _, lse, _ = attention_reference(spec, inputs)
    exact = torch.autograd.grad(lse, [inputs.q, inputs.k], dlse.double())
    for grad, one in zip(grads[:2], exact, strict=True):
        torch.testing.assert_close(grad.double(), one.double(), atol=2e-2, rtol=2**-7)

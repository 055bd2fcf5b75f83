"""PyTorch's kernels called by their aten ops: flash and math on CPU against the definition of attention,
and the CUDA ones on fake tensors and on stand-ins that compute what those ops compute."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention_cases import BOTTOM_RIGHT, CASES, CAUSAL, Case, build, int32, merge
from attnsel.backends.contract import Inputs, Result, Spec
from attnsel.backends.registry import CANDIDATES
from attnsel.backends.sdpa import ops, run
from attnsel.backends.sdpa import ops as shapes
from attnsel.backends.sdpa.run import KERNELS, bind
from pairwise import pairwise
from reference import attention_reference
from tables import each

torch.set_num_threads(1)

ON_CPU = ("sdpa.flash", "sdpa.math")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}
SQUARE = {"s_kv": 21}
PADDED = {"seqlens_q": "b", "seqlens_kv": "b"}
MORE = [
    Case("causal square", CAUSAL, sizes=SQUARE),
    Case("window of dead rows", {"window_left": 2, "window_right": 2}, sizes={"s_q": 40}),
    Case("offsets that cancel", {**CAUSAL, "q_offset": 6, "kv_offset": 6}),
    Case("offset past every key", {**CAUSAL, "kv_offset": 100}),
    Case("lengths of queries", tensors={"seqlens_q": "b"}),
    Case("lengths of 0", tensors=PADDED, sizes={"s_q": 5, "s_kv": 10}),
    Case("causal, lengths of 0", CAUSAL, PADDED, {"s_q": 5, "s_kv": 10}),
    Case("bottom-right key lengths", {"window_left": 3, "bottom_right": True}, {"seqlens_kv": "b"}),
    Case("causal self lengths", CAUSAL, {"seqlens": "b"}, SQUARE),
    Case("bottom-right self lengths", BOTTOM_RIGHT, {"seqlens": "b"}, SQUARE),
    Case("bottom-right window, self lengths", {"window_left": 3, "bottom_right": True}, {"seqlens": "b"}),
    Case("bias of keys with causal", CAUSAL, {"bias": "1 h 1 s_kv"}),
    Case("alibi with lengths", {"bottom_right": True}, {"alibi_slopes": "h", "seqlens_kv": "b"}),
    Case("negative scale", {"softmax_scale": -0.3}),
    Case("negative scale, causal", {**CAUSAL, "softmax_scale": -0.3}),
    Case("scale of zero, causal", {**CAUSAL, "softmax_scale": 0.0}),
]
UNKNOWN = {"packed", "softcap", "softmax_type", "dropout_p"}
EVERY = [case for case in CASES if not UNKNOWN & case.spec.keys()] + MORE
NAMED = {case.name: case for case in EVERY}


def make(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes: int) -> tuple[Spec, Inputs]:
    """The case's spec and random inputs; q, k, v and bias are leaves that require gradients."""
    tensors = {name: shape for name, shape in case.tensors.items() if name != "seqlens"}
    case = dataclasses.replace(case, sizes={**case.sizes, **sizes})
    spec, inputs = build(dataclasses.replace(case, tensors=tensors), dtype, seed)
    if "seqlens" in case.tensors:
        one = int32([inputs.q.shape[2], 8])
        inputs = inputs._replace(seqlens_q=one, seqlens_kv=one)
    if inputs.attn_mask is not None:
        inputs.attn_mask.view(-1, inputs.attn_mask.shape[-1])[0] = True  # one row that sees nothing
    for t in leaves(inputs, grad=False):
        t.requires_grad_()
    return dataclasses.replace(spec, return_max_logit=False, need_lse=False), inputs


def leaves(inputs: Inputs, grad: bool = True) -> list[Tensor]:
    found = (inputs.q, inputs.k, inputs.v, inputs.bias)
    return [t for t in found if t is not None and (t.requires_grad or not grad)]


def call(kernel: str, spec: Spec, inputs: Inputs) -> Tensor:
    optional = {n: t for n, t in zip(inputs._fields[3:], inputs[3:], strict=True) if t is not None}
    return bind(kernel, spec, inputs)(inputs.q, inputs.k, inputs.v, **optional)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


def check(kernel: str, spec: Spec, inputs: Inputs) -> None:
    """Differentiated by PyTorch and through the contract, against the reference; with a gradient of lse where
    the kernel has one, and none of the bias where it gives none."""
    implementation, gives_lse = KERNELS[kernel], CANDIDATES[kernel].gives_lse
    if inputs.bias is not None and kernel not in ("sdpa.math", "sdpa.efficient"):
        inputs = inputs._replace(bias=inputs.bias.detach())
    tolerance, of = TOLERANCE[inputs.q.dtype], leaves(inputs)
    expected, expected_lse, _ = attention_reference(spec, inputs)
    dout, dlse = (
        torch.randn(t.shape, generator=torch.Generator().manual_seed(9)) for t in (expected, expected_lse)
    )
    dout = dout.to(inputs.q.dtype)

    out = call(kernel, spec, inputs)
    assert out.dtype == inputs.q.dtype
    close(out, expected, tolerance)
    exact = torch.autograd.grad(expected, of, dout.double(), retain_graph=True)
    for grad, one in zip(torch.autograd.grad(out, of, dout), exact, strict=True):
        close(grad, one, tolerance * 4)

    result = implementation.forward(spec, inputs)
    assert not result.out.requires_grad
    close(result.out, expected, tolerance)
    assert (result.lse is not None) == gives_lse
    if gives_lse:
        close(result.lse, expected_lse, tolerance)
        assert result.lse.dtype == torch.promote_types(inputs.q.dtype, torch.float32) or kernel not in ON_CPU
        into_lse = dlse.double().masked_fill(expected_lse == -math.inf, 0.0)
        pair = [expected, expected_lse], of, [dout.double(), into_lse]
        exact = torch.autograd.grad(*pair, allow_unused=True)
        dlse = dlse.to(result.lse.dtype)
    grads = implementation.backward(spec, inputs, result, dout, dlse if gives_lse else None)
    actual = [grads.q, grads.k, grads.v] + ([grads.bias] if grads.bias is not None else [])
    for grad, leaf, one in zip(actual, of, exact, strict=True):
        assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        close(grad, torch.zeros_like(grad) if one is None else one, tolerance * 4)


@each("kernel, case", [(kernel, case) for kernel in ON_CPU for case in EVERY])
def test_every_feature_is_attention(kernel: str, case: Case) -> None:
    if kernel == "sdpa.flash" and "e" in case.sizes:
        with pytest.raises(ValueError, match="head_dim"):
            KERNELS[kernel].forward(*make(case))
        return
    check(kernel, *make(case))


WINDOWS = [{"window_left": 5, "window_right": 3}, {"window_left": 3, "bottom_right": True}]
AXES: dict[str, Any] = {
    "band": [{}, CAUSAL, BOTTOM_RIGHT, *WINDOWS],
    "seqlens_q": ["", "b"],
    "seqlens_kv": ["", "b"],
    "attn_mask": ["", "b 1 1 s_kv", "1 h s_q s_kv", "s_q s_kv"],
    "bias": ["", "1 h s_q s_kv", "b 1 s_q 1", "1 1 1 s_kv"],
    "alibi_slopes": ["", "h", "b h"],
    "offsets": [{}, {"q_offset": 4}, {"kv_offset": 9}],
    "sizes": [{"g": 4}, {"g": 2}, {"g": 1, "s_q": 5, "s_kv": 10}],
    "scale": [0.4, -0.3],
    "dtype": list(TOLERANCE),
}


@each("row", pairwise(AXES))
def test_every_two_features_together_are_attention(row: dict[str, Any]) -> None:
    optional = ("attn_mask", "bias", "alibi_slopes", "seqlens_q", "seqlens_kv")
    spec = {**row["band"], **row["offsets"], "softmax_scale": row["scale"]}
    case = Case("", spec, {name: row[name] for name in optional if row[name]}, row["sizes"])
    for kernel in ON_CPU:
        check(kernel, *make(case, row["dtype"]))


def test_partial_results_merge_and_differentiate() -> None:
    """Context parallelism's use: halves of k and v, merged by lse, then one backward per half."""
    spec, inputs = make(Case("", CAUSAL, sizes={"s_q": 28, "s_kv": 28}), torch.float64)
    kernel = KERNELS["sdpa.flash"]
    expected, expected_lse, _ = attention_reference(spec, inputs)
    halves = []
    for start in (0, 14):
        k, v = (t[:, :, start : start + 14] for t in inputs[1:3])
        halves.append((dataclasses.replace(spec, kv_offset=start), inputs._replace(k=k, v=v)))
    results = [kernel.forward(*half) for half in halves]
    whole = merge(results)
    close(whole.out, expected, 1e-12)
    close(whole.lse, expected_lse, 1e-12)
    dout = torch.randn_like(whole.out)
    grads = [
        kernel.backward(*half, whole._replace(saved=r.saved), dout)
        for half, r in zip(halves, results, strict=True)
    ]
    dq, dk, dv = torch.autograd.grad(expected, inputs[:3], dout)
    close(grads[0].q + grads[1].q, dq, 1e-12)
    close(torch.cat([g.k for g in grads], 2), dk, 1e-12)
    close(torch.cat([g.v for g in grads], 2), dv, 1e-12)


@each(
    "kernel, name, explicit",
    [
        *((kernel, "lengths of queries", explicit) for kernel in ON_CPU for explicit in (False, True)),
        ("sdpa.flash", "causal bottom-right, rows that see no key", True),
        ("sdpa.flash", "lengths of 0", True),
    ],
)
def test_garbage_in_the_gradient_of_a_zeroed_row_goes_nowhere(kernel: str, name: str, explicit: bool) -> None:
    spec, inputs = make(NAMED[name])
    expected, lse, _ = attention_reference(spec, inputs)
    dead = (lse == -math.inf)[..., None]
    assert dead.any()
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
    spec, inputs = make(NAMED["plain"])
    kernel = KERNELS["sdpa.flash"]
    result = kernel.forward(spec, inputs)
    dout = torch.randn_like(result.out)
    expected = kernel.backward(spec, inputs, result, dout)
    moved = result._replace(out=result.out.mT.contiguous().mT, lse=result.lse.contiguous())
    for given_result, laid in ((result, dout.mT.contiguous().mT), (moved, dout)):
        for grad, exact in zip(kernel.backward(spec, inputs, given_result, laid)[:3], expected, strict=False):
            close(grad, exact, 1e-6)


def test_dropout_of_math_is_that_of_f_sdpa_and_its_backward_replays_it() -> None:
    spec, inputs = make(NAMED["mha"])
    spec = dataclasses.replace(spec, dropout_p=0.3)
    torch.manual_seed(5)
    out = F.scaled_dot_product_attention(*inputs[:3], dropout_p=0.3, scale=spec.softmax_scale)
    expected = torch.autograd.grad(out.sum(), inputs[:3])
    torch.manual_seed(5)
    close(call("sdpa.math", spec, inputs), out, 1e-6)
    torch.manual_seed(5)
    result = KERNELS["sdpa.math"].forward(spec, inputs)
    for _ in range(2):  # a plain function: a second call gives the same
        grads = KERNELS["sdpa.math"].backward(spec, inputs, result, torch.ones_like(result.out))
        for grad, exact in zip(grads[:3], expected, strict=True):
            close(grad, exact, 1e-6)


def test_math_gives_no_lse_and_no_backward_without_need_grad() -> None:
    assert not CANDIDATES["sdpa.math"].gives_lse
    math_kernel = KERNELS["sdpa.math"]
    spec, inputs = make(NAMED["plain"])
    with pytest.raises(ValueError, match="need_lse"):
        math_kernel.forward(dataclasses.replace(spec, need_lse=True), inputs)
    result = math_kernel.forward(spec, inputs)
    assert result.lse is None
    with pytest.raises(ValueError, match="dlse"):
        math_kernel.backward(spec, inputs, result, result.out, torch.zeros(result.out.shape[:3]))
    spec, inputs = dataclasses.replace(spec, need_grad=False), Inputs(*(t.detach() for t in inputs[:3]))
    result = math_kernel.forward(spec, inputs)
    with pytest.raises(ValueError, match="need_grad"):
        math_kernel.backward(spec, inputs, result, result.out)


def test_math_under_autocast_multiplies_in_float32() -> None:
    spec, inputs = make(NAMED["plain"])
    plain = call("sdpa.math", spec, inputs)
    bound_call = bind("sdpa.math", spec, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bound_call(*inputs[:3]), plain)
        assert torch.equal(KERNELS["sdpa.math"].forward(spec, inputs).out, plain)


def test_a_bound_call_refuses_what_it_was_not_bound_with() -> None:
    spec, inputs = make(NAMED["plain"])
    with pytest.raises(ValueError, match="attn_mask"):
        bind("sdpa.flash", spec, inputs)(*inputs[:3], torch.zeros(21, 27, dtype=torch.bool))
    spec, masked = make(NAMED["mask of two dimensions"])
    with pytest.raises(ValueError, match="other arguments"):
        bind("sdpa.flash", spec, masked)(*masked[:3])
    spec, both = make(NAMED["causal self lengths"])
    with pytest.raises(ValueError, match="one tensor"):
        bind("sdpa.flash", spec, both)(
            *both[:3], seqlens_q=both.seqlens_q, seqlens_kv=both.seqlens_kv.clone()
        )


def test_unknown_kernels_devices_and_ops_are_refused() -> None:
    spec, inputs = make(NAMED["plain"])
    with pytest.raises(ValueError, match="must be one of"):
        bind("flash", spec, inputs)
    for kernel in ("sdpa.efficient", "sdpa.cudnn"):
        with pytest.raises(ValueError, match="device type 'cpu'"):
            bind(kernel, spec, inputs)
    with pytest.raises(RuntimeError, match="does not exist"):
        ops.checked_op("_scaled_dot_product_no_such_attention", [], set())
    with pytest.raises(RuntimeError, match="other arguments"):
        ops.checked_op("_scaled_dot_product_attention_math", ["query", "value"], {"scale"})


# CUDA without a GPU: stand-ins prove what surrounds the calls, tests/proof/test_cuda_matrix.py, nightly, the
# calls themselves.


@each("kernel", ["sdpa.flash", "sdpa.efficient", "sdpa.cudnn"])
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


def test_the_cudnn_backward_gets_an_lse_of_the_rank_that_its_forward_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch 2.9 it was [b, h, s], to which the backward itself appended a dimension."""
    lse = torch.randn(2, 8, 4).transpose(1, 2)
    for shape in ((1, 1, 8), (1, 1, 8, 1)):
        gives = lambda q, *rest, shape=shape: (q, q.new_empty(shape, dtype=torch.float32))  # noqa: E731
        monkeypatch.setattr(shapes, "forward_op", lambda traits, gives=gives: gives)
        shapes.cudnn_lse_dims.cache_clear()
        try:
            handed = shapes.op_lse(ops.CUDNN, lse)
        finally:
            shapes.cudnn_lse_dims.cache_clear()
        assert handed.shape == (2, 4, 8, *shape[3:])
        assert handed.is_contiguous()
        assert torch.equal(handed.view(2, 4, 8), lse)


def test_cudnn_gets_a_result_and_its_gradient_with_the_same_strides() -> None:
    """pytorch#176915: a rank's part of the result, and a gradient that lies otherwise."""
    out, dout = torch.randn(2, 4, 8, 16)[:, :, 4:], torch.randn(2, 4, 16, 4).transpose(2, 3)
    mine, grad = run.alike(ops.CUDNN, out, dout)
    assert mine.stride() == grad.stride() == (256, 64, 16, 1)
    assert torch.equal(mine, out)
    assert torch.equal(grad, dout)
    out, dout = (torch.randn(2, 8, 4, 16).transpose(1, 2) for _ in range(2))
    for traits, other in ((ops.CUDNN, dout), (ops.FLASH_CUDA, dout.contiguous())):  # what needs no copy
        mine, grad = run.alike(traits, out, other)
        assert mine is out
        assert grad is other


@each("traits", ops.TRAITS)
def test_every_op_differentiates_q_k_and_v_some_their_mask_and_none_its_lse(traits: ops.Traits) -> None:
    *qkv, mask = (torch.empty(2, 4, 8, 8, device="meta", requires_grad=True) for _ in range(4))
    result = ops.run_forward(traits, *qkv, None, is_causal=True, scale=1.0)
    assert all(g.shape == (2, 4, 8, 8) for g in torch.autograd.grad(result.out.sum(), qkv))
    assert traits.returns_lse == (result.lse is not None)
    assert result.lse is None or not result.lse.requires_grad
    assert traits.mask_grad == (traits.kernel in ("sdpa.efficient", "sdpa.math"))
    if traits.mask_grad:
        out = ops.run_forward(traits, *qkv, mask, is_causal=False, scale=1.0).out
        assert all(g.shape == (2, 4, 8, 8) for g in torch.autograd.grad(out.sum(), (*qkv, mask)))
    elif traits is not ops.FLASH_CUDA:  # it has no mask
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'attn_"):
            ops.run_forward(traits, *qkv, mask, is_causal=False, scale=1.0)


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
    ops.cudnn_lse_dims()  # asks the real op, once
    monkeypatch.setattr(run, "resolve", lambda kernel, device: traits)
    monkeypatch.setattr(run, "check_call", lambda *args: None)
    for module in (run, ops):
        monkeypatch.setattr(module, "forward_op", lambda _: fake.forward)
    monkeypatch.setattr(ops, "backward_op", lambda _: fake.backward)
    return traits


# Flash on CUDA has no mask: what is left is full, causal from its own corner, and lengths of queries.
WITHOUT_MASK = [
    *("plain", "mha", "mqa", "one query row", "causal square", "causal bottom-right", "lengths of queries"),
    *("causal self lengths", "bottom-right self lengths"),
]


def test_what_surrounds_the_cuda_ops_is_attention(stand_in: ops.Traits) -> None:
    for case in EVERY:
        if case.spec.get("softmax_scale", 1) <= 0 or "e" in case.sizes:
            continue
        # Efficient has no groups: an adaptation repeats kv heads.
        spec, inputs = make(case, **({"g": 4} if stand_in is ops.EFFICIENT else {}))
        if stand_in is not ops.FLASH_CUDA or case.name in WITHOUT_MASK:
            check(stand_in.kernel, spec, inputs)
        else:
            with pytest.raises(ValueError, match="takes no mask"):
                KERNELS[stand_in.kernel].forward(spec, inputs)


@each("name, d", [(name, d) for name in ("causal square", "negative scale") for d in (128, 256)])
def test_a_gradient_of_lse_at_the_largest_head_dim(stand_in: ops.Traits, name: str, d: int) -> None:
    """No column is left for it in flash's 256 and cuDNN's 128: it is a backward of its own."""
    spec, inputs = make(NAMED[name], d=d, e=d, g=4)
    check(stand_in.kernel, dataclasses.replace(spec, softmax_scale=spec.softmax_scale / 8), inputs)


@each("d", [16, 256])
def test_a_gradient_of_lse_survives_bfloat16(stand_in: ops.Traits, d: int) -> None:
    """One bfloat16 column would carry dlse with 8 bits; three carry it whole."""
    spec, inputs = make(NAMED["plain"], torch.bfloat16, d=d, e=d, g=4)
    spec = dataclasses.replace(spec, softmax_scale=1.6 / d**0.5)
    kernel = KERNELS[stand_in.kernel]
    result = kernel.forward(spec, inputs)
    dlse = torch.randn(result.out.shape[:3]) * 30
    grads = kernel.backward(spec, inputs, result, torch.zeros_like(result.out), dlse)
    _, lse, _ = attention_reference(spec, inputs)
    exact = torch.autograd.grad(lse, [inputs.q, inputs.k], dlse.double())
    for grad, one in zip(grads[:2], exact, strict=True):
        torch.testing.assert_close(grad.double(), one.double(), atol=2e-2, rtol=2**-7)

"""Every call of PyTorch's kernels on CUDA, forward and backward, against this torch's schemas and shape
functions, and what is handed to each op against what its CUDA kernel needs. No GPU; other releases of torch:
``benchmarks/torch_versions.py``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import cuda_families
from attnsel.backends.sdpa import bound, ops, varlen
from attnsel.backends.sdpa.kernels import KERNELS, SdpaKernel
from cuda_calls import CALLS, FEATURES, FORMS, Call
from cuda_families import Family, OpCall, aligned

HALF = (torch.float16, torch.bfloat16)


def on_meta() -> Any:
    """Meta tensors are taken for CUDA ones."""
    as_cuda = lambda kernel, device: ops.resolve(kernel, "cuda")  # noqa: E731
    return mock.patch.multiple(bound, resolve=as_cuda)


def refuses(kernel: str, call: Call) -> str | None:
    """By which words ``kernel`` must refuse the call on CUDA; None: it must run."""
    n, dtype, spec = call.size, call.form.dtype, call.spec()
    if call.packed:
        return "packed"
    if kernel == "sdpa.math":
        return None
    if dtype not in (HALF if kernel != "sdpa.efficient" else (*HALF, torch.float32)):
        return "dtype"
    if n["d"] * dtype.itemsize % 16 or n["e"] * dtype.itemsize % 16:
        return "head_dim_multiple"
    if kernel == "sdpa.efficient":
        return None if n["g"] == n["h"] else "equal_heads"
    if kernel == "sdpa.cudnn":
        return "kv_single" if n["s_kv"] == 1 or (n["s_q"] == 1 and spec.dropout_p) else None
    if n["d"] != n["e"]:
        return "must equal head_dim_qk"
    return None if said_without_mask(call) else "takes no mask"


def said_without_mask(call: Call) -> bool:
    """Whether full, or causal from the bottom-right corner, is all there is to say: what flash expresses."""
    seen, (s_q, s_kv) = call.visible(), call.visible().shape
    corner = torch.ones(s_q, s_kv, dtype=torch.bool).tril(s_kv - s_q)
    if "seqlens" in call.feature.tensors:  # one tensor: what lies behind a length, no row inside it can see
        return call.spec().window_right == 0 and s_q == s_kv and torch.equal(seen, corner)
    if call.hides_by_tensors():
        return False
    return bool(seen.all()) or (s_q <= s_kv and torch.equal(seen, corner))


def check(kernel: str, op: OpCall, call: Call) -> None:
    """What the CUDA sources of the ops check, and what they assume (attention.cu, sdp_utils.cpp, MHA.cpp)."""
    q, k, v, n = op["query"], op["key"], op["value"], call.size
    assert q.dtype == k.dtype == v.dtype == call.form.dtype
    assert q.shape[:3] == (n["b"], n["h"], n["s_q"])
    assert k.shape[:3] == v.shape[:3] == (n["b"], n["g"], n["s_kv"])
    assert q.shape[3] == k.shape[3]
    rows = [q, k, v]
    assert op["dropout_p"] == call.spec().dropout_p
    assert op["scale"] > 0.0
    assert isinstance(op["is_causal"], bool)
    if "out" in op.arguments:
        dout = op["grad_out_" if kernel == "sdpa.efficient" else "grad_out"]
        assert op["out"].shape == dout.shape == (*q.shape[:3], v.shape[3])
        assert op["out"].dtype == dout.dtype == q.dtype
        assert op["logsumexp"].dtype == torch.float32
        rows += [op["out"], dout]
        if kernel != "sdpa.efficient":
            assert (op["max_q"], op["max_k"]) == (n["s_q"], n["s_kv"])
            assert op["cum_seq_q"] is None
            assert op["cum_seq_k"] is None
    for t in rows:
        assert t.shape[-1] * t.element_size() % 16 == 0
        assert aligned(t), (t.shape, t.stride(), t.storage_offset())
    if kernel == "sdpa.cudnn":  # head_dim above 128 is not for every release and GPU
        assert v.shape[3] <= max(128, n["e"])
    if kernel == "sdpa.flash":
        assert q.shape[3] == v.shape[3] <= 256
    elif op["attn_bias"] is not None:
        check_mask(kernel, op["attn_bias"], q, n)


def check_mask(kernel: str, mask: Tensor, q: Tensor, n: dict[str, int]) -> None:
    assert mask.dtype == q.dtype
    full = (n["b"], n["h"], n["s_q"], n["s_kv"])
    if kernel == "sdpa.efficient":
        assert tuple(mask.shape) == full
        assert aligned(mask), mask.stride()
    assert mask.dim() == 4
    assert all(size in (1, whole) for size, whole in zip(mask.shape, full, strict=True))
    assert mask.shape[3] == n["s_kv"]
    assert mask.stride(3) == 1


ROWS_BEHIND_ROWS = ("bshd", "qkv")  # layouts in which one sequence begins where the one before ends


def varlen_refuses(call: Call) -> str | None:
    """The same for the op with lengths."""
    n, spec, tensors = call.size, call.spec(), set(call.feature.tensors)
    if call.form.dtype not in HALF:
        return "dtype"
    if n["d"] * call.form.dtype.itemsize % 16 or n["e"] * call.form.dtype.itemsize % 16:
        return "head_dim_multiple"
    if n["d"] != n["e"]:
        return "must equal head_dim_qk"
    if tensors & {"attn_mask", "bias", "alibi_slopes"}:
        return "no argument"
    if spec.q_offset or spec.kv_offset:
        return "no argument"
    lengths = not call.packed and bool(tensors & {"seqlens", "seqlens_q", "seqlens_kv"})
    if (spec.window_left >= 0 or spec.window_right >= 0) and not spec.bottom_right:
        if call.packed or (lengths and "seqlens" not in tensors):
            return "one tensor for the lengths"
        longer = 0 if lengths else n["s_kv"] - n["s_q"]
        if 0 <= spec.window_left < -longer or 0 <= spec.window_right < longer:
            return "from the top left"
    if lengths and n["b"] > 1 and call.form.layout not in ROWS_BEHIND_ROWS:
        return "where the one before ends"
    return None


def varlen_check(op: OpCall, call: Call) -> None:
    """What flash_api.cpp checks, and what its kernels assume, of dense [b, s, h, d] or of rows [t, h, d]."""
    q, k, v, n = op["query"], op["key"], op["value"], call.size
    cu_q, cu_kv, lengths = (
        op["cum_seq_q"],
        op["cum_seq_k"],
        bool(n) and "seqlens" in str(call.feature.tensors),
    )
    rows = [q, k, v]
    if "out" in op.arguments:
        assert op["out"].shape == op["grad_out"].shape == q.shape
        assert op["logsumexp"].dtype == torch.float32
        rows += [op["out"], op["grad_out"]]
    for t in rows:
        assert t.dtype == call.form.dtype
        assert t.shape[-1] % 8 == 0
        assert t.shape[-1] <= 256
        assert aligned(t), (t.shape, t.stride(), t.storage_offset())
    if call.packed or lengths:
        tokens = (n["b"] * n["s_q"], n["b"] * n["s_kv"])
        assert (q.shape[:2], k.shape[:2]) == ((tokens[0], n["h"]), (tokens[1], n["g"]))
        sequences = n["b"] * (1 if call.packed else 2)  # padding is sequences too
        for cu in (cu_q, cu_kv):
            assert (cu.dtype, tuple(cu.shape), cu.is_contiguous()) == (torch.int32, (sequences + 1,), True)
        assert op["max_q"] == max(2, n["s_q"])  # one row would stand for another problem
        assert op["max_k"] == max(2, n["s_kv"])
    else:
        assert cu_q is cu_kv is None
        assert q.shape[:3] == (n["b"], n["s_q"], n["h"])
        assert k.shape[:3] == v.shape[:3] == (n["b"], n["s_kv"], n["g"])
        assert (op["max_q"], op["max_k"]) == (n["s_q"], n["s_kv"])
    assert op["scale"] > 0.0
    assert op["dropout_p"] == call.spec().dropout_p
    assert not {"seqused_k", "alibi_slopes", "block_table"} & {
        name for name, t in op.arguments.items() if t is not None
    }


def family(name: str, **how: Any) -> Family:
    return Family(KERNELS[name], refuses=partial(refuses, name), check=partial(check, name), **how)


def pair(name: str) -> tuple[str, ...]:
    return (f"_scaled_dot_product_{name}_attention", f"_scaled_dot_product_{name}_attention_backward")


FLASH = family("sdpa.flash", ops=pair("flash"), state=(6, 7), on_meta=on_meta)
EFFICIENT = family("sdpa.efficient", ops=pair("efficient"), state=(2, 3), bias_gradient=True, on_meta=on_meta)
CUDNN = family("sdpa.cudnn", ops=pair("cudnn"), state=(6, 7), on_meta=on_meta)
MATH = family("sdpa.math", ops=(), bias_gradient=True, gives_lse=False, saves_graph=True)
VARLEN = Family(
    SdpaKernel("sdpa.varlen", varlen.forward, varlen.backward, varlen.bind),
    ops=("_flash_attention_forward", "_flash_attention_backward"),
    refuses=varlen_refuses,
    check=varlen_check,
    state=(2, 3),
)
FAMILIES = (FLASH, EFFICIENT, CUDNN, MATH, VARLEN)

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kernel.name)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["one form", "every form"])
def every(request: pytest.FixtureRequest) -> bool:
    """Whether each feature is asked in all its forms, or in one, by turns."""
    return bool(request.param)


def failures(calls: Iterable[Call], check: Callable[[Call, int], None]) -> dict[str, str]:
    """What goes wrong in which call; the number of a call decides what else is varied."""
    wrong: dict[str, str] = {}
    for number, call in enumerate(calls):
        try:
            check(call, number)
        except Exception as error:
            wrong[call.name] = f"{type(error).__name__}: {error}"
    return wrong


@families
def test_what_a_kernel_cannot_do_is_refused(family: Family, every: bool) -> None:
    calls = [call for feature in FEATURES for call in family.turns(feature, every, refused=True)]
    assert not failures(calls, lambda call, number: cuda_families.check_refused(family, call))


@families
def test_all_else_runs_by_the_contract(family: Family, every: bool) -> None:
    calls = [call for feature in FEATURES for call in family.turns(feature, every)]
    assert len(calls) >= 10

    def check(call: Call, number: int) -> None:
        needs = itertools.product((False, True)[: 1 + family.gives_lse], (False, True))
        for n, (need_lse, need_grad) in enumerate(needs):
            if every or n == number % 4:
                cuda_families.check_forward(family, call, need_lse=need_lse, need_grad=need_grad)
        for dlse in (False, True)[: 1 + family.gives_lse]:
            if every or dlse == (family.gives_lse and number % 2 == 0):
                cuda_families.check_backward(family, call, dlse=dlse)
        if every or number % 2:
            cuda_families.check_bound_forward(family, call)
        if every or number % 2 == 0:
            cuda_families.check_bound(family, call)

    assert not failures(calls, check)


@families
@pytest.mark.parametrize("dout", ["expanded", "columns", "unaligned"])
def test_a_gradient_of_the_result_may_lie_anyhow(family: Family, dout: str, every: bool) -> None:
    calls = family.turns(FEATURES[0], every)
    check = partial(cuda_families.check_backward, family, dlse=False, dout=dout)
    assert not failures(calls, lambda call, number: check(call))


def test_every_feature_and_form_runs_somewhere() -> None:
    ran = [call for call in CALLS if any(f.refuses(call) is None for f in FAMILIES)]
    assert {call.feature for call in ran} == set(FEATURES)
    assert {call.form for call in ran} == set(FORMS)

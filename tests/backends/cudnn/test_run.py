"""cuDNN's forward and backward through the contract, on an emulation of what its graphs say.

No GPU is here: ``emulated_cudnn`` carries out the very graphs and buffers that libcudnn would get, by its
documentation, so a wrong bound, stride, offset, uid or scale is a wrong number here.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

import emulated_cudnn
from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    Case,
    assert_matches,
    build,
    carried_out,
    expected,
    merge,
    packed,
    starts,
    upstream,
)
from attnsel import AttentionParams
from attnsel.backends.checks import default_slopes
from attnsel.backends.contract import Inputs, Spec, Steps
from attnsel.backends.cudnn import plans
from attnsel.backends.cudnn import plans as session
from attnsel.backends.cudnn import run as tensors
from attnsel.backends.cudnn.graph import GraphCall, Strided, planned
from attnsel.backends.cudnn.plans import PLANS, PlanCache, PlanRefused
from attnsel.backends.cudnn.run import backward, bind, forward, prepare
from attnsel.errors import InvalidInput, UnsupportedArgument
from attnsel.runtime.bind import make_spec
from attnsel.runtime.call import config
from cudnn_cases import ALIBI, FEATURES
from forward_checks import pages_of
from pairwise import pairwise
from reference import attention_reference
from tables import each

torch.set_num_threads(1)
CPU = torch.device("cpu")
TOLERANCE = 2e-5  # stats are float32


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = session.Session(emulated_cudnn, object(), CPU, ("9.13.0", "1.23.0"))
    monkeypatch.setattr(session, "current", lambda device: made._replace(device=device))
    emulated_cudnn.built.clear()
    emulated_cudnn.refuse.clear()
    PLANS.clear()
    yield
    PLANS.clear()


HERE = [
    *FEATURES,
    *(case for case in CASES if "head_dim" in case.name),
    packed("padding between, bottom-right", BOTTOM_RIGHT, {"cu_seqlens_padded": ""}),
    Case("padding, window", {"window_left": 3, "window_right": 2}, {"seqlens_q": "b", "seqlens_kv": "b"}),
    Case("window past every key", {"window_left": 2, "window_right": 0}, {}, {"s_q": 40}),
]


@each("case", HERE)
def test_forward_and_backward_are_those_of_the_reference(case: Case) -> None:
    """With a largest logit, and without: then the backward reads what the forward saved."""
    spec, inputs = build(case, torch.float32)
    if case is ALIBI:
        inputs = inputs._replace(alibi_slopes=default_slopes(inputs.q.shape[1], CPU))
    actual, dout, _ = carried_out(forward, backward, spec, inputs, dlse=False)
    wanted = expected(spec, inputs, dout, None)
    assert_matches(actual, wanted, TOLERANCE)

    spec = dataclasses.replace(spec, need_lse=False, return_max_logit=False)
    result = forward(spec, inputs)
    grads = backward(spec, inputs, result, dout)
    actual = {"out": result.out, "dq": grads.q, "dk": grads.k, "dv": grads.v}
    assert_matches(actual, {name: wanted[name] for name in actual}, TOLERANCE)

    call = bind(dataclasses.replace(spec, need_grad=False), inputs)
    if call is not None:
        out = call(*inputs[:3], None, inputs.bias, None, inputs.seqlens_q, inputs.seqlens_kv)
        assert_matches({"out": out}, {"out": wanted["out"]}, TOLERANCE)

    steps = bind(spec, inputs)
    if isinstance(steps, Steps):
        out, lse = steps.forward(*inputs[:3])
        for q, k, v in (inputs[:3], [t.transpose(0, 3).clone().transpose(0, 3) for t in inputs[:3]]):
            dq, dk, dv = steps.backward(q, k, v, out, lse, dout)
            actual = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
            assert_matches(actual, {name: wanted[name] for name in actual}, TOLERANCE)


def check(spec: Spec, inputs: Inputs) -> None:
    actual, dout, _ = carried_out(forward, backward, spec, inputs, dlse=False)
    wanted = expected(spec, inputs, dout, None)
    assert_matches(actual, {name: wanted[name] for name in actual}, TOLERANCE)


def nodes() -> list[str]:
    return [graph.node for graph in emulated_cudnn.built]


def test_inference_makes_no_backward_plan_and_no_stats() -> None:
    spec, inputs = build(Case("plain"), torch.float32)
    spec = dataclasses.replace(spec, need_lse=False, return_max_logit=False, need_grad=False)
    prepare(spec, inputs)
    assert forward(spec, inputs).lse is None
    call = bind(spec, inputs)
    assert call is not None
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="bound for plain tensors"):
        call(*inputs[:3])
    assert nodes() == ["sdpa"]
    assert emulated_cudnn.built[0].given["generate_stats"] is False


OWN = {"_plans": "ab", "_plan_index": 1, "selected_engine": None, "_data_bindings": {}}


@each("changed", [{}, {"release": "1.27.0"}, {"_data_bindings": {1: 0}}, {"selected_engine": 1}])
def test_addresses_go_where_the_frontend_would_use_nothing_else(changed: dict[str, Any]) -> None:
    graph = tensors.problem(*build(packed("causal", CAUSAL), torch.float32)).forward
    versions = ("9.13.0", changed.get("release", "1.28.0"))
    here = session.Session(emulated_cudnn, mock.Mock(backend_handle=7), CPU, versions)
    buffers = {name: torch.zeros(1) for _, name in plans.ready(graph, None, 0, here).names}
    made, seen = mock.Mock(**{**OWN, **changed}), list[int]()
    made._variant_pack_uids.return_value = [uid for uid, _ in plans.ready(graph, None, 0, here).names]
    made._materialize_backend_plan.side_effect = lambda index: mock.Mock(cpp_index=index)
    made._lowered_graph._execute_with_raw_ptrs.side_effect = lambda first, count, *rest: seen.extend(
        [*(ctypes.c_int64 * count).from_address(first), *rest]
    )
    plans.ready(graph, made, 0, here).run(here, buffers)
    assert seen == ([] if changed else [*(t.data_ptr() for t in buffers.values()), 0, 7, 1])
    assert made.execute.called == bool(changed)


@each("order, one_buffer", [("bshd", True), ("sbhd", False), ("bhsd", False)])
def test_strides_are_taken_as_they_are(order: str, one_buffer: bool) -> None:
    PLANS.clear()
    emulated_cudnn.built.clear()
    b, h, g, s, d = 2, 4, 1, 11, 8
    size = {"b": b, "s": s, "d": d}
    heads = h + 2 * g
    buffer = torch.randn([size.get(letter, heads) for letter in order])
    views = buffer.permute([order.index(letter) for letter in "bhsd"])
    q, k, v = views.split([h, g, g], dim=1)
    if not one_buffer:
        q, k, v = q.clone(), k.clone(), v.clone()
    check(Spec(softmax_scale=d**-0.5, window_right=0, need_lse=True, need_grad=True), Inputs(q, k, v))
    declared = emulated_cudnn.built[0].tensors
    assert tuple(declared["q"].stride) == q.stride()
    assert tuple(declared["k"].stride) == k.stride()


def test_gradients_that_lie_otherwise_are_copied_not_planned_for() -> None:
    spec, inputs = build(Case("plain"), torch.float32)
    result = forward(spec, inputs)
    expanded = torch.ones(()).expand(result.out.shape)
    transposed = torch.randn(result.out.transpose(1, 3).shape).transpose(1, 3)
    for dout in (expanded, transposed):
        grads = backward(spec, inputs, result, dout)
        wanted = expected(spec, inputs, dout, None)
        assert_matches({"dq": grads.q}, {"dq": wanted["dq"]}, TOLERANCE)
    assert nodes() == ["sdpa", "sdpa_backward"]


def test_merged_results_have_the_whole_rows_gradients() -> None:
    spec, inputs = build(Case("two halves of the keys"), torch.float32)
    parts = (slice(13), slice(13, 27))
    halves = [inputs._replace(k=inputs.k[:, :, at], v=inputs.v[:, :, at]) for at in parts]
    whole = merge([forward(spec, half) for half in halves])
    dout, _ = upstream(whole)
    grads = [backward(spec, half, whole, dout.float()) for half in halves]
    actual = {"out": whole.out, "dq": grads[0].q + grads[1].q, "dk": torch.cat([part.k for part in grads], 2)}
    wanted = expected(spec, inputs, dout, None)
    assert_matches(actual, {name: wanted[name] for name in actual}, TOLERANCE)


@each("case", [Case("", BOTTOM_RIGHT), packed("", BOTTOM_RIGHT)])
def test_pages(case: Case) -> None:
    spec, inputs = build(case, torch.float32)
    spec = dataclasses.replace(spec, return_max_logit=False)
    wide = {"max_seqlen_q": 17} if spec.packed else {}
    paged_spec, paged = pages_of(spec, inputs._replace(**wide), 4)
    result = forward(paged_spec, paged)
    assert_matches({"out": result.out}, {"out": attention_reference(spec, inputs)[0]}, TOLERANCE)
    bias = torch.zeros(1, 1, 1, 1)
    with pytest.raises(ValueError, match="bias: cuDNN takes none beside keys and values in pages"):
        forward(paged_spec, paged._replace(bias=bias))


@each("case", [Case("plain"), packed("causal", CAUSAL)])
def test_dropout_drops_in_the_backward_what_the_forward_dropped(case: Case) -> None:
    spec, inputs = build(case, torch.float64)
    spec = dataclasses.replace(spec, dropout_p=0.3, return_max_logit=False)
    inputs = inputs._replace(dropout_seed=torch.tensor(11), dropout_offset=torch.tensor(3))
    result = forward(spec, inputs)
    assert torch.equal(result.out, forward(spec, inputs).out)
    four = torch.tensor(4)
    for other in ({"dropout_seed": four}, {"dropout_offset": four}, {"dropout_offset": None}):
        assert not torch.equal(result.out, forward(spec, inputs._replace(**other)).out)
    dout, _ = upstream(result)
    grads = backward(spec, inputs, result, dout)
    gen = torch.Generator().manual_seed(5)
    for name, grad in (("q", grads.q), ("k", grads.k), ("v", grads.v)):
        way = torch.randn(grad.shape, generator=gen, dtype=torch.float64)
        moved = [
            (forward(spec, inputs._replace(**{name: getattr(inputs, name) + step * way})).out * dout).sum()
            for step in (1e-3, -1e-3)
        ]
        assert (grad * way).sum().item() == pytest.approx(((moved[0] - moved[1]) / 2e-3).item(), rel=1e-4)


def test_both_plans_are_built_before_the_forward_and_never_again() -> None:
    """One that fails is tried again."""
    spec, inputs = build(Case("causal", CAUSAL), torch.float32)
    emulated_cudnn.refuse.append("sdpa_backward")
    with pytest.raises(PlanRefused, match=r"no backward plan \(check_support\): no engine takes it"):
        prepare(spec, inputs)
    emulated_cudnn.refuse.clear()
    prepare(spec, inputs)
    assert nodes() == ["sdpa", "sdpa_backward"]
    for _ in range(3):
        result = forward(spec, inputs)
        backward(spec, inputs, result, torch.randn_like(result.out))
    assert len(emulated_cudnn.built) == 2
    assert PLANS.info()._asdict() == {"hits": 7, "builds": 2, "size": 2, "limit": 512, "pinned": 0}


def test_another_library_or_device_has_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = build(Case("plain"), torch.float32)
    found = tensors.problem(spec, inputs)
    here = session.Session(emulated_cudnn, object(), CPU, ("9.13.0", "1.23.0"))
    there = [
        here._replace(versions=("9.14.0", "1.23.0")),
        here._replace(versions=("9.13.0", "1.28.0")),
        here._replace(device=torch.device("cuda", 1)),
    ]
    monkeypatch.setattr(plans, "capturing", lambda device: False)
    for where in (here, *there, here):
        plans.plan_of(found.forward, found.forward_digest, where)
    assert len(emulated_cudnn.built) == 4


def test_threads_that_want_one_plan_wait_for_one_build() -> None:
    cache, builds, gate = PlanCache(limit=4), [], threading.Event()

    def slow() -> Any:
        builds.append(1)
        gate.wait(5)
        return "plan"

    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(cache.get, "key", slow) for _ in range(8)]
        gate.set()
    assert [one.result() for one in found] == ["plan"] * 8
    assert builds == [1]
    assert cache.info().builds == 1


def test_the_cache_is_bounded_and_drops_the_least_recently_used_but_never_a_captured_plan() -> None:
    cache = PlanCache(limit=3)
    made: list[int] = []

    def get(key: int, pin: bool = False) -> None:
        cache.get(key, lambda: made.append(key), pin=pin)  # type: ignore[return-value]

    get(0, pin=True)
    for key in (1, 2, 1, 3, 4):
        get(key)
    assert cache.info().size == 3
    get(0)
    get(4)
    assert made == [0, 1, 2, 3, 4]
    get(1)  # went before 3 and 4
    assert made[-1] == 1


def test_packed_batches_of_a_run_are_a_handful_of_plans() -> None:
    for step in range(0, 20, 4):
        lengths = [17 + 3 * step, 5, 40 + step, *[9] * (step % 3 + 8)]
        q, k, v = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0))
        cu, longest = starts(lengths), max(lengths)
        inputs = Inputs(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        check(Spec(packed=True, softmax_scale=0.3, window_right=0, need_lse=True, need_grad=True), inputs)
    assert len(emulated_cudnn.built) == 4  # 12 or 14 sequences, forward and backward


def test_large_packed_buffers_get_64_bit_offsets() -> None:
    spec = Spec(packed=True, need_grad=True)
    for rows, longest, offsets in ((3_000_000, 4096, "int64"), (4096, 64, "int32")):
        facts = ("bf16", (rows, 8, 128), (1024, 128, 1))
        others = (False, False, 4, longest, longest, None)
        assert tensors._problem(spec, facts, facts, facts, None, others).call.offset_dtype == offsets


ROW = torch.randn(2, 4, 5, 8)


@each(
    "spec, changes, words",
    [
        ({"softcap": 1.0}, {}, "softcap: cuDNN"),
        ({"q_offset": 3}, {}, "q_offset: cuDNN"),
        ({"dropout_p": 0.1}, {}, "dropout_seed: dropout needs"),
        ({}, {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask: cuDNN"),
        ({}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes: cuDNN computes its own"),
        ({}, {"q": ROW.double()}, "dtype: q, k and v are torch.float64, torch.float32"),
        ({}, {"k": ROW.double()}, "dtype: q, k and v are torch.float32, torch.float64"),
        ({}, {"v": ROW.double()}, "dtype: .* and torch.float64; one of torch.bfloat16"),
        ({}, dict.fromkeys("qkv", ROW.int()), "dtype: q, k and v are torch.int32"),
        ({"kv_offset": 3}, {}, "q_offset: cuDNN"),
        ({}, {"k": ROW[:, :, :0], "v": ROW[:, :, :0]}, "k: cuDNN takes no empty tensor"),
        ({}, {"q": torch.randn(2 * 4 * 5 * 8 + 1)[1:].view(2, 4, 5, 8)}, "q: its first element must lie"),
        ({"softmax_type": "learnable"}, {}, "softmax_offset: softmax_type 'learnable'"),
        ({"packed": True}, {"q": ROW[0], "k": ROW[0], "v": ROW[0]}, "needs inputs.cu_seqlens_q"),
    ],
)
def test_what_no_graph_expresses_is_said_before_anything_is_built(
    spec: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    inputs = Inputs(ROW, ROW, ROW)._replace(**changes)
    for function in (prepare, forward):
        with pytest.raises(ValueError, match=words):
            function(Spec(**spec), inputs)
    assert emulated_cudnn.built == []


def test_a_backward_that_was_not_planned_for_is_refused() -> None:
    spec, inputs = build(Case("plain"), torch.float32)
    result = forward(spec, inputs)
    with pytest.raises(ValueError, match="need_grad"):
        backward(dataclasses.replace(spec, need_grad=False), inputs, result, result.out)
    assert result.lse is not None
    with pytest.raises(ValueError, match="dlse"):
        backward(spec, inputs, result, torch.zeros_like(result.out), torch.zeros_like(result.lse))


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ASKED: dict[str, list[Any]] = {
    "qkv_layout": ["bshd_bshd_bshd", "bs3hd", "sbhd_sb2hd", "bhsd_bhsd_bhsd", "thd_thd_thd", "t3hd"],
    "attn_mask_type": ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal"],
    "window_size": [None, (128, 0)],
    "core_attention_bias_type": ["no_bias", "post_scale_bias", "alibi"],
    "core_attention_bias_requires_grad": [False, True],
    "core_attention_bias_shape": ["1hss", "b1ss"],
    "num_gqa_groups": [4, 2],
    "head_dim_v": [64, 128],
    "max_seqlen_kv": [256, 512],  # what no bucket of packed calls rounds up
    "softmax_type": ["vanilla", "learnable"],
    "attention_dropout": [0.0, 0.1],
    "deterministic": [False, True],
    "return_max_logit": [False, True],
    "is_training": [True, False],
    "dtype": list(DTYPES),
}


def questions() -> Iterator[AttentionParams]:
    """Of every two features, as far as a graph has them together."""
    for row in pairwise(ASKED):
        bias = row["core_attention_bias_type"]
        kept = {name: value for name, value in row.items() if not name.startswith("core_attention_bias")}
        if bias == "post_scale_bias":
            kept = row
        elif bias == "alibi":
            kept["core_attention_bias_type"] = bias
        with contextlib.suppress(InvalidInput, UnsupportedArgument):
            p = AttentionParams(**kept, batch_size=8, num_heads=4, head_dim_qk=64, max_seqlen_q=256)
            planned(p)
            yield p


def comparable(call: GraphCall) -> dict[str, Any]:
    """Its fields; strides of dimensions with one entry, which nobody reads, are 0."""

    def told(t: Strided) -> Strided:
        zeroed = [0 if n == 1 else stride for n, stride in zip(t.dims, t.strides, strict=True)]
        return Strided(t.dims, tuple(zeroed))

    fields = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    return {name: told(value) if isinstance(value, Strided) else value for name, value in fields.items()}


def test_the_runtime_builds_the_graphs_that_the_planner_asks_about() -> None:
    compared = 0
    for p in questions():
        wanted = planned(p)
        packed_q, qkv = wanted.packed_q, []
        for t in (wanted.q, wanted.k, wanted.v):
            dims, strides = t.dims, t.strides
            if packed_q:  # full of sequences of the same length
                (b, h, s, d), (_, *apart) = dims, strides
                dims, strides = (b * s, h, d), (apart[1], apart[0], apart[2])
            qkv.append(torch.empty_strided(dims, strides, dtype=DTYPES[p.dtype], device="meta"))
        bias = None
        if wanted.bias is not None:
            bias = torch.empty(
                wanted.bias.dims, dtype=DTYPES[p.dtype], device="meta", requires_grad=wanted.bias_grad
            )
        lengths = torch.empty(p.batch_size, dtype=torch.int32, device="meta") if p.padding else None
        cu = torch.empty(p.batch_size + 1, dtype=torch.int32, device="meta") if packed_q else None
        inputs = Inputs(
            *qkv,
            bias=bias,
            alibi_slopes=torch.empty(p.num_heads, device="meta") if wanted.alibi else None,
            seqlens_q=None if packed_q else lengths,
            seqlens_kv=None if packed_q else lengths,
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=p.max_seqlen_q,
            max_seqlen_kv=p.max_seqlen_kv,
        )
        spec = make_spec(config(softmax_scale=wanted.softmax_scale), p, p.is_training)
        spec = dataclasses.replace(spec, dropout_p=wanted.dropout)  # nothing is dropped outside training
        call = tensors.problem(spec, inputs).call
        made = dataclasses.replace(call, bias_dtype=wanted.bias_dtype)
        assert comparable(made) == comparable(wanted), p
        compared += 1
    assert compared > 20

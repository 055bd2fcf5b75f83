"""The Triton kernels, compiled and run, against float64: every feature, head dimension and float type; short
queries and keys in pages."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    DROPOUT,
    STRIDES,
    Case,
    assert_errs_little_more,
    build,
    carried_out,
    error,
    expected,
    onto,
    poison,
    upstream,
)
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled import kernel as tiled
from forward_checks import check_forward, pages_of
from reference import attention_reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.run import backward, forward

DTYPES = [
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.cuda_only("one 16-bit type shows it")),
    pytest.param(torch.float32, marks=pytest.mark.cuda_only("tests/backends/triton/test_numbers.py has it")),
]
pytestmark = pytest.mark.shows("triton")
both_ways = pytest.mark.shows("triton", also=("training", "lse", "max_logit"))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
not_interpreted = pytest.mark.cuda_only("tests/backends/triton/test_numbers.py has it")


def skip_what_rules_refuse(arch: int | None, dtype: torch.dtype, width: int = 0) -> None:
    """TRITON003 and TRITON021: what attnsel does not run is not this suite's to prove."""
    if arch is not None and arch < 80 and dtype != torch.float16:
        pytest.skip("TRITON003: on Turing the kernels compute in fp16")
    if arch is not None and arch < 80 and width > 128:
        pytest.skip("TRITON021: on Turing the backward stops at head_dim 128")


def check(spec: Spec, inputs: Inputs) -> None:
    actual, dout, dlse = carried_out(forward, backward, spec, inputs)
    dtype = inputs.q.dtype
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    if not spec.return_max_logit:
        wanted.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, dtype)


@both_ways
@dtypes
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_feature(
    case: Case, dtype: torch.dtype, device: torch.device, arch: int | None, scale: int
) -> None:
    skip_what_rules_refuse(arch, dtype)
    if device.type == "cuda" and "head_dim" not in case.name:
        case = dataclasses.replace(case, sizes={"d": 64, "e": 64, **case.sizes})
    for larger in {1, scale}:  # of one tile, and of several
        spec, inputs = build(case, dtype, scale=larger)
        check(spec, onto(device, inputs))


HEAD_DIMS = [(64, 64), (80, 80), (128, 128), (192, 128), (40, 72), (256, 256), (1, 17)]


@both_ways
@dtypes
@pytest.mark.parametrize("spec", [{}, CAUSAL, {"window_left": 7, "window_right": 0}], ids=str)
@pytest.mark.parametrize(("d", "e"), HEAD_DIMS)
def test_head_dims(
    d: int,
    e: int,
    spec: dict[str, int],
    dtype: torch.dtype,
    device: torch.device,
    arch: int | None,
    scale: int,
) -> None:
    skip_what_rules_refuse(arch, dtype, max(d, e))
    sizes = {"d": d, "e": e, "b": 1, "h": 2, "g": 1, "s_q": 19, "s_kv": 35}
    call, inputs = build(Case("", {**spec, "return_max_logit": False}, {}, sizes), dtype, scale=scale)
    check(call, onto(device, inputs))


@pytest.mark.shows("triton", "head_dim 576")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_latent_attentions_head_dims_forward(
    dtype: torch.dtype, device: torch.device, arch: int | None, scale: int
) -> None:
    skip_what_rules_refuse(arch, dtype)
    sizes = {"d": 576, "e": 512, "b": 1, "h": 2, "g": 1, "s_q": 19, "s_kv": 35}
    spec, inputs = build(Case("", {**CAUSAL, "need_grad": False}, {}, sizes), dtype, scale=scale)
    inputs = onto(device, inputs)
    result = forward(spec, inputs)
    wanted, plain = (attention_reference(spec, inputs, at) for at in (torch.float64, dtype))
    named = [dict(zip(("out", "lse", "max_logit"), r, strict=True)) for r in (result[:3], wanted, plain)]
    assert_errs_little_more(named[0], named[1], named[2], dtype)


@pytest.mark.shows("triton", "strides")
@pytest.mark.parametrize("layout", ["sequence before heads", "at an odd offset"])
@pytest.mark.parametrize("spec", [{}, CAUSAL], ids=str)
def test_strides_and_offsets(layout: str, spec: dict[str, int], device: torch.device, scale: int) -> None:
    call, inputs = build(Case("", spec), torch.float16, scale=scale)
    inputs = onto(device, inputs)
    strided = {name: STRIDES[layout](getattr(inputs, name)) for name in "qkv"}
    assert layout != "at an odd offset" or strided["q"].data_ptr() % 16
    check(call, inputs._replace(**strided))


def test_rows_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """Addresses of tiles need 64 bits, products of a row and its stride too."""
    rows, apart = 300, 2**23  # 2.5e9 elements, of which the interpreter touches only the rows' pages
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 8 * 2**30:
        pytest.skip("needs 8 GiB of free GPU memory")
    sizes = {"b": 1, "h": 1, "g": 1, "s_q": rows, "s_kv": rows}
    spec, inputs = build(Case("", CAUSAL, {}, sizes), torch.float16)
    inputs = onto(device, inputs)
    room = torch.empty((rows - 1) * apart + 8, dtype=torch.float16, device=device)
    k = room.as_strided(inputs.k.shape, (0, 0, apart, 1))
    k.copy_(inputs.k)
    check(spec, inputs._replace(k=k))
    apart_more = room.as_strided((1, 1, 9, 8), (0, 0, 2 * apart, 1))
    with pytest.raises(ValueError, match="rows of k lie 16777216 elements apart"):
        forward(spec, inputs._replace(k=apart_more, v=inputs.v[:, :, :9]))


@pytest.mark.shows("triton", "padding")
@not_interpreted
def test_nan_in_padding_reaches_nothing(device: torch.device) -> None:
    spec, inputs = build(Case("", {}, {"seqlens_q": "b", "seqlens_kv": "b"}), torch.float16, scale=17)
    assert inputs.seqlens_q is not None
    assert inputs.seqlens_kv is not None
    lengths_q, lengths_kv = inputs.seqlens_q.tolist(), inputs.seqlens_kv.tolist()
    inputs = onto(device, inputs)
    clean, poisoned = [], []
    for results, spoil in ((clean, lambda t, lengths: t), (poisoned, poison)):
        given = inputs._replace(
            q=spoil(inputs.q, lengths_q), k=spoil(inputs.k, lengths_kv), v=spoil(inputs.v, lengths_kv)
        )
        result = forward(spec, given)
        dout, dlse = upstream(result)
        grads = backward(spec, given, result, spoil(dout, lengths_q), spoil(dlse, lengths_q))
        results += [result.out, result.lse, grads.q, grads.k, grads.v]
    for one, other in zip(clean, poisoned, strict=True):
        assert torch.equal(one, other)


@pytest.mark.shows("triton", "dropout")
@pytest.mark.parametrize("dropout_p", [0.3, 0.7])
@pytest.mark.parametrize("offsets", [(0, 0), (5, 3)], ids=str)
def test_drops_the_same_entries_as_tiled(
    dropout_p: float, offsets: tuple[int, int], device: torch.device
) -> None:
    """The identity as values shows every dropped entry as a zero of the output."""
    # Scores near 0: no probability is lost in float16.
    spec = Spec(softmax_scale=0.05, dropout_p=dropout_p, q_offset=offsets[0], kv_offset=offsets[1])
    rows, keys = (300, 128) if device.type == "cuda" else (19, 32)
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, rows, 8, generator=gen), torch.randn(2, 2, keys, 8, generator=gen)
    v = torch.eye(keys).expand(2, 2, keys, keys)
    seed, offset = torch.tensor(-987654321987654321), torch.tensor(2**40 + 7)
    for dtype in (torch.float32, torch.float16):
        given = (t.to(device, dtype) for t in (q, k, v))
        inputs = Inputs(*given, dropout_seed=seed.to(device), dropout_offset=offset.to(device))
        dropped = forward(spec, inputs).out == 0
        on_cpu = onto("cpu", inputs)._replace(q=q, k=k, v=v)
        assert torch.equal(dropped.cpu(), tiled.forward(spec, on_cpu).out == 0)
        assert 0 < dropped.float().mean() < 1


@pytest.mark.shows("triton", "deterministic")
def test_two_runs_are_bitwise_equal(device: torch.device, scale: int) -> None:
    case = Case("", {**CAUSAL, **DROPOUT}, {"bias": "1 1 s_q s_kv"})
    spec, inputs = build(case, torch.float16, scale=scale)
    inputs = onto(device, inputs)
    runs: list[dict[str, Tensor]] = [carried_out(forward, backward, spec, inputs)[0] for _ in range(4)]
    for again in runs[1:]:
        assert {name for name in runs[0] if not torch.equal(runs[0][name], again[name])} == set()


@pytest.mark.cuda_only("takes minutes there")
@pytest.mark.parametrize("spec", [{}, CAUSAL, {"window_left": 1000, "window_right": 0}], ids=str)
def test_long_sequences(spec: dict[str, int], device: torch.device) -> None:
    """Rows from the end of 16384, held against float64."""
    s, last = 16384, 64
    sizes = {"b": 1, "h": 2, "g": 1, "s_q": s, "s_kv": s, "d": 64, "e": 64}
    call, inputs = build(Case("", {**spec, "return_max_logit": False}, {}, sizes), torch.float16)
    inputs = onto(device, inputs)
    result = forward(call, inputs)
    dout, _ = upstream(result)
    grads = backward(call, inputs, result, dout)
    end_spec = dataclasses.replace(call, q_offset=s - last)
    end = inputs._replace(q=inputs.q[:, :, -last:])
    wanted, plain = (
        expected(end_spec, end, dout[:, :, -last:], None, at) for at in (torch.float64, torch.float16)
    )
    assert result.lse is not None
    actual = {"out": result.out[:, :, -last:], "lse": result.lse[:, :, -last:], "dq": grads.q[:, :, -last:]}
    names = actual.keys()
    wanted, plain = ({name: t[name] for name in names} for t in (wanted, plain))
    assert_errs_little_more(actual, wanted, plain, torch.float16)
    if "window_right" in spec:  # the last keys are seen by the last rows alone
        unit = torch.finfo(torch.float16).eps
        last_key = expected(end_spec, end, dout[:, :, -last:], None)["dv"][:, :, -1]
        assert error(grads.v[:, :, -1], last_key) <= 8 * unit * max(1.0, last_key.abs().max().item())


LONG = pytest.mark.cuda_only("too many tiles there")


@pytest.mark.parametrize("case", [c for c in CASES if c.sizes.get("s_q") != 40], ids=lambda c: c.name)
@pytest.mark.cuda_only("tests/backends/triton/test_decode.py has it")
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
    on_cpu = {name: getattr(result, name).cpu() for name in ("out", "lse", "max_logit")}
    check_forward(result._replace(**on_cpu), spec, inputs)


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

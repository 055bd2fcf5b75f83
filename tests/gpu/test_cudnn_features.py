"""cuDNN through attnsel's own graphs: features against float64, plans, and what was said of this GPU before.

On a CPU the graphs are carried out by the emulation in tests/support/emulated_cudnn.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated_cudnn
from attention_cases import (
    CAUSAL,
    STRIDES,
    Case,
    assert_errs_little_more,
    carried_out,
    error,
    expected,
    onto,
)
from attnsel import AttentionParams, DotProductAttention, Environment, attention, select
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.cudnn import build
from attnsel.backends.cudnn import graph as graphs
from attnsel.backends.cudnn import plans as session
from attnsel.backends.cudnn.graph import planned
from attnsel.backends.cudnn.plans import PLANS, PlanRefused
from attnsel.errors import InvalidInput, UnsupportedArgument
from cudnn_cases import FEATURES, HEAD_DIM_SPECS, HEAD_DIMS, as_carried_out, head_dim_case, made
from forward_checks import call_in_pages, check_hits, check_on_the_cpu
from pairwise import pairwise

if importlib.util.find_spec("cudnn") is None and torch.cuda.is_available():
    pytest.skip("nvidia-cudnn-frontend is not installed", allow_module_level=True)

from attnsel.backends.cudnn.run import backward, forward, prepare

DTYPES = [
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.cuda_only("one 16-bit type shows it")),
]
pytestmark = pytest.mark.shows("cudnn")
both_ways = {"also": ("training", "lse")}


@pytest.fixture(autouse=True)
def emulated_where_there_is_no_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if device.type == "cpu":
        made = session.Session(emulated_cudnn, object(), device, ("9.13.0", "1.23.0"))
        monkeypatch.setattr(session, "current", lambda device: made)
        PLANS.clear()
    yield
    if device.type == "cpu":
        PLANS.clear()


@contextlib.contextmanager
def skipped_where_refused() -> Iterator[None]:
    try:
        yield
    except PlanRefused as refused:
        pytest.skip(str(refused))


def check(spec: Spec, inputs: Inputs) -> None:
    inputs = as_carried_out(inputs)
    with skipped_where_refused():
        prepare(spec, inputs)
    actual, dout, _ = carried_out(forward, backward, spec, inputs, dlse=False)
    dtype = inputs.q.dtype
    wanted, plain = (expected(spec, inputs, dout, None, at) for at in (torch.float64, dtype))
    wanted.pop("max_logit")
    assert_errs_little_more(actual, wanted, plain, dtype)


@pytest.mark.shows("cudnn", **both_ways)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_every_feature(case: Case, dtype: torch.dtype, device: torch.device, scale: int) -> None:
    check(*made(case, dtype, device, scale))


@pytest.mark.shows("cudnn", "bf16", **both_ways)
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("spec", HEAD_DIM_SPECS, ids=str)
def test_head_dims(d: int, spec: dict[str, int], device: torch.device, scale: int) -> None:
    check(*made(head_dim_case(spec), torch.bfloat16, device, scale, d))


@pytest.mark.shows("cudnn", "strides", **both_ways)
def test_strides(device: torch.device, scale: int) -> None:
    spec, inputs = made(Case(""), torch.float16, device, scale)
    check(spec, inputs._replace(**{n: STRIDES["sequence before heads"](getattr(inputs, n)) for n in "qkv"}))


@pytest.mark.shows("cudnn", "deterministic", **both_ways)
def test_two_deterministic_runs_are_bitwise_equal(device: torch.device, scale: int) -> None:
    spec, inputs = made(Case("", {"deterministic": True}), torch.float16, device, scale)
    check(spec, inputs)
    one, other = (carried_out(forward, backward, spec, inputs, dlse=False)[0] for _ in range(2))
    assert {name for name in one if not torch.equal(one[name], other[name])} == set()


@pytest.mark.shows("cudnn", "paged")
@pytest.mark.parametrize("s_q", [1, 20])
def test_pages(s_q: int, device: torch.device, scale: int) -> None:
    plain, (paged_spec, paged) = call_in_pages(s_q, scale, 16)
    # What unused rows of a page hold is the business of a test below.
    paged = paged._replace(k=paged.k.nan_to_num(), v=paged.v.nan_to_num())
    with skipped_where_refused():
        result = forward(paged_spec, onto(device, paged))
    check_on_the_cpu(result, *plain)


@pytest.mark.shows("cudnn", "max_logit")
def test_the_largest_score(device: torch.device, scale: int) -> None:
    spec, inputs = made(Case("", CAUSAL), torch.float16, device, scale)
    spec = dataclasses.replace(spec, return_max_logit=True, need_grad=False)
    with skipped_where_refused():
        result = forward(spec, inputs)
    wanted = expected(spec, inputs, torch.zeros((), device=device), None)
    assert result.max_logit is not None
    assert result.lse is not None
    assert error(result.max_logit, wanted["max_logit"]) < 2e-2
    assert error(result.lse, wanted["lse"]) < 2e-2


@pytest.mark.shows("cudnn", "padding")
@pytest.mark.parametrize("fill", [1e4, 6e4], ids=str)
def test_what_padded_rows_hold_reaches_nothing(fill: float, device: torch.device, scale: int) -> None:
    wanted, again, found = (filled(value, device, scale) for value in (0.0, 0.0, fill))
    for one, same, other in zip(wanted, again, found, strict=True):
        assert error(other, one) <= 4 * error(same, one) + 1e-3  # dq is summed in any order


@pytest.mark.shows(None)  # of what attnsel's documentation says
@pytest.mark.cuda_only("the emulation hides it")
@pytest.mark.parametrize("fill", [float("inf"), float("nan")], ids=str)
def test_what_is_not_finite_there_reaches_everything(fill: float, device: torch.device, scale: int) -> None:
    assert all(t.isnan().any() for t in filled(fill, device, scale))


def filled(value: float, device: torch.device, scale: int) -> list[Tensor]:
    """out, dq, dk and dv with that value in each padded row of q, k, v and dout."""
    spec, inputs = made(Case("", {}, {"seqlens_q": "b", "seqlens_kv": "b"}), torch.float16, device, scale)
    assert inputs.seqlens_q is not None
    assert inputs.seqlens_kv is not None
    q, k, v = (
        t.masked_fill(_absent(t, lengths), value)
        for t, lengths in (
            (inputs.q, inputs.seqlens_q),
            (inputs.k, inputs.seqlens_kv),
            (inputs.v, inputs.seqlens_kv),
        )
    )
    given = inputs._replace(q=q, k=k, v=v)
    with skipped_where_refused():
        result = forward(spec, given)
        dout = torch.ones_like(result.out).masked_fill(_absent(result.out, inputs.seqlens_q), value)
        return [result.out, *backward(spec, given, result, dout)[:3]]


def _absent(t: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(t.shape[2], device=t.device) >= lengths[:, None])[:, None, :, None]


@pytest.mark.shows("cudnn", "dropout")
def test_dropout_repeats_for_a_seed_and_keeps_the_mean(device: torch.device, scale: int) -> None:
    rows = 16 * scale
    q, v = (torch.full((2, 4, rows, 64), x, dtype=torch.float16, device=device) for x in (0.0, 1.0))
    spec = Spec(softmax_scale=0.125, dropout_p=0.25)
    outs = []
    for number in (1, 1, 2):
        seed = torch.tensor(number, device=device)
        with skipped_where_refused():
            outs.append(forward(spec, Inputs(q, q, v, dropout_seed=seed)).out)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert outs[0].float().mean().item() == pytest.approx(1.0, abs=0.05)


@pytest.mark.shows("cudnn", "cuda_graph")
@pytest.mark.cuda_only("CUDA graphs")
def test_a_captured_call_replays(device: torch.device) -> None:
    q, k, v = (torch.randn(2, 256, 4, 64, dtype=torch.float16, device=device) for _ in "qkv")
    module = DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="causal", backend="cudnn")
    module(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, module(q, k, v)) == 0.0
    assert PLANS.info().pinned >= 1


@pytest.mark.cuda_only("through the public API")
def test_repeated_training_calls_are_right(device: torch.device) -> None:
    check_hits("cudnn", device, 300, 64)


@pytest.mark.cuda_only("streams")
def test_side_streams_and_threads(device: torch.device) -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (torch.randn(2, 256, 4, 64, dtype=torch.float16, device=device) for _ in "qkv")
    wanted = attention(q, k, v, backend="cudnn")
    torch.cuda.synchronize()

    def work(_: int) -> Tensor:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            out: Tensor = attention(q, k, v, backend="cudnn")
            torch.cuda.current_stream().synchronize()
            return out

    before = PLANS.info().builds
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(work, range(16)):
            assert torch.equal(out, wanted)
    assert PLANS.info().builds == before


ASKED: dict[str, Any] = {
    "attn_mask_type": ["no_mask", "causal", "padding_causal", "causal_bottom_right"],
    "sizes": [(64, 64), (128, 128), (192, 128), (256, 256), (72, 520)],
    "lengths": [(512, 512), (1, 1024), (1000, 129), (2048, 64)],
    "heads": [(8, 8), (8, 2), (6, 1)],
    "qkv_layout": ["bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bhsd_bhsd_bhsd"],
    "window_size": [None, (128, 0)],
    "core_attention_bias_type": ["no_bias", "post_scale_bias", "alibi"],
    "softmax_type": ["vanilla", "learnable"],
    "attention_dropout": [0.0, 0.1],
    "deterministic": [False, True],
    "is_training": [True, False],
    "dtype": ["bf16", "fp16"],
}


@pytest.mark.shows(None)  # it asks, and computes nothing
@pytest.mark.cuda_only("asks the real card")
def test_what_the_rules_say_is_what_the_card_says(device: torch.device) -> None:
    """check_support with a handle, against the rules on this machine, for questions of every two features."""
    here, env = session.current(device), Environment.detect(device)
    wrong, asked = [], 0
    for row in pairwise(ASKED):
        (d, e), (s_q, s_kv), (h, g) = row.pop("sizes"), row.pop("lengths"), row.pop("heads")
        sizes = {"head_dim_qk": d, "head_dim_v": e, "max_seqlen_q": s_q, "max_seqlen_kv": s_kv}
        try:
            p = AttentionParams(**row, **sizes, num_heads=h, num_gqa_groups=g)
            call = planned(p)
        except (InvalidInput, UnsupportedArgument):
            continue
        candidate = select(p, env)["cudnn"]
        if any(reason.code.startswith("BUG") for reason in candidate.reasons):
            continue  # known bugs compile, and one of them ends the process
        try:
            for graph in [graphs.forward(call)] + ([graphs.backward(call)] if p.is_training else []):
                build.check(build.declare(graph, here.cudnn, handle=here.handle), here.cudnn, [])
            said, words = True, ""
        except Exception as error:  # the bindings raise many types
            said, words = False, str(error).splitlines()[0]
        asked += 1
        if candidate.verdict != "unknown" and candidate.eligible != said:
            wrong.append((p.model_dump(exclude_defaults=True), [r.code for r in candidate.reasons], words))
    assert asked > 20
    assert not [one for one in wrong if not one[1]]  # what no rule refuses is planned
    assert len(wrong) <= 1, wrong

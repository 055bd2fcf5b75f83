"""How a loop is laid out changes no number: which tiles are masked, what is read ahead, who shares heads."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CAUSAL,
    DROPOUT,
    Case,
    assert_errs_little_more,
    build,
    carried_out,
    expected,
    packed,
)
from attnsel.backends.contract import Inputs, Spec

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import run
from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.launch import head_shares, make_call, may_have_dead_rows
from ptx_interpreter.run import Executed, executed_on

torch.set_num_threads(1)

WINDOW = {"window_left": 40, "window_right": 20}
# With tiles of 16 the last rows have an edge before the inner tiles, one of those, and an edge behind.
SIZES = {"b": 1, "h": 2, "g": 1, "s_q": 48, "s_kv": 45}
CALLS = {
    "full": Case("full", sizes=SIZES),
    "causal": Case("causal", CAUSAL, sizes=SIZES),
    "window": Case("window", WINDOW, sizes=SIZES),
    "left bound": Case("left bound", {"window_left": 40}, sizes=SIZES),
    "bottom right": Case("bottom right", BOTTOM_RIGHT, sizes=SIZES),
    "packed window": packed("packed window", {"window_left": 16, "window_right": 16}),
    "dropout": Case("dropout", {**WINDOW, **DROPOUT}, sizes=SIZES),
}
LAYOUTS = {
    "all": Block(16, 16, masks="all"),
    "edges": Block(16, 16, masks="edges"),
    "branch": Block(16, 16, masks="branch"),
    "always right": Block(16, 16, masks="edges", always_right=True),
    "all, ahead": Block(16, 16, masks="all", ahead=True),
    "edges, ahead": Block(16, 16, masks="edges", ahead=True),
}


def results(spec: Spec, inputs: Inputs, tiles: Tiles) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    def forward(*given: Any) -> Any:
        return run.forward(*given, tiles=tiles)

    def backward(*given: Any) -> Any:
        return run.backward(*given, tiles=tiles)

    return carried_out(forward, backward, spec, inputs)


@pytest.mark.parametrize("case", CALLS.values(), ids=list(CALLS))
def test_every_layout_of_the_loops_gives_the_same_numbers(case: Case) -> None:
    spec, inputs = build(case, torch.float32)
    first, dout, dlse = results(spec, inputs, Tiles(*[LAYOUTS["all"]] * 5))
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, torch.float32))
    assert_errs_little_more(first, wanted, plain, torch.float32)
    for block in list(LAYOUTS.values())[1:]:
        actual, dout, dlse = results(spec, inputs, Tiles(*[block] * 5))
        assert_errs_little_more(actual, wanted, plain, torch.float32)


# Query heads of one kv head, shared among programs


def test_programs_that_share_heads_leave_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("group of 5", CAUSAL, sizes={"h": 5, "g": 1})
    spec, inputs = build(case, torch.float32)
    alone, _, _ = results(spec, inputs, Tiles(*[Block(16, 16)] * 5))
    monkeypatch.setattr(run, "_processors", lambda device: 6)
    made: list[int] = []
    monkeypatch.setattr(run, "head_shares", lambda *given: made.append(head_shares(*given)) or made[-1])
    shared, _, _ = results(spec, inputs, Tiles(*[Block(16, 16)] * 5))
    again, _, _ = results(spec, inputs, Tiles(*[Block(16, 16)] * 5))
    assert set(made) & {2, 3, 4}, made  # which do not divide 5
    for name, t in alone.items():
        torch.testing.assert_close(shared[name], t, rtol=1e-5, atol=1e-6)
        assert torch.equal(shared[name], again[name])  # one order of summation


@pytest.mark.parametrize(
    ("groups", "processors", "shares"), [(1, 132, 8), (8, 132, 5), (1, 0, 1), (1, 4, 1), (8, 20, 1)]
)
def test_heads_are_shared_where_the_grid_leaves_processors_idle(
    groups: int, processors: int, shares: int
) -> None:
    q = torch.empty(1, 8 * groups, 1024, 64, device="meta", dtype=torch.bfloat16)
    k = torch.empty(1, groups, 1024, 64, device="meta", dtype=torch.bfloat16)
    call = make_call(Spec(softmax_scale=1.0, need_grad=True), Inputs(q, k, k), Tiles(*[Block(32, 128)] * 5))
    assert head_shares(call, 90, processors) == shares


# Rows that see no key


def test_self_attention_has_no_dead_rows_whatever_its_lengths_are() -> None:
    spec, inputs = build(packed("packed", CAUSAL), torch.float32)
    spec = dataclasses.replace(spec, bottom_right=True)
    own = inputs._replace(cu_seqlens_kv=inputs.cu_seqlens_q)
    assert inputs.cu_seqlens_q is not None
    view = own._replace(cu_seqlens_kv=inputs.cu_seqlens_q[:])
    copy = own._replace(cu_seqlens_kv=inputs.cu_seqlens_q.clone())
    assert not may_have_dead_rows(make_call(spec, own))
    assert not may_have_dead_rows(make_call(spec, view))  # the same memory
    assert may_have_dead_rows(make_call(spec, copy))
    apart = dataclasses.replace(spec, kv_offset=3)
    assert may_have_dead_rows(make_call(apart, own))


def test_prepare_compiles_what_self_attention_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, inputs = build(packed("packed", CAUSAL), torch.float32)
    own = inputs._replace(cu_seqlens_kv=inputs.cu_seqlens_q, k=inputs.q, v=inputs.q)
    seen: list[bool] = []
    monkeypatch.setattr(run, "_arch", lambda q: 80)
    monkeypatch.setattr(run, "_compile", lambda launch, *_: seen.append(launch.args.get("DEAD_ROWS", False)))
    run.prepare(dataclasses.replace(spec, need_grad=True), own)
    assert seen
    assert not any(seen)


# NaN stays NaN


def poisoned(where: str) -> tuple[Spec, Inputs]:
    spec, inputs = build(Case("causal", CAUSAL, sizes={"s_q": 40, "s_kv": 40}), torch.float16)
    given = {name: getattr(inputs, name).clone() for name in "qkv"}
    if where == "a row of q":
        given["q"][0, 0, 7] = math.nan
    elif where == "all keys":
        given["k"][:] = math.nan
    else:
        given["k"][0, 0, 0] = math.nan  # which each row of that head sees
    return dataclasses.replace(spec, return_max_logit=True, need_grad=False), inputs._replace(**given)


def tiled_says(spec: Spec, inputs: Inputs) -> dict[str, Tensor]:
    from attnsel.backends.tiled.kernel import forward

    result = forward(spec, inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float()))
    assert result.lse is not None
    assert result.max_logit is not None
    return {"out": result.out, "lse": result.lse, "max_logit": result.max_logit}


@pytest.mark.parametrize("where", ["a row of q", "all keys", "one key"])
@pytest.mark.parametrize("splits", [0, 3])
@pytest.mark.parametrize("arch", [None, 75, 80])
def test_nan_comes_out_where_nan_went_in(where: str, splits: int, arch: int | None) -> None:
    """On the interpreter, and as machine code, whose maximum drops NaN."""
    spec, inputs = poisoned(where)
    if arch is None:
        found = run.forward(spec, inputs, splits=splits)
    else:
        done: list[Executed] = []
        with executed_on(arch, done):
            found = run.forward(spec, inputs, splits=splits)
        assert [each.faults for each in done] == [[]] * len(done)
    for name, wanted in tiled_says(spec, inputs).items():
        actual = getattr(found, name)
        assert actual.isnan().equal(wanted.isnan()), name
        assert wanted.isnan().any()


def test_a_sink_of_minus_infinity_is_no_sink() -> None:
    spec, inputs = build(Case("sinks", {"softmax_type": "learnable"}, {"softmax_offset": "h"}), torch.float32)
    assert inputs.softmax_offset is not None
    inputs = inputs._replace(softmax_offset=torch.full_like(inputs.softmax_offset, -math.inf))
    with_sink = run.forward(spec, inputs)
    without = run.forward(dataclasses.replace(spec, softmax_type="vanilla"), inputs)
    assert with_sink.lse is not None
    torch.testing.assert_close(with_sink.out, without.out)
    torch.testing.assert_close(with_sink.lse, without.lse)


# Compiled once


def test_lengths_and_counts_compile_nothing_anew() -> None:
    """Of 1, of multiples of 16 and of others: one kernel, as aot.py and Triton's binder see it."""
    from aot import _specialised
    from attnsel.backends.triton.launch import forward_launch
    from attnsel.backends.triton.tile import PLAIN

    def kinds(rows: int, keys: int, batch: int, groups: int) -> Any:
        q = torch.empty(batch, 4, rows, 64, device="meta", dtype=torch.bfloat16)
        k = torch.empty(batch, groups, keys, 64, device="meta", dtype=torch.bfloat16)
        call = make_call(Spec(softmax_scale=1.0), Inputs(q, k, k))
        lse = torch.empty(batch, 4, rows, device="meta")
        launch = forward_launch(call, 80, q, lse, None, Block(64, 64))
        signature, constants, attributes = _specialised(launch)
        own = {place for place, p in enumerate(launch.kernel.params) if p.name in PLAIN}
        assert not own & {place for (place,) in (*constants, *attributes)}
        return {name: kind for name, kind in signature.items() if name in PLAIN}

    first = kinds(1, 160, 1, 1)
    assert first == kinds(33, 161, 3, 4) == kinds(64, 1, 16, 2)
    assert set(first.values()) == {"i32"}

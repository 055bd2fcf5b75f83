"""``triton`` against the definition of attention: the kernels themselves, on CPU tensors by the interpreter.

Its cost is the number of tiles, so tiles are the smallest a dot takes, and shapes a few of them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    CAUSAL,
    STRIDES,
    Case,
    assert_errs_little_more,
    build,
    carried_out,
    error,
    expected,
    int32,
)
from attnsel.backends.contract import Inputs, Spec
from attnsel.backends.tiled import kernel as tiled
from forward_checks import check_forward
from pairwise import PAIRS, Pair, some
from reference import attention_reference
from tables import each

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.run import backward, forward
from attnsel.backends.triton.tile import span

torch.set_num_threads(1)

SMALL = Tiles(*[Block(16, 16)] * 4)
UNEVEN = Tiles(
    Block(32, 16, masks="edges", ahead=True),
    Block(16, 32, masks="branch", always_right=True),
    Block(16, 32, masks="edges", always_right=True),
    Block(32, 16, masks="branch", ahead=True),
)


def run(
    spec: Spec, inputs: Inputs, tiles: Tiles | None = SMALL
) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Forward and backward by name, and the dout and dlse that went in."""
    return carried_out(partial(forward, tiles=tiles), partial(backward, tiles=tiles), spec, inputs)


def check_case(spec: Spec, inputs: Inputs, tiles: Tiles | None = SMALL) -> None:
    dtype = inputs.q.dtype
    actual, dout, dlse = run(spec, inputs, tiles)
    wanted, plain = (expected(spec, inputs, dout, dlse, at) for at in (torch.float64, dtype))
    assert_errs_little_more(actual, wanted, plain, dtype)


@some(PAIRS, 16)
def test_errs_little_more_than_plain_pytorch(pair: Pair) -> None:
    """On tiles that are square, uneven, or the default."""
    number = PAIRS.index(pair)
    check_case(*build(pair.case, pair.dtype), (SMALL, UNEVEN, SMALL, None)[number % 4])


HEADS = {"b": 1, "h": 2, "g": 1, "s_q": 19, "s_kv": 35}


@each("d, e", [(192, 128), (40, 72), (256, 256), (1, 17)])
def test_head_dims(d: int, e: int) -> None:
    case = Case("", CAUSAL, {}, {"d": d, "e": e, **HEADS})
    check_case(*build(case, torch.float16), Tiles(*[Block(32, 32)] * 4))


def test_wide_heads_without_a_backward() -> None:
    case = Case("", {**CAUSAL, "need_grad": False}, {}, {"d": 320, "e": 40, **HEADS})
    spec, inputs = build(case, torch.bfloat16)
    result = forward(spec, inputs, tiles=SMALL)
    check_forward(result, spec, inputs)
    with pytest.raises(ValueError, match="stops at head_dim 256"):
        backward(spec, inputs, result, result.out)
    with pytest.raises(ValueError, match="stop at head_dim 256 with a backward"):
        forward(dataclasses.replace(spec, need_grad=True), inputs)


@each("cu_seqlens", [[0, 7, 3], [-1, 2, 3], [0, 4, 1 << 20]])
def test_cu_seqlens_outside_the_packed_tensors_stay_in_bounds(cu_seqlens: list[int]) -> None:
    t, cu = torch.randn(10, 2, 4), int32(cu_seqlens)
    inputs = Inputs(t, t, t, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    result = forward(Spec(packed=True), inputs, tiles=SMALL)
    assert backward(Spec(packed=True), inputs, result, result.out, tiles=SMALL).q.isfinite().all()


@each("m, n", [(16, 16), (16, 32), (32, 16)])
def test_blocks_outside_the_band_are_skipped(m: int, n: int) -> None:
    """``span`` is ordinary arithmetic: held against every pair, for every position of the band."""
    tl_like = _PlainLanguage()
    own = dict(span.fn.__globals__) | {"tl": tl_like}
    plain = type(span.fn)(span.fn.__code__, own)
    for low, high in [(None, 0), (None, -40), (-20, 3), (5, 30), (-7, None), (None, None), (40, 60)]:
        for m0 in range(0, 128, m):
            begin, full_begin, full_end, end = plain(
                m0, m, 75, low or 0, high or 0, n, low is not None, high is not None
            )
            assert 0 <= begin <= full_begin <= full_end <= end
            for block in range(0, 96, n):
                pairs = [
                    x < 75 and (low is None or x - y >= low) and (high is None or x - y <= high)
                    for x in range(block, block + n)
                    for y in range(m0, m0 + m)
                ]
                inside = begin <= block < end
                assert inside or not any(pairs)
                assert all(pairs) or not full_begin <= block < full_end
                if full_begin < full_end and all(pairs):
                    assert full_begin <= block < full_end
                assert any(pairs) or not inside or block + n > 75


class _PlainLanguage:
    constexpr = int
    minimum, maximum = min, max

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


def test_drops_the_same_entries_as_tiled() -> None:
    """The identity as values shows every dropped entry as a zero of the output."""
    spec = Spec(dropout_p=0.3, q_offset=5, kv_offset=3)
    q, k = torch.randn(2, 4, 19, 8), torch.randn(2, 2, 32, 8)
    v = torch.eye(32).expand(2, 2, 32, 32)
    seed, offset = torch.tensor(-987654321987654321), torch.tensor(2**40 + 7)
    inputs = Inputs(q, k, v, dropout_seed=seed, dropout_offset=offset)
    dropped = forward(spec, inputs, tiles=SMALL).out == 0
    assert torch.equal(dropped, tiled.forward(spec, inputs).out == 0)
    assert 0 < dropped.float().mean() < 1


def test_strides() -> None:
    spec, inputs = build(Case("", CAUSAL, {}, {"h": 2, "g": 1}), torch.float16)
    layouts = dict(zip("qkv", ("sequence before heads", "at an odd offset", "as made"), strict=True))
    strided = {name: STRIDES[layout](getattr(inputs, name)) for name, layout in layouts.items()}
    check_case(spec, inputs._replace(**strided))


def test_compiling_still_works_after_a_launch_on_cpu_tensors() -> None:
    import triton
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    before = {name: getattr(tl, name) for name in ("dot", "load", "max", "sum", "zeros", "philox")}
    spec, inputs = build(Case("", CAUSAL), torch.bfloat16)
    forward(spec, inputs)
    assert {name: getattr(tl, name) for name in before} == before
    assert isinstance(tl.max, JITFunction)
    assert isinstance(span, triton.JITFunction)


def test_loops_run_with_an_interpreter_that_makes_integers_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As up to Triton 3.6, whose conversion numpy refuses from 2.4 on."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def old(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data) if self.handle.data.ndim == 0 else None

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", old)
    spec, inputs = build(Case("", CAUSAL), torch.float16)
    assert error(forward(spec, inputs).out, attention_reference(spec, inputs, torch.float64)[0]) < 1e-2
    assert interpreter._patch_lang_tensor is old


@each(
    "message, tensors",
    [
        ("innermost stride of k is 2", {"k": torch.randn(2, 2, 27, 16)[..., ::2]}),
        ("must share float16", {"v": torch.randn(2, 2, 27, 8, dtype=torch.float64)}),
        ("differ in head_dim", {"k": torch.randn(2, 2, 27, 9)}),
        ("stop at head_dim 256 with a backward; v has 257", {"v": torch.randn(2, 2, 27, 257)}),
        ("do not divide", {"k": torch.randn(2, 3, 27, 8), "v": torch.randn(2, 3, 27, 8)}),
    ],
)
def test_impossible_calls_are_refused(message: str, tensors: dict[str, Tensor]) -> None:
    spec, inputs = build(Case(""), torch.float32)
    with pytest.raises(ValueError, match=message):
        forward(spec, inputs._replace(**tensors))

    dropped = dataclasses.replace(spec, dropout_p=0.5, head_offset=2)
    with pytest.raises(ValueError, match="head_offset 2"):
        forward(dropped, inputs._replace(dropout_seed=torch.tensor(1)))

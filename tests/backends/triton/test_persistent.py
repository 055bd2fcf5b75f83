"""The persistent forward: interpreted against the definition, its order, its matrices, what it refuses."""

from __future__ import annotations

import dataclasses
import heapq
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import BOTTOM_RIGHT, CAUSAL, STRIDES, Case, build, error, packed
from attnsel.backends.contract import Inputs, Result, Spec
from reference import attention_reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attnsel.backends.triton import descriptors, run
from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.launch import make_call
from attnsel.backends.triton.persistent import Matrix, matrix_of
from attnsel.backends.triton.run import forward
from gate import Configuration, configurations, report_on

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not descriptors.tried(), reason="the kernel is not for this Triton")

SMALL = Tiles(*[Block(16, 16)] * 4)
SIZES = {"s_q": 37, "s_kv": 48, "d": 16, "e": 16}


def persistent(spec: Spec, inputs: Inputs) -> Result:
    return forward(spec, inputs, tiles=SMALL, variant="persistent")


def assert_right(spec: Spec, inputs: Inputs) -> None:
    """Out at most twice as far off as plain PyTorch at the same dtype, and two ulp; lse to float32."""
    result, dtype = persistent(spec, inputs), inputs.q.dtype
    wanted, plain = (attention_reference(spec, inputs, at) for at in (torch.float64, dtype))
    unit = torch.finfo(dtype).eps * wanted[0].abs().max().item()
    assert error(result.out, wanted[0]) <= 2 * error(plain[0], wanted[0]) + 2 * unit
    assert result.lse is not None
    assert error(result.lse, wanted[1]) < 1e-5


def made(spec: dict[str, Any], tensors: dict[str, str], **sizes: int) -> tuple[Spec, Inputs]:
    return build(Case("", {"return_max_logit": False, **spec}, tensors, {**SIZES, **sizes}), torch.float16)


@pytest.mark.parametrize("processors", [0, 1, 3, 1000])
@pytest.mark.parametrize(
    ("spec", "tensors"),
    [
        ({}, {}),
        (CAUSAL, {}),
        (BOTTOM_RIGHT, {"alibi_slopes": "b h"}),
        ({"window_left": 9, "window_right": 2}, {}),
        ({"q_offset": 20, "window_right": 0, "softcap": 1.5}, {}),
        ({"softmax_type": "learnable"}, {"softmax_offset": "h"}),
    ],
    ids=str,
)
def test_features_on_few_processors_and_many(
    spec: dict[str, Any], tensors: dict[str, str], processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_processors", lambda device: processors)
    assert_right(*made(spec, tensors))


@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 16), (16, 16), (33, 16), (5, 64), (16, 0)])
def test_lengths(s_q: int, s_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_processors", lambda device: 2)
    assert_right(*made(CAUSAL, {}, s_q=s_q, s_kv=s_kv))


@pytest.mark.parametrize("name", ["sequence before heads", "sequence first"])
def test_memory_orders(name: str) -> None:
    spec, inputs = made(CAUSAL, {})
    if name == "sequence first":  # [s, b, h, d]
        orders = {n: getattr(inputs, n).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for n in "qkv"}
    else:
        orders = {n: STRIDES[name](getattr(inputs, n)) for n in "qkv"}
    assert_right(spec, inputs._replace(**orders))


def test_nothing_in_nothing_out() -> None:
    spec, inputs = made({}, {}, b=0)
    assert persistent(spec, inputs).out.shape == (0, 4, 37, 16)


# What it does not take


@pytest.mark.parametrize(
    ("message", "case"),
    [
        ("of lengths of their own", Case("", {}, {"seqlens_kv": "b"}, SIZES)),
        ("of lengths of their own", packed("", {}, {})),
        ("another head's", Case("", {}, {}, {**SIZES, "d": 24})),
        ("40 keys are no multiple of 16", Case("", {}, {}, {**SIZES, "s_kv": 40})),
        ("takes no bias", Case("", {}, {"bias": "1 h s_q s_kv"}, SIZES)),
        ("no dropout", Case("", {"dropout_p": 0.5}, {}, SIZES)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(message: str, case: Case) -> None:
    case = dataclasses.replace(case, spec={**case.spec, "return_max_logit": False})
    spec, inputs = build(case, torch.float16)
    with pytest.raises(ValueError, match=message):
        persistent(spec, inputs)


def test_only_hopper_has_a_tile() -> None:
    q = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device="meta")
    call, lse = make_call(Spec(softmax_scale=1.0), Inputs(q, q, q)), torch.empty(1, 2, 256, device="meta")
    launch = descriptors.described_launch(call, 90, 132, q, lse, "persistent")
    assert launch is not None
    assert (launch.name, launch.programs) == ("forward_persistent", 4)
    for arch in (80, 100, 120):
        with pytest.raises(ValueError, match=f"on sm{arch}"):
            descriptors.described_launch(call, arch, 132, q, lse, "persistent")


# Its parts


def strided(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, stride, device="meta")


@pytest.mark.parametrize(
    ("t", "matrix"),
    [
        (strided((2, 4, 10, 8), (320, 80, 8, 1)), Matrix(80, 40, 10, 0, 0)),  # bhsd
        (strided((2, 4, 10, 8), (320, 8, 32, 1)), Matrix(20, 10, 0, 0, 8)),  # bshd
        (strided((2, 4, 10, 8), (32, 8, 64, 1)), Matrix(10, 0, 0, 32, 8)),  # sbhd
        (strided((2, 4, 10, 8), (960, 24, 96, 1)), Matrix(20, 10, 0, 0, 24)),  # of bs3hd
        (strided((1, 1, 10, 8), (999, 777, 8, 1)), Matrix(10, 0, 0, 0, 0)),
        (strided((2, 4, 10, 8), (0, 8, 32, 1)), Matrix(10, 0, 0, 0, 8)),  # expanded
        (strided((2, 4, 10, 8), (324, 8, 32, 1)), None),  # a batch entry begins within a row
        (strided((2, 4, 1 << 30, 8), (1 << 35, 1 << 33, 8, 1)), None),  # too many rows
    ],
)
def test_tensors_as_matrices(t: Tensor, matrix: Matrix | None) -> None:
    assert matrix_of(t) == matrix


def ends(costs: list[list[int]]) -> float:
    """How much later the last of some programs ends than if all had the same to do."""
    return max(map(sum, costs)) / (sum(map(sum, costs)) / len(costs))


def test_its_order_leaves_no_program_with_the_largest_blocks() -> None:
    """The docstring of ``persistent.py``; a block costs its tiles, and one for what is not in the loop."""
    processors, tiles, heads = 132, 32, 32
    longest_first = [tiles - place // heads + 1 for place in range(tiles * heads)]
    dealt: list[list[int]] = [[] for _ in range(processors)]
    for place, cost in enumerate(longest_first):
        turn, program = divmod(place, processors)
        dealt[program if turn % 2 == 0 else processors - 1 - program].append(cost)
    free: list[tuple[int, int]] = [(0, program) for program in range(processors)]
    taken: list[list[int]] = [[] for _ in range(processors)]
    for place in range(tiles * heads):  # as ``forward.py`` has them: by head
        busy, program = heapq.heappop(free)
        taken[program].append(tiles - place % tiles + 1)
        heapq.heappush(free, (busy + taken[program][-1], program))
    assert round(100 * (ends(dealt) - 1), 1) == 0.2
    assert round(100 * (ends(taken) - 1)) == 13


# Compiled


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("feature", ["full", "causal", "window"])
def test_warps_are_specialised_and_nothing_spills(d: int, feature: str) -> None:
    report = report_on(Configuration("forward_persistent", 90, d, d, "bf16", feature))
    assert report.ok
    assert report.specialised
    assert report.warps == 12


def test_gate_lists_it_where_it_ships() -> None:
    listed = {(c.arch, c.head_dim_qk) for c in configurations() if c.kernel == "forward_persistent"}
    assert listed == {(90, 64), (90, 128)}

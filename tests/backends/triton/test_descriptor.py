"""The forward through tensor descriptors: interpreted against the definition, compiled for GPUs not here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_cases import (
    BOTTOM_RIGHT,
    CASES,
    CAUSAL,
    STRIDES,
    Case,
    build,
    error,
    packed,
    with_garbage,
)
from attnsel.backends.contract import Inputs, Result, Spec
from forward_checks import check_forward
from pairwise import PAIRS, Pair, some
from reference import attention_reference
from tables import each

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton

from attnsel.backends.triton import launch as descriptors
from attnsel.backends.triton.blocks import Block, Tiles
from attnsel.backends.triton.launch import descriptor_block, make_call, scratch_memory
from attnsel.backends.triton.run import forward

torch.set_num_threads(1)
pytestmark = pytest.mark.skipif(not descriptors.tried(), reason="the kernel is not for this Triton")

SMALL = Tiles(*[Block(16, 16)] * 4)


def forced(spec: Spec, inputs: Inputs, tiles: Tiles | None = SMALL) -> Result:
    return forward(
        dataclasses.replace(spec, return_max_logit=False), inputs, tiles=tiles, variant="descriptor"
    )


def assert_right(spec: Spec, inputs: Inputs, result: Result) -> None:
    """Out at most twice as far off as plain PyTorch at the same dtype, and two ulp; lse to float32."""
    check_forward(result, spec, inputs)
    assert error(result.lse, attention_reference(spec, inputs)[1]) < 1e-5


def check(case: Case, dtype: torch.dtype, tiles: Tiles | None = SMALL) -> None:
    spec, inputs = build(case, dtype)
    assert_right(spec, inputs, forced(spec, inputs, tiles))


TAKEN = [
    pair
    for pair in [*PAIRS, *(Pair(case, torch.float16) for case in CASES)]
    if not {"bias", "attn_mask"} & pair.case.tensors.keys()
    if not pair.case.spec.get("dropout_p")
    if pair.case.sizes.get("e", 8) % 8 == 0
    if pair.dtype != torch.float32
]


@some(TAKEN[::2] + TAKEN[1::2], 15)
def test_every_feature_it_has(pair: Pair) -> None:
    check(*pair, (SMALL, None)[TAKEN.index(pair) % 2])


ONE = {"b": 1, "h": 2, "g": 1}


@each("d, e", [(80, 80), (192, 128), (8, 16)])
def test_head_dims(d: int, e: int) -> None:
    case = Case("", CAUSAL, {}, {"d": d, "e": e, "s_q": 19, "s_kv": 35, **ONE})
    check(case, torch.bfloat16, Tiles(*[Block(32, 32)] * 4))


@each("s_q, s_kv, spec", [(1, 1, {}), (32, 48, BOTTOM_RIGHT), (33, 5, BOTTOM_RIGHT), (17, 0, {})])
def test_sequences_shorter_and_longer_than_tiles(s_q: int, s_kv: int, spec: dict[str, Any]) -> None:
    check(Case("", spec, {}, {"s_q": s_q, "s_kv": s_kv, **ONE}), torch.float16)


@each(
    "case",
    [
        Case("", BOTTOM_RIGHT, {"seqlens_q": "b", "seqlens_kv": "b"}),
        packed("", CAUSAL, {"cu_seqlens_padded": ""}),
    ],
)
def test_garbage_reaches_nothing(case: Case) -> None:
    spec, inputs = build(case, torch.float16)
    assert_right(spec, inputs, forced(spec, with_garbage(spec, inputs)))


def test_packed_memory_that_ends_with_a_tile_and_a_sequence_of_no_rows() -> None:
    """Whole tiles of memory are not whole tiles of a sequence, and the last one begins where nothing is."""
    spec, inputs = build(packed("", {}), torch.float16)
    inputs = inputs._replace(
        q=inputs.q[:16],
        k=inputs.k[:32],
        v=inputs.v[:32],
        cu_seqlens_q=torch.tensor([0, 5, 16, 16], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 9, 32, 32], dtype=torch.int32),
    )
    assert_right(spec, inputs, forced(spec, inputs))


def test_strides() -> None:
    spec, inputs = build(Case("", CAUSAL), torch.float16)
    for name in ("q", "k", "v"):
        strided = STRIDES["sequence before heads"](getattr(inputs, name))
        wide = torch.cat([strided, strided], -1)[..., :8]  # rows apart from each other
        inputs = inputs._replace(**{name: wide})
    assert_right(spec, inputs, forced(spec, inputs))


def odd_heads(t: Tensor) -> Tensor:
    """A head stride that is no multiple of 8 elements."""
    b, h, s, d = t.shape
    return t.new_empty(b, h, s * d + 4)[..., : s * d].view(b, h, s, d).copy_(t)


@each(
    "message, made",
    [
        ("q does not begin", lambda i: {"q": STRIDES["at an odd offset"](i.q)}),
        ("stride of k is 9", lambda i: {"k": torch.cat([i.k, i.k[..., :1]], -1)[..., :8]}),
        ("stride of v is 220", lambda i: {"v": odd_heads(i.v)}),
        ("overlap", lambda i: {"k": i.k[:, :, :1].expand(i.k.shape)}),
        ("takes no bias", lambda i: {"bias": torch.zeros(1, 1, 1, 27, dtype=torch.float16)}),
        ("takes no attn_mask", lambda i: {"attn_mask": torch.zeros(27, dtype=torch.bool).view(1, 27)}),
    ],
)
def test_what_descriptors_cannot_address_is_refused_and_runs_without(message: str, made: Any) -> None:
    spec, inputs = build(Case("", {"return_max_logit": False}), torch.float16)
    inputs = inputs._replace(**made(inputs))
    with pytest.raises(ValueError, match=message):
        forced(spec, inputs)
    assert descriptor_block(make_call(spec, inputs), 90, None) is None
    assert_right(spec, inputs, forward(spec, inputs))


def test_what_it_has_no_code_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not descriptors.DEFAULT  # until it was timed
    for message, changes, dtype, variant in (
        ("no torch.float32 tile", {}, torch.float32, "descriptor"),
        ("no largest logit", {"return_max_logit": True}, torch.float16, "descriptor"),
        ("no dropout", {"dropout_p": 0.5}, torch.float16, "descriptor"),
        ("allowed: pointer, descriptor", {}, torch.float16, "tma"),
    ):
        spec, inputs = build(Case("", {"return_max_logit": False, **changes}), dtype)
        with pytest.raises(ValueError, match=message):
            forward(spec, inputs, variant=variant)
    for arch, call in [(80, long_call()), (80, long_call(tiles=SMALL)), (100, long_call(256, 256))]:
        with pytest.raises(ValueError, match=f"on sm{arch}"):
            descriptor_block(call, arch, "descriptor")
    monkeypatch.setattr(triton, "__version__", "3.10.0")  # that nobody tried
    assert descriptor_block(long_call(), 90, None) is None
    with pytest.raises(ValueError, match=r"3\.10\.0 was not tried"):
        descriptor_block(long_call(), 90, "descriptor")


def long_call(d: int = 128, e: int = 128, s: int = 4096, tiles: Tiles | None = None, **spec: Any) -> Any:
    q, k, v = (torch.empty(1, 2, s, width, dtype=torch.bfloat16, device="meta") for width in (d, d, e))
    return make_call(Spec(softmax_scale=1.0, **spec), Inputs(q, k, v), tiles)


@each(
    "arch, call, chosen",
    [
        (90, long_call(), True),
        (100, long_call(), True),
        (100, long_call(256, 256), False),
        (100, long_call(softcap=30.0), False),
        (100, long_call(window_left=2048, window_right=0), False),
        (90, long_call(window_left=2048, window_right=0), True),
        (90, long_call(window_left=512, window_right=0), False),
        (90, long_call(s=512), False),
        (90, long_call(tiles=SMALL), False),
        (80, long_call(), False),
        (None, long_call(), False),
    ],
)
def test_where_it_is_chosen_once_it_is_the_default(
    arch: int | None, call: Any, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptors, "DEFAULT", False)
    assert descriptor_block(call, arch, None) is None
    monkeypatch.setattr(descriptors, "DEFAULT", True)
    assert (descriptor_block(call, arch, None) is not None) == chosen
    assert descriptor_block(call, arch, "pointer") is None


def test_memory_for_descriptors_leaves_the_callers_allocator_alone() -> None:
    from triton.runtime import _allocation

    def mine(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(0)

    before = _allocation._allocator.get()
    token = _allocation._allocator.set(mine)
    try:
        with scratch_memory(torch.device("cpu")):
            assert _allocation._allocator.get()(384, 128, None).nbytes == 384
        with contextlib.suppress(RuntimeError), scratch_memory(torch.device("cpu")):
            raise RuntimeError("launch failed")
        assert _allocation._allocator.get() is mine
    finally:
        _allocation._allocator.reset(token)
    assert _allocation._allocator.get() is before

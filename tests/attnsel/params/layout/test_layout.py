"""The layout of three tensors: its name, what it says of storages and overlap, its drawing; and that every
triple of tensors has one."""

from __future__ import annotations

import itertools
import json
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnsel import DotProductAttention, Layout, detect_layout
from attnsel.base.records import to_json
from layout_cases import B, D, H, S, buffers_of, cut

torch.set_num_threads(1)

G = 2
Triple = tuple[Tensor, Tensor, Tensor]


class NoOperators(TorchDispatchMode):
    """Nothing may be computed, let alone read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"detect_layout ran {func}")


def detect(q: Tensor, k: Tensor, v: Tensor, qkv_format: str, **about: Any) -> Layout:
    with NoOperators():
        return detect_layout(q, k, v, qkv_format, **about)


def packed(fmt: str, group: str, g: int = G) -> Any:
    """q, k and v of a group of layouts, h = g = H where the three are packed into equal parts."""
    return cut(fmt, group, g, [t.detach() for t in buffers_of(fmt, group, g)])


def test_dimensions_of_size_one_have_no_say() -> None:
    for fmt, shape in itertools.product(("bshd", "sbhd", "bhsd"), itertools.product((1, 3), repeat=4)):
        q = torch.empty(shape)
        assert detect(q, q.clone(), q.clone(), fmt).name == f"{fmt}_{fmt}_{fmt}"
    one = torch.empty(1, 1, 1, 1).as_strided((1, 1, 1, 1), (7, 0, 3, 5))
    assert detect(one, one.clone(), one.clone(), "bshd").name == "bshd_bshd_bshd"


# Storages, overlap, alignment


def test_memory_that_lies_in_two_storages_is_seen() -> None:
    size = B * S * H * D
    array = torch.zeros(4 * size).numpy()
    q, k, v = (torch.from_numpy(array[start : start + size]).view(B, S, H, D) for start in (0, 99, 2 * size))
    found = detect(q, k, v, "bshd")
    assert [t.offset for t in found.tensors] == [0, 0, 0]
    assert found.overlaps == (("q", "k", True),)
    assert found.shared == ("qk",)
    assert found.k.start == 99 * 4


def test_alignment_is_that_of_the_address() -> None:
    raw = torch.empty(1024, dtype=torch.uint8)
    start = 2 - raw.data_ptr() % 64 + 64
    q = raw[start : start + 2 * B * S * 4].view(torch.float16).view(B, S, 1, 4)
    found = detect(q, q, q, "bshd").q
    assert (found.alignment, found.row_alignment) == (2, 2)
    buffer = torch.empty(B, S, H + 2, 16, dtype=torch.float16)
    assert detect(*buffer.split([H, 1, 1], 2), "bshd").v.row_alignment == 32
    meta = torch.empty(B, S, H, D, device="meta")[:, 1:]
    assert detect(meta, meta, meta, "bshd").q.alignment == 256  # if its storage is, as allocators give it


# Every triple has a layout


class Tag(torch.Tensor):
    """A tensor that wraps nothing: strides, and no storage."""

    @staticmethod
    def __new__(cls, *shape: int) -> Tag:
        strides = torch.empty(shape, device="meta").stride()
        return torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_strange_tensors() -> None:
    ragged = [torch.zeros(2, H, D), torch.zeros(3, H, D)]
    with FakeTensorMode():
        fake = torch.empty(B, S, H, D)
    strange = [
        torch.empty(B, S, H, D, device="meta"), fake, torch.zeros(B, S, H, D).to_sparse(), Tag(B, S, H, D),
        torch.nested.nested_tensor(ragged), torch.nested.nested_tensor(ragged, layout=torch.jagged),
        torch.empty(B, 0, H, D), torch.empty(B, S, H, D, dtype=torch.float8_e4m3fn),
    ]  # fmt: skip
    dense = torch.nn.Parameter(torch.empty(B, S, H, D))
    for one in strange:
        for q, k in ((one, dense), (dense, one)):
            found = detect(q, k, one, "bshd")
            assert found.name
            assert all(len(line) <= 80 for line in found.describe().splitlines())
            json.dumps(to_json(found))
    assert detect(dense, strange[3], strange[2], "bshd").shared == ()


def test_tensors_under_vmap_and_functional_transforms() -> None:
    names: list[str] = []

    def loss(q: Tensor) -> Tensor:
        names.append(detect_layout(q, q, q, "bshd").name)
        return q.sum()

    torch.vmap(loss)(torch.zeros(3, B, S, H, D))
    torch.func.grad(loss)(torch.zeros(B, S, H, D))
    assert names == ["bshd_bshd_bshd"] * 2


def test_fake_tensors_share_storages_as_real_ones_do() -> None:
    with FakeTensorMode():
        assert detect_layout(*packed("sbhd", "(h+2hg)d", 1), "sbhd").name == "sb(h+2hg)d"
        q, k, v = packed("bshd", "hd_hd_hd")
        found = detect_layout(q, k, v, "bshd")
    assert (found.name, found.shared, found.overlaps) == ("bshd_bshd_bshd", (), ())


def test_symbolic_sizes_are_shown_and_not_compared() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    found: list[Layout] = []

    def call(x: Tensor) -> Tensor:
        tensors = x.split([H, G, G], 2)
        guards = x.shape[0].node.shape_env.guards  # type: ignore[attr-defined]
        before = len(guards)
        found.append(detect_layout(*tensors, "sbhd"))
        assert len(guards) == before
        return x + 1

    make_fx(call, tracing_mode="symbolic")(torch.empty(S, B, H + 2 * G, D))
    assert found[0].q.stride is None
    json.dumps(to_json(found[0]))


@st.composite
def strided(draw: st.DrawFn) -> tuple[Triple, str]:
    """Three tensors anywhere in up to three storages."""
    fmt = draw(st.sampled_from(["bshd", "sbhd", "bhsd", "thd"]))
    made: list[Tensor] = []
    for _ in range(3):
        shape = [draw(st.integers(0, 4)) for _ in fmt]
        inside, stride = 1, [0] * len(shape)
        for dim in draw(st.permutations(range(len(shape)))):
            stride[dim] = draw(st.sampled_from([inside, inside, inside, 0, 1, 3, inside + 1, 2 * inside]))
            inside = max(1, inside * shape[dim])
        offset = draw(st.integers(0, 9))
        reach = offset + 1 + sum((max(n, 1) - 1) * step for n, step in zip(shape, stride, strict=True))
        if made and draw(st.booleans()):
            base = made[draw(st.integers(0, len(made) - 1))]
            size = base.untyped_storage().nbytes() // 4
            if size < reach:
                base = torch.arange(float(reach))
        else:
            base = torch.arange(float(reach))
        made.append(base.as_strided(shape, stride, offset))
    return (made[0], made[1], made[2]), fmt


@settings(max_examples=200)
@given(strided())
def test_any_strided_tensors_are_what_their_layout_says(case: tuple[Triple, str]) -> None:
    tensors, fmt = case
    found = detect(*tensors, fmt)
    assert found.name
    assert all(len(line) <= 80 for line in found.describe().splitlines())
    json.dumps(to_json(found))
    for t, about in zip(tensors, found.tensors, strict=True):
        assert about.stride is not None
        whole = torch.empty(0).set_(t.untyped_storage())
        again = whole.as_strided(about.shape, about.stride, about.offset)
        assert torch.equal(again, t)
        assert about.contiguous == t.is_contiguous()
    for a, b, sure in found.overlaps:
        assert sure, (a, b)
    seen = {t.name: addresses_of(t) for t in found.tensors}
    for a, b in itertools.combinations("qkv", 2):
        assert ((a, b, True) in found.overlaps) == bool(seen[a] & seen[b])


def addresses_of(t: Any) -> set[tuple[int, int]]:
    indices = itertools.product(*map(range, t.shape))
    return {(t.storage, t.start + 4 * sum(map(operator.mul, index, t.stride))) for index in indices}


# Where it is told


def test_a_report_draws_what_is_not_dense() -> None:
    core = DotProductAttention(H, D, num_gqa_groups=G, qkv_format="sbhd")
    q, k, v = packed("sbhd", "(h+2hg)d")
    core(q, k, v)
    for selection in (core.last_selection, core.explain(q, k, v)):
        assert selection is not None
        assert selection.layout == detect_layout(q, k, v, "sbhd")
        assert selection.layout.describe() in selection.report()
        assert selection.as_dict()["layout"]["name"] == "sb(h+2hg)d"
    plain = core.explain(q.contiguous(), k.contiguous(), v.contiguous())
    assert plain.layout is None
    assert "layout" not in plain.report()
    assert "layout" not in plain.as_dict()

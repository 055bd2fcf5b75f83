"""Whatever the storage, offset and strides: the right number, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnsel import NoBackendError, attention
from layout_cases import (
    BACKENDS,
    LEAD,
    PACKINGS,
    B,
    S,
    about_lengths,
    assert_rounding,
    buffers_of,
    cut,
    reference,
    watched,
)
from tables import each

torch.set_num_threads(1)


def cases() -> Iterator[Any]:
    """(packing, hg, format, backend, with a backward): each packing in each format, with one of the kernels
    in turn; an interpreted backward takes a second, and the case that went wrong has one."""
    for number, ((packing, g), fmt) in enumerate(product(PACKINGS, LEAD)):
        backend = BACKENDS[(number + number // len(LEAD)) % len(BACKENDS)]
        yield packing, g, fmt, backend, backend != "triton" or (packing, g) == ("(h+2hg)d", 1)


# One buffer for all: TransformerEngine took sb(h+2hg)d for sbhd_sbhd_sbhd and was wrong by 6.2
@each("packing, g, fmt, backend, train", cases())
def test_every_way_of_packing_gives_the_right_numbers_without_a_copy(
    packing: str, g: int, fmt: str, backend: str, train: bool
) -> None:
    buffers, about = buffers_of(fmt, packing, g), about_lengths(fmt, 5, S * B - 5)
    q, k, v = cut(fmt, packing, g, buffers)
    arguments = {"qkv_format": fmt, "backend": backend, "adapt": "never", **about}
    if fmt == "thd" and backend.startswith("sdpa"):
        with pytest.raises(NoBackendError, match="packed"):
            attention(q, k, v, **arguments)
        return
    with watched() as copies:
        out = attention(q, k, v, **arguments)
    if backend in ("sdpa.flash", "triton"):  # the others are made of PyTorch operations
        assert copies.seen == []
    doubles = [t.detach().double().requires_grad_() for t in buffers]
    wanted = reference(fmt, *cut(fmt, packing, g, doubles), about)
    assert_rounding(out, wanted)
    if train:
        dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
        wanted_grads = torch.autograd.grad(wanted, doubles, dout.double())
        for grad, right in zip(torch.autograd.grad(out, buffers, dout), wanted_grads, strict=True):
            assert_rounding(grad, right)


# Any storage, offset and strides


@st.composite
def strided(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A shape with strides that reach: packed in any order, with gaps, steps, overlap or none at all."""
    stride, inside = [1] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = draw(st.sampled_from([inside, inside, inside, inside, 0, 1, 2, 3 * inside, inside + 5]))
        inside = max(1, inside * shape[dim])
    if draw(st.booleans()) and len(shape):  # what people have: head_dim side by side
        stride = [max(1, s) * shape[-1] if s else 0 for s in stride[:-1]] + [1]
    return shape, tuple(stride), draw(st.integers(0, 7))


@st.composite
def questions(draw: st.DrawFn) -> dict[str, Any]:
    fmt = draw(st.sampled_from(list(LEAD)))
    g = draw(st.integers(1, 2))
    h, d = g * draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 16]))
    e = draw(st.sampled_from([d, d, d, 5]))
    b, s_q = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    s_kv = draw(st.sampled_from([s_q, s_q, 1, 4]))
    lengths: tuple[list[int], list[int]] = ([], [])
    if fmt == "thd":
        lengths = tuple([draw(st.integers(0, n)) for _ in range(b)] for n in (s_q, s_kv))
        shapes = [(sum(lengths[0]), h, d), (sum(lengths[1]), g, d), (sum(lengths[1]), g, e)]
    else:
        shapes = [
            tuple({"b": b, "s": s, "h": n, "d": width}[letter] for letter in fmt)
            for s, n, width in ((s_q, h, d), (s_kv, g, d), (s_kv, g, e))
        ]
    return {
        "fmt": fmt,
        "views": [draw(strided(shape)) for shape in shapes],
        "shared": draw(st.sampled_from(["", "kv", "qkv"])),
        "lengths": lengths,
        "causal": draw(st.booleans()),
        "dout": draw(strided((*shapes[0][:-1], e))),
        "seed": draw(st.integers(0, 99)),
    }


def reach(view: tuple[tuple[int, ...], tuple[int, ...], int]) -> int:
    shape, stride, offset = view
    return offset + 1 + sum(max(0, n - 1) * step for n, step in zip(shape, stride, strict=True))


def stores(question: dict[str, Any]) -> list[Tensor]:
    """One-dimensional float32 leaves, one to three of them."""
    views, shared = question["views"], question["shared"]
    sizes = [reach(view) for view in views]
    if shared == "qkv":
        sizes = [max(sizes)]
    elif shared == "kv":
        sizes = [sizes[0], max(sizes[1:])]
    gen = torch.Generator().manual_seed(question["seed"])
    return [torch.randn(n, generator=gen).requires_grad_() for n in sizes]


def views_of(question: dict[str, Any], bases: list[Tensor]) -> list[Tensor]:
    return [bases[min(i, len(bases) - 1)].as_strided(*view) for i, view in enumerate(question["views"])]


def right_or_refused(question: dict[str, Any], backend: str | None, adapt: str, train: bool = True) -> None:
    """Strides refuse nothing unless copies are ruled out; without that policy nothing at all is refused."""
    bases, causal = stores(question), question["causal"]
    about: dict[str, Any] = {"attn_mask_type": "causal" if causal else "no_mask"}
    if question["fmt"] == "thd":
        about = {"attn_mask_type": "padding_causal" if causal else "padding"}
        for side, n in zip(("q", "kv"), question["lengths"], strict=True):
            about[f"cu_seqlens_{side}"] = torch.tensor([0, *n], dtype=torch.int32).cumsum(
                0, dtype=torch.int32
            )
    q, k, v = views_of(question, bases)
    try:
        out = attention(q, k, v, qkv_format=question["fmt"], backend=backend, adapt=adapt, **about)
    except NoBackendError as refusal:
        assert backend not in (None, "tiled")
        fields = {reason.field for reason in refusal.selection[backend].reasons}
        assert fields
        assert adapt == "never" or fields - {"tensors.q", "tensors.k", "tensors.v"}
        return
    doubles = [base.detach().double().requires_grad_() for base in bases]
    wanted = reference(question["fmt"], *views_of(question, doubles), about, 0 if causal else -1)
    assert_rounding(out, wanted)
    if train:
        shape, stride, offset = question["dout"]
        flat = torch.randn(reach((shape, stride, offset)), generator=torch.Generator().manual_seed(1))
        dout = flat.as_strided(shape, stride, offset) if shape == out.shape else torch.ones_like(out)
        wanted_grads: tuple[Tensor | None, ...] = (None,) * len(bases)
        if wanted.requires_grad:  # where there is no row, nothing depends on anything
            wanted_grads = torch.autograd.grad(wanted, doubles, dout.double(), allow_unused=True)
        grads = torch.autograd.grad(out, bases, dout, allow_unused=True)
        for grad, hoped, base in zip(grads, wanted_grads, bases, strict=True):
            zeros = torch.zeros_like(base)
            assert_rounding(
                zeros if grad is None else grad, zeros.double() if hoped is None else hoped, ulps=256
            )


@settings(max_examples=180)
@given(questions(), st.sampled_from([None, *BACKENDS]), st.sampled_from(["auto", "never"]))
def test_any_strides_give_the_right_numbers_or_a_refusal(
    question: dict[str, Any], backend: str | None, adapt: str
) -> None:
    right_or_refused(question, backend, adapt, train=backend != "triton")

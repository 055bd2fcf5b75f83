"""Views of packed buffers: the right number without a copy. Any other strides: the fuzz target numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

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

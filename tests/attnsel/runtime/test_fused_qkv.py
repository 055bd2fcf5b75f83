"""``qkv_layer`` and ``kv_layer``: the views they stand for, no copy, a gradient of their own shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnsel import DotProductAttention, attention, detect_layout
from layout_cases import B, D, H, S, about_lengths, buffers_of, cut, watched

torch.set_num_threads(1)


@pytest.mark.parametrize(("packing", "fmt"), [("3hd", "bshd"), ("h3d", "sbhd"), ("hd_2hd", "thd")])
def test_packed_inputs_are_the_views_they_stand_for(packing: str, fmt: str) -> None:
    g = H if packing in ("3hd", "h3d") else 4
    buffers, about = buffers_of(fmt, packing, g), about_lengths(fmt, 5, S * B - 5)
    given_as: dict[str, Any] = {"qkv_interleave_dim": -3 if packing in ("3hd", "hd_2hd") else -2}
    if g == H:
        given_as["qkv_layer"] = buffers[0]
    else:
        given_as |= {"kv_layer": buffers[1]}
    first = () if g == H else (buffers[0],)
    with watched() as copies:
        out = attention(*first, qkv_format=fmt, **given_as, **about)
    assert fmt == "thd" or copies.seen == []
    plain = attention(*cut(fmt, packing, g, buffers), qkv_format=fmt, **about)
    assert torch.equal(out, plain)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    for grad, same in zip(
        torch.autograd.grad(out, buffers, dout), torch.autograd.grad(plain, buffers, dout), strict=True
    ):
        assert torch.equal(grad, same)

    mask = {"attn_mask_type": "no_mask", **about}
    core = DotProductAttention(H, D, num_gqa_groups=g, qkv_format=fmt)
    names = ("query_layer", "key_layer", "value_layer")
    packed = dict(zip(names, first, strict=False)) | given_as
    assert torch.equal(core(**packed, **mask), plain.flatten(-2))
    layout = core.explain(**packed, **mask).layout
    assert layout is not None
    assert layout.name == detect_layout(*cut(fmt, packing, g, buffers), fmt).name
    assert layout.known

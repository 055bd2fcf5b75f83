"""--stride and --misaligned: what they say reaches the question, and the answer names what it avoids.

What they refuse: test_mistakes.py.
"""

from __future__ import annotations

import json

from attnsel.cli.layout_flags import read_lying
from attnsel.params import AttentionParams
from tables import each


def lying(stride=(), misaligned=None, **fields):
    return read_lying(list(stride), misaligned).of(AttentionParams(**fields)).tensors


@each(
    "layout, shape",
    [
        ("bshd", (2, 64, 8, 128)),
        ("sbhd", (64, 2, 8, 128)),
        ("bhsd", (2, 8, 64, 128)),
        ("thd", (128, 8, 128)),
    ],
)
def test_shapes_are_in_the_order_of_the_layout(layout, shape):
    mask = "padding" if layout == "thd" else "no_mask"
    fields = {"qkv_layout": layout, "num_heads": 8, "max_seqlen_q": 64, "attn_mask_type": mask}
    q = lying(misaligned="q", **fields).q
    assert q.shape == shape
    assert q.contiguous
    assert q.alignment == 2  # one element of bf16


def test_keys_have_their_own_heads_and_values_their_own_width():
    steps = ["k=1,1,1,1", "v=1,1,1,1"]
    fields = {"num_gqa_groups": 4, "max_seqlen_q": 8, "max_seqlen_kv": 16, "head_dim_v": 64}
    tensors = lying(steps, **fields)
    assert tensors.q is None
    assert tensors.k.shape == (2, 16, 4, 128)
    assert tensors.v.shape == (2, 16, 4, 64)


def test_a_mask_of_fewer_dimensions_broadcasts():
    mask = lying(["mask=160,1"], attn_mask_type="arbitrary", max_seqlen_q=8, max_seqlen_kv=157).mask
    assert (mask.shape, mask.stride, mask.dtype) == ((8, 157), (160, 1), "bool")


PAGED = "--layout paged_kv_bshd_bshd_bshd --kv-cache paged --page-size 64 --mask padding --inference"


def test_pages_have_the_shape_of_pages(asked):
    tensors = asked(f"explain --gpu H100 {PAGED} --seqlen-q 1 --seqlen-kv 100 --misaligned k").params.tensors
    assert tensors.k.shape == (4, 64, 16, 128)


def test_alignment_may_be_stated_in_bytes():
    tensors = lying(misaligned="q=8, k", dtype="fp32")
    assert (tensors.q.alignment, tensors.k.alignment) == (8, 4)


def test_a_misaligned_tensor_is_copied_for_a_reason(run):
    code, out, _ = run("explain --gpu H100 --torch 2.13 --inference --misaligned q --json")
    assert code == 0
    flash = next(c for c in json.loads(out)["candidates"] if c["name"] == "sdpa.flash")
    [copied] = flash["adaptations"]
    assert (copied["name"], copied["avoids"]) == ("contiguous", ["SDPA021"])

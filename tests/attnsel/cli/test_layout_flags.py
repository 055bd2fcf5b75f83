"""--stride and --misaligned: what they say reaches the question, and the answer names what it avoids."""

from __future__ import annotations

import json

import pytest

from attnsel.cli import main
from attnsel.cli.layout_flags import read_lying
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from tables import each


def lying(stride=(), misaligned=None, **fields):
    return read_lying(list(stride), misaligned).of(AttentionParams(**fields)).tensors


def asked(capsys, command):
    code = main(["explain", "--gpu", "H100", "--torch", "2.13", "--inference", *command.split(), "--json"])
    return code, json.loads(capsys.readouterr().out)


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


def test_pages_have_the_shape_of_pages():
    fields = {
        "qkv_layout": "paged_kv_bshd_bshd_bshd",
        "kv_cache": "paged",
        "page_size": 64,
        "attn_mask_type": "padding",
        "is_training": False,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 100,
    }
    assert lying(misaligned="k", **fields).k.shape == (4, 64, 16, 128)


def test_alignment_may_be_stated_in_bytes():
    tensors = lying(misaligned="q=8, k", dtype="fp32")
    assert (tensors.q.alignment, tensors.k.alignment) == (8, 4)


def test_a_misaligned_tensor_is_copied_for_a_reason(capsys):
    code, told = asked(capsys, "--misaligned q")
    assert code == 0
    flash = next(c for c in told["candidates"] if c["name"] == "sdpa.flash")
    assert [a["name"] for a in flash["adaptations"]] == ["contiguous"]
    assert flash["adaptations"][0]["avoids"] == ["SDPA021"]


@each(
    "flags, words",
    [
        ("--stride q", "must be q=S0,S1,S2,S3"),
        ("--stride z=1,1,1,1", "must be q=S0,S1,S2,S3"),
        ("--stride q=1,-1,1,1", "must be q=S0,S1,S2,S3"),
        ("--stride q=1,a,1,1", "must be q=S0,S1,S2,S3"),
        ("--stride q=1,1,1", "must have 4 numbers, for bshd"),
        ("--stride q=1,1,1,1 --stride q=1,1,1,1", "q was stated before"),
        ("--stride q=1,1,1,99999999999999999999", "is larger than any tensor"),
        ("--stride mask=1,1,1,1", "without --attn-mask-type arbitrary"),
        ("--stride mask=1,1,1,1,1 --attn-mask-type arbitrary", "must have 4 numbers, for bhss"),
        ("--misaligned z", "must be q, k, v or mask"),
        ("--misaligned q=16", "16 are aligned"),
        ("--misaligned q=x", "must be q, k, v or mask"),
        ("--misaligned ,", "must name q, k, v or mask"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags, words, capsys):
    assert main(["explain", "--gpu", "H100", *flags.split()]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.strip().splitlines()) == 1


def test_nothing_said_changes_nothing():
    p = AttentionParams()
    assert read_lying(None, None).of(p) is p
    with pytest.raises(InvalidInput):
        read_lying(None, "")

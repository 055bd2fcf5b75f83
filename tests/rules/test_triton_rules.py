"""Where attnsel's Triton kernels may be planned, and what tiled refuses."""

from __future__ import annotations

import pytest

from attnsel.environment import Environment

H100 = Environment.describe(gpu="H100", torch="2.13.0")
T4 = Environment.describe(gpu="T4", torch="2.13.0")
CPU = Environment.describe(gpu="cpu", torch="2.13.0", triton="3.7.1")


@pytest.mark.parametrize("gpu", ["A100", "A10", "L4", "H100", "B200", "B300", "RTX 5090", "GB10"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "fp32"},
        {"head_dim_qk": 256},
        {"softcap": 30.0, "softmax_type": "learnable", "window_size": (256, 0), "attention_dropout": 0.1},
        {"qkv_layout": "thd", "attn_mask_type": "padding_causal_bottom_right", "num_gqa_groups": 2},
        {"deterministic": True, "return_lse": True, "return_max_logit": True, "cuda_graph": True},
    ],
)
def test_every_feature_from_ampere_on(codes, gpu, fields):
    assert codes("triton", Environment.describe(gpu=gpu, torch="2.13.0"), **fields) == set()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"TRITON003"}),
        ({"dtype": "fp32"}, {"TRITON003"}),
        ({"dtype": "fp16"}, set()),
        ({"dtype": "fp16", "head_dim_qk": 192}, {"TRITON021"}),
        ({"dtype": "fp16", "head_dim_qk": 256, "is_training": False}, set()),
    ],
)
def test_turing(codes, fields, expected):
    assert codes("triton", T4, **fields) == expected


@pytest.mark.parametrize(
    ("triton", "refused"), [("3.2.0", False), ("3.3.1", True), ("3.4.0", False), ("3.8.0", False)]
)
def test_triton_3_3_lost_turing(codes, triton, refused):
    env = Environment.describe(gpu="T4", torch="2.7.1", triton=triton)
    assert (codes("triton", env, dtype="fp16") == {"TRITON011"}) is refused
    ampere = Environment.describe(gpu="A100", torch="2.7.1", triton=triton)
    assert codes("triton", ampere) == set()


def test_volta_and_cpus_are_refused(codes):
    assert "TRITON002" in codes("triton", Environment.describe(gpu="V100"), dtype="fp16")
    assert codes("triton", CPU) == {"TRITON007"}


def test_linux_only(codes):
    assert codes("triton", H100.replace(platform="windows")) == {"TRITON006"}


def test_wide_heads(codes):
    assert codes("triton", H100, head_dim_qk=320) == {"TRITON020"}
    assert codes("triton", H100, head_dim_qk=576, head_dim_v=512, is_training=False) == set()
    assert codes("triton", H100, head_dim_qk=576, head_dim_v=512) == {"TRITON020"}
    assert codes("triton", H100, dtype="fp32", head_dim_qk=576, head_dim_v=512, is_training=False) == {
        "TRITON020"
    }
    assert codes("triton", H100, head_dim_qk=320, is_training=False) == {"TRITON020"}
    assert codes("triton", H100, dtype="fp32", head_dim_qk=256) == set()


@pytest.mark.parametrize(
    ("gpu", "triton", "refused"),
    [
        ("B200", "3.2.0", {"TRITON012"}),
        ("B200", "3.3.1", set()),
        ("B200", "3.4.0", {"TRITON015"}),
        ("B300", "3.5.1", {"TRITON013"}),
        ("GB10", "3.6.0", set()),
        ("sm110", "3.6.0", {"TRITON014"}),
        ("sm110", "3.7.1", set()),
    ],
)
def test_which_triton_knows_which_blackwell(codes, gpu, triton, refused):
    env = Environment.describe(gpu=gpu, torch="2.13.0", triton=triton)
    assert codes("triton", env, is_training=True) == refused


@pytest.mark.parametrize("env", [H100, T4, CPU])
def test_tiled_refuses_fp8_and_nothing_else(codes, env):
    assert codes("tiled", env, dtype="fp8_e4m3") == {"TILED001"}
    paged = {
        "qkv_layout": "paged_kv_bshd_bshd_bshd",
        "kv_cache": "paged",
        "page_size": 16,
        "is_training": False,
    }
    for fields in (
        paged,
        {"dtype": "fp64", "head_dim_qk": 333, "head_dim_v": 7, "deterministic": True},
        {"qkv_layout": "thd", "attn_mask_type": "padding_causal", "pad_between_seqs": True},
        {"softcap": 5.0, "softmax_type": "off-by-one", "attention_dropout": 0.3, "return_max_logit": True},
        {"max_seqlen_q": 0, "attn_mask_type": "no_mask"},
        {"kv_cache": "contiguous", "is_training": False, "attn_mask_type": "padding_causal_bottom_right"},
    ):
        assert codes("tiled", env, **fields) == set()

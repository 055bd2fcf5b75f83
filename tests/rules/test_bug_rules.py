"""Known bugs: each predicate on both sides of its edge, each interval at both ends."""

from __future__ import annotations

import pytest

from attnsel.environment import Environment
from attnsel.params import Tensors, TensorSpec


def env(gpu, cudnn=None, torch="2.13.0", **more):
    return Environment.describe(gpu=gpu, torch=torch, **({"cudnn": cudnn} if cudnn else {}), **more)


def bugs(codes, candidate, environment, **fields):
    return {code for code in codes(candidate, environment, **fields) if code.startswith("BUG")}


DECODE = {"is_training": False, "max_seqlen_q": 1, "max_seqlen_kv": 2048, "num_heads": 28}
MASKED = {"attn_mask_type": "arbitrary"}
ONE = {"max_seqlen_q": 1, "max_seqlen_kv": 128, "attn_mask_type": "no_mask"}
THD = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
WINDOW = {"attn_mask_type": "no_mask", "window_size": (512, 512)}
SINK = {**THD, "softmax_type": "learnable", "head_dim_qk": 192}
FEW = {**DECODE, "num_gqa_groups": 4}
HALF_TILE = {**MASKED, "max_seqlen_q": 704}
BIASED = {"core_attention_bias_type": "post_scale_bias", "max_seqlen_q": 704}
DECODE_THD = {**THD, "max_seqlen_q": 1, "max_seqlen_kv": 300, "num_gqa_groups": 4, "is_training": False}


@pytest.mark.parametrize(
    ("code", "candidate", "where", "fields", "fires"),
    [
        # pytorch#193893: B200, few key/value heads, decoding
        ("BUG005", "sdpa.cudnn", env("B200", "9.19.0"), FEW, True),
        ("BUG005", "cudnn", env("B200", "9.20.0"), FEW, True),
        ("BUG005", "sdpa.cudnn", env("B200", "9.18.1"), FEW, False),
        ("BUG005", "sdpa.cudnn", env("RTX 5090", "9.19.0"), FEW, False),
        ("BUG005", "sdpa.cudnn", env("B200", "9.19.0"), {**DECODE, "num_gqa_groups": 14}, False),
        ("BUG005", "sdpa.cudnn", env("B200", "9.19.0"), {**FEW, "max_seqlen_q": 64}, False),
        # pytorch#196678: H100, mask, keys % 128 == 64
        ("BUG006", "sdpa.cudnn", env("H100", "9.20.0"), HALF_TILE, True),
        ("BUG006", "sdpa.cudnn", env("H200", "9.20.0"), HALF_TILE, True),
        ("BUG006", "sdpa.cudnn", env("H100", "9.25.1"), {**MASKED, "max_seqlen_q": 64}, True),
        ("BUG006", "sdpa.cudnn", env("H100", "9.26.0"), HALF_TILE, False),
        ("BUG006", "sdpa.cudnn", env("H100", "9.20.0"), {**MASKED, "max_seqlen_q": 768}, False),
        ("BUG006", "sdpa.cudnn", env("H100", "9.20.0"), {"max_seqlen_q": 704}, False),
        ("BUG006", "sdpa.cudnn", env("H100", "9.20.0"), {**HALF_TILE, "is_training": False}, False),
        ("BUG006", "sdpa.cudnn", env("A100", "9.20.0"), HALF_TILE, False),
        ("BUG006", "cudnn", env("H100", "9.20.0"), BIASED, True),
        # cudnn-frontend#160
        ("BUG007", "cudnn", env("H100", "9.12.0", cudnn_frontend="1.14.0"), {"max_seqlen_q": 1000}, True),
        ("BUG007", "cudnn", env("H100", "9.12.0", cudnn_frontend="1.15.0"), {"max_seqlen_q": 1000}, False),
        ("BUG007", "cudnn", env("H100", "9.15.1", cudnn_frontend="1.14.0"), {"max_seqlen_q": 1000}, False),
        # cudnn-frontend#1072 and #1071
        ("BUG008", "cudnn", env("H200", "9.26.0"), {**ONE, "num_heads": 2}, True),
        ("BUG008", "cudnn", env("H200", "9.26.0"), {**ONE, "max_seqlen_kv": 97}, False),
        ("BUG008", "cudnn", env("H200", "9.26.0"), {**ONE, "attn_mask_type": "padding"}, False),
        ("BUG009", "cudnn", env("A100", "9.28.0"), {**ONE, "batch_size": 1, "num_heads": 1}, True),
        ("BUG009", "cudnn", env("A100", "9.18.1"), {**ONE, "batch_size": 1, "num_heads": 1}, False),
        ("BUG009", "cudnn", env("A100", "9.28.0"), {**ONE, "batch_size": 1, "num_heads": 2}, False),
        # cudnn-frontend#1083
        ("BUG010", "cudnn", env("A100", "9.26.0"), {**DECODE_THD, "return_lse": True}, True),
        ("BUG010", "cudnn", env("A100", "9.26.0"), DECODE_THD, False),
        ("BUG010", "cudnn", env("A100", "9.26.0"), {**DECODE_THD, "num_gqa_groups": 16}, False),
        ("BUG010", "cudnn", env("A100", "9.25.0"), {**DECODE_THD, "return_lse": True}, False),
        # TransformerEngine#2186, #3249
        ("BUG011", "cudnn", env("H100", "9.7.1"), {**THD, "pad_between_seqs": True}, True),
        ("BUG011", "cudnn", env("H100", "9.18.0"), {**THD, "pad_between_seqs": True}, False),
        ("BUG011", "cudnn", env("B200", "9.8.0"), {**THD, "pad_between_seqs": True}, False),
        ("BUG012", "cudnn", env("H100", "9.21.1"), SINK, True),
        ("BUG012", "cudnn", env("H100", "9.21.1"), {**SINK, "softmax_type": "off-by-one"}, False),
        ("BUG012", "cudnn", env("H100", "9.26.0"), SINK, False),
        # withdrawn and graph-captured releases
        ("BUG001", "cudnn", env("H100", "9.10.1"), {}, True),
        ("BUG001", "sdpa.cudnn", env("H100", "9.10.0"), {}, True),
        ("BUG001", "cudnn", env("H100", "9.10.2"), {}, False),
        ("BUG001", "cudnn", env("H100", "9.9.0"), {}, False),
        ("BUG002", "cudnn", env("H100", "9.14.0"), WINDOW, True),
        ("BUG002", "cudnn", env("H100", "9.14.0"), {**WINDOW, "max_seqlen_q": 1024}, False),
        ("BUG002", "cudnn", env("H100", "9.15.0"), WINDOW, False),
        ("BUG003", "cudnn", env("H100", "9.15.0"), {"cuda_graph": True, "max_seqlen_q": 1000}, True),
        ("BUG003", "cudnn", env("H100", "9.15.1"), {"cuda_graph": True, "max_seqlen_q": 1000}, False),
        ("BUG003", "cudnn", env("H100", "9.15.0"), {"max_seqlen_q": 1000}, False),
        # PyTorch
        ("BUG004", "sdpa.cudnn", env("H100", "9.10.2", "2.9.1"), {"max_seqlen_q": 261}, True),
        ("BUG004", "sdpa.cudnn", env("H100", "9.9.0", "2.9.1"), {"max_seqlen_q": 261}, False),
        ("BUG004", "sdpa.cudnn", env("H100", "9.10.2", "2.9.1"), {"max_seqlen_q": 256}, False),
        ("BUG030", "sdpa.cudnn", env("H100", "9.1.0", "2.5.0"), {}, True),
        ("BUG030", "sdpa.cudnn", env("H100", "9.1.0", "2.5.1"), {}, False),
        ("BUG032", "sdpa.efficient", env("A100"), {**MASKED, "batch_size": 1, "max_seqlen_q": 53936}, True),
        ("BUG032", "sdpa.efficient", env("A100"), {"batch_size": 1, "max_seqlen_q": 53936}, False),
    ],
)  # fmt: skip
def test_known_bugs(codes, code, candidate, where, fields, fires):
    assert (code in bugs(codes, candidate, where, **fields)) is fires


def shared_kv(rows, stride=0):
    kv = TensorSpec(shape=(1, rows, 64, 64), stride=(rows * 64 * 64, 64, stride, 1))
    return {"tensors": Tensors(k=kv, v=kv), "max_seqlen_kv": rows, "batch_size": 1, "head_dim_qk": 64}


@pytest.mark.parametrize(
    ("torch", "fields", "fires"),
    [
        ("2.13.0", {"num_heads": 64, "max_seqlen_q": 1, "attn_mask_type": "no_mask"}, True),
        ("2.14.1", {"num_heads": 64, "max_seqlen_q": 1, "attn_mask_type": "no_mask"}, False),
        ("2.13.0", {"num_heads": 16, "max_seqlen_q": 1, "attn_mask_type": "no_mask"}, False),
        ("2.13.0", {"num_heads": 16, "max_seqlen_q": 65, "attn_mask_type": "causal"}, True),
        ("2.13.0", {"num_heads": 64, "max_seqlen_q": 2, "attn_mask_type": "no_mask"}, False),
        (
            "2.13.0",
            {"num_heads": 64, "max_seqlen_q": 1, "attn_mask_type": "no_mask", "return_lse": True},
            False,
        ),
    ],
)
def test_one_kv_head_in_memory_for_many_query_heads(codes, torch, fields, fires):
    where = env("A100", torch=torch)
    question = {**shared_kv(512), "is_training": False, **fields}
    assert ("BUG031" in bugs(codes, "sdpa.efficient", where, **question)) is fires
    dense = {**question, **shared_kv(512, stride=512 * 64)}
    assert "BUG031" not in bugs(codes, "sdpa.efficient", where, **dense)


@pytest.mark.parametrize(
    "candidate", ["cudnn", "sdpa.cudnn", "sdpa.efficient", "sdpa.flash", "triton", "tiled"]
)
def test_the_default_question_meets_no_bug_on_current_wheels(codes, candidate):
    for gpu in ("A100", "H100", "B200", "RTX 5090"):
        for torch in ("2.13.0", "2.14.1"):
            assert bugs(codes, candidate, Environment.describe(gpu=gpu, torch=torch)) == set()

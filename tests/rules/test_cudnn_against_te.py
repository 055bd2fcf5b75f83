"""From cuDNN 9.8 on: where TransformerEngine's table says no and the library itself says yes.

The library is the judge; each row says why nothing of ours stands in the way. What the table refuses
because of wrong numbers, and an issue describes, is a BUG rule instead.
"""

from __future__ import annotations

from attnsel import AttentionParams, Environment, Policy, select
from tables import each

S = {"max_seqlen_q": 2048}
DECODE_512 = {"head_dim_qk": 512, "is_training": False, "max_seqlen_q": 1, "max_seqlen_kv": 1024}
PACKED = {"qkv_layout": "thd", "attn_mask_type": "padding_causal"}
BIAS_AND_LENGTHS = {"attn_mask_type": "padding", "core_attention_bias_type": "post_scale_bias"}
ALIBI = {"core_attention_bias_type": "alibi"}
OPEN_RIGHT = {**S, "window_size": (128, 0), "attn_mask_type": "padding_causal"}
DIFFERENCES = [
    (
        "sm90",
        "9.11.0",
        {"head_dim_qk": 256, "head_dim_v": 128},
    ),  # library: one backward engine covers 256/128
    (
        "sm90",
        "9.10.2",
        DECODE_512,
    ),  # library: the run-time compiled engine takes one causal query from 9.10 on
    ("sm100", "9.23.0", {"head_dim_qk": 256, **PACKED}),  # library: from 9.23, two releases before the table
    ("sm120", "9.18.0", S),  # library: dense sm120 training before the table's 9.18.1
    ("sm90", "9.15.1", BIAS_AND_LENGTHS),  # library
    ("sm90", "9.15.1", {"attn_mask_type": "padding_causal", **ALIBI}),  # library
    ("sm80", "9.15.1", ALIBI),  # library: on Ampere
    ("sm90", "9.13.0", {"softmax_type": "learnable"}),  # frontend: from 9.13.0, the table waits for 9.13.1
    ("sm90", "9.20.0", {"return_max_logit": True}),  # library: from 9.13.0, the table waits for 9.21
    ("sm90", "9.14.0", OPEN_RIGHT),  # frontend: the limit of 9.14.0 is for windows that are open on the right
    ("sm100", "9.18.0", {**S, "deterministic": True}),  # frontend: from 9.18.0
]


@each("gpu, cudnn, fields", DIFFERENCES)
def test_the_library_is_followed_where_the_table_is_stricter(gpu, cudnn, fields):
    """The question itself: TransformerEngine pads and copies nothing."""
    env = Environment.describe(gpu, cudnn=cudnn)
    candidate = select(AttentionParams(**fields), env, policy=Policy(adapt="never"))["cudnn"]
    assert candidate.eligible, [reason.code for reason in candidate.reasons]

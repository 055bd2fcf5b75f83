"""Context parallelism, as a specification of what it supports."""

from __future__ import annotations

from attnsel.environment import Environment
from tables import each

H100 = Environment.describe(gpu="H100", torch="2.13.0")
NO_OFFSETS = ("cudnn", "sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math")
BY_HEADS = {"cp_size": 4, "cp_comm_type": "a2a"}
BOTH = {"cp_size": 4, "cp_comm_type": "a2a+p2p"}
CROSS = {"cp_size": 2, "max_seqlen_q": 4096, "max_seqlen_kv": 8192}
DROPOUT = {**CROSS, "attn_mask_type": "causal_bottom_right", "attention_dropout": 0.125}
WINDOW = {"window_size": (64, 0)}


@each(
    "fields, expected",
    [
        ({"cp_size": 4, "max_seqlen_q": 4100}, {"CP001"}),
        ({"cp_size": 4, "attn_mask_type": "no_mask", "max_seqlen_q": 4100}, set()),
        ({**BY_HEADS, "num_heads": 16, "num_gqa_groups": 2}, {"CP004"}),
        ({**BOTH, "num_heads": 18, "num_gqa_groups": 2}, set()),
        ({**BOTH, "num_heads": 9}, {"CP004"}),
        ({"cp_size": 4, "num_heads": 9, "num_gqa_groups": 3}, set()),
        # dropout where the diagonal moves
        (DROPOUT, set()),
        ({**DROPOUT, "max_seqlen_kv": 2048}, {"CP015"}),  # the bound would move below 0
        ({**DROPOUT, **WINDOW}, {"CP015"}),
        ({**DROPOUT, **WINDOW, "max_seqlen_kv": 4096}, set()),
    ],
)
def test_what_triton_cannot(codes, fields, expected):
    assert {code for code in codes("triton", H100, **fields) if code.startswith("CP")} == expected


@each(
    "fields, code",
    [
        ({"window_size": (128, 0)}, "CP006"),
        ({"attention_dropout": 0.125}, "CP008"),
        ({"max_seqlen_q": 2048, "max_seqlen_kv": 4096}, "CP010"),
        ({"core_attention_bias_type": "alibi"}, "CP012"),
    ],
)
def test_what_needs_offsets_is_for_triton_and_tiled(codes, fields, code):
    assert all(code in codes(name, H100, cp_size=2, **fields) for name in NO_OFFSETS)
    assert not any(code in codes(name, H100, cp_size=2, **fields) for name in ("triton", "tiled"))


@each(
    "length, expected",
    [
        (16534, {"CP001", "CP020"}),  # not even divisible by 2 * cp_size
        (16576, {"CP020"}),  # chunks of 4144, which is no multiple of 64
        (16640, set()),
    ],
)
def test_cudnn_8_wants_chunks_of_64_and_the_way_out_of_issue_1051_is_16640(findings, length, expected):
    issue = {"batch_size": 48, "num_heads": 18, "head_dim_qk": 128, "cp_size": 2, "max_seqlen_q": length}
    found = findings("cudnn", Environment.describe("H100", cudnn="8.9.7"), **issue)
    assert {code for code in found if code.startswith("CP")} == expected
    if "CP020" in found:
        assert list(found["CP020"].required.repairs(length)) == [16640]

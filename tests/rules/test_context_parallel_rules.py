"""Context parallelism, as a specification of what it supports."""

from __future__ import annotations

from attnsel.environment import Environment
from tables import each

H100 = Environment.describe(gpu="H100", torch="2.13.0")
OLD = Environment.describe(gpu="H100", cudnn="8.9.7")
ALL = ("cudnn", "triton", "sdpa.cudnn", "sdpa.flash", "sdpa.efficient", "sdpa.math", "tiled")
NO_OFFSETS = tuple(name for name in ALL if name not in ("triton", "tiled"))


def cp(codes, candidate, **fields):
    return {code for code in codes(candidate, H100, **{"cp_size": 2, **fields}) if code.startswith("CP")}


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
    found = {code: f for code, f in findings("cudnn", OLD, **issue).items() if code.startswith("CP")}
    assert set(found) == expected
    if "CP020" in found:
        assert list(found["CP020"].required.repairs(length)) == [16640]


@each("candidate", ["triton", "tiled", "sdpa.flash"])
@each(
    "fields, expected",
    [
        ({"cp_size": 4, "max_seqlen_q": 4100}, {"CP001"}),
        ({"cp_size": 4, "max_seqlen_q": 4104}, set()),
        ({"cp_size": 4, "attn_mask_type": "no_mask", "max_seqlen_q": 4100}, set()),
        ({"cp_size": 4, "attn_mask_type": "no_mask", "max_seqlen_q": 4102}, {"CP002"}),
        ({"cp_comm_type": "all_gather", "attn_mask_type": "no_mask", "max_seqlen_q": 4098}, {"CP003"}),
        ({"cp_comm_type": "all_gather", "max_seqlen_q": 4100}, set()),
    ],
)
def test_lengths(codes, candidate, fields, expected):
    assert cp(codes, candidate, **fields) == expected


@each(
    "comm, heads, groups, refused",
    [
        ("a2a", 16, 4, False),
        ("a2a", 18, 18, True),
        ("a2a", 16, 2, True),
        ("a2a+p2p", 18, 2, False),
        ("a2a+p2p", 9, 9, True),
        ("p2p", 9, 3, False),
    ],
)
def test_heads(codes, comm, heads, groups, refused):
    fields = {"cp_size": 4, "cp_comm_type": comm, "num_heads": heads, "num_gqa_groups": groups}
    assert ("CP004" in cp(codes, "triton", **fields)) is refused


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
    assert all(code in cp(codes, name, **fields) for name in NO_OFFSETS)
    assert cp(codes, "triton", **fields) == cp(codes, "tiled", **fields) == set()


@each(
    "fields, refused",
    [
        ({}, False),
        ({"max_seqlen_kv": 2048}, True),  # the bound would move below 0
        ({"window_size": (64, 0)}, True),
        ({"core_attention_bias_type": "alibi"}, True),
        ({"window_size": (64, 0), "max_seqlen_kv": 4096}, False),
        ({"attention_dropout": 0.0, "window_size": (64, 0)}, False),
        ({"cp_comm_type": "a2a", "window_size": (64, 0)}, False),
    ],
)
def test_dropout_where_the_diagonal_moves(codes, fields, refused):
    asked = {
        "attention_dropout": 0.125,
        "attn_mask_type": "causal_bottom_right",
        "max_seqlen_q": 4096,
        "max_seqlen_kv": 8192,
        **fields,
    }
    assert ("CP015" in cp(codes, "triton", **asked)) is refused

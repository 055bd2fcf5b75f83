"""cuDNN graphs as plain descriptions: what each feature of a call becomes, and what the frontend is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import emulated_cudnn
from attnsel.backends.cudnn.build import declare
from attnsel.backends.cudnn.call import Strided, planned
from attnsel.backends.cudnn.graph import UIDS, Graph, backward, forward
from attnsel.backends.cudnn.words import engine_refusals, in_short
from attnsel.errors import UnsupportedArgument
from attnsel.params import AttentionParams
from tables import each

SMALL = {"batch_size": 2, "num_heads": 4, "max_seqlen_q": 8, "head_dim_qk": 16, "attn_mask_type": "no_mask"}


def call(**fields):
    return planned(AttentionParams(**{**SMALL, **fields}))


def told(graph):
    """What the frontend was told: the function's keywords, with tensors by name."""
    made = declare(graph, emulated_cudnn, device_property="a GPU", sm_version=90)
    assert (made.node, made.how["device_property"], made.how["sm_version"]) == (graph.node, "a GPU", 90)
    assert "handle" not in made.how
    return {k: v.name if isinstance(v, emulated_cudnn.Tensor) else v for k, v in made.given.items()}


@each(
    "layout, q, k",
    [
        ("bshd", (512, 16, 64, 1), (512, 16, 64, 1)),
        ("sbhd", (64, 16, 128, 1), (64, 16, 128, 1)),
        ("bhsd", (512, 128, 16, 1), (512, 128, 16, 1)),
        ("bs3hd", (1536, 16, 192, 1), (1536, 16, 192, 1)),
        ("bsh3d", (1536, 48, 192, 1), (1536, 48, 192, 1)),
        ("sb3hd", (192, 16, 384, 1), (192, 16, 384, 1)),
        ("bshd_bs2hd", (512, 16, 64, 1), (1024, 16, 128, 1)),
        ("sbhd_sbh2d", (64, 16, 128, 1), (128, 32, 256, 1)),
        ("sbhd_bshd_bshd", (64, 16, 128, 1), (512, 16, 64, 1)),
    ],
)
def test_strides_follow_the_layout(layout, q, k):
    graph = forward(call(qkv_layout=layout))
    assert [graph.tensor(name).strides for name in "qkv"] == [q, k, k]
    assert {graph.tensor(name).dims for name in "qkvo"} == {(2, 4, 8, 16)}


def test_specs_of_tensors_win_over_the_layout_and_gradients_get_memory_of_their_own():
    spec = {"shape": (2, 8, 4, 16), "stride": (1024, 128, 16, 1)}
    graph = forward(call(tensors={"k": spec}))
    assert graph.tensor("k").strides == (1024, 16, 128, 1)
    assert graph.tensor("q").strides == (512, 16, 64, 1)
    one = call(qkv_layout="bs3hd")
    assert backward(one).tensor("dQ").strides == (512, 16, 64, 1)
    assert backward(replace(one, dq=one.q)).tensor("dQ").strides == (1536, 16, 192, 1)


def test_packed_sequences_have_offsets_in_elements():
    graph = forward(call(qkv_layout="thd", attn_mask_type="padding", num_gqa_groups=2, head_dim_v=8))
    by_name = {offsets.name: offsets for offsets in graph.ragged}
    found = {name: by_name[graph.tensor(name).ragged] for name in "qkvo"}
    assert {name: offsets.unit for name, offsets in found.items()} == {"q": 64, "k": 32, "v": 16, "o": 32}
    assert [found[name].side for name in "qkvo"] == ["q", "kv", "kv", "q"]
    assert {offsets.entries for offsets in graph.ragged} == {3}
    for rows, dtype in (((1 << 24) - 1, "int32"), (1 << 24, "int64")):  # the last one is two to the 31
        long = call(qkv_layout="thd", attn_mask_type="padding", max_seqlen_q=rows, is_training=False)
        assert {offsets.dtype for offsets in forward(long).ragged} == {dtype}
    mixed = forward(call(qkv_layout="thd_bshd_bshd", attn_mask_type="padding"))
    assert mixed.tensor("q").ragged
    assert not mixed.tensor("k").ragged


def test_determinism_is_the_backwards_matter():
    """What numbers do not show: the rest of half precision is held by test_run.py."""
    assert told(backward(call(deterministic=True)))["use_deterministic_algorithm"] is True
    assert "use_deterministic_algorithm" not in told(forward(call(deterministic=True)))
    assert "use_deterministic_algorithm" not in told(backward(call()))


def test_pages_are_pools_with_a_table_for_each():
    fields = {"kv_cache": "paged", "page_size": 4, "is_training": False, "attn_mask_type": "padding"}
    graph = forward(call(qkv_layout="paged_kv_bshd_bshd_bshd", max_seqlen_kv=30, num_gqa_groups=2, **fields))
    assert graph.tensor("k")[2:4] == ((16, 2, 4, 16), (128, 16, 32, 1))
    assert graph.tensor("paged_attention_k_table").dims == (2, 1, 8, 1)
    keywords = told(graph)
    assert keywords["paged_attention_v_table"] == "paged_attention_v_table"
    assert keywords["paged_attention_max_seq_len_kv"] == 30


# FP8.


def recipe(kind, **more):
    return {"fp8": True, "fp8_meta": {"recipe": {"kind": kind, "fp8_dpa": True, **more}}}


@each(
    "kind, style, out, dout, grad",
    [
        ("delayed", "HYBRID", "fp8_e4m3", "fp8_e5m2", "fp8_e5m2"),
        ("delayed", "E4M3", "fp8_e4m3", "fp8_e4m3", "fp8_e4m3"),
        ("current", "HYBRID", "bf16", "fp8_e5m2", "bf16"),
        ("current", "E4M3", "bf16", "fp8_e4m3", "bf16"),
        ("mxfp8", "HYBRID", "bf16", "fp8_e5m2", "bf16"),
        ("mxfp8", "E4M3", "bf16", "fp8_e4m3", "bf16"),
    ],
)
def test_results_and_gradients_have_the_recipes_format(kind, style, out, dout, grad):
    one = call(**recipe(kind, fp8_format=style), attn_mask_type="causal")
    fwd, bwd = forward(one), backward(one)
    node = "sdpa_mxfp8" if kind == "mxfp8" else "sdpa_fp8"
    assert (fwd.node, bwd.node) == (node, f"{node}_backward")
    assert (fwd.tensor("q").dtype, fwd.tensor("o").dtype) == ("fp8_e4m3", out)
    assert (bwd.tensor("dO").dtype, bwd.tensor("dQ").dtype) == (dout, grad)
    assert told(fwd)["diagonal_band_right_bound" if kind == "mxfp8" else "right_bound"] == 0
    assert told(bwd)["right_bound"] == 0
    if kind == "mxfp8":
        assert {"q_T", "descale_dO_T", "o_f16"} <= told(bwd).keys()
    else:
        assert fwd.tensor("scale_s").dims == bwd.tensor("descale_dP").dims == (1, 1, 1, 1)
        assert {"descale_q", "descale_dO", "scale_dV"} <= told(bwd).keys()


MXFP8 = {**recipe("mxfp8"), "head_dim_qk": 192, "head_dim_v": 96, "max_seqlen_q": 200, "max_seqlen_kv": 1100}


def test_block_scales_lie_along_what_is_summed_over_in_whole_tiles():
    graph = forward(call(**MXFP8, num_gqa_groups=2))
    # q and k: 192 / 32 scales in a row, of 4 or 8; v: 1100 / 32 scales in a column, up to 36.
    assert graph.tensor("descale_q").dims == (2, 4, 256, 8)
    assert graph.tensor("descale_k").dims == (2, 2, 1152, 8)
    assert graph.tensor("descale_v").dims == (2, 2, 36, 128)
    for name in ("descale_q", "descale_k", "descale_v"):
        assert graph.tensor(name)[4:] == ("fp8_e8m0", "", "F8_128x4")
    assert [t.name for t in graph.outputs] == ["o", "stats", "amax_o"]
    made = declare(graph, emulated_cudnn, device_property="a GPU", sm_version=100)
    assert made.tensors["descale_q"].reordering_type is emulated_cudnn.tensor_reordering.F8_128x4
    assert made.tensors["q"].reordering_type is None


def test_a_block_scaled_backward_reads_q_k_and_dout_twice():
    graph = backward(call(**MXFP8, num_gqa_groups=2, dtype="fp16"))
    dims = {tensor.name: tensor.dims for tensor in graph.inputs}
    assert dims["q_T"] == dims["q"] == (2, 4, 200, 192)
    assert dims["dO_T"] == dims["dO"] == dims["dO_f16"] == dims["o_f16"] == (2, 4, 200, 96)
    assert (dims["descale_q"], dims["descale_q_T"]) == ((2, 4, 256, 8), (2, 4, 8, 256))
    assert (dims["descale_k"], dims["descale_k_T"]) == ((2, 2, 1152, 8), (2, 2, 36, 256))
    assert dims["descale_v"] == (2, 2, 1152, 4)  # along d here: dP sums over it
    assert (dims["descale_dO"], dims["descale_dO_T"]) == ((2, 4, 256, 4), (2, 4, 8, 128))
    assert {graph.tensor(name).dtype for name in ("o_f16", "dO_f16", "dQ", "dK", "dV")} == {"fp16"}
    assert not {"o", "scale_s"} & dims.keys()


def test_words_that_a_frontend_does_not_know_are_named():
    graph = forward(call(**recipe("mxfp8"), attn_mask_type="padding"))
    words = "sdpa_mxfp8 of cudnn-frontend .* does not take seq_len_q, seq_len_kv, use_padding_mask$"
    with pytest.raises(UnsupportedArgument, match=words):
        told(graph)


@each(
    "fields",
    [
        {"attn_mask_type": "arbitrary"},
        {"softcap": 30.0},
        {"core_attention_bias_type": "pre_scale_bias"},
        {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (4,)},
        {"cp_size": 2},
        {"qkv_layout": "bsh3d", "num_gqa_groups": 2},
        {"fp8_meta": None, "dtype": "fp8_e4m3"},
        {"fp8_meta": {"recipe": "delayed"}, "dtype": "fp8_e4m3"},
        recipe("block"),
        {"core_attention_bias_type": "post_scale_bias", **recipe("delayed")},
        {"core_attention_bias_type": "alibi", "attn_mask_type": "causal", **recipe("delayed")},
        recipe("mxfp8", fp8_mha=True),
        {"attention_dropout": 0.1, **recipe("mxfp8")},
        {"return_max_logit": True, **recipe("mxfp8")},
    ],
)
def test_what_cannot_be_expressed_is_said(fields):
    with pytest.raises(UnsupportedArgument, match=rf"^({'|'.join(fields)}): "):
        call(**fields)


EVERYTHING = {
    "attn_mask_type": "padding_causal",
    "qkv_layout": "thd",
    "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias_requires_grad": True,
    "attention_dropout": 0.1,
    "softmax_type": "learnable",
    "window_size": (3, 0),
    "deterministic": True,
}


def test_json_and_back_without_loss():
    for make in (forward, backward):
        graph = make(call(**EVERYTHING))
        again = Graph.from_dict(json.loads(json.dumps(graph.as_dict())))
        assert (again, hash(again), again.key()) == (graph, hash(graph), graph.key())


def test_whatever_is_baked_in_makes_another_key():
    one = call()
    for name in ("q", "k", "v", "out"):
        tensor = getattr(one, name)
        for axis in range(4):
            strides = tuple(s + 8 * (i == axis) for i, s in enumerate(tensor.strides))
            other = replace(one, **{name: Strided(tensor.dims, strides)})
            assert other != one
            assert backward(other).key() != backward(one).key()
            assert forward(other).key() != forward(one).key()
    for change in (
        {"dtype": "fp16"}, {"softmax_scale": 0.3}, {"window_left": 4}, {"dropout": 0.1}, {"need_grad": False},
    ):  # fmt: skip
        assert forward(replace(one, **change)).key() != forward(one).key()


def test_uids_are_the_same_in_every_graph_and_results_are_declared_with_their_layout() -> None:
    for make in (forward, backward):
        made = declare(make(call(**EVERYTHING)), emulated_cudnn, handle="h")
        uids = {name: tensor.uid for name, tensor in made.tensors.items()}
        assert all(uids[name] == UIDS[name] for name in uids if name in UIDS)
        assert len(set(uids.values())) == len(uids)
    graph = forward(call(qkv_layout="thd", attn_mask_type="padding"))
    made = declare(graph, emulated_cudnn, handle="h")
    out, stats = made.results
    assert (out.output, out.uid, out.data_type, out.dim) == (True, UIDS["o"], "BFLOAT16", [2, 4, 8, 16])
    assert out.ragged_offset is made.tensors[graph.tensor("o").ragged]
    assert (stats.data_type, stats.stride) == ("FLOAT", [32, 8, 1, 1])
    assert made.how["handle"] == "h"
    assert "device_property" not in made.how


REFUSAL = """No valid engine configs for ____
{"engineId":1,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT; Reason: too much shared memory at: exceeds(x)
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()

{"engineId":2,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only Blackwell is supported at: !x
{"engineId":3,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only Blackwell is supported at: !y
"""


def test_each_engine_has_its_own_reason_and_a_refusal_is_told_in_a_line():
    found = engine_refusals(REFUSAL)
    assert [(r.engine, r.arch) for r in found] == [(1, 90), (2, 90), (3, 90)]
    assert found[0].status == "NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT"
    assert found[0].reason == "too much shared memory"
    assert in_short(REFUSAL) == (
        "no engine takes it (engine 1: too much shared memory; engine 2, 3: only Blackwell is supported)"
    )
    assert in_short("hidden_dim should be\tmultiple of 8\nmore") == "hidden_dim should be multiple of 8"

"""cuDNN graphs as plain descriptions: what makes another graph, and the words of a refusal.

What each feature, layout and recipe becomes, and what the frontend is told of it, is held by
test_recorded.py, and what it means by test_run.py.
"""

from __future__ import annotations

from dataclasses import replace

import emulated_cudnn
from attnsel.backends.cudnn.build import declare
from attnsel.backends.cudnn.candidate import engine_refusals, in_short, log_in_short
from attnsel.backends.cudnn.graph import Strided, backward, forward, planned
from attnsel.params import AttentionParams

SMALL = {"batch_size": 2, "num_heads": 4, "max_seqlen_q": 8, "head_dim_qk": 16, "attn_mask_type": "no_mask"}


def call(**fields):
    return planned(AttentionParams(**{**SMALL, **fields}))


def test_block_scales_lie_along_what_is_summed_over_in_whole_tiles():
    """By definition, of 32 numbers each, in tiles of 128 by 4: rows of q and k for QK^T, columns of v for PV;
    in the backward dP sums over v's rows."""
    fields = {"head_dim_qk": 192, "head_dim_v": 96, "max_seqlen_q": 200, "max_seqlen_kv": 1100}
    fp8 = {"fp8": True, "fp8_meta": {"recipe": {"kind": "mxfp8", "fp8_dpa": True}}}
    one = call(**fields, **fp8, num_gqa_groups=2)
    for graph, v in ((forward(one), (36, 128)), (backward(one), (1152, 4))):
        found = [graph.tensor(f"descale_{name}").dims for name in "qkv"]
        assert found == [(2, 4, 256, 8), (2, 2, 1152, 8), (2, 2, *v)]


def test_gradients_get_memory_of_their_own_or_what_is_said():
    one = call(qkv_layout="bs3hd")
    assert backward(one).tensor("dQ").strides == (512, 16, 64, 1)
    assert backward(replace(one, dq=one.q)).tensor("dQ").strides == (1536, 16, 192, 1)


def test_a_graph_for_a_handle_says_nothing_of_a_device():
    made = declare(forward(call()), emulated_cudnn, handle="h")
    assert made.how["handle"] == "h"
    assert "device_property" not in made.how
    assert all(result.output for result in made.results)


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


REFUSAL = """No valid engine configs for ____
{"engineId":1,"smVersion":900,"knobChoices":{"CUDNN_KNOB_TYPE_KERNEL_CFG":-1}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT; Reason: too much shared memory at: exceeds(x)
Warning: CUDNN_STATUS_NOT_SUPPORTED; Reason: ptr->isSupported()

{"engineId":2,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only Blackwell is supported at: !x
{"engineId":3,"smVersion":900,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only Blackwell is supported at: !y
"""
# Of another GPU, and of a choice that was not made: said where nothing else is known.
OTHERS = """No valid engine configs for Matmul_
{"engineId":8,"smVersion":800,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN; Reason: KERNEL_CFG knob must be set at: kcfg_idx < 0
Warning: CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN; Reason: process_knob_choices()
{"engineId":9,"smVersion":800,"knobChoices":{}}
Warning: CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH; Reason: only Hopper is supported for this engine at: arch
"""
TELLING = '{"engineId":4,"smVersion":800}\nWarning: CUDNN_STATUS_NOT_SUPPORTED; Reason: d too large at: d\n'
FOUR = "".join(
    f'{{"engineId":{n},"smVersion":800}}\nCUDNN_STATUS_NOT_SUPPORTED; Reason: {n} odd at: n\n'
    for n in range(1, 5)
)


def test_each_engine_has_its_own_reason_and_a_refusal_is_told_in_a_line():
    """Messages as libcudnn 9.28.0 writes them."""
    found = engine_refusals(REFUSAL)
    assert [(r.engine, r.arch) for r in found] == [(1, 90), (2, 90), (3, 90)]
    assert found[0].status == "NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT"
    assert found[0].reason == "too much shared memory"
    for text, short in (
        (REFUSAL, "(engine 1: too much shared memory; engine 2, 3: only Blackwell is supported)"),
        (OTHERS + TELLING, "(engine 4: d too large; 2 more)"),
        (FOUR, "(engine 1: 1 odd; engine 2: 2 odd; engine 3: 3 odd; 1 more)"),
        (FOUR.replace("4 odd", "3 odd"), "(engine 1: 1 odd; engine 2: 2 odd; engine 3, 4: 3 odd)"),
        (
            OTHERS,
            "(engine 8: KERNEL_CFG knob must be set; engine 9: only Hopper is supported for this engine)",
        ),
    ):
        assert in_short(text) == f"no engine takes it {short}"
    assert in_short("hidden_dim should be\tmultiple of 8\nmore") == "hidden_dim should be multiple of 8"
    logged = ["E! function a()", *FOUR.splitlines(), "function b()", "E! function a()"]
    assert log_in_short(logged) == "1 odd; 2 odd; 3 odd; in a, b"
    assert log_in_short(logged[1:3]) == "1 odd"

"""FP16/BF16/FP32 attention in cuDNN 9.8 and newer: all but what training alone needs.

Sources as in ``since_9_8_masks``, which has masks and windows; for training see ``since_9_8_backward``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.words import (
    AMPERE_ADA,
    BLACKWELL,
    BLACKWELL_THOR,
    CONSUMER_BLACKWELL,
    HOPPER,
    PACKED,
    PAGED,
    beyond_128,
)
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, AtMost, FreeText, Multiple, OneOf

rule = rules_about("cudnn", fp8=False, when=SINCE_9_8)
asked = rules_about("cudnn", fp8=False, when=SINCE_9_8, evidence="library")


FP32 = {"dtype": "fp32", "is_training": False}
FP8 = {"dtype": "fp8_e4m3"}


# The library and the device.


@rule("CUDNN001", when=cudnn("==9.10.0", "==9.10.1"), requires={"cudnn": NEWER}, fires_on={}, passes=FP8)
def broken_releases(p: AttentionParams, env: Environment) -> None:
    """cuDNN 9.10.0 and 9.10.1 are blocked for attention

    Why: known bugs of these two releases.
    Fix: cuDNN 9.10.2.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("not supported on cuDNN 9.10.0/9.10.1 due to known
    bugs"); TransformerEngine v2.18, fused_attn.cpp, refuses them too.
    """


@asked("CUDNN002", requires={"arch": AtLeast(80)}, fires_on={"gpu": "T4"}, passes={"gpu": "A100"})
def needs_ampere(p: AttentionParams, env: Environment) -> None:
    """Fused attention needs an Ampere GPU (sm80) or newer

    Fix: another candidate; on these cards triton, sdpa.efficient and tiled are left.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("requires SM80").
    """


# Element types.


@asked("CUDNN003", requires={"dtype": OneOf("bf16", "fp16")}, fires_on={"dtype": "fp64"})
def double_precision(p: AttentionParams, env: Environment) -> bool:
    """There is no FP64 attention

    Fix: bf16 or fp16; sdpa.math and tiled take fp64.
    Source: libcudnn, asked.
    """
    return p.dtype == "fp64"


@asked("CUDNN150", when=cudnn(">=9.8.0,<9.9.0"), requires={"dtype": OneOf("bf16", "fp16")}, fires_on=FP32)
def fp32_from_9_9(p: AttentionParams, env: Environment) -> bool:
    """FP32 inference needs cuDNN 9.9.0

    Fix: bf16 or fp16; or cuDNN 9.9.0.
    Source: libcudnn, asked.
    """
    return p.dtype == "fp32"


@asked(
    "CUDNN151",
    when=cudnn(">=9.9.0,<9.10.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={**FP32, "head_dim_qk": 160},
    passes=FP32,
)
def fp32_head_dim_9_9(p: AttentionParams, env: Environment) -> bool:
    """In cuDNN 9.9 FP32 inference ends at head dimension 128

    Fix: bf16 or fp16; or cuDNN 9.10.2.
    Source: libcudnn, asked.
    """
    return p.dtype == "fp32"


@asked(
    "CUDNN152",
    when=(cudnn(">=9.26.0"), cudnn_frontend("<1.27.0")),
    requires={"dtype": OneOf("bf16", "fp16")},
    fires_on=FP32,
)
def fp32_and_older_frontend(p: AttentionParams, env: Environment) -> bool:
    """From cuDNN 9.26 on FP32 inference needs cudnn-frontend 1.27

    Why: older frontends send FP32 to the newer of two implementations, which takes it no longer.
    Fix: cudnn-frontend 1.27 or newer; or bf16, fp16.
    Source: libcudnn, asked.
    """
    return p.dtype == "fp32"


_FP32_HEAD_DIM = {80: 256, 87: 256, 86: 128, 89: 128, 120: 128, 121: 128}


@asked("CUDNN153", when=cudnn(">=9.10.2"), fires_on={**FP32, "head_dim_qk": 512}, passes=FP32)
def fp32_head_dim(p: AttentionParams, env: Environment) -> Violation | None:
    """FP32 inference ends at a head dimension that depends on the GPU

    Why: the limits follow the shared memory of a block: 128 columns of queries and keys on sm86, sm89 and
    sm12x, 256 on sm80 and sm87, 384 on sm90, sm10x and sm110.
    Fix: bf16 or fp16.
    Source: libcudnn, asked. Without mask, bias and window some releases accept more through the other
    implementation; those few are refused here too.
    """
    if p.dtype != "fp32":
        return None
    return limit(p, "head_dim_qk", AtMost(_FP32_HEAD_DIM.get(env.arch or 0, 384)))


# Head dimensions.


@asked("CUDNN005", requires={"head_dim_qk": Multiple(8)}, fires_on={"head_dim_qk": 100, "head_dim_v": 128})
def head_dim_qk_multiple(p: AttentionParams, env: Environment) -> None:
    """The head dimension of queries and keys must be a multiple of 8

    Why: rows are read 16 bytes at a time.
    Fix: pad the last dimension of q and k with zeros; the scale stays that of the true dimension.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("hidden_dim should be multiple of 8").
    """


@asked("CUDNN006", requires={"head_dim_v": Multiple(8)}, fires_on={"head_dim_v": 100})
def head_dim_v_multiple(p: AttentionParams, env: Environment) -> None:
    """The head dimension of values must be a multiple of 8

    Why: rows are read 16 bytes at a time.
    Fix: pad the last dimension of v with zeros and drop the same columns of the output.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("hidden_dim should be multiple of 8").
    """


@asked(
    "CUDNN160",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=AMPERE_ADA,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "is_training": False},
)
def head_dim_ampere(p: AttentionParams, env: Environment) -> None:
    """On Ampere and Ada the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h.
    """


@asked(
    "CUDNN161",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 512, "is_training": False},
    passes={"head_dim_qk": 256},
)
def head_dim_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper the head dimension is at most 256 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h.
    """


@asked(
    "CUDNN162",
    when=cudnn(">=9.8.0,<9.9.0"),
    arch=BLACKWELL_THOR,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "is_training": False},
)
def head_dim_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell the head dimension is at most 128 in cuDNN 9.8

    Fix: cuDNN 9.9.0 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h.
    """


@asked(
    "CUDNN163",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=CONSUMER_BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "is_training": False},
)
def head_dim_consumer_blackwell(p: AttentionParams, env: Environment) -> None:
    """On sm120 the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: libcudnn, asked.
    """


@asked(
    "CUDNN164",
    when=cudnn(">=9.9.0,<9.10.0"),
    arch=BLACKWELL_THOR,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={
        "head_dim_qk": 192,
        "is_training": False,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "attn_mask_type": "no_mask",
    },
    passes={"head_dim_qk": 192, "is_training": False},
)
def head_dim_one_query(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell in cuDNN 9.9 a single query ends at head dimension 128

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("decode only mode … for backend version 9.9 or
    below").
    """
    return p.max_seqlen_q == 1


@asked(
    "CUDNN165",
    when=cudnn(">=9.13.0"),
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "attention_dropout": 0.1,
    },
    passes={"head_dim_qk": 192, "head_dim_v": 128, "attention_dropout": 0.1},
)
def one_query_wide_dropout(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell one query above head dimension 128 takes no dropout

    Fix: attention_dropout=0.0.
    Source: libcudnn, asked.
    """
    return p.max_seqlen_q == 1 and p.dropout and beyond_128(p)


# Strides, packed (thd) layouts and paged caches. What training with packed sequences needs beyond this is in
# ``since_9_8_backward_modes``.


@rule(
    "CUDNN007",
    fp8="both",
    fires_on={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 1, 524288, 4096)}}},
    passes={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 2048, 128, 1)}}},
)
def innermost_stride(p: AttentionParams, env: Environment) -> Violation | None:
    """The head dimension must be the innermost one of q, k and v

    Fix: .contiguous() on the tensor named, or lay it out with the head dimension last.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("The stride for the last dimension …
    should be 1").
    """
    for name in ("q", "k", "v"):
        spec = getattr(p.tensors, name)
        if spec is not None and spec.last_stride != 1:
            return Violation(f"tensors.{name}", spec.stride, FreeText("an innermost stride of 1"))
    return None


@asked("CUDNN170", fp8=False, when=cudnn(">=9.8.0,<9.18.1"), arch=AMPERE_ADA, fires_on=PACKED)
def packed_ampere(p: AttentionParams, env: Environment) -> Violation | None:
    """On Ampere and Ada packed sequences (thd) need cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer; or bshd with a padding mask.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("THD (ragged offset) is only supported in Hopper and
    above").
    """
    if p.qkv_format == "thd":
        return Violation("qkv_layout", p.qkv_layout, FreeText("bshd, sbhd or bhsd"))
    return None


@asked("CUDNN171", fp8="both", fires_on={**PAGED, "attn_mask_type": "causal"}, passes=PAGED)
def paged_padding(p: AttentionParams, env: Environment) -> Violation | None:
    """A paged cache needs a padding mask, for the length of each sequence

    Fix: padding, padding_causal or padding_causal_bottom_right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged caches can only be used in combination with
    padding mask").
    """
    if p.layout.paged and not p.padding:
        wanted = "padding" if p.attn_mask_type == "no_mask" else f"padding_{p.attn_mask_type}"
        return Violation("attn_mask_type", p.attn_mask_type, OneOf(wanted))
    return None


@asked("CUDNN172", fp8="both", fires_on={**PAGED, "page_size": 48}, passes=PAGED)
def page_size_power(p: AttentionParams, env: Environment) -> Violation | None:
    """Pages hold a power of two of tokens

    Fix: another page size; 1 to 256 were accepted.
    Source: cudnnBackendFinalize ("block size needs to be non-zero and a power of 2").
    """
    if p.page_size is not None and p.page_size & (p.page_size - 1):
        return Violation("page_size", p.page_size, OneOf(1 << p.page_size.bit_length()))
    return None


@asked(
    "CUDNN173",
    fp8=False,
    when=cudnn(">=9.8.0,<9.10.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={**PAGED, "head_dim_qk": 192},
    passes=PAGED,
)
def paged_head_dim(p: AttentionParams, env: Environment) -> bool:
    """With a paged cache the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged attention only supported with d_qk and d_v <=
    128").
    """
    return p.layout.paged


# Bias, ALiBi, sinks, dropout, the largest score.


SINK = {"softmax_type": "learnable"}
ALIBI = {"core_attention_bias_type": "alibi"}


@rule(
    "CUDNN020",
    requires={"core_attention_bias_type": OneOf("post_scale_bias")},
    fires_on={"core_attention_bias_type": "pre_scale_bias"},
    passes={"core_attention_bias_type": "post_scale_bias"},
)
def bias_before_scale(p: AttentionParams, env: Environment) -> bool:
    """A bias is added after the softmax scale, never before it

    Fix: multiply the bias by the softmax scale and give it as post_scale_bias.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h: the bias follows attn_scale.
    """
    return p.core_attention_bias_type == "pre_scale_bias"


@asked("CUDNN021", fires_on={"attn_mask_type": "no_mask", **ALIBI}, passes=ALIBI)
def alibi_without_causal(p: AttentionParams, env: Environment) -> Violation | None:
    """ALiBi needs a right bound of 0

    Why: slopes are applied to the distance to keys in the past.
    Fix: a causal mask type, or the ALiBi values as post_scale_bias.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("diagonal_band_right_bound needs to be set to 0").
    """
    if p.core_attention_bias_type == "alibi" and p.window_size[1] != 0:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("a causal mask type"))
    return None


@rule(
    "CUDNN022",
    fp8="both",
    requires={"alibi_slopes_shape": OneOf(None)},
    note="the usual slopes are implied",
    fires_on={**ALIBI, "alibi_slopes_shape": (16,)},
    passes=ALIBI,
)
def alibi_slopes(p: AttentionParams, env: Environment) -> None:
    """ALiBi slopes cannot be given: they are computed from the number of heads

    Fix: leave the slopes out where they are the usual ones; else give a post_scale_bias.
    Source: cudnn-frontend 1.23, pygraph.sdpa: use_alibi_mask is a flag, the slopes are made inside.
    """


@rule("CUDNN023", requires={"softcap": OneOf(0.0)}, fires_on={"softcap": 30.0})
def soft_cap(p: AttentionParams, env: Environment) -> None:
    """Soft-capped scores are not built here

    Why: the frontend could express them as a score function, but then refuses masks, padding and windows.
    Fix: softcap=0.0, or another candidate.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("score mod enabled and hence other subgraphs are
    disabled").
    """


@asked("CUDNN024", when=cudnn(">=9.8.0,<9.13.0"), requires={"softmax_type": OneOf("vanilla")}, fires_on=SINK)
def sink_from_9_13(p: AttentionParams, env: Environment) -> None:
    """Attention sinks need cuDNN 9.13.0

    Why: sink_token became an input of the graph with that release.
    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("sink_token is not supported before
    9.13"). TransformerEngine waits for 9.13.1.
    """


@asked(
    "CUDNN140",
    when=cudnn(">=9.13.0"),
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={**SINK, "max_seqlen_q": 1, "max_seqlen_kv": 4096},
    passes=SINK,
)
def one_query_sink(p: AttentionParams, env: Environment) -> bool:
    """A single query takes no attention sink

    Fix: decode with two query rows of which one is ignored, or another candidate.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("s_q == 1, not supported with sink_token").
    """
    return p.max_seqlen_q == 1


@asked(
    "CUDNN141",
    when=cudnn(">=9.8.0,<9.13.0"),
    requires={"return_max_logit": OneOf(False)},
    fires_on={"return_max_logit": True},
)
def max_logit_from_9_13(p: AttentionParams, env: Environment) -> None:
    """The largest score is returned from cuDNN 9.13.0 on

    Why: older engines do not return the maximum and the sum of exponents.
    Fix: cuDNN 9.13.0 or newer.
    Source: libcudnn, asked. TransformerEngine waits for 9.21.0.
    """


@asked(
    "CUDNN142",
    when=cudnn(">=9.13.0,<9.21.0"),
    requires={"return_max_logit": OneOf(False)},
    fires_on={**SINK, "return_max_logit": True},
    passes={"return_max_logit": True},
)
def max_logit_beside_sink(p: AttentionParams, env: Environment) -> bool:
    """With an attention sink the largest score is returned from cuDNN 9.21.0 on

    Fix: cuDNN 9.21.0 or newer.
    Source: libcudnn, asked.
    """
    return p.softmax_type != "vanilla"


@asked(
    "CUDNN143",
    when=cudnn("==9.13.1"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.1},
    passes={"attention_dropout": 0.1},
)
def few_queries_dropout(p: AttentionParams, env: Environment) -> bool:
    """In cuDNN 9.13.1 dropout needs more than a few queries

    Why: not known; this release alone does so, and not beside ALiBi or a sink.
    Fix: another release of cuDNN, or attention_dropout=0.0.
    Source: libcudnn, asked.
    """
    if not p.dropout or p.core_attention_bias_type == "alibi" or p.softmax_type != "vanilla":
        return False
    fewest = 2
    if env.arch in BLACKWELL:
        fewest = 65 if beyond_128(p) else 8
    return p.max_seqlen_q < fewest

"""FP8 attention in cuDNN: bias, softmax, dropout, determinism, packed layouts and caches.

Sources and the meaning of "FP8 question" as in ``fp8``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.fp8 import CUDA, DELAYED, MXFP8, bottom_right, kind_of
from attnsel.rules.cudnn.fp8_shapes import INFERENCE
from attnsel.rules.cudnn.vocabulary import BLACKWELL, HOPPER, PACKED, PAGED
from attnsel.verdicts.requirements import FreeText, OneOf
from attnsel.verdicts.verdict import Unknown, Violation

rule = rules_about("cudnn", fp8=True, device=CUDA)


def packed(p: AttentionParams) -> bool:
    return "thd" in (p.layout.q_format, p.layout.kv_format)


# Scores and softmax.


@rule(
    "CUDNN350",
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**DELAYED, "core_attention_bias_type": "post_scale_bias"},
    passes=DELAYED,
)
def no_bias(p: AttentionParams, env: Environment) -> bool:
    """FP8 attention takes no bias, and ALiBi in per-tensor inference only

    Why: neither the backward nor the block-scaled functions have an input for ALiBi.
    Fix: attention in bf16 (fp8_dpa off).
    Source: cudnn-frontend 1.23 and 1.32 ("SDPA FP8 does not support bias"); libcudnn 9.8 to 9.28 asked
    without a GPU take ALiBi in inference. TransformerEngine v2.18, fused_attn.cpp, FP8 branch, never asks for
    it and is followed below 9.8.
    """
    recent = env.cudnn is not None and env.cudnn >= (9, 8, 0)
    scaled_per_tensor = kind_of(p) in ("delayed", "current")
    alibi = p.core_attention_bias_type == "alibi"
    return not (alibi and recent and scaled_per_tensor and not p.is_training)


@rule("CUDNN351", requires={"softcap": OneOf(0.0)}, fires_on={**DELAYED, "softcap": 30.0}, passes=DELAYED)
def no_soft_cap(p: AttentionParams, env: Environment) -> None:
    """FP8 attention has no soft cap

    Fix: run this layer in bf16 on triton or tiled.
    Source: TransformerEngine d0067d0: soft capping is no parameter of its cuDNN attention.
    """


@rule(
    "CUDNN352",
    when=cudnn("<9.13.0"),
    requires={"return_max_logit": OneOf(False)},
    evidence="library",
    fires_on={**DELAYED, "return_max_logit": True},
    passes=DELAYED,
)
def no_max_logit(p: AttentionParams, env: Environment) -> None:
    """FP8 attention returns the largest score from cuDNN 9.13.0 on

    Fix: cuDNN 9.13.0 or newer, and a recipe of kind delayed or current.
    Source: libcudnn asked without a GPU refuses 9.8 and 9.10.2 and accepts 9.13 to 9.28. TransformerEngine
    v2.18, fused_attn.cpp, FP8 branch, and d0067d0, utils.py lines 757 to 765, never asks for it.
    """


@rule(
    "CUDNN353",
    when=cudnn("<9.13.0"),
    requires={"softmax_type": OneOf("vanilla")},
    evidence="library",
    fires_on={**DELAYED, "softmax_type": "learnable"},
    passes=DELAYED,
)
def sinks_from_9_13(p: AttentionParams, env: Environment) -> None:
    """Attention sinks with FP8 need cuDNN 9.13.0

    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("sink_token is not supported before
    9.13"); libcudnn asked without a GPU refuses 9.8 and 9.10.2 and accepts 9.13 to 9.28. TransformerEngine
    d0067d0, utils.py lines 1125 to 1140, waits for 9.21 and Blackwell; the library is followed.
    """


# Dropout and determinism.


@rule(
    "CUDNN355",
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    evidence="library",
    fires_on={**DELAYED, "attention_dropout": 0.1},
    passes=DELAYED,
)
def dropout_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell FP8 training takes no dropout

    Why: its backward always runs the deterministic kernels, which have none.
    Fix: no dropout.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("not supported on Blackwell when dropout is enabled");
    libcudnn 9.26 and 9.28 asked without a GPU.
    """
    return p.dropout


@rule(
    "CUDNN356",
    when=cudnn("<9.5.0"),
    arch=HOPPER,
    requires={"attention_dropout": OneOf(0.0)},
    evidence="documented",
    fires_on={**DELAYED, "attention_dropout": 0.1},
    passes=DELAYED,
)
def dropout_from_9_5(p: AttentionParams, env: Environment) -> bool:
    """Dropout with FP8 needs cuDNN 9.5.0

    Fix: cuDNN 9.5.0 or newer.
    Source: cudnn-frontend v1.8.0 release notes ("fp8 sdpa attention now allows dropout and padding mask.
    Requires cudnn 9.5.0"). TransformerEngine has no clause.
    """
    return p.dropout


@rule(
    "CUDNN357",
    when=cudnn("<9.19.0"),
    arch=HOPPER,
    requires={"deterministic": OneOf(False)},
    unknown=True,
    fires_on={**DELAYED, "deterministic": True},
    passes=DELAYED,
)
def deterministic_from_9_19(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.19.0 nobody vouches for deterministic FP8 training on Hopper

    Why: the library plans it, but the flag changes nothing in the graph that it is given; TransformerEngine
    takes the results for deterministic from 9.19.0 on.
    Fix: cuDNN 9.19.0 or newer, or bf16 attention.
    Source: TransformerEngine d0067d0, utils.py lines 1545 to 1555; cudnn-frontend 1.23, sdpa_fp8_bwd.h (the
    request is passed on for Blackwell only).
    """
    return p.is_training


@rule(
    "CUDNN358",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(100, 130),
    requires={"deterministic": OneOf(False)},
    unknown=True,
    fires_on={**INFERENCE, "deterministic": True},
    passes=INFERENCE,
)
def deterministic_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell deterministic FP8 inference is in doubt below cuDNN 9.8

    Why: a forward pass adds nothing up atomically, so TransformerEngine's refusal below 9.18 may be meant for
    training only; libraries that can be asked take it.
    Fix: cuDNN 9.8.0 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 675 to 702.
    """
    return kind_of(p) in ("delayed", "current") and not p.is_training


@rule(
    "CUDNN360",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={
        **INFERENCE,
        "attn_mask_type": "causal_bottom_right",
        "is_training": True,
        "attention_dropout": 0.1,
    },
    passes=INFERENCE,
)
def bottom_right_dropout(p: AttentionParams, env: Environment) -> bool:
    """For FP8 a bottom-right diagonal takes no dropout

    Fix: no dropout.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h and sdpa_fp8_bwd.h.
    """
    return bottom_right(p) and p.dropout


# Layouts and caches.


@rule("CUDNN361", arch=HOPPER, evidence="library", fires_on={**DELAYED, **PACKED}, passes=DELAYED)
def packed_training_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper FP8 training takes no packed sequences (thd)

    Fix: padded sequences (bshd).
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("sdpa fp8 backward with THD is not supported on Hopper
    architecture"); libcudnn 9.8 to 9.28 asked without a GPU.
    """
    if packed(p) and p.is_training:
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@rule(
    "CUDNN362",
    when=cudnn_frontend("<1.28.0"),
    arch=BLACKWELL,
    evidence="library",
    fires_on={**MXFP8, **PACKED},
    passes=MXFP8,
)
def packed_mxfp8(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 takes packed sequences (thd) from cudnn-frontend 1.28 on

    Why: they come with a padding mask, for which sdpa_mxfp8 has no input before (CUDNN367).
    Fix: cudnn-frontend 1.28, or sequences of one length.
    Source: libcudnn 9.28 asked without a GPU takes them with frontend 1.28. TransformerEngine d0067d0,
    utils.py lines 703 to 720, never asks for them; the library is followed.
    """
    if kind_of(p) == "mxfp8" and packed(p):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@rule("CUDNN363", when=cudnn("<9.8.0"), fires_on={**INFERENCE, **PACKED}, passes=DELAYED)
def packed_unused(p: AttentionParams, env: Environment) -> Unknown | None:
    """Below 9.8 nobody has seen FP8 with packed sequences (thd)

    Why: TransformerEngine gives the FP8 kernels no packed layout at any version; the frontend refuses only
    the Hopper backward (CUDNN361).
    Fix: padded sequences (bshd), or cuDNN 9.8.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch (bshd, sbhd and, from 9.21, bhsd);
    cudnn-frontend 1.32; libcudnn 9.8 to 9.28 asked without a GPU take it.
    """
    if packed(p):
        return Unknown("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@rule(
    "CUDNN364",
    when=cudnn("<9.8.0"),
    requires={"kv_cache": OneOf("none")},
    unknown=True,
    fires_on={**DELAYED, **PAGED},
    passes=DELAYED,
)
def fp8_with_cache(p: AttentionParams, env: Environment) -> None:
    """Below 9.8 nobody has seen FP8 attention over a cache

    Why: TransformerEngine never gives one to cuDNN, at any version.
    Fix: bf16 attention for decoding, or cuDNN 9.8.0 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 857 to 869; libcudnn 9.8 to 9.28 asked without a GPU
    take it.
    """


@rule(
    "CUDNN365",
    arch=BLACKWELL,
    requires={"kv_cache": OneOf("none", "contiguous")},
    fires_on={**MXFP8, **PAGED},
    passes=MXFP8,
)
def paged_mxfp8(p: AttentionParams, env: Environment) -> bool:
    """MXFP8 reads no paged cache

    Fix: a contiguous cache, or delayed scaling.
    Source: cudnn-frontend 1.20 to 1.28, sdpa_mxfp8 (no page tables); cudnn-frontend 1.32,
    scaled_dot_product_flash_attention.h lines 344 to 444.
    """
    return kind_of(p) == "mxfp8"


@rule(
    "CUDNN366",
    arch=BLACKWELL,
    requires={"return_max_logit": OneOf(False)},
    fires_on={**MXFP8, "return_max_logit": True},
    passes=MXFP8,
)
def max_logit_mxfp8(p: AttentionParams, env: Environment) -> bool:
    """MXFP8 attention does not return the largest score

    Fix: delayed or current scaling.
    Source: cudnn-frontend 1.20 to 1.28, sdpa_mxfp8 (no score_max).
    """
    return kind_of(p) == "mxfp8"


@rule(
    "CUDNN367",
    when=cudnn_frontend("<1.28.0"),
    arch=BLACKWELL,
    evidence="library",
    fires_on={**MXFP8, "attn_mask_type": "padding_causal"},
    passes=MXFP8,
)
def padded_mxfp8(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 takes a padding mask from cudnn-frontend 1.28 on

    Why: before, sdpa_mxfp8 has no input for the lengths.
    Fix: cudnn-frontend 1.28.
    Source: signatures of sdpa_mxfp8 in cudnn-frontend 1.20, 1.22, 1.23 and 1.25 to 1.28; asked with 1.28.
    """
    if kind_of(p) == "mxfp8" and p.padding:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("no_mask or causal"))
    return None

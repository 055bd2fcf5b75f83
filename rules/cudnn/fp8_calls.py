"""FP8 attention in cuDNN: head dimensions, lengths, masks, windows, layouts and the rest.

Sources and the meaning of "FP8 question" as in ``fp8``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.cudnn.fp8 import CUDA, DELAYED, MXFP8, bottom_right, kind_of
from attnsel.rules.cudnn.words import BLACKWELL, CONSUMER_BLACKWELL, HOPPER, PACKED, PAGED
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtMost, AtMostField, FreeText, Multiple, OneOf

rule = rules_about("cudnn", fp8=True, device=CUDA, passes=DELAYED)
asked = rules_about("cudnn", fp8=True, device=CUDA, passes=DELAYED, evidence="library")

INFERENCE = {**DELAYED, "is_training": False}


# Head dimensions and lengths.


@asked(
    "CUDNN320",
    requires={"head_dim_qk": Multiple(16)},
    fires_on={**DELAYED, "head_dim_qk": 72, "head_dim_v": 128},
)
def head_dim_qk_of_16(p: AttentionParams, env: Environment) -> None:
    """For FP8 the head dimension of queries and keys must be a multiple of 16

    Fix: pad q and k with zeros (keep the softmax scale of the original dimension).
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h; TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """


@asked("CUDNN321", requires={"head_dim_v": Multiple(16)}, fires_on={**DELAYED, "head_dim_v": 72})
def head_dim_v_of_16(p: AttentionParams, env: Environment) -> None:
    """For FP8 the head dimension of values must be a multiple of 16

    Fix: pad v with zeros and cut the output.
    Source: as for queries and keys (CUDNN320).
    """


@rule("CUDNN322", when=cudnn("<9.7.0"), arch=HOPPER, fires_on={**INFERENCE, "head_dim_qk": 64})
def head_dim_128_before_9_7(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.7.0 FP8 attention has head dimension 128 only

    Fix: pad to 128, or cuDNN 9.7.0 or newer for inference.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch ("9.2.1: ... d=128").
    """
    return only_128(p)


@asked(
    "CUDNN323",
    training=True,
    when=cudnn(">=9.7.0"),
    arch=HOPPER,
    fires_on={**DELAYED, "head_dim_qk": 64},
    passes={**INFERENCE, "head_dim_qk": 64},
)
def training_head_dim_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper FP8 training has head dimension 128 only

    Fix: pad to 128.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8_bwd.h ("should be equal to 128"); TransformerEngine
    v2.18, fused_attn.cpp, FP8 branch.
    """
    return only_128(p)


def only_128(p: AttentionParams) -> Violation | None:
    """An objection to a head dimension that is not 128: zeros can widen a narrower one."""
    return (
        limit(p, "head_dim_qk", AtMost(128))
        or limit(p, "head_dim_qk", Multiple(128))
        or limit(p, "head_dim_v", AtMost(128))
        or limit(p, "head_dim_v", Multiple(128))
    )


@asked(
    "CUDNN324",
    when=cudnn(">=9.7.0"),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={**INFERENCE, "head_dim_qk": 512},
    passes={**INFERENCE, "head_dim_qk": 256},
)
def head_dim_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper FP8 attention has head dimensions up to 256

    Why: the frontend refuses a wider FP8 graph before any engine sees it.
    Fix: run this layer in bf16 (fp8_dpa off).
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h; TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """


@asked(
    "CUDNN325",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    fires_on={**INFERENCE, "head_dim_qk": 256},
    passes=INFERENCE,
)
def head_dim_blackwell(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """On Blackwell FP8 has head dimensions up to 128; datacentre 192/128 too

    Why: 256/256 for inference came with 9.26 and needs a frontend newer than attnsel uses, hence unknown.
    Fix: for 192/128 cuDNN 9.19.0 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h (192/128 from 9.19; 1.32 adds 256/256 from 9.26) and
    sdpa_fp8_bwd.h. TransformerEngine v2.18 waits for 9.21 and then takes every pair up to 192/128; the
    frontend, which names 9.19 and just this pair, is followed.
    """
    found = limit(p, "head_dim_qk", AtMost(128)) or limit(p, "head_dim_v", AtMost(128))
    if found is None or env.cudnn is None:
        return None
    sizes = (p.head_dim_qk, p.head_dim_v)
    if sizes == (192, 128) and env.cudnn >= (9, 19, 0) and env.arch not in CONSUMER_BLACKWELL:
        return None
    newest = sizes == (256, 256) and not p.is_training and env.cudnn >= (9, 26, 0)
    return Unknown(*found) if newest else found


@rule(
    "CUDNN326",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    requires={"max_seqlen_q": Multiple(128)},
    fires_on={**DELAYED, "max_seqlen_q": 1000, "max_seqlen_kv": 1024},
)
def query_length_of_128(p: AttentionParams, env: Environment) -> None:
    """Below cuDNN 9.7.0 FP8 attention needs a query length multiple of 128

    Fix: pad the queries, or cuDNN 9.7.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """


@rule(
    "CUDNN327",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    requires={"max_seqlen_kv": Multiple(128)},
    fires_on={**DELAYED, "max_seqlen_q": 1024, "max_seqlen_kv": 1000},
)
def key_length_of_128(p: AttentionParams, env: Environment) -> None:
    """Below cuDNN 9.7.0 FP8 attention needs a key length multiple of 128

    Fix: cuDNN 9.7.0 or newer, which also takes a padding mask.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """


# Masks and windows.


@rule("CUDNN330", fires_on={**DELAYED, "attn_mask_type": "arbitrary"})
def no_arbitrary_mask(p: AttentionParams, env: Environment) -> Violation | None:
    """FP8 attention takes no arbitrary mask, and no bias to write one into

    Fix: attention in bf16 (fp8_dpa off).
    Source: TransformerEngine d0067d0, utils.py line 1300; cudnn-frontend 1.23 ("SDPA FP8 does not support
    bias").
    """
    if p.attn_mask_type == "arbitrary":
        return Violation("attn_mask_type", "arbitrary", FreeText("a mask type other than arbitrary"))
    return None


@rule("CUDNN331", when=cudnn("<9.7.0"), arch=HOPPER, fires_on={**DELAYED, "attn_mask_type": "padding"})
def padding_from_9_7(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """Padding masks with FP8 need cuDNN 9.7.0

    Why: the frontend announced them for 9.5.0; TransformerEngine waits for 9.7.0. In between: unknown.
    Fix: cuDNN 9.7.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch; cudnn-frontend v1.8.0 release notes ("fp8
    sdpa attention now allows dropout and padding mask. Requires cudnn 9.5.0").
    """
    if not p.padding:
        return None
    finding = Unknown if env.cudnn is not None and env.cudnn >= (9, 5, 0) else Violation
    return finding("attn_mask_type", p.attn_mask_type, FreeText("no_mask or causal"))


@asked("CUDNN332", arch=HOPPER, fires_on={**DELAYED, "attn_mask_type": "causal_bottom_right"})
def bottom_right_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper FP8 attention has no bottom-right diagonal

    Why: neither a mask's nor that of a window with a right bound, which is anchored there unless
    bottom_right_diagonal is False.
    Fix: with equal lengths and no padding the top-left diagonal is the same.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h (Blackwell and 9.7 only); TransformerEngine v2.18,
    fused_attn.cpp, FP8 branch.
    """
    if not bottom_right(p):
        return None
    if not p.bottom_right:
        return Violation("bottom_right_diagonal", True, OneOf(False))
    same = p.max_seqlen_q == p.max_seqlen_kv and not p.padding
    return Violation("attn_mask_type", p.attn_mask_type, OneOf("causal") if same else FreeText("causal"))


@rule(
    "CUDNN333",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(100, 130),
    fires_on={**INFERENCE, "attn_mask_type": "causal_bottom_right"},
    passes=INFERENCE,
)
def bottom_right_blackwell(p: AttentionParams, env: Environment) -> Unknown | None:
    """Below 9.8 nobody has seen FP8 with a bottom-right mask

    Why: the frontend takes it on Blackwell from 9.7.0 and has a sample; TransformerEngine waits for 9.21.0.
    Fix: cuDNN 9.8.0 or newer.
    Source: cudnn-frontend v1.10.0, sdpa_fp8.h and samples/cpp/sdpa/fp8_fwd_bottom_right_causal_mask.cpp;
    TransformerEngine v2.18, fused_attn.cpp, FP8 branch ("9.21").
    """
    if p.bottom_right:
        return Unknown("attn_mask_type", p.attn_mask_type, FreeText("a top-left mask"))
    return None


@asked(
    "CUDNN335",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    requires={"max_seqlen_q": AtMostField("max_seqlen_kv")},
    fires_on={**INFERENCE, "attn_mask_type": "causal_bottom_right", "max_seqlen_kv": 1024},
    passes=INFERENCE,
)
def bottom_right_more_queries(p: AttentionParams, env: Environment) -> bool:
    """For FP8 a bottom-right diagonal cannot have more queries than keys

    Why: without a padding mask, which knows the true lengths, the forward refuses; the backward always does.
    Fix: cut off the queries that see no key.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h and sdpa_fp8_bwd.h.
    """
    return bottom_right(p) and (p.is_training or not p.padding)


@asked(
    "CUDNN336",
    training=True,
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    requires={"max_seqlen_q": Multiple(64)},
    fires_on={
        **DELAYED,
        "attn_mask_type": "causal_bottom_right",
        "max_seqlen_q": 1000,
        "max_seqlen_kv": 2048,
    },
    passes={**DELAYED, "attn_mask_type": "causal_bottom_right"},
)
def bottom_right_query_length(p: AttentionParams, env: Environment) -> bool:
    """FP8 training with a bottom-right mask needs a query length multiple of 64

    Fix: pad the queries at the front.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8_bwd.h (the forward lost the clause by 1.23).
    """
    return bottom_right(p)


@asked(
    "CUDNN337",
    training=True,
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    requires={"max_seqlen_kv": Multiple(64)},
    fires_on={
        **DELAYED,
        "attn_mask_type": "causal_bottom_right",
        "max_seqlen_q": 1024,
        "max_seqlen_kv": 2000,
    },
    passes={**DELAYED, "attn_mask_type": "causal_bottom_right"},
)
def bottom_right_key_length(p: AttentionParams, env: Environment) -> bool:
    """FP8 training with a bottom-right mask needs a key length multiple of 64

    Fix: pad keys and values, masked out; or upgrade as for queries (CUDNN336).
    Source: as for queries (CUDNN336).
    """
    return bottom_right(p)


@rule(
    "CUDNN338",
    when=cudnn("<9.8.0"),
    arch=HOPPER,
    requires={"window_size": OneOf((-1, -1))},
    fires_on={**DELAYED, "window_size": (128, 0)},
)
def window_hopper(p: AttentionParams, env: Environment) -> bool:
    """On Hopper a sliding window with FP8 needs cuDNN 9.8.0

    Fix: cuDNN 9.8.0 or newer, or attention in bf16 for windowed layers.
    Source: libcudnn, asked. TransformerEngine d0067d0, utils.py lines 1344 to 1366, refuses it on Hopper at
    every version, which is followed below 9.8.
    """
    return p.windowed


@rule(
    "CUDNN339",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(100, 130),
    requires={"window_size": OneOf((-1, -1))},
    fires_on={**INFERENCE, "window_size": (128, 0)},
    passes=INFERENCE,
)
def window_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a sliding window with FP8 needs cuDNN 9.8.0

    Fix: cuDNN 9.8.0 or newer.
    Source: libcudnn, asked. TransformerEngine d0067d0, utils.py lines 1344 to 1366, waits for 9.21, which is
    followed below 9.8.
    """
    return p.windowed


@asked(
    "CUDNN340",
    training=True,
    when=cudnn(">=9.8.0"),
    arch=range(90, 130),
    requires={"max_seqlen_q": AtMostField("max_seqlen_kv")},
    fires_on={**DELAYED, "window_size": (128, 0), "max_seqlen_kv": 1024},
    passes={**DELAYED, "window_size": (128, 0)},
)
def window_more_queries(p: AttentionParams, env: Environment) -> bool:
    """FP8 training with a left bound cannot have more queries than keys

    Why: the frontend refuses the backward; a padding mask, which knows the true lengths, lifts it.
    Fix: cut off the queries that see no key.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h.
    """
    return p.window_size[0] >= 0 and not p.padding


def packed(p: AttentionParams) -> bool:
    return "thd" in (p.layout.q_format, p.layout.kv_format)


# Scores and softmax.


@rule(
    "CUDNN350",
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**DELAYED, "core_attention_bias_type": "post_scale_bias"},
)
def no_bias(p: AttentionParams, env: Environment) -> bool:
    """FP8 attention takes no bias, and ALiBi in per-tensor inference only

    Why: neither the backward nor the block-scaled functions have an input for ALiBi.
    Fix: attention in bf16 (fp8_dpa off).
    Source: cudnn-frontend 1.23 and 1.32 ("SDPA FP8 does not support bias"). TransformerEngine v2.18,
    fused_attn.cpp, FP8 branch, never asks for ALiBi and is followed below 9.8.
    """
    recent = env.cudnn is not None and env.cudnn >= (9, 8, 0)
    scaled_per_tensor = kind_of(p) in ("delayed", "current")
    alibi = p.core_attention_bias_type == "alibi"
    return not (alibi and recent and scaled_per_tensor and not p.is_training)


@rule("CUDNN351", requires={"softcap": OneOf(0.0)}, fires_on={**DELAYED, "softcap": 30.0})
def no_soft_cap(p: AttentionParams, env: Environment) -> None:
    """FP8 attention has no soft cap

    Fix: run this layer in bf16 on triton or tiled.
    Source: TransformerEngine d0067d0: soft capping is no parameter of its cuDNN attention.
    """


@asked(
    "CUDNN352",
    when=cudnn("<9.13.0"),
    requires={"return_max_logit": OneOf(False)},
    fires_on={**DELAYED, "return_max_logit": True},
)
def no_max_logit(p: AttentionParams, env: Environment) -> None:
    """FP8 attention returns the largest score from cuDNN 9.13.0 on

    Fix: cuDNN 9.13.0 or newer, and a recipe of kind delayed or current.
    Source: libcudnn, asked. TransformerEngine v2.18, fused_attn.cpp, FP8 branch, and d0067d0, utils.py lines
    757 to 765, never asks for it.
    """


@asked(
    "CUDNN353",
    when=cudnn("<9.13.0"),
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={**DELAYED, "softmax_type": "learnable"},
)
def sinks_from_9_13(p: AttentionParams, env: Environment) -> None:
    """Attention sinks with FP8 need cuDNN 9.13.0

    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("sink_token is not supported before
    9.13"). TransformerEngine d0067d0, utils.py lines 1125 to 1140, waits for 9.21 and Blackwell; the library
    is followed.
    """


# Dropout and determinism.


@asked(
    "CUDNN355",
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={**DELAYED, "attention_dropout": 0.1},
)
def dropout_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell FP8 training takes no dropout

    Why: its backward always runs the deterministic kernels, which have none.
    Fix: no dropout.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("not supported on Blackwell when dropout is enabled").
    """
    return p.dropout


@rule(
    "CUDNN356",
    when=cudnn("<9.5.0"),
    arch=HOPPER,
    requires={"attention_dropout": OneOf(0.0)},
    evidence="documented",
    fires_on={**DELAYED, "attention_dropout": 0.1},
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
    training=True,
    when=cudnn("<9.19.0"),
    arch=HOPPER,
    requires={"deterministic": OneOf(False)},
    unknown=True,
    fires_on={**DELAYED, "deterministic": True},
)
def deterministic_from_9_19(p: AttentionParams, env: Environment) -> None:
    """Below cuDNN 9.19.0 nobody vouches for deterministic FP8 training on Hopper

    Why: the library plans it, but the flag changes nothing in the graph that it is given; TransformerEngine
    takes the results for deterministic from 9.19.0 on.
    Fix: cuDNN 9.19.0 or newer, or bf16 attention.
    Source: TransformerEngine d0067d0, utils.py lines 1545 to 1555; cudnn-frontend 1.23, sdpa_fp8_bwd.h (the
    request is passed on for Blackwell only).
    """


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


@asked("CUDNN361", training=True, arch=HOPPER, fires_on={**DELAYED, **PACKED})
def packed_training_hopper(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper FP8 training takes no packed sequences (thd)

    Fix: padded sequences (bshd).
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("sdpa fp8 backward with THD is not supported on Hopper
    architecture").
    """
    if packed(p):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@asked("CUDNN362", when=cudnn_frontend("<1.28.0"), arch=BLACKWELL, fires_on={**MXFP8, **PACKED}, passes=MXFP8)
def packed_mxfp8(p: AttentionParams, env: Environment) -> Violation | None:
    """MXFP8 takes packed sequences (thd) from cudnn-frontend 1.28 on

    Why: they come with a padding mask, for which sdpa_mxfp8 has no input before (CUDNN367).
    Fix: cudnn-frontend 1.28, or sequences of one length.
    Source: libcudnn, asked. TransformerEngine d0067d0, utils.py lines 703 to 720, never asks for them; the
    library is followed.
    """
    if kind_of(p) == "mxfp8" and packed(p):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@rule("CUDNN363", when=cudnn("<9.8.0"), fires_on={**INFERENCE, **PACKED})
def packed_unused(p: AttentionParams, env: Environment) -> Unknown | None:
    """Below 9.8 nobody has seen FP8 with packed sequences (thd)

    Why: TransformerEngine gives the FP8 kernels no packed layout at any version; the frontend refuses only
    the Hopper backward (CUDNN361).
    Fix: padded sequences (bshd), or cuDNN 9.8.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch (bshd, sbhd and, from 9.21, bhsd);
    cudnn-frontend 1.32.
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
)
def fp8_with_cache(p: AttentionParams, env: Environment) -> None:
    """Below 9.8 nobody has seen FP8 attention over a cache

    Why: TransformerEngine never gives one to cuDNN, at any version.
    Fix: bf16 attention for decoding, or cuDNN 9.8.0 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 857 to 869.
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


@asked(
    "CUDNN367",
    when=cudnn_frontend("<1.28.0"),
    arch=BLACKWELL,
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

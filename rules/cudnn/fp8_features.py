"""FP8 attention in cuDNN: bias, softmax, dropout, determinism, packed layouts and caches.

Sources and the meaning of "FP8 question" as in ``fp8``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.cudnn.fp8 import DELAYED, MXFP8, bottom_right, fp8
from attnsel.rules.cudnn.fp8_shapes import INFERENCE
from attnsel.rules.cudnn.vocabulary import BLACKWELL, HOPPER, PACKED, PAGED
from attnsel.verdict import Bad, OneOf, Unknown, Words
from attnsel.versions import cudnn

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams


def packed(p: AttentionParams) -> bool:
    return "thd" in (p.layout.q_format, p.layout.kv_format)


# Scores and softmax.


@fp8(
    "CUDNN350",
    evidence="source",
    trips={**DELAYED, "core_attention_bias_type": "post_scale_bias"},
    passes=DELAYED,
)
def no_bias(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 attention takes no bias and no ALiBi

    Fix: attention in bf16 (fp8_dpa off).
    Source: cudnn-frontend 1.23 and 1.32 ("SDPA FP8 does not support bias"); TransformerEngine v2.18,
    fused_attn.cpp, FP8 branch.
    """
    if p.core_attention_bias_type != "no_bias":
        return Bad("core_attention_bias_type", p.core_attention_bias_type, OneOf("no_bias"))
    return None


@fp8("CUDNN351", evidence="source", trips={**DELAYED, "softcap": 30.0}, passes=DELAYED)
def no_soft_cap(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 attention has no soft cap

    Fix: run this layer in bf16 on triton or tiled.
    Source: TransformerEngine d0067d0: soft capping is no parameter of its cuDNN attention.
    """
    if p.softcap:
        return Bad("softcap", p.softcap, OneOf(0.0))
    return None


@fp8("CUDNN352", evidence="source", trips={**DELAYED, "return_max_logit": True}, passes=DELAYED)
def no_max_logit(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 attention does not return the largest score

    Fix: attention in bf16 with cuDNN 9.21.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch, and d0067d0, utils.py lines 757 to 765.
    """
    if p.return_max_logit:
        return Bad("return_max_logit", True, OneOf(False))
    return None


@fp8(
    "CUDNN353", arch=HOPPER, evidence="source", trips={**DELAYED, "softmax_type": "learnable"}, passes=DELAYED
)
def sinks_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 attention has no attention sinks

    Fix: attention in bf16 with cuDNN 9.13.1 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 1125 to 1140.
    """
    if p.softmax_type != "vanilla":
        return Bad("softmax_type", p.softmax_type, OneOf("vanilla"))
    return None


@fp8(
    "CUDNN354",
    when=cudnn("<9.21.0"),
    arch=range(100, 130),
    evidence="source",
    trips={**INFERENCE, "softmax_type": "learnable"},
    passes=INFERENCE,
)
def sinks_from_9_21(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell attention sinks with FP8 need cuDNN 9.21.0

    Fix: cuDNN 9.21.0 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 1125 to 1140, and fused_attn.cpp, FP8 branch.
    """
    if p.softmax_type != "vanilla":
        return Bad("softmax_type", p.softmax_type, OneOf("vanilla"))
    return None


# Dropout and determinism.


@fp8(
    "CUDNN355",
    arch=BLACKWELL,
    evidence="source",
    trips={**DELAYED, "attention_dropout": 0.1},
    passes=DELAYED,
)
def dropout_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell FP8 training takes no dropout

    Why: its backward always runs the deterministic kernels, which have none.
    Fix: no dropout.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("not supported on Blackwell when dropout is enabled").
    """
    if p.dropout:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@fp8(
    "CUDNN356",
    when=cudnn("<9.5.0"),
    arch=HOPPER,
    evidence="documented",
    trips={**DELAYED, "attention_dropout": 0.1},
    passes=DELAYED,
)
def dropout_from_9_5(p: AttentionParams, env: Environment) -> Bad | None:
    """Dropout with FP8 needs cuDNN 9.5.0

    Fix: cuDNN 9.5.0 or newer.
    Source: cudnn-frontend v1.8.0 release notes ("fp8 sdpa attention now allows dropout and padding mask.
    Requires cudnn 9.5.0"). TransformerEngine has no clause.
    """
    if p.dropout:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@fp8(
    "CUDNN357",
    when=cudnn("<9.19.0"),
    evidence="source",
    trips={**DELAYED, "deterministic": True},
    passes=DELAYED,
)
def deterministic_from_9_19(p: AttentionParams, env: Environment) -> Bad | None:
    """Deterministic FP8 training needs cuDNN 9.19.0

    Fix: cuDNN 9.19.0 or newer, or bf16 attention.
    Source: TransformerEngine d0067d0, utils.py lines 1545 to 1555; cudnn-frontend 1.23, sdpa_fp8_bwd.h.
    """
    if p.deterministic and p.is_training:
        return Bad("deterministic", True, OneOf(False))
    return None


@fp8(
    "CUDNN358",
    "delayed",
    "current",
    when=cudnn("<9.18.0"),
    arch=range(100, 130),
    evidence="source",
    trips={**INFERENCE, "deterministic": True},
    passes=INFERENCE,
)
def deterministic_blackwell(p: AttentionParams, env: Environment) -> Unknown | None:
    """On Blackwell deterministic FP8 inference is in doubt below cuDNN 9.18

    Why: a forward pass adds nothing up atomically, so the refusal may be meant for training only (CUDNN357);
    no source says so.
    Fix: cuDNN 9.18.0 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 675 to 702.
    """
    if p.deterministic and not p.is_training:
        return Unknown("deterministic", True, OneOf(False))
    return None


@fp8(
    "CUDNN359",
    evidence="source",
    trips={**DELAYED, "deterministic": True, "softmax_type": "off-by-one"},
    passes=DELAYED,
)
def deterministic_sinks(p: AttentionParams, env: Environment) -> Bad | None:
    """With attention sinks nothing is deterministic

    Fix: vanilla softmax.
    Source: TransformerEngine d0067d0, utils.py lines 1535 to 1544 (inference too).
    """
    if p.deterministic and p.softmax_type != "vanilla":
        return Bad("softmax_type", p.softmax_type, OneOf("vanilla"))
    return None


@fp8(
    "CUDNN360",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    evidence="source",
    trips={
        **INFERENCE,
        "attn_mask_type": "causal_bottom_right",
        "is_training": True,
        "attention_dropout": 0.1,
    },
    passes=INFERENCE,
)
def bottom_right_dropout(p: AttentionParams, env: Environment) -> Bad | None:
    """For FP8 a bottom-right diagonal takes no dropout

    Fix: no dropout.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h and sdpa_fp8_bwd.h.
    """
    if bottom_right(p) and p.dropout:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


# Layouts and caches.


@fp8("CUDNN361", arch=HOPPER, evidence="source", trips={**DELAYED, **PACKED}, passes=DELAYED)
def packed_training_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 training takes no packed sequences (thd)

    Fix: padded sequences (bshd).
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h ("sdpa fp8 backward with THD is not supported on Hopper
    architecture"); TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    if packed(p) and p.is_training:
        return Bad("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@fp8("CUDNN362", "mxfp8", arch=BLACKWELL, evidence="source", trips={**MXFP8, **PACKED}, passes=MXFP8)
def packed_mxfp8(p: AttentionParams, env: Environment) -> Bad | None:
    """MXFP8 takes no packed sequences (thd)

    Fix: padded sequences (bshd).
    Source: TransformerEngine d0067d0, utils.py lines 703 to 720.
    """
    if packed(p):
        return Bad("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@fp8("CUDNN363", evidence="source", trips={**INFERENCE, **PACKED}, passes=DELAYED)
def packed_unused(p: AttentionParams, env: Environment) -> Unknown | None:
    """FP8 with packed sequences (thd): the frontend takes it, nobody uses it

    Why: TransformerEngine gives the FP8 kernels no packed layout at any version; the frontend refuses only
    the Hopper backward (CUDNN361).
    Fix: padded sequences (bshd).
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch (bshd, sbhd and, from 9.21, bhsd);
    cudnn-frontend 1.32.
    """
    if packed(p):
        return Unknown("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@fp8("CUDNN364", evidence="source", trips={**DELAYED, **PAGED}, passes=DELAYED)
def fp8_with_cache(p: AttentionParams, env: Environment) -> Bad | Unknown | None:
    """FP8 attention over a cache is used by nobody

    Why: TransformerEngine never gives one to cuDNN; the frontend says a plain no to paged MXFP8 only.
    Fix: bf16 attention for decoding.
    Source: TransformerEngine d0067d0, utils.py lines 857 to 869; cudnn-frontend 1.32,
    scaled_dot_product_flash_attention.h lines 344 to 444.
    """
    if p.kv_cache == "none":
        return None
    mxfp8 = p.recipe is not None and getattr(p.recipe, "kind", None) == "mxfp8"
    finding = Bad if mxfp8 and p.kv_cache == "paged" else Unknown
    return finding("kv_cache", p.kv_cache, Words("none"))

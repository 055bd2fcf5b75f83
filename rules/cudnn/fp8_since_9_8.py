"""FP8 attention in cuDNN 9.8 and newer: what the library alone says, asked without a GPU.

The meaning of "FP8 question" as in ``fp8``. Asked were 9.8.0, 9.10.2, 9.13.0, 9.14.0, 9.18.1, 9.26.1 and
9.28.0, through cudnn-frontend 1.23. Where a page says that the process is killed, that is what happened to a
child process that asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.cudnn.fp8 import DELAYED, MXFP8, bottom_right, fp8
from attnsel.rules.cudnn.fp8_shapes import INFERENCE
from attnsel.rules.cudnn.vocabulary import (
    BLACKWELL,
    BLACKWELL_THOR,
    CONSUMER_BLACKWELL,
    HOPPER,
    PACKED,
    PAGED,
)
from attnsel.verdict import Bad, OneOf, Words
from attnsel.versions import cudnn, cudnn_frontend

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

DECODE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 4096}
WIDE = {"head_dim_qk": 192, "head_dim_v": 128}
TWO_QUERIES = Words("at least 2")


def masks(p: AttentionParams) -> int:
    """What hides scores: a left bound, a right bound (a causal mask has one), the lengths."""
    left, right = p.window_size
    return (left >= 0) + (right >= 0) + p.padding


# A single query.


@fp8(
    "CUDNN370",
    when=cudnn(">=9.10.0"),
    arch=(*HOPPER, *CONSUMER_BLACKWELL),
    evidence="library",
    trips=DECODE,
    passes=INFERENCE,
)
def one_query(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper and consumer Blackwell FP8 takes no single query

    Why: no engine does, except beside an attention sink or, with several heads, ALiBi (from 9.13 on).
    Fix: pad the queries to 2, or attention in bf16 for decoding.
    Source: asked on sm90 and sm120: 9.8.0 takes it on sm90, 9.10.2 to 9.28.0 refuse it.
    """
    if p.max_seqlen_q != 1 or p.softmax_type != "vanilla":
        return None
    recent = env.cudnn is not None and env.cudnn >= (9, 13, 0)
    several = p.num_heads > 1 and (p.batch_size > 1 or p.max_seqlen_kv > 1)
    if p.core_attention_bias_type == "alibi" and recent and several:
        return None
    return Bad("max_seqlen_q", 1, TWO_QUERIES)


@fp8(
    "CUDNN371",
    when=cudnn(">=9.19.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={**DECODE, **WIDE},
    passes=DECODE,
)
def one_query_wide(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell FP8 with head dimensions 192/128 takes no single query

    Fix: pad the queries to 2, or attention in bf16 for decoding.
    Source: asked on sm100: 9.26.1 and 9.28.0 refuse it, with every recipe.
    """
    if p.max_seqlen_q == 1 and p.head_dim_qk > 128:
        return Bad("max_seqlen_q", 1, TWO_QUERIES)
    return None


@fp8(
    "CUDNN372",
    when=cudnn(">=9.8.0,<9.13.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={**DECODE, **PACKED},
    passes=DECODE,
)
def one_packed_query(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell below cuDNN 9.13 packed FP8 sequences have more than one query

    Fix: cuDNN 9.13.0 or newer; or bshd with a padding mask.
    Source: asked on sm100: 9.8.0 and 9.10.2 refuse it, 9.13.0 takes it.
    """
    if p.max_seqlen_q == 1 and p.layout.q_format == "thd":
        return Bad("max_seqlen_q", 1, TWO_QUERIES)
    return None


@fp8(
    "CUDNN373",
    "mxfp8",
    when=cudnn("<9.28.0"),
    arch=BLACKWELL,
    evidence="library",
    trips={**MXFP8, "max_seqlen_q": 1, "max_seqlen_kv": 4096},
    passes={**MXFP8, "max_seqlen_q": 1, "max_seqlen_kv": 4096, "softmax_type": "learnable"},
)
def one_query_mxfp8(p: AttentionParams, env: Environment) -> Bad | None:
    """Below cuDNN 9.28 a single MXFP8 query kills the process

    Why: the library's planner crashes; nothing can be caught. Not beside an attention sink.
    Fix: cuDNN 9.28.0; or pad the queries to 2.
    Source: asked on sm100: 9.26.1 (segmentation fault), 9.28.0 (accepted).
    """
    if p.max_seqlen_q == 1 and p.softmax_type == "vanilla":
        return Bad("max_seqlen_q", 1, TWO_QUERIES)
    return None


# Masks and sinks.


@fp8(
    "CUDNN382",
    when=(cudnn(">=9.13.0"), cudnn_frontend("<1.21.0")),
    evidence="source",
    trips={**DELAYED, "softmax_type": "learnable"},
    passes=DELAYED,
)
def sinks_from_frontend_1_21(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 takes attention sinks from cudnn-frontend 1.21 on

    Why: before, its FP8 functions have no input for them.
    Fix: cudnn-frontend 1.21 or newer.
    Source: signatures of sdpa_fp8 and sdpa_mxfp8 in cudnn-frontend 1.20 and 1.21.
    """
    if p.softmax_type != "vanilla":
        return Bad("softmax_type", p.softmax_type, OneOf("vanilla"))
    return None


@fp8(
    "CUDNN374",
    when=cudnn(">=9.8.0,<9.26.0"),
    arch=HOPPER,
    evidence="library",
    trips={**DELAYED, "attn_mask_type": "padding_causal", "window_size": (128, 0)},
    passes={**DELAYED, "attn_mask_type": "padding_causal"},
)
def three_masks(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper below cuDNN 9.26 three masks at once kill the process in FP8 training

    Why: the planner of the backward crashes; nothing can be caught. A left bound, a right bound (a causal
    mask has one) and padding count one each; beside two of them so does dropout, and so do learnt sinks.
    Dropout and learnt sinks together crash beside padding or shared heads.
    Fix: cuDNN 9.26.1 or newer, or fewer of them.
    Source: asked on sm90: 9.8.0 to 9.18.1 (segmentation fault), 9.26.1 (accepted); nothing in between.
    """
    if not p.is_training:
        return None
    count, learnt = masks(p), p.softmax_type == "learnable"
    if count == 3 or (count == 2 and (p.dropout or learnt)):
        return Bad("window_size", p.window_size, Words("at most two of left bound, right bound and padding"))
    if p.dropout and learnt and (p.padding or p.gqa):
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@fp8(
    "CUDNN375",
    when=cudnn(">=9.19.0"),
    evidence="library",
    trips={
        **DELAYED,
        "softmax_type": "learnable",
        "num_gqa_groups": 4,
        "attn_mask_type": "padding_causal",
    },
    passes={**DELAYED, "softmax_type": "learnable", "attn_mask_type": "padding_causal"},
)
def padding_and_more(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 training with padding and too much beside it kills the process

    Why: the planner of the backward crashes; nothing can be caught. Too much is dropout together with learnt
    sinks, and either of them together with shared heads and a diagonal (a causal mask or a window).
    Fix: no padding, or as many key heads as query heads (repeat them), or no dropout.
    Source: asked on sm90 and sm100: 9.26.1 and 9.28.0 (segmentation fault); with one of them less accepted.
    """
    learnt = p.softmax_type == "learnable"
    if not (p.is_training and p.padding and (p.dropout or learnt)):
        return None
    if p.dropout and learnt:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    if p.gqa and p.window_size != (-1, -1):
        return Bad("num_gqa_groups", p.num_gqa_groups, OneOf(p.num_heads))
    return None


@fp8(
    "CUDNN376",
    when=cudnn(">=9.13.0,<9.21.0"),
    evidence="library",
    trips={**INFERENCE, "softmax_type": "learnable", "return_max_logit": True},
    passes={**INFERENCE, "return_max_logit": True},
)
def max_logit_beside_sink(p: AttentionParams, env: Environment) -> Bad | None:
    """With an attention sink FP8 returns the largest score from cuDNN 9.21.0 on

    Fix: cuDNN 9.21.0 or newer.
    Source: asked: 9.13.0 to 9.18.1 have no engine, 9.26.1 accepts; that it is 9.21.0 was seen in half
    precision (CUDNN142).
    """
    if p.return_max_logit and p.softmax_type != "vanilla":
        return Bad("return_max_logit", True, OneOf(False))
    return None


@fp8(
    "CUDNN377",
    "delayed",
    "current",
    when=cudnn(">=9.8.0"),
    arch=range(90, 130),
    evidence="library",
    trips={**INFERENCE, "core_attention_bias_type": "alibi", "attn_mask_type": "causal_bottom_right"},
    passes={**INFERENCE, "core_attention_bias_type": "alibi", "attn_mask_type": "causal"},
)
def alibi_bottom_right(p: AttentionParams, env: Environment) -> Bad | None:
    """For FP8 ALiBi and a bottom-right diagonal exclude each other

    Why: the frontend refuses them together.
    Fix: a causal mask type without bottom_right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("is_alibi=False"); asked on sm100, 9.8.0 to 9.28.0.
    """
    if p.core_attention_bias_type == "alibi" and bottom_right(p):
        return Bad("attn_mask_type", p.attn_mask_type, Words("causal or padding_causal"))
    return None


# Layouts, caches and formats.


@fp8(
    "CUDNN378",
    arch=CONSUMER_BLACKWELL,
    when=(cudnn(">=9.18.1"), cudnn_frontend("<1.28.0")),
    evidence="library",
    trips={**INFERENCE, **PACKED},
    passes=INFERENCE,
)
def packed_consumer(p: AttentionParams, env: Environment) -> Bad | None:
    """On consumer Blackwell (sm120) FP8 takes packed sequences (thd) from frontend 1.28 on

    Fix: cudnn-frontend 1.28, or bshd with a padding mask.
    Source: cudnn-frontend 1.20 to 1.27, sdpa_support_surface.h ("sdpa fp8 with THD not supported for sm120
    yet"); asked 9.18.1 to 9.28.0 with frontend 1.23 (refused), 9.28.0 with 1.28 (accepted).
    """
    if "thd" in (p.layout.q_format, p.layout.kv_format):
        return Bad("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@fp8(
    "CUDNN379",
    when=cudnn(">=9.8.0,<9.18.1"),
    arch=HOPPER,
    evidence="library",
    trips={**DELAYED, **PAGED},
    passes=INFERENCE,
)
def paged_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 reads a paged cache from cuDNN 9.18.1 on

    Fix: cuDNN 9.18.1 or newer, or a contiguous cache.
    Source: asked on sm90: 9.8.0 to 9.14.0 refuse it (but for some calls with a batch of 1), 9.18.1 takes it.
    """
    return Bad("kv_cache", "paged", OneOf("none", "contiguous")) if p.kv_cache == "paged" else None


@fp8(
    "CUDNN380",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={**DELAYED, **PAGED},
    passes=INFERENCE,
)
def paged_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell FP8 reads a paged cache from cuDNN 9.10.2 on

    Fix: cuDNN 9.10.2 or newer, or a contiguous cache.
    Source: asked on sm100: 9.8.0 refuses it, 9.10.2 takes it.
    """
    return Bad("kv_cache", "paged", OneOf("none", "contiguous")) if p.kv_cache == "paged" else None


@fp8(
    "CUDNN381",
    "mxfp8",
    arch=BLACKWELL,
    evidence="library",
    trips={"dtype": "fp8_e5m2", **MXFP8},
    passes={"dtype": "fp8_e4m3", **MXFP8},
)
def mxfp8_in_e5m2(p: AttentionParams, env: Environment) -> Bad | None:
    """MXFP8 training has q, k and v in E4M3

    Fix: E4M3.
    Source: asked on sm100: 9.26.1 and 9.28.0 have no engine for the backward in E5M2.
    """
    if p.dtype == "fp8_e5m2" and p.is_training:
        return Bad("dtype", "fp8_e5m2", OneOf("fp8_e4m3"))
    return None

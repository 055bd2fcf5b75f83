"""FP8 attention in cuDNN 9.8 and newer: what the library alone says, asked without a GPU.

The meaning of "FP8 question" as in ``fp8``; the library's answers are in ``data/asked.csv``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.cudnn.fp8 import CUDA, DELAYED, MXFP8, bottom_right, kind_of
from attnsel.rules.cudnn.fp8_calls import INFERENCE
from attnsel.rules.cudnn.words import BLACKWELL, BLACKWELL_THOR, CONSUMER_BLACKWELL, HOPPER, PACKED, PAGED
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import FreeText, OneOf

rule = rules_about("cudnn", fp8=True, device=CUDA)
asked = rules_about("cudnn", fp8=True, device=CUDA, evidence="library")

DECODE = {**INFERENCE, "max_seqlen_q": 1, "max_seqlen_kv": 4096}
WIDE = {"head_dim_qk": 192, "head_dim_v": 128}
TWO_QUERIES = FreeText("at least 2")


def masks(p: AttentionParams) -> int:
    """What hides scores: a left bound, a right bound (a causal mask has one), the lengths."""
    left, right = p.window_size
    return (left >= 0) + (right >= 0) + p.padding


# A single query.


@asked(
    "CUDNN370",
    when=cudnn(">=9.10.0"),
    arch=(*HOPPER, *CONSUMER_BLACKWELL),
    fires_on=DECODE,
    passes=INFERENCE,
)
def one_query(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper and consumer Blackwell FP8 takes no single query

    Why: no engine does, except beside an attention sink or, with several heads, ALiBi (from 9.13 on).
    Fix: pad the queries to 2, or attention in bf16 for decoding.
    Source: libcudnn, asked.
    """
    if p.max_seqlen_q != 1 or p.softmax_type != "vanilla":
        return None
    recent = env.cudnn is not None and env.cudnn >= (9, 13, 0)
    several = p.num_heads > 1 and (p.batch_size > 1 or p.max_seqlen_kv > 1)
    if p.core_attention_bias_type == "alibi" and recent and several:
        return None
    return Violation("max_seqlen_q", 1, TWO_QUERIES)


@asked("CUDNN371", when=cudnn(">=9.19.0"), arch=BLACKWELL_THOR, fires_on={**DECODE, **WIDE}, passes=DECODE)
def one_query_wide(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell FP8 with head dimensions 192/128 takes no single query

    Fix: pad the queries to 2, or attention in bf16 for decoding.
    Source: libcudnn, asked.
    """
    if p.max_seqlen_q == 1 and p.head_dim_qk > 128:
        return Violation("max_seqlen_q", 1, TWO_QUERIES)
    return None


@asked(
    "CUDNN372",
    when=cudnn(">=9.8.0,<9.13.0"),
    arch=BLACKWELL_THOR,
    fires_on={**DECODE, **PACKED},
    passes=DECODE,
)
def one_packed_query(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell below cuDNN 9.13 packed FP8 sequences have more than one query

    Fix: cuDNN 9.13.0 or newer; or bshd with a padding mask.
    Source: libcudnn, asked.
    """
    if p.max_seqlen_q == 1 and p.layout.q_format == "thd":
        return Violation("max_seqlen_q", 1, TWO_QUERIES)
    return None


@asked(
    "CUDNN373",
    when=cudnn("<9.28.0"),
    arch=BLACKWELL,
    fires_on={**MXFP8, "max_seqlen_q": 1, "max_seqlen_kv": 4096},
    passes={**MXFP8, "max_seqlen_q": 1, "max_seqlen_kv": 4096, "softmax_type": "learnable"},
)
def one_query_mxfp8(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.28 a single MXFP8 query kills the process

    Why: the library's planner crashes; nothing can be caught. Not beside an attention sink.
    Fix: cuDNN 9.28.0; or pad the queries to 2.
    Source: libcudnn, asked.
    """
    if kind_of(p) == "mxfp8" and p.max_seqlen_q == 1 and p.softmax_type == "vanilla":
        return Violation("max_seqlen_q", 1, TWO_QUERIES)
    return None


# Masks and sinks.


@rule(
    "CUDNN382",
    when=(cudnn(">=9.13.0"), cudnn_frontend("<1.21.0")),
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={**DELAYED, "softmax_type": "learnable"},
    passes=DELAYED,
)
def sinks_from_frontend_1_21(p: AttentionParams, env: Environment) -> None:
    """FP8 takes attention sinks from cudnn-frontend 1.21 on

    Why: before, its FP8 functions have no input for them.
    Fix: cudnn-frontend 1.21 or newer.
    Source: signatures of sdpa_fp8 and sdpa_mxfp8 in cudnn-frontend 1.20 and 1.21.
    """


@asked(
    "CUDNN374",
    training=True,
    when=cudnn(">=9.8.0,<9.26.0"),
    arch=HOPPER,
    fires_on={**DELAYED, "attn_mask_type": "padding_causal", "window_size": (128, 0)},
    passes={**DELAYED, "attn_mask_type": "padding_causal"},
)
def three_masks(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper three masks at once kill FP8 training below cuDNN 9.26

    Why: the planner of the backward crashes; nothing can be caught. A left bound, a right bound (a causal
    mask has one) and padding count one each; beside two of them so does dropout, and so do learned sinks.
    Dropout and learned sinks together crash beside padding or shared heads.
    Fix: cuDNN 9.26.1 or newer, or fewer of them.
    Source: libcudnn, asked.
    """
    count, learned = masks(p), p.softmax_type == "learnable"
    beside = "dropout" if p.dropout else "learned sinks" if learned else ""
    if count == 3 or (count == 2 and beside):
        most = f"at most one, beside {beside}," if beside else "at most two"
        needed = FreeText(f"{most} of left bound, right bound and padding")
        return Violation("window_size", p.window_size, needed, f"the call has {count}")
    if p.dropout and learned and (p.padding or p.gqa):
        return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@asked(
    "CUDNN375",
    training=True,
    when=cudnn(">=9.19.0"),
    fires_on={
        **DELAYED,
        "softmax_type": "learnable",
        "num_gqa_groups": 4,
        "attn_mask_type": "padding_causal",
    },
    passes={**DELAYED, "softmax_type": "learnable", "attn_mask_type": "padding_causal"},
)
def padding_and_more(p: AttentionParams, env: Environment) -> Violation | None:
    """FP8 training with padding and too much beside it kills the process

    Why: the planner of the backward crashes; nothing can be caught. Too much is dropout together with learned
    sinks, and either of them together with shared heads and a diagonal (a causal mask or a window).
    Fix: no padding, or as many key heads as query heads (repeat them), or no dropout.
    Source: libcudnn, asked.
    """
    learned = p.softmax_type == "learnable"
    if not (p.padding and (p.dropout or learned)):
        return None
    if p.dropout and learned:
        return Violation("attention_dropout", p.attention_dropout, OneOf(0.0))
    if p.window_size != (-1, -1):
        return limit(p, "num_gqa_groups", OneOf(p.num_heads))
    return None


@asked(
    "CUDNN376",
    when=cudnn(">=9.13.0,<9.21.0"),
    requires={"return_max_logit": OneOf(False)},
    fires_on={**INFERENCE, "softmax_type": "learnable", "return_max_logit": True},
    passes={**INFERENCE, "return_max_logit": True},
)
def max_logit_beside_sink(p: AttentionParams, env: Environment) -> bool:
    """With an attention sink FP8 returns the largest score from cuDNN 9.21.0 on

    Fix: cuDNN 9.21.0 or newer.
    Source: libcudnn, asked.
    """
    return p.softmax_type != "vanilla"


@asked(
    "CUDNN377",
    when=cudnn(">=9.8.0"),
    arch=range(90, 130),
    fires_on={**INFERENCE, "core_attention_bias_type": "alibi", "attn_mask_type": "causal_bottom_right"},
    passes={**INFERENCE, "core_attention_bias_type": "alibi", "attn_mask_type": "causal"},
)
def alibi_bottom_right(p: AttentionParams, env: Environment) -> Violation | None:
    """For FP8 ALiBi and a bottom-right diagonal exclude each other

    Why: the frontend refuses them together.
    Fix: a causal mask type without bottom_right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("is_alibi=False").
    """
    if kind_of(p) not in ("delayed", "current"):
        return None
    if p.core_attention_bias_type == "alibi" and bottom_right(p):
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("causal or padding_causal"))
    return None


# Layouts, caches and formats.


@asked(
    "CUDNN378",
    when=(cudnn(">=9.18.1"), cudnn_frontend("<1.28.0")),
    arch=CONSUMER_BLACKWELL,
    requires={"qkv_layout": OneOf("bshd_bshd_bshd")},
    fires_on={**INFERENCE, **PACKED},
    passes=INFERENCE,
)
def packed_consumer(p: AttentionParams, env: Environment) -> bool:
    """On consumer Blackwell packed FP8 sequences need cudnn-frontend 1.28

    Fix: cudnn-frontend 1.28, or bshd with a padding mask.
    Source: cudnn-frontend 1.20 to 1.27, sdpa_support_surface.h ("sdpa fp8 with THD not supported for sm120
    yet").
    """
    return "thd" in (p.layout.q_format, p.layout.kv_format)


@asked(
    "CUDNN379",
    when=cudnn(">=9.8.0,<9.18.1"),
    arch=HOPPER,
    requires={"kv_cache": OneOf("none", "contiguous")},
    fires_on={**DELAYED, **PAGED},
    passes=INFERENCE,
)
def paged_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper FP8 reads a paged cache from cuDNN 9.18.1 on

    Fix: cuDNN 9.18.1 or newer, or a contiguous cache.
    Source: libcudnn, asked.
    """


@asked(
    "CUDNN380",
    when=cudnn(">=9.8.0,<9.10.2"),
    arch=BLACKWELL_THOR,
    requires={"kv_cache": OneOf("none", "contiguous")},
    fires_on={**DELAYED, **PAGED},
    passes=INFERENCE,
)
def paged_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell FP8 reads a paged cache from cuDNN 9.10.2 on

    Fix: cuDNN 9.10.2 or newer, or a contiguous cache.
    Source: libcudnn, asked.
    """


@asked(
    "CUDNN381",
    training=True,
    arch=BLACKWELL,
    requires={"dtype": OneOf("fp8_e4m3")},
    fires_on={"dtype": "fp8_e5m2", **MXFP8},
    passes={"dtype": "fp8_e4m3", **MXFP8},
)
def mxfp8_in_e5m2(p: AttentionParams, env: Environment) -> bool:
    """MXFP8 training has q, k and v in E4M3

    Fix: E4M3.
    Source: libcudnn, asked.
    """
    return kind_of(p) == "mxfp8" and p.dtype.startswith("fp8")

"""FP16/BF16/FP32 attention in cuDNN 9.8 and newer: bias, ALiBi, sinks, dropout, the largest score.

Sources as in ``since_9_8_masks``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.vocabulary import BLACKWELL, beyond_128
from attnsel.verdicts.requirements import FreeText, OneOf
from attnsel.verdicts.verdict import Violation

rule = rules_about("cudnn", fp8=False)

SINK = {"softmax_type": "learnable"}
ALIBI = {"core_attention_bias_type": "alibi"}


@rule(
    "CUDNN020",
    when=SINCE_9_8,
    fires_on={"core_attention_bias_type": "pre_scale_bias"},
    passes={"core_attention_bias_type": "post_scale_bias"},
)
def bias_before_scale(p: AttentionParams, env: Environment) -> Violation | None:
    """A bias is added after the softmax scale, never before it

    Fix: multiply the bias by the softmax scale and give it as post_scale_bias.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h: the bias follows attn_scale.
    """
    if p.core_attention_bias_type == "pre_scale_bias":
        return Violation("core_attention_bias_type", "pre_scale_bias", OneOf("post_scale_bias"))
    return None


@rule(
    "CUDNN021",
    when=SINCE_9_8,
    evidence="library",
    fires_on={"attn_mask_type": "no_mask", **ALIBI},
    passes=ALIBI,
)
def alibi_without_causal(p: AttentionParams, env: Environment) -> Violation | None:
    """ALiBi needs a right bound of 0

    Why: slopes are applied to the distance to keys in the past.
    Fix: a causal mask type, or the ALiBi values as post_scale_bias.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("diagonal_band_right_bound needs to be set to 0");
    asked 9.8.0 to 9.28.0, all refuse.
    """
    if p.core_attention_bias_type == "alibi" and p.window_size[1] != 0:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("a causal mask type"))
    return None


@rule(
    "CUDNN022",
    fp8="both",
    when=SINCE_9_8,
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


@rule("CUDNN023", when=SINCE_9_8, requires={"softcap": OneOf(0.0)}, fires_on={"softcap": 30.0})
def soft_cap(p: AttentionParams, env: Environment) -> None:
    """Soft-capped scores are not built here

    Why: the frontend could express them as a score function, but then refuses masks, padding and windows.
    Fix: softcap=0.0, or another candidate.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("score mod enabled and hence other subgraphs are
    disabled").
    """


@rule(
    "CUDNN024",
    when=cudnn(">=9.8.0,<9.13.0"),
    requires={"softmax_type": OneOf("vanilla")},
    evidence="library",
    fires_on=SINK,
)
def sink_from_9_13(p: AttentionParams, env: Environment) -> None:
    """Attention sinks need cuDNN 9.13.0

    Why: sink_token became an input of the graph with that release.
    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("sink_token is not supported before
    9.13"); asked 9.8.0 to 9.12.0 (refused), 9.13.0 (accepted). TransformerEngine waits for 9.13.1.
    """


@rule(
    "CUDNN140",
    when=cudnn(">=9.13.0"),
    requires={"softmax_type": OneOf("vanilla")},
    evidence="library",
    fires_on={**SINK, "max_seqlen_q": 1, "max_seqlen_kv": 4096},
    passes=SINK,
)
def one_query_sink(p: AttentionParams, env: Environment) -> bool:
    """A single query takes no attention sink

    Fix: decode with two query rows of which one is ignored, or another candidate.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("s_q == 1, not supported with sink_token"); asked
    9.13.0 to 9.28.0, all refuse.
    """
    return p.max_seqlen_q == 1


@rule(
    "CUDNN141",
    when=cudnn(">=9.8.0,<9.13.0"),
    requires={"return_max_logit": OneOf(False)},
    evidence="library",
    fires_on={"return_max_logit": True},
)
def max_logit_from_9_13(p: AttentionParams, env: Environment) -> None:
    """The largest score is returned from cuDNN 9.13.0 on

    Why: older engines do not return the maximum and the sum of exponents.
    Fix: cuDNN 9.13.0 or newer.
    Source: asked 9.8.0 to 9.12.0 (no engine), 9.13.0 (accepted). TransformerEngine waits for 9.21.0.
    """


@rule(
    "CUDNN142",
    when=cudnn(">=9.13.0,<9.21.0"),
    requires={"return_max_logit": OneOf(False)},
    evidence="library",
    fires_on={**SINK, "return_max_logit": True},
    passes={"return_max_logit": True},
)
def max_logit_beside_sink(p: AttentionParams, env: Environment) -> bool:
    """With an attention sink the largest score is returned from cuDNN 9.21.0 on

    Fix: cuDNN 9.21.0 or newer.
    Source: asked 9.13.0 to 9.20.0 (no engine), 9.21.0 (accepted).
    """
    return p.softmax_type != "vanilla"


@rule(
    "CUDNN143",
    when=cudnn("==9.13.1"),
    requires={"attention_dropout": OneOf(0.0)},
    evidence="library",
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.1},
    passes={"attention_dropout": 0.1},
)
def few_queries_dropout(p: AttentionParams, env: Environment) -> bool:
    """In cuDNN 9.13.1 dropout needs more than a few queries

    Why: not known; this release alone does so, and not beside ALiBi or a sink.
    Fix: another release of cuDNN, or attention_dropout=0.0.
    Source: asked 9.13.1: no engine for 1 query; on sm100 and sm103 for up to 7, and up to 64 above head
    dimension 128. 9.13.0 and 9.14.0 accept (but see CUDNN165).
    """
    if not p.dropout or p.core_attention_bias_type == "alibi" or p.softmax_type != "vanilla":
        return False
    fewest = 2
    if env.arch in BLACKWELL:
        fewest = 65 if beyond_128(p) else 8
    return p.max_seqlen_q < fewest

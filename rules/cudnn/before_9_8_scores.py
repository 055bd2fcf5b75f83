"""FP16/BF16 attention in cuDNN below 9.8: what happens to the scores: bias, ALiBi, sinks, soft cap.

Sources as in ``before_9_8_forward``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.vocabulary import AMPERE_ADA
from attnsel.verdicts.requirements import FreeText, OneOf
from attnsel.verdicts.verdict import Unknown, Violation

rule = rules_about("cudnn", fp8=False, when=cudnn("<9.8.0"))

# Bias.


@rule(
    "CUDNN119",
    when=cudnn("<8.9.6"),
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "post_scale_bias"},
)
def bias_from_8_9_6(p: AttentionParams, env: Environment) -> None:
    """A bias needs cuDNN 8.9.6

    Fix: a newer cuDNN.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.10.0 ("Bias mask is not
    supported below cudnn version 8.9.6"), which holds ALiBi to the same version.
    """


@rule(
    "CUDNN120",
    when=cudnn(">=8.9.6,<9.0.0"),
    arch=AMPERE_ADA,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"core_attention_bias_type": "post_scale_bias"},
)
def bias_before_hopper(p: AttentionParams, env: Environment) -> bool:
    """Before Hopper a bias needs cuDNN 9.0.0

    Fix: cuDNN 9.0.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.10.0 ("Post scale Bias
    mask is not supported below Hopper").
    """
    return p.has_bias


@rule(
    "CUDNN121",
    fires_on={"core_attention_bias_type": "pre_scale_bias"},
    passes={"core_attention_bias_type": "post_scale_bias"},
)
def no_pre_scale_bias(p: AttentionParams, env: Environment) -> Violation | None:
    """A bias is added after the softmax scale, never before it

    Fix: multiply the bias by the softmax scale and pass it as post_scale_bias: the same scores.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type": no row has pre_scale_bias.
    """
    if p.core_attention_bias_type == "pre_scale_bias":
        return Violation("core_attention_bias_type", "pre_scale_bias", OneOf("post_scale_bias"))
    return None


@rule(
    "CUDNN122",
    when=cudnn(">=8.9.6,<9.8.0"),
    fires_on={"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "padding"},
    passes={"core_attention_bias_type": "post_scale_bias", "attn_mask_type": "no_mask"},
)
def bias_with_padding(p: AttentionParams, env: Environment) -> Unknown | None:
    """Nobody agrees on a bias together with padding

    Why: TransformerEngine refuses the pair at every version. The frontend allows it forward from 8.9.6 and
    backward from 9.5.0 (below that, CUDNN207 refuses the bias gradient).
    Fix: write the padding into the bias as -inf, with an unpadded mask type.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias + mask combination"; cudnn-frontend v1.10.0 ("Bias
    + padding or causal mask is only supported in 8.9.6 and above").
    """
    if p.has_bias and p.padding:
        return Unknown("attn_mask_type", p.attn_mask_type, FreeText("no padding beside a bias"))
    return None


@rule(
    "CUDNN123",
    when=cudnn(">=8.9.6,<9.8.0"),
    arch=AMPERE_ADA,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    unknown=True,
    fires_on={"core_attention_bias_type": "alibi"},
)
def alibi_before_hopper(p: AttentionParams, env: Environment) -> bool:
    """ALiBi before Hopper: TransformerEngine says no, the frontend tests it

    Why: TransformerEngine gives ALiBi to sm90 and newer only; the frontend has no such check and its tests
    ran ALiBi on Ampere.
    Fix: pass the ALiBi values as a post_scale_bias (stores them), or another candidate.
    Source: TransformerEngine v2.18, fused_attn.cpp, "bias type"; cudnn-frontend v1.8.0, test_mhas.py.
    """
    return p.core_attention_bias_type == "alibi"


@rule(
    "CUDNN124",
    when=cudnn(">=8.9.6,<9.8.0"),
    fires_on={"core_attention_bias_type": "alibi", "attn_mask_type": "no_mask"},
    passes={"core_attention_bias_type": "alibi"},
)
def alibi_is_causal(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """ALiBi needs a causal mask

    Why: the kernel computes the distance below the diagonal only. With padding_causal the frontend builds it
    and TransformerEngine refuses it, so that case is unknown.
    Fix: a causal mask, or the ALiBi values as post_scale_bias.
    Source: cudnn-frontend v1.10.0 ("When alibi mask is used, diagonal_band_right_bound needs to be set to
    0"); TransformerEngine v2.18, fused_attn.cpp, "bias type".
    """
    if p.core_attention_bias_type != "alibi" or p.attn_mask_type == "causal" or p.bottom_right:
        return None  # the bottom-right masks: CUDNN408
    finding = Unknown if p.causal else Violation
    return finding("attn_mask_type", p.attn_mask_type, OneOf("causal"))


@rule(
    "CUDNN125",
    requires={"alibi_slopes_shape": OneOf(None)},
    fires_on={"core_attention_bias_type": "alibi", "alibi_slopes_shape": (16,)},
    passes={"core_attention_bias_type": "alibi"},
)
def alibi_slopes(p: AttentionParams, env: Environment) -> None:
    """ALiBi slopes cannot be given: they are computed from the number of heads

    Fix: leave the slopes out if they are the usual ones, else pass the values as post_scale_bias.
    Source: cudnn-frontend v1.10.0, scaled_dot_product_flash_attention.h (slopes made from h_q);
    TransformerEngine d0067d0, utils.py line 1425, turns explicit slopes into a bias.
    """


# Softmax.


@rule("CUDNN126", requires={"softmax_type": OneOf("vanilla")}, fires_on={"softmax_type": "learnable"})
def attention_sinks(p: AttentionParams, env: Environment) -> None:
    """Attention sinks need cuDNN 9.13.0

    Fix: cuDNN 9.13.0 or newer.
    Source: cudnn-frontend 1.32 (sink token), and libcudnn asked (CUDNN024). TransformerEngine v2.18,
    fused_attn.cpp, "softmax type", waits for 9.13.1.
    """


@rule("CUDNN127", requires={"return_max_logit": OneOf(False)}, fires_on={"return_max_logit": True})
def maximal_logit(p: AttentionParams, env: Environment) -> None:
    """The largest score is returned from cuDNN 9.13.0 on

    Fix: cuDNN 9.13.0 or newer, or compute it beside the call.
    Source: libcudnn asked (CUDNN141). TransformerEngine v2.18, fused_attn.cpp, "max_logit", waits for 9.21.0.
    """


@rule("CUDNN128", requires={"softcap": OneOf(0.0)}, fires_on={"softcap": 30.0})
def soft_capping(p: AttentionParams, env: Environment) -> None:
    """Soft-capped scores are not built here

    Why: the frontend can express tanh as a score modifier, but then refuses every mask beside it.
    Fix: another candidate.
    Source: cudnn-frontend v1.10.0, scaled_dot_product_flash_attention.h ("Attention score mod enabled and
    hence other subgraphs are disabled").
    """

"""FP16/BF16 attention in cuDNN below 9.8: what only the backward pass asks for.

Sources as in ``before_9_8_forward``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.before_9_8_layouts import packed
from attnsel.rules.cudnn.words import AMPERE_ADA, ANY_BLACKWELL, HOPPER, PACKED
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtMost, EqualTo, FreeText, Multiple, OneOf

rule = rules_about("cudnn", fp8=False, when=cudnn("<9.8.0"), training=True)

BIAS_GRADIENT = {
    "core_attention_bias_type": "post_scale_bias",
    "core_attention_bias_requires_grad": True,
    "attn_mask_type": "no_mask",
}


@rule(
    "CUDNN204",
    when=cudnn("<9.5.0"),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192, "head_dim_v": 128},
)
def backward_head_dim(p: AttentionParams, env: Environment) -> None:
    """Backward above head_dim 128 needs cuDNN 9.5.0 (Hopper)

    Why: the forward pass takes 256 since 9.1.0; the backward kernels for it came later. Newer frontends do
    not check this, so the refusal comes when the backward plan is built, after the forward has run.
    Fix: cuDNN 9.5.0 or newer.
    Source: TransformerEngine#1591; TransformerEngine v2.18, fused_attn.cpp ("9.5: <= 256 + Hopper + bprop");
    cudnn-frontend v1.8.0 release notes ("d upto 256 for Hopper. Requires cudnn 9.5.0").
    """


# Determinism.


@rule(
    "CUDNN201",
    when=cudnn("<8.9.5"),
    arch=HOPPER,
    requires={"deterministic": OneOf(False)},
    fires_on={"deterministic": True},
)
def deterministic_from_8_9_5(p: AttentionParams, env: Environment) -> None:
    """A deterministic backward needs cuDNN 8.9.5

    Fix: cuDNN 8.9.5 or newer.
    Source: TransformerEngine d0067d0, utils.py lines 1556 to 1567.
    """


@rule(
    "CUDNN202",
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**BIAS_GRADIENT, "deterministic": True},
    passes=BIAS_GRADIENT,
)
def deterministic_bias_gradient(p: AttentionParams, env: Environment) -> bool:
    """The gradient of a bias is not deterministic

    Why: parts of it are added up atomically.
    Fix: no gradient for the bias, or another candidate.
    Source: TransformerEngine d0067d0, utils.py lines 1556 to 1567 (the why is inferred).
    """
    return p.deterministic


@rule(
    "CUDNN203",
    when=cudnn("<9.0.0"),
    arch=AMPERE_ADA,
    requires={"deterministic": OneOf(False)},
    fires_on={"deterministic": True},
)
def deterministic_ampere_before_9(p: AttentionParams, env: Environment) -> None:
    """On Ampere and Ada a deterministic backward does not exist below cuDNN 9.0.0

    Fix: see CUDNN205 for newer releases.
    Source: cudnn-frontend v1.5.2, test_mhas.py ("Ampere deterministic implementation is not supported below
    9.0.0"); TransformerEngine d0067d0, utils.py lines 1556 to 1567.
    """


@rule(
    "CUDNN205",
    when=cudnn(">=9.0.0,<9.8.0"),
    arch=AMPERE_ADA,
    requires={"deterministic": OneOf(False)},
    unknown=True,
    fires_on={"deterministic": True},
)
def deterministic_ampere(p: AttentionParams, env: Environment) -> None:
    """Is the backward on Ampere and Ada deterministic? The sources differ

    Why: TransformerEngine never trusts it before Hopper; the frontend's tests ask for it from 9.0.0, and its
    support table for 9.18.1 says yes.
    Fix: a candidate that is deterministic by construction.
    Source: TransformerEngine d0067d0, utils.py lines 1556 to 1567; cudnn-frontend v1.5.2, test_mhas.py, and
    the support matrix of its Attention page for 9.18.1.
    """


@rule(
    "CUDNN206",
    arch=ANY_BLACKWELL,
    requires={"deterministic": OneOf(False)},
    fires_on={"deterministic": True},
)
def deterministic_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell a deterministic backward needs cuDNN 9.18

    Fix: cuDNN 9.18.1 or newer.
    Source: cudnn-frontend 1.32, scaled_dot_product_flash_attention.h (below 9.18.0); TransformerEngine v2.18,
    fused_attn.cpp, "determinism on Blackwell" (9.18.1).
    """


# The gradient of a bias.


@rule(
    "CUDNN207",
    when=cudnn(">=8.9.6,<9.5.0"),
    fires_on={**BIAS_GRADIENT, "attn_mask_type": "padding"},
    passes=BIAS_GRADIENT,
)
def bias_gradient_with_padding(p: AttentionParams, env: Environment) -> Violation | None:
    """Below cuDNN 9.5.0 a bias beside padding has no gradient

    Fix: cuDNN 9.5.0 or newer, or write the padding into the bias.
    Source: cudnn-frontend v1.7.0 to v1.10.0 ("For cuDNN version below 9.5.0, dBias with variable sequence
    lengths is not supported"); TransformerEngine v2.18, fused_attn.cpp, refuses bias and padding altogether.
    """
    if p.core_attention_bias_requires_grad and p.padding:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("no padding beside a bias"))
    return None


@rule(
    "CUDNN208",
    when=cudnn(">=9.0.0,<9.5.0"),
    requires={"max_seqlen_q": Multiple(64)},
    fires_on={**BIAS_GRADIENT, "max_seqlen_q": 1000, "max_seqlen_kv": 1024},
    passes=BIAS_GRADIENT,
)
def bias_gradient_query_length(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.5.0 a bias gradient needs a query length multiple of 64

    Fix: pad the queries, or cuDNN 9.5.0 or newer.
    Source: cudnn-frontend v1.7.0 to 1.32 ("dBias not support s_q/s_kv which aren't multiple of 64");
    TransformerEngine has no such clause, the frontend refuses the graph.
    """
    return p.core_attention_bias_requires_grad


@rule(
    "CUDNN209",
    when=cudnn(">=9.0.0,<9.5.0"),
    requires={"max_seqlen_kv": Multiple(64)},
    fires_on={**BIAS_GRADIENT, "max_seqlen_q": 1024, "max_seqlen_kv": 1000},
    passes=BIAS_GRADIENT,
)
def bias_gradient_key_length(p: AttentionParams, env: Environment) -> bool:
    """Below cuDNN 9.5.0 a bias gradient needs a key length multiple of 64

    Fix: pad keys, values and the bias (with -inf), or cuDNN 9.5.0 or newer.
    Source: as for queries (CUDNN208).
    """
    return p.core_attention_bias_requires_grad


@rule(
    "CUDNN210",
    when=cudnn(">=8.9.6,<9.8.0"),
    requires={"core_attention_bias_shape": OneOf("11ss")},
    fires_on={**BIAS_GRADIENT, "core_attention_bias_shape": "111s"},
    passes=BIAS_GRADIENT,
)
def bias_gradient_shape(p: AttentionParams, env: Environment) -> bool:
    """A bias of one row for all queries (111s) has no gradient

    Fix: expand it to 11ss and sum its gradient over the queries.
    Source: TransformerEngine d0067d0, utils.py line 1445; cudnn-frontend v1.10.0,
    docs/operations/Attention.md, lists shapes that span queries and keys only.
    """
    return p.core_attention_bias_requires_grad and p.core_attention_bias_shape == "111s"


# The rest.


@rule(
    "CUDNN211",
    arch=ANY_BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"attention_dropout": 0.1, "core_attention_bias_type": "post_scale_bias"},
    passes={"attention_dropout": 0.1},
)
def dropout_and_bias_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell the backward takes dropout or a bias, not both

    Fix: no dropout.
    Source: TransformerEngine v2.18, fused_attn.cpp, "determinism on Blackwell".
    """
    return p.dropout and p.core_attention_bias_type != "no_bias"


@rule(
    "CUDNN212",
    requires={"max_seqlen_kv": Multiple(128)},
    evidence="documented",
    fires_on={"cuda_graph": True, "max_seqlen_q": 1000},
    passes={"cuda_graph": True},
)
def captured_odd_lengths(p: AttentionParams, env: Environment) -> bool:
    """In a CUDA graph the backward needs a key length multiple of 128

    Why: for other lengths the frontend adds a padding mask of its own, and replaying the graph read invalid
    memory.
    Fix: pad keys and values, use a padding mask, or cuDNN 9.15.1 or newer.
    Source: cudnn-frontend v1.16.0 release notes (fixed in 9.15.1); TransformerEngine#2344; TransformerEngine
    v2.18, fused_attn.cpp, last override but one. TransformerEngine limits it to bshd and sbhd; the frontend
    does not, so bhsd counts too.
    """
    return p.cuda_graph and not p.padding


@rule(
    "CUDNN213",
    evidence="documented",
    fires_on={"max_seqlen_q": 1, "attn_mask_type": "no_mask"},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 128, "attn_mask_type": "no_mask"},
)
def backward_of_one_pair(p: AttentionParams, env: Environment) -> Violation | None:
    """There is no backward for one query and one key

    Fix: nothing to compute: the output is v.
    Source: cudnn-frontend 1.32, scaled_dot_product_flash_attention.h line 1353; cuDNN release notes, known
    issues. TransformerEngine does not ask.
    """
    if p.max_seqlen_q == 1 and p.max_seqlen_kv == 1:
        return Violation("max_seqlen_q", 1, FreeText("more than one query or key"))
    return None


@rule(
    "CUDNN214",
    when=cudnn(">=9.1.0,<9.6.0"),
    requires={"num_gqa_groups": EqualTo("num_heads")},
    fires_on={**PACKED, "num_gqa_groups": 4},
    passes=PACKED,
)
def packed_grouped_heads_backward(p: AttentionParams, env: Environment) -> bool:
    """Training with packed sequences and grouped heads needs cuDNN 9.6.0

    Fix: cuDNN 9.6.0 or newer, or repeat the key and value heads.
    Source: cudnn-frontend v1.8.0 to 1.32 ("For cuDNN version below 9.6.0, group-query attention with raggged
    offset is not supported"); TransformerEngine v2.18, fused_attn.cpp, "qkv format".
    """
    return packed(p)


@rule(
    "CUDNN215",
    arch=range(100, 110),
    requires={"qkv_layout": OneOf("bshd_bshd_bshd")},
    fires_on={**PACKED, **BIAS_GRADIENT, "attn_mask_type": "padding"},
    passes={**PACKED},
)
def packed_bias_gradient_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient with packed sequences

    Fix: padded sequences, or no gradient for the bias.
    Source: cudnn-frontend v1.10.0 to 1.32 ("Deterministic kernel or dbias with ragged is not supported").
    """
    return p.core_attention_bias_requires_grad and packed(p)

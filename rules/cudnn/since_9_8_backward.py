"""FP16/BF16 training in cuDNN 9.8 and newer: what the backward pass refuses beyond the forward pass.

Sources as in ``since_9_8_masks``. Determinism, packed sequences, single queries and keys are in
``since_9_8_backward_modes``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, cudnn_frontend
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.words import AMPERE_ADA, BLACKWELL, CONSUMER_BLACKWELL, HOPPER, beyond_128, widest
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtMost, FreeText, Multiple, OneOf

rule = rules_about("cudnn", fp8=False, when=SINCE_9_8, training=True)
asked = rules_about("cudnn", fp8=False, when=SINCE_9_8, training=True, evidence="library")

DEEPSEEK = {"head_dim_qk": 192, "head_dim_v": 128}
BIAS = {"core_attention_bias_type": "post_scale_bias"}
BIAS_GRADIENT = {**BIAS, "core_attention_bias_requires_grad": True}
NARROW_ONLY = frozenset((*AMPERE_ADA, 110, *CONSUMER_BLACKWELL))
"""Architectures whose backward never goes beyond 128."""
ROW_WISE = frozenset((*AMPERE_ADA, *CONSUMER_BLACKWELL))
"""Architectures that share the sm80 backward."""


def square_256(p: AttentionParams) -> bool:
    return p.head_dim_qk == p.head_dim_v == 256


# The libraries and the element type.


@asked(
    "CUDNN230",
    when=(cudnn(">=9.8.0,<9.22.0"), cudnn_frontend(">=1.24.0,<1.27.0")),
    requires={"cudnn_frontend": NEWER},
    note="or 1.23",
    fires_on={},
    passes={"is_training": False},
)
def newer_frontend_older_library(p: AttentionParams, env: Environment) -> None:
    """cudnn-frontend 1.24 to 1.26 builds no backward for cuDNN below 9.22

    Why: it sets the mode of a reshape, an attribute that older libraries do not have.
    Fix: cudnn-frontend 1.27 or newer (or 1.23); or cuDNN 9.22.0.
    Source: libcudnn, asked.
    """


@asked(
    "CUDNN231",
    requires={"dtype": OneOf("bf16", "fp16")},
    fires_on={"dtype": "fp32"},
    passes={"dtype": "fp16"},
)
def fp32_backward(p: AttentionParams, env: Environment) -> bool:
    """There is no FP32 backward

    Fix: bf16 or fp16.
    Source: libcudnn, asked.
    """
    return p.dtype == "fp32"


@asked(
    "CUDNN232",
    when=(cudnn(">=9.8.0,<9.10.0"), cudnn_frontend(">=1.27.0")),
    fires_on={"attn_mask_type": "padding_causal"},
    passes={"attn_mask_type": "padding_causal", "is_training": False},
)
def newer_frontend_padding_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """On cuDNN 9.8 and 9.9 cudnn-frontend 1.27 crashes on a padded backward

    Why: not known. For releases below 9.10 the frontend adds a second padding mask, and where the number of
    keys is no multiple of 128 it pads by itself; such graphs crash, others do not.
    Fix: cuDNN 9.10.2 or newer; or cudnn-frontend 1.23; or no padding and a multiple of 128 keys.
    Source: libcudnn, asked.
    """
    if p.padding:
        return Violation("attn_mask_type", p.attn_mask_type, FreeText("a mask type without padding"))
    return limit(p, "max_seqlen_kv", Multiple(128))


# Head dimensions.


@asked(
    "CUDNN233",
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 512},
    passes={"head_dim_qk": 256},
)
def backward_head_dim_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper the backward ends at head dimension 256

    Fix: another candidate for training; inference goes further.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("less than or equal to 256").
    """


@asked(
    "CUDNN234",
    when=cudnn(">=9.11.0,<9.13.0"),
    arch=HOPPER,
    requires={"head_dim_v": OneOf(128)},
    fires_on={"head_dim_qk": 160, "head_dim_v": 96},
    passes=DEEPSEEK,
)
def backward_between_sizes_hopper(p: AttentionParams, env: Environment) -> bool:
    """In cuDNN 9.11 and 9.12 head dimensions near 192/128 must be 192 or 128

    Why: the 192/128 kernel of these two releases does not serve smaller sizes.
    Fix: pad q and k to 192 or v to 128 with zeros; or cuDNN 9.13.0.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("9.11 only supports 192 hidden dim").
    """
    return 128 < p.head_dim_qk < 192 and 64 < p.head_dim_v < 128


@asked(
    "CUDNN235",
    arch=NARROW_ONLY,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192},
    passes={"head_dim_qk": 192, "is_training": False},
)
def backward_head_dim(p: AttentionParams, env: Environment) -> None:
    """Elsewhere than on sm90 and sm10x the backward ends at head dimension 128

    Fix: another candidate for training; inference goes further.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h.
    """


@asked(
    "CUDNN236",
    when=cudnn(">=9.8.0,<9.11.0"),
    arch=BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on=DEEPSEEK,
)
def backward_head_dim_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell below cuDNN 9.11 the backward ends at head dimension 128

    Fix: cuDNN 9.11.0 for 192/128, 9.23.0 for 256/256.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h.
    """


@asked("CUDNN237", when=cudnn(">=9.11.0"), arch=BLACKWELL, fires_on={"head_dim_qk": 192}, passes=DEEPSEEK)
def backward_sizes_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell beyond 128 the backward takes 192/128 only, and later 256/256

    Fix: pad to one of these sizes with zeros, with the scale of the true one; or another candidate.
    Source: cudnn-frontend 1.23 and 1.28, scaled_dot_product_flash_attention.h.
    """
    if square_256(p):
        return None
    if p.head_dim_qk == 192:
        return limit(p, "head_dim_v", OneOf(128))
    return limit(p, widest(p), AtMost(128))


@asked(
    "CUDNN238",
    when=cudnn(">=9.11.0,<9.23.0"),
    arch=BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes=DEEPSEEK,
)
def backward_256_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell the backward for head dimension 256 needs cuDNN 9.23.0

    Fix: cuDNN 9.23.0 and cudnn-frontend 1.24 or newer.
    Source: libcudnn, asked.
    """
    return square_256(p)


@asked(
    "CUDNN239",
    when=(cudnn(">=9.23.0"), cudnn_frontend("<1.24.0")),
    arch=BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes=DEEPSEEK,
)
def backward_256_frontend(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell the backward for head dimension 256 needs cudnn-frontend 1.24

    Fix: cudnn-frontend 1.24 or newer.
    Source: libcudnn, asked.
    """
    return square_256(p)


@asked(
    "CUDNN240",
    when=cudnn(">=9.23.0"),
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"head_dim_qk": 256, "attention_dropout": 0.1},
    passes={"head_dim_qk": 256},
)
def backward_256_dropout(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell the backward for head dimension 256 takes no dropout

    Why: it is served by the deterministic kernel.
    Fix: attention_dropout=0.0.
    Source: libcudnn, asked.
    """
    return square_256(p) and p.dropout


@asked(
    "CUDNN241",
    when=cudnn(">=9.23.0"),
    arch=BLACKWELL,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={"head_dim_qk": 256, "core_attention_bias_type": "alibi"},
    passes={"head_dim_qk": 256},
)
def backward_256_alibi(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell the backward for head dimension 256 takes no ALiBi

    Why: it is served by the deterministic kernel.
    Fix: no_bias, or the ALiBi values as a post_scale_bias without gradient.
    Source: libcudnn, asked.
    """
    return square_256(p) and p.core_attention_bias_type == "alibi"


# Gradients of a bias.


@asked(
    "CUDNN242",
    when=cudnn(">=9.11.0"),
    arch=BLACKWELL,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**DEEPSEEK, **BIAS_GRADIENT},
    passes={**DEEPSEEK, **BIAS},
)
def bias_gradient_wide(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient beyond head dimension 128

    Fix: a bias without gradient.
    Source: libcudnn, asked.
    """
    return beyond_128(p)


@asked(
    "CUDNN243",
    when=cudnn(">=9.13.0"),
    arch=BLACKWELL,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**BIAS_GRADIENT, "attention_dropout": 0.1},
    passes=BIAS_GRADIENT,
)
def bias_gradient_dropout(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient beside dropout

    Fix: a bias without gradient, or attention_dropout=0.0.
    Source: libcudnn, asked. TransformerEngine refuses any bias beside dropout there; the library takes a bias
    without gradient.
    """
    return p.dropout


@asked(
    "CUDNN244",
    when=cudnn(">=9.8.0,<9.10.0"),
    fires_on={**BIAS_GRADIENT, "core_attention_bias_shape": "b1ss"},
    passes=BIAS_GRADIENT,
)
def bias_gradient_b1ss(p: AttentionParams, env: Environment) -> Violation | None:
    """Up to cuDNN 9.9 a bias of shape b1ss (or bhss of one head) has no gradient

    Fix: cuDNN 9.10.2 or newer; or 1hss, bhss, 11ss.
    Source: libcudnn, asked.
    """
    shape = p.core_attention_bias_shape
    one_head = shape == "b1ss" or (shape == "bhss" and p.num_heads == 1)
    if p.core_attention_bias_requires_grad and one_head and p.batch_size > 1:
        several = FreeText("a bias shared by the batch, or one without gradient")
        return Violation("core_attention_bias_shape", shape, several if p.num_heads == 1 else OneOf("bhss"))
    return None

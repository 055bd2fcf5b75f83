"""FP16/BF16 training in cuDNN 9.8 and newer: deterministic and packed backward passes.

Sources as in ``since_9_8_masks``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.cudnn.since_9_8_backward import (
    BIAS,
    BIAS_GRADIENT,
    ROW_WISE,
    bias_gradient,
    no_bias_gradient,
)
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.vocabulary import (
    BLACKWELL,
    BLACKWELL_THOR,
    CONSUMER_BLACKWELL,
    PACKED,
    half_precision,
)
from attnsel.verdict import AtLeast, Bad, EqualTo, OneOf, Words
from attnsel.versions import cudnn

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

DETERMINISTIC = {"deterministic": True}


def deterministic_training(p: AttentionParams) -> bool:
    return p.is_training and p.deterministic


def packed_training(p: AttentionParams) -> bool:
    return p.is_training and p.qkv_format == "thd"


# Deterministic.


@half_precision(
    "CUDNN260",
    when=cudnn(">=9.8.0,<9.18.0"),
    arch=BLACKWELL,
    evidence="library",
    trips=DETERMINISTIC,
)
def deterministic_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a deterministic backward needs cuDNN 9.18.0

    Fix: cuDNN 9.18.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("with cudnn version below 9.18.0");
    asked 9.8.0 to 9.17.1 (refused), 9.18.0 (accepted). Thor (sm110) accepts from 9.8.0.
    """
    return Bad("deterministic", True, OneOf(False)) if deterministic_training(p) else None


@half_precision(
    "CUDNN261",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    evidence="library",
    trips={**DETERMINISTIC, **BIAS_GRADIENT},
    passes={**DETERMINISTIC, **BIAS},
)
def deterministic_bias_gradient(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a deterministic backward has no bias gradient

    Fix: a bias without gradient, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled"); asked 9.18.0 to 9.28.0, all refuse.
    """
    return no_bias_gradient() if p.deterministic and bias_gradient(p) else None


@half_precision(
    "CUDNN262",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    evidence="library",
    trips={**DETERMINISTIC, "attention_dropout": 0.1},
    passes=DETERMINISTIC,
)
def deterministic_dropout(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a deterministic backward takes no dropout

    Fix: attention_dropout=0.0, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled"); asked 9.18.0 to 9.28.0, all refuse.
    """
    if p.deterministic and p.dropout:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@half_precision(
    "CUDNN263",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    evidence="library",
    trips={**DETERMINISTIC, "core_attention_bias_type": "alibi"},
    passes=DETERMINISTIC,
)
def deterministic_alibi(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a deterministic backward takes no ALiBi

    Fix: the ALiBi values as a post_scale_bias without gradient, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled"); asked 9.18.0 to 9.28.0, all refuse.
    """
    if deterministic_training(p) and p.core_attention_bias_type == "alibi":
        return Bad("core_attention_bias_type", "alibi", OneOf("no_bias"))
    return None


@half_precision(
    "CUDNN264",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    evidence="library",
    trips={**PACKED, **DETERMINISTIC},
    passes=DETERMINISTIC,
)
def deterministic_packed(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm8x and sm12x the packed (thd) backward is not deterministic

    Fix: bshd with a padding mask, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("not supported for bprop thd on SM8X
    and SM12X GPUs"); asked 9.18.1 to 9.28.0, all refuse.
    """
    if p.deterministic and packed_training(p):
        return Bad("deterministic", True, OneOf(False))
    return None


@half_precision(
    "CUDNN265",
    when=SINCE_9_8,
    arch={110},
    evidence="library",
    trips={**PACKED, **DETERMINISTIC},
    passes=DETERMINISTIC,
)
def deterministic_packed_thor(p: AttentionParams, env: Environment) -> Bad | None:
    """On Thor (sm110) the packed (thd) backward is not deterministic

    Fix: bshd with a padding mask, or deterministic=False.
    Source: asked 9.8.0, 9.9.0, 9.10.2, 9.14.0, 9.18.1 and 9.28.0: no engine.
    """
    if p.deterministic and packed_training(p):
        return Bad("deterministic", True, OneOf(False))
    return None


ONE_KEY = {**DETERMINISTIC, **BIAS, "max_seqlen_kv": 1}


def biased_single_key(p: AttentionParams) -> Bad | None:
    biased = p.has_bias and p.core_attention_bias_shape != "111s"
    if deterministic_training(p) and biased and p.max_seqlen_kv == 1:
        return Bad("max_seqlen_kv", 1, AtLeast(2))
    return None


@half_precision(
    "CUDNN266",
    when=cudnn(">=9.18.0,<9.21.0"),
    arch=BLACKWELL,
    evidence="library",
    trips=ONE_KEY,
    passes={**ONE_KEY, "max_seqlen_kv": 2},
)
def deterministic_bias_of_one_key(p: AttentionParams, env: Environment) -> Bad | None:
    """Before cuDNN 9.21 Blackwell has no deterministic backward of a bias over one key

    Fix: cuDNN 9.21.1 or newer, or deterministic=False; a bias of shape 111s is taken.
    Source: asked 9.18.1 and 9.20.0 (no engine), 9.21.1, 9.22, 9.24, 9.26 and 9.28.0 (accepted); 9.18.0 and
    9.21.0 were not asked.
    """
    return biased_single_key(p)


@half_precision(
    "CUDNN267",
    when=cudnn(">=9.10.2"),
    arch={110},
    evidence="library",
    trips=ONE_KEY,
    passes={**ONE_KEY, "max_seqlen_kv": 2},
)
def deterministic_bias_of_one_key_thor(p: AttentionParams, env: Environment) -> Bad | None:
    """Thor (sm110) has no deterministic backward of a bias over one key

    Fix: deterministic=False; a bias of shape 111s is taken.
    Source: asked from 9.10.2 to 9.28.0, all refuse.
    """
    return biased_single_key(p)


# Packed sequences.


@half_precision(
    "CUDNN270",
    when=cudnn(">=9.8.0,<9.18.1"),
    arch=CONSUMER_BLACKWELL,
    evidence="library",
    trips=PACKED,
    passes={**PACKED, "is_training": False},
)
def packed_backward_consumer_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm120 the packed (thd) backward needs cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer; or bshd with a padding mask. Inference runs.
    Source: asked 9.8.0 to 9.18.0 (no engine, though the frontend agrees), 9.18.1 (accepted).
    """
    if packed_training(p):
        return Bad("qkv_layout", p.qkv_layout, Words("bshd, sbhd or bhsd"))
    return None


@half_precision(
    "CUDNN271",
    when=cudnn(">=9.18.1"),
    arch={87, 121},
    evidence="library",
    trips=PACKED,
    passes={**PACKED, "is_training": False},
)
def packed_backward_orin_spark(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm87 and sm121 there is no packed (thd) backward

    Why: the kernels that came with 9.18.1 are for sm80, sm86, sm89 and sm120.
    Fix: bshd with a padding mask. Inference runs.
    Source: asked 9.18.1 and 9.28.0 with the described devices Orin and GB10: no engine.
    """
    if packed_training(p):
        return Bad("qkv_layout", p.qkv_layout, Words("bshd, sbhd or bhsd"))
    return None


@half_precision(
    "CUDNN272",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    evidence="library",
    trips={**PACKED, "head_dim_v": 64},
    passes=PACKED,
)
def packed_backward_unequal(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm8x and sm12x the packed (thd) backward needs equal head dimensions

    Fix: pad the smaller one with zeros; or bshd with a padding mask.
    Source: asked 9.18.1 with every pair of multiples of 8 up to 128, and 9.19.0 to 9.28.0: no engine.
    """
    if packed_training(p) and p.head_dim_qk != p.head_dim_v:
        return Bad("head_dim_v", p.head_dim_v, EqualTo("head_dim_qk", p.head_dim_qk))
    return None


@half_precision(
    "CUDNN273",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    evidence="library",
    trips={**PACKED, **BIAS_GRADIENT},
    passes={**PACKED, **BIAS},
)
def packed_bias_gradient(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm8x and sm12x a bias has no gradient with packed sequences (thd)

    Fix: a bias without gradient; or bshd with a padding mask.
    Source: asked 9.18.1 to 9.28.0: no engine.
    """
    return no_bias_gradient() if bias_gradient(p) and packed_training(p) else None


@half_precision(
    "CUDNN274",
    when=SINCE_9_8,
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={**PACKED, **BIAS_GRADIENT},
    passes={**PACKED, **BIAS},
)
def packed_bias_gradient_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a bias has no gradient with packed sequences (thd)

    Fix: a bias without gradient; or bshd with a padding mask.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("dbias with ragged is not supported
    for SM Major version 10"); asked 9.8.0 to 9.28.0, all refuse, Thor (sm110) too.
    """
    return no_bias_gradient() if bias_gradient(p) and packed_training(p) else None


@half_precision(
    "CUDNN275",
    when=cudnn(">=9.18.1"),
    arch=CONSUMER_BLACKWELL,
    evidence="library",
    trips={**PACKED, "qkv_layout": "t3hd"},
    passes=PACKED,
)
def packed_backward_interleaved(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm120 the packed (thd) backward takes no q inside a shared buffer

    Fix: thd_thd_thd, or thd_t2hd; a copy of q is enough.
    Source: asked 9.18.1 to 9.28.0: no engine for t3hd and th3d, accepted for thd_t2hd and thd_th2d.
    TransformerEngine v2.18, fused_attn.cpp, refuses the same two.
    """
    if packed_training(p) and p.layout.group in ("3hd", "h3d"):
        return Bad("qkv_layout", p.qkv_layout, OneOf("thd_thd_thd"))
    return None

"""FP16/BF16 training in cuDNN 9.8 and newer: deterministic and packed backward passes, a single query or key.

Sources as in ``since_9_8_masks``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.since_9_8_backward import BIAS, BIAS_GRADIENT, ROW_WISE
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.words import BLACKWELL, BLACKWELL_THOR, CONSUMER_BLACKWELL, PACKED
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtLeast, EqualTo, FreeText, OneOf

asked = rules_about("cudnn", fp8=False, when=SINCE_9_8, training=True, evidence="library")

DETERMINISTIC = {"deterministic": True}


# Deterministic.


@asked(
    "CUDNN260",
    when=cudnn(">=9.8.0,<9.18.0"),
    arch=BLACKWELL,
    requires={"deterministic": OneOf(False)},
    fires_on=DETERMINISTIC,
)
def deterministic_blackwell(p: AttentionParams, env: Environment) -> None:
    """On Blackwell a deterministic backward needs cuDNN 9.18.0

    Fix: cuDNN 9.18.0 or newer.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("with cudnn version below 9.18.0").
    """


@asked(
    "CUDNN261",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**DETERMINISTIC, **BIAS_GRADIENT},
    passes={**DETERMINISTIC, **BIAS},
)
def deterministic_bias_gradient(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a deterministic backward has no bias gradient

    Fix: a bias without gradient, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled").
    """
    return p.deterministic


@asked(
    "CUDNN262",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={**DETERMINISTIC, "attention_dropout": 0.1},
    passes=DETERMINISTIC,
)
def deterministic_dropout(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a deterministic backward takes no dropout

    Fix: attention_dropout=0.0, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled").
    """
    return p.deterministic and p.dropout


@asked(
    "CUDNN263",
    when=cudnn(">=9.18.0"),
    arch=BLACKWELL,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**DETERMINISTIC, "core_attention_bias_type": "alibi"},
    passes=DETERMINISTIC,
)
def deterministic_alibi(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a deterministic backward takes no ALiBi

    Fix: the ALiBi values as a post_scale_bias without gradient, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("when dbias, rng/dropout, alibi is
    enabled").
    """
    return p.deterministic and p.core_attention_bias_type == "alibi"


@asked(
    "CUDNN264",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    requires={"deterministic": OneOf(False)},
    fires_on={**PACKED, **DETERMINISTIC},
    passes=DETERMINISTIC,
)
def deterministic_packed(p: AttentionParams, env: Environment) -> bool:
    """On sm8x and sm12x the packed (thd) backward is not deterministic

    Fix: bshd with a padding mask, or deterministic=False.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("not supported for bprop thd on SM8X
    and SM12X GPUs").
    """
    return p.qkv_format == "thd"


@asked(
    "CUDNN265",
    arch={110},
    requires={"deterministic": OneOf(False)},
    fires_on={**PACKED, **DETERMINISTIC},
    passes=DETERMINISTIC,
)
def deterministic_packed_thor(p: AttentionParams, env: Environment) -> bool:
    """On Thor (sm110) the packed (thd) backward is not deterministic

    Fix: bshd with a padding mask, or deterministic=False.
    Source: libcudnn, asked.
    """
    return p.qkv_format == "thd"


ONE_KEY = {**DETERMINISTIC, **BIAS, "max_seqlen_kv": 1}


def deterministic_bias(p: AttentionParams) -> bool:
    """Deterministic training with a bias of a row per query. Without any key nothing runs (DEVICE002)."""
    biased = p.has_bias and p.core_attention_bias_shape != "111s"
    return p.deterministic and biased and p.max_seqlen_kv > 0


@asked(
    "CUDNN266",
    when=cudnn(">=9.18.0,<9.21.0"),
    arch=BLACKWELL,
    requires={"max_seqlen_kv": AtLeast(2)},
    fires_on=ONE_KEY,
    passes={**ONE_KEY, "max_seqlen_kv": 2},
)
def deterministic_bias_of_one_key(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias over one key is deterministic from cuDNN 9.21 on

    Fix: cuDNN 9.21.1 or newer, or deterministic=False; a bias of shape 111s is taken.
    Source: libcudnn, asked.
    """
    return deterministic_bias(p)


@asked(
    "CUDNN267",
    when=cudnn(">=9.10.2"),
    arch={110},
    requires={"max_seqlen_kv": AtLeast(2)},
    fires_on=ONE_KEY,
    passes={**ONE_KEY, "max_seqlen_kv": 2},
)
def deterministic_bias_of_one_key_thor(p: AttentionParams, env: Environment) -> bool:
    """Thor (sm110) has no deterministic backward of a bias over one key

    Fix: deterministic=False; a bias of shape 111s is taken.
    Source: libcudnn, asked.
    """
    return deterministic_bias(p)


# Packed sequences.


@asked(
    "CUDNN270",
    when=cudnn(">=9.8.0,<9.18.1"),
    arch=CONSUMER_BLACKWELL,
    fires_on=PACKED,
    passes={**PACKED, "is_training": False},
)
def packed_backward_consumer_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On sm120 the packed (thd) backward needs cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer; or bshd with a padding mask. Inference runs.
    Source: libcudnn, asked.
    """
    if p.qkv_format == "thd":
        return Violation("qkv_layout", p.qkv_layout, FreeText("bshd, sbhd or bhsd"))
    return None


@asked(
    "CUDNN271",
    when=cudnn(">=9.18.1"),
    arch={87, 121},
    fires_on=PACKED,
    passes={**PACKED, "is_training": False},
)
def packed_backward_orin_spark(p: AttentionParams, env: Environment) -> Violation | None:
    """On sm87 and sm121 there is no packed (thd) backward

    Why: the kernels that came with 9.18.1 are for sm80, sm86, sm89 and sm120.
    Fix: bshd with a padding mask. Inference runs.
    Source: libcudnn, asked.
    """
    if p.qkv_format == "thd":
        return Violation("qkv_layout", p.qkv_layout, FreeText("bshd, sbhd or bhsd"))
    return None


@asked(
    "CUDNN272",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    requires={"head_dim_v": EqualTo("head_dim_qk")},
    fires_on={**PACKED, "head_dim_v": 64},
    passes=PACKED,
)
def packed_backward_unequal(p: AttentionParams, env: Environment) -> bool:
    """On sm8x and sm12x the packed (thd) backward needs equal head dimensions

    Fix: pad the smaller one with zeros; or bshd with a padding mask.
    Source: libcudnn, asked.
    """
    return p.qkv_format == "thd"


@asked(
    "CUDNN273",
    when=cudnn(">=9.18.1"),
    arch=ROW_WISE,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**PACKED, **BIAS_GRADIENT},
    passes={**PACKED, **BIAS},
)
def packed_bias_gradient(p: AttentionParams, env: Environment) -> bool:
    """On sm8x and sm12x a bias has no gradient with packed sequences (thd)

    Fix: a bias without gradient; or bshd with a padding mask.
    Source: libcudnn, asked.
    """
    return p.qkv_format == "thd"


@asked(
    "CUDNN274",
    arch=BLACKWELL_THOR,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**PACKED, **BIAS_GRADIENT},
    passes={**PACKED, **BIAS},
)
def packed_bias_gradient_blackwell(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient with packed sequences (thd)

    Fix: a bias without gradient; or bshd with a padding mask.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("dbias with ragged is not supported for
    SM Major version 10").
    """
    return p.qkv_format == "thd"


@asked(
    "CUDNN275",
    when=cudnn(">=9.18.1"),
    arch=CONSUMER_BLACKWELL,
    requires={"qkv_layout": OneOf("thd_thd_thd")},
    fires_on={**PACKED, "qkv_layout": "t3hd"},
    passes=PACKED,
)
def packed_backward_interleaved(p: AttentionParams, env: Environment) -> bool:
    """On sm120 the packed (thd) backward takes no q inside a shared buffer

    Fix: thd_thd_thd, or thd_t2hd; a copy of q is enough.
    Source: libcudnn, asked. TransformerEngine v2.18, fused_attn.cpp, refuses the same two.
    """
    return p.qkv_format == "thd" and p.layout.group in ("3hd", "h3d")


# A single query or a single key.


ONE_KEY_BACKWARD = {"max_seqlen_kv": 1, "attn_mask_type": "no_mask"}


@asked("CUDNN250", fires_on={"max_seqlen_q": 1}, passes={"max_seqlen_q": 1, "is_training": False})
def one_query_one_key(p: AttentionParams, env: Environment) -> Violation | None:
    """There is no backward for one query and one key

    Fix: nothing needs computing: the output is v, and so are the gradients.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("s_q = s_kv = 1 is not supported").
    """
    if p.max_seqlen_q == 1 and p.max_seqlen_kv == 1:
        return Violation("max_seqlen_kv", 1, FreeText("at least 2"))
    return None


@asked(
    "CUDNN251",
    when=cudnn(">=9.10.0"),
    arch=ROW_WISE,
    requires={"core_attention_bias_type": OneOf("no_bias")},
    fires_on={**ONE_KEY_BACKWARD, **BIAS},
    passes=ONE_KEY_BACKWARD,
)
def one_key_bias(p: AttentionParams, env: Environment) -> bool:
    """On sm8x and sm12x the backward for a single key takes no bias

    Fix: pad the keys to 2, with padding or -inf in the bias.
    Source: libcudnn, asked.
    """
    return p.max_seqlen_kv == 1 and p.has_bias and p.core_attention_bias_shape != "111s"


@asked(
    "CUDNN252",
    when=cudnn(">=9.10.0"),
    arch=BLACKWELL_THOR,
    requires={"core_attention_bias_requires_grad": OneOf(False)},
    fires_on={**ONE_KEY_BACKWARD, **BIAS_GRADIENT},
    passes={**ONE_KEY_BACKWARD, **BIAS},
)
def one_key_bias_gradient(p: AttentionParams, env: Environment) -> bool:
    """On Blackwell a bias has no gradient when there is a single key

    Fix: a bias without gradient; with one key its gradient is zero.
    Source: libcudnn, asked.
    """
    return p.max_seqlen_kv == 1 and p.core_attention_bias_shape != "111s"


@asked(
    "CUDNN253",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=BLACKWELL_THOR,
    fires_on=ONE_KEY_BACKWARD,
    passes={**ONE_KEY_BACKWARD, **BIAS_GRADIENT},
)
def one_key_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell up to cuDNN 9.9 a single key's backward kills the process

    Why: the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.10.2 or newer; or pad the keys to 2.
    Source: libcudnn, asked.
    """
    if p.max_seqlen_kv == 1 and not p.core_attention_bias_requires_grad:
        return Violation("max_seqlen_kv", 1, FreeText("at least 2"))
    return None


@asked(
    "CUDNN254",
    when=cudnn(">=9.8.0,<9.13.1"),
    arch=BLACKWELL_THOR,
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "batch_size": 1, "attn_mask_type": "no_mask"},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attn_mask_type": "no_mask"},
)
def one_query_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """On Blackwell below cuDNN 9.13.1 a lone query's backward kills the process

    Why: with one query and a batch or head count of 1 the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.13.1 or newer; or pad the queries to 2.
    Source: libcudnn, asked.
    """
    if p.max_seqlen_q == 1 and 1 in (p.batch_size, p.num_heads) and not p.core_attention_bias_requires_grad:
        return Violation("max_seqlen_q", 1, FreeText("at least 2"))
    return None


@asked(
    "CUDNN255",
    when=cudnn(">=9.26.0"),
    fires_on={
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "batch_size": 1,
        "num_heads": 1,
        "attn_mask_type": "no_mask",
    },
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "batch_size": 1, "attn_mask_type": "no_mask"},
)
def one_row_crash(p: AttentionParams, env: Environment) -> Violation | None:
    """From cuDNN 9.26 on one query, head and batch kill the process in training

    Why: the library's planner crashes; nothing can be caught.
    Fix: cuDNN 9.25; or pad the queries to 2.
    Source: cudnn-frontend#1071 (9.26.0).
    """
    if p.max_seqlen_q == 1 and p.batch_size == 1 and p.num_heads == 1:
        return Violation("max_seqlen_q", 1, FreeText("at least 2"))
    return None

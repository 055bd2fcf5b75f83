"""FLASH4xx: FlashAttention 4, the package flash-attn-4, of which there are betas.

Lines are of flash_attn/cute/interface.py in the wheel 4.0.0b36, and of 4.0.0b20 where both are given. Nearly
all of its checks are asserts, which ``python -O`` leaves out.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import flash_attn_4
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.verdicts.requirements import NEWER, AtLeast, FreeText, Multiple, OneOf
from attnsel.verdicts.verdict import Unknown

rule = rules_about("flash_attn.4")

CUDA = {"cuda"}
AMPERE, HOPPER, SM12 = range(80, 90), range(90, 100), range(120, 130)
DATACENTRE = range(100, 120)
BEFORE_B36 = flash_attn_4("<4.0.0b36")
NEW, OLD = {"flash_attn_4": "4.0.0b36"}, {"flash_attn_4": "4.0.0b20"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 128, "is_training": False}


# Releases and architectures.


@rule(
    "FLASH401",
    when=flash_attn_4("<4.0.0b20"),
    fires_on={"flash_attn_4": "4.0.0b9"},
    passes=NEW,
)
def four_releases(p: AttentionParams, env: Environment) -> Unknown:
    """flash-attn-4 was read from 4.0.0b20 on

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py in the wheels 4.0.0b20 and 4.0.0b36.
    """
    return Unknown("flash_attn_4", env.flash_attn_4, FreeText("4.0.0b20 or newer"))


@rule(
    "FLASH402",
    requires={"arch": AtLeast(80)},
    fires_on={"gpu": "T4", **NEW},
    passes=NEW,
)
def four_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 needs Ampere or newer (sm80)

    Fix: on Turing triton and sdpa.efficient run.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert "Unsupported compute capability", line 845
    (4.0.0b20: 447).
    """


@rule(
    "FLASH403",
    arch=AMPERE,
    requires={"is_training": OneOf(False)},
    fires_on={"gpu": "A100", **NEW},
    passes={"gpu": "A100", "is_training": False, **NEW},
)
def four_trains_from_hopper_on(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 has no backward on Ampere and Ada

    Fix: flash_attn.2 or sdpa.flash for training there.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert arch // 10 in [9, 10, 11, 12], line 2288
    (4.0.0b20: 1337).
    """


@rule(
    "FLASH404",
    when=BEFORE_B36,
    arch=SM12,
    requires={"flash_attn_4": NEWER},
    evidence="compiler",
    fires_on={"gpu": "RTX 5090", **OLD},
    passes={"gpu": "RTX 5090", **NEW},
)
def four_on_sm12(p: AttentionParams, env: Environment) -> None:
    """4.0.0b20 does not build for sm12x

    Why: its forward takes a path of Hopper's there, and its backward fails before it is compiled.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_fwd.py 4.0.0b20, line 406, and interface.py, line 1708 (UnboundLocalError); compiled for
    sm120 with nvidia-cutlass-dsl 4.6.0.dev0.
    """


@rule(
    "FLASH405",
    when=BEFORE_B36,
    arch=AMPERE,
    requires={"flash_attn_4": NEWER},
    evidence="compiler",
    fires_on={"gpu": "A100", "is_training": False, "num_gqa_groups": 4, **OLD},
    passes={"gpu": "A100", "is_training": False, **OLD},
)
def four_on_ampere(p: AttentionParams, env: Environment) -> bool:
    """On sm8x 4.0.0b20 builds neither grouped heads nor windows

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36', or flash_attn.2.
    Source: pack_gqa.py 4.0.0b20, line 139, and interface.py, line 1015; compiled for sm80 with
    nvidia-cutlass-dsl 4.6.0.dev0.
    """
    return p.gqa or p.windowed


# Features.


@rule(
    "FLASH420",
    when=BEFORE_B36,
    device=CUDA,
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"softmax_type": "learnable", **OLD},
    passes={"softmax_type": "learnable", **NEW},
)
def four_sinks_since_b36(p: AttentionParams, env: Environment) -> None:
    """attnsel uses FlashAttention 4's sinks from 4.0.0b36 on

    Why: 4.0.0b20 takes them in bf16 only, gives them no gradient without a word, and NaN where a row sees no
    key. Which release between the two mended it was not read.
    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: interface.py of 4.0.0b20, lines 424 and 425, and of 4.0.0b36, line 820; softmax.py, finalize.
    """


@rule(
    "FLASH421",
    arch=(*AMPERE, *SM12),
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"gpu": "RTX 5090", "softmax_type": "learnable", **NEW},
    passes={"gpu": "RTX 5090", **NEW},
)
def four_sinks_from_hopper_on(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 has sinks on Hopper and datacentre Blackwell only

    Fix: triton has sinks everywhere.
    Source: "Learnable sink is not supported in this kernel", flash_fwd.py 4.0.0b36, line 651 (4.0.0b20: 649).
    """


@rule(
    "FLASH422",
    arch=(*AMPERE, *SM12),
    requires={"kv_cache": OneOf("none")},
    fires_on={"gpu": "RTX 5090", **PAGED, **NEW},
    passes={"gpu": "H100", **PAGED, **NEW},
)
def four_pages(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 4 reads pages on Hopper and datacentre Blackwell only

    Fix: flash_attn.2 (pages of 256 rows), sdpa.varlen, triton.
    Source: flash_attn/cute/interface.py 4.0.0b36, asserts on page_table, lines 1611 and 1753 (4.0.0b20:
    824 and 942).
    """
    return p.kv_cache == "paged"


@rule(
    "FLASH423",
    arch=(*HOPPER, *DATACENTRE),
    requires={("head_dim_qk", "head_dim_v"): Multiple(16)},
    fires_on={**PAGED, "head_dim_qk": 72, **NEW},
    passes={**PAGED, "head_dim_qk": 80, **NEW},
)
def four_pages_want_even_heads(p: AttentionParams, env: Environment) -> bool:
    """With pages FlashAttention 4 takes head dimensions in multiples of 16

    Why: pages that are not of the tile's size are gathered by a copy that has no bounds in that dimension.
    Fix: attnsel pads with zeros.
    Source: "Paged KV does not support irregular head dim", flash_fwd_sm90.py, line 66, and
    flash_fwd_sm100.py, line 265 (4.0.0b20: 223).
    """
    return p.kv_cache == "paged"


@rule(
    "FLASH424",
    arch=SM12,
    requires={"deterministic": OneOf(False)},
    fires_on={"gpu": "RTX 5090", "deterministic": True, **NEW},
    passes={"gpu": "RTX 5090", "deterministic": True, "is_training": False, **NEW},
)
def four_deterministic_on_sm12(p: AttentionParams, env: Environment) -> bool:
    """On sm12x FlashAttention 4's backward is not deterministic

    Fix: flash_attn.2 is; or deterministic=False.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert on deterministic, line 2352 (4.0.0b20: 1373).
    """
    return p.is_training


@rule(
    "FLASH425",
    when=BEFORE_B36,
    device=CUDA,
    requires={"softcap": OneOf(0.0)},
    fires_on={"softcap": 30.0, "qkv_layout": "thd", "attn_mask_type": "padding_causal", **OLD},
    passes={"softcap": 30.0, **OLD},
)
def four_softcap_with_lengths(p: AttentionParams, env: Environment) -> bool:
    """4.0.0b20 has no backward with softcap and lengths

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert "varlen + score_mod not supported in bwd yet",
    line 1510 of 4.0.0b20.
    """
    return p.is_training and (p.padding or p.qkv_format == "thd")

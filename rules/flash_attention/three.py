"""FLASH3xx: FlashAttention 3, built from hopper/ of its repository.

Lines are of hopper/flash_api.cpp at 0251105a (3.0.0); v2.8.3 holds what calls itself 3.0.0b1.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import flash_attn_3
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about, same_head_dims
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import NEWER, AtLeast, AtMost, FreeText, Multiple, OneOf

CUDA = {"cuda"}
rule = rules_about("flash_attn.3", device=CUDA)
AMPERE = range(80, 90)
_3 = {"flash_attn_3": "3.0.0"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 64, "is_training": False}


@rule(
    "FLASH301",
    device=None,
    requires={"arch": AtLeast(80)},
    fires_on={"gpu": "T4", **_3},
    passes={"gpu": "A100", **_3},
)
def three_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 3 needs Ampere or newer (sm80)

    Fix: on Turing triton and sdpa.efficient run.
    Source: hopper/flash_api.cpp at 0251105a, TORCH_CHECK "FlashAttention only supports Ampere GPUs or
    newer", lines 712 and 1298.
    """


@rule("FLASH302", device=None, requires={"arch": AtMost(90)}, fires_on={"gpu": "B200", **_3}, passes=_3)
def three_ends_at_hopper(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 3 has no code for anything newer than Hopper

    Why: it is compiled for sm80 and sm90a, and neither runs on Blackwell; its own check (major >= 8) lets the
    call through to "no kernel image is available".
    Fix: flash_attn.4 or cudnn on Blackwell, flash_attn.2 on sm12x.
    Source: hopper/setup.py at 0251105a, line 558 (compute_90a) and line 206 (compute_80).
    """
    return env.arch is not None


@rule("FLASH303", device=None, when=flash_attn_3("<3.0.0b1"), fires_on={"flash_attn_3": "3.0.0b0"}, passes=_3)
def three_releases(p: AttentionParams, env: Environment) -> Violation:
    """attnsel calls FlashAttention 3 from 3.0.0b1 on

    Fix: build hopper/ of flash-attention at v2.8.3 or newer.
    Source: hopper/flash_attn_interface.py at v2.8.3 and at 0251105a.
    """
    return Violation("flash_attn_3", env.flash_attn_3, FreeText("3.0.0b1 or newer"))


@rule(
    "FLASH310",
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 100, **_3},
    passes={"head_dim_qk": 104, **_3},
)
def three_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 3 takes head dimensions in multiples of 8

    Fix: attnsel pads with zeros, keeps the softmax scale of the true head_dim_qk and cuts the output.
    Source: hopper/flash_api.cpp at 0251105a, TORCH_CHECK "head_size should be a multiple of", lines 855
    and 856; 1349 and 1350 in the backward.
    """


@rule("FLASH311", requires={"head_dim_qk": AtMost(256)}, fires_on={"head_dim_qk": 320, **_3}, passes=_3)
def three_head_dim_limit(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 3 has head dimensions of q and k up to 256

    Fix: sdpa.efficient and tiled have no limit, at a lower speed.
    Source: hopper/flash_api.cpp at 0251105a, TORCH_CHECK "only supports head dimension at most", line
    780; get_max_headdim.
    """


@rule(
    "FLASH312",
    fires_on={"head_dim_qk": 128, "head_dim_v": 64, **_3},
    passes={"head_dim_qk": 192, "head_dim_v": 128, **_3},
)
def three_head_dims_apart(p: AttentionParams, env: Environment) -> Violation | None:
    """FlashAttention 3 has two ranges of unequal head dimensions, on Hopper

    Why: 136 to 192 with 104 to 128 (latent attention's prefill), and up to 64 with up to 512 (its absorbed
    form, and 512 without a backward).
    Fix: attnsel pads the smaller one with zeros and cuts the output.
    Source: hopper/flash_api.cpp at 0251105a, TORCH_CHECK "If V headdim is different from Q/K dim", lines
    782 to 791.
    """
    d, e = p.head_dim_qk, p.head_dim_v
    prefill = 128 < d <= 192 and 96 < e <= 128
    absorbed = d <= 64 and e <= 512
    return None if env.arch == 90 and (prefill or absorbed) else same_head_dims(p)


@rule(
    "FLASH313",
    training=True,
    requires={"head_dim_v": AtMost(256)},
    fires_on={"head_dim_qk": 64, "head_dim_v": 512, **_3},
    passes={"head_dim_qk": 64, "head_dim_v": 512, "is_training": False, **_3},
)
def three_wide_values(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 3's backward has head dimensions up to 256

    Fix: triton and tiled; or is_training=False.
    Source: hopper/flash_api.cpp at 0251105a, TORCH_CHECK on std::max(head_size, head_size_v) in mha_bwd,
    line 1352.
    """


@rule(
    "FLASH320",
    training=True,
    when=flash_attn_3("<3.0.0"),
    requires={"flash_attn_3": NEWER},
    fires_on={"deterministic": True, "flash_attn_3": "3.0.0b1"},
    passes={"deterministic": True, **_3},
)
def three_deterministic_since_3_0_0(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 3's backward is deterministic from 3.0.0 on

    Why: 3.0.0b1 takes the argument and its template does not: the gradients differ from run to run without a
    word.
    Fix: FlashAttention 3.0.0, or flash_attn.2.
    Source: "false /*Deterministic*/" in hopper/flash_bwd_launch_template.h at v2.8.3.
    """
    return p.deterministic


@rule(
    "FLASH321",
    training=True,
    requires={"deterministic": OneOf(False)},
    fires_on={"deterministic": True, "head_dim_qk": 256, **_3},
    passes={"deterministic": True, **_3},
)
def three_deterministic(p: AttentionParams, env: Environment) -> bool:
    """FlashAttention 3's backward is deterministic up to head_dim 192

    Fix: flash_attn.2, which is deterministic at 256, or deterministic=False.
    Source: TORCH_CHECK "Deterministic backward not supported for hdim 256", hopper/flash_api.cpp at
    0251105a, line 1370.
    """
    return max(p.head_dim_qk, p.head_dim_v) > 192

"""FLASH4xx: FlashAttention 4, the package flash-attn-4, of which there are betas.

Lines are of flash_attn/cute/interface.py in the wheel 4.0.0b36, and of 4.0.0b20 where both are given. Nearly
all of its checks are asserts, which ``python -O`` leaves out.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.selection.requirements import NEWER, AtLeast, AtMost, EqualTo, FreeText, Multiple, OneOf
from attnsel.selection.verdict import Unknown, Violation
from attnsel.versions import Version, flash_attn_4

rule = rules_about("flash_attn.4")

CUDA = {"cuda"}
AMPERE, HOPPER, SM12 = range(80, 90), range(90, 100), range(120, 130)
DATACENTRE = range(100, 120)
BEFORE_B36 = flash_attn_4("<4.0.0b36")
_4, OLD = {"flash_attn_4": "4.0.0b36"}, {"flash_attn_4": "4.0.0b20"}
PAGED = {"qkv_layout": "paged_kv_bshd_bshd_bshd", "kv_cache": "paged", "page_size": 128, "is_training": False}


# Releases and architectures.


@rule(
    "FLASH401",
    when=flash_attn_4("<4.0.0b20"),
    fires_on={"flash_attn_4": "4.0.0b9"},
    passes=_4,
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
    fires_on={"gpu": "T4", **_4},
    passes=_4,
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
    fires_on={"gpu": "A100", **_4},
    passes={"gpu": "A100", "is_training": False, **_4},
)
def four_trains_from_hopper_on(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 has no backward on Ampere and Ada

    Fix: flash_attn.2 or sdpa.flash for training there.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert arch // 10 in [9, 10, 11, 12], line 2288
    (4.0.0b20: 1337).
    """


# Head dimensions.


@rule(
    "FLASH410",
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 100, **_4},
    passes={"head_dim_qk": 104, **_4},
    device=CUDA,
)
def four_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """FlashAttention 4 takes head dimensions in multiples of 8

    Why: 16 bytes of half precision; it pads nothing itself, and on sm8x and sm12x nothing checks it.
    Fix: attnsel pads with zeros, keeps the softmax scale of the true head_dim_qk and cuts the output.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, lines 121 to 138 (4.0.0b20: 97 to
    112).
    """


@rule(
    "FLASH411",
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 320, **_4},
    passes=_4,
)
def four_head_dims_on_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper FlashAttention 4 has head dimensions up to 256

    Fix: sdpa.efficient and tiled have no limit, at a lower speed.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, line 130 (4.0.0b20: 105).
    """


@rule(
    "FLASH412",
    arch=DATACENTRE,
    fires_on={"gpu": "B200", "head_dim_qk": 160, **_4},
    passes={"gpu": "B200", "head_dim_qk": 192, "head_dim_v": 128, **_4},
)
def four_head_dims_on_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On datacentre Blackwell FlashAttention 4 has head dimensions up to 128, (192, 128) and 256

    Why: 512 passes its check too, and is for calls that attnsel does not make (qv).
    Fix: pad to (256, 256), which attnsel does; or cudnn.
    Source: flash_attn/cute/interface.py 4.0.0b36, _validate_head_dims, line 135 (4.0.0b20: 109).
    """
    d, e = p.head_dim_qk, p.head_dim_v
    if (d <= 128 and e <= 128) or (d, e) in ((192, 128), (256, 256)):
        return None
    if d > 256 or e > 256:
        field = "head_dim_qk" if d >= e else "head_dim_v"
        return limit(p, field, AtMost(256))
    return limit(p, "head_dim_qk", OneOf(256)) or limit(p, "head_dim_v", EqualTo("head_dim_qk"))


@rule(
    "FLASH413",
    arch=(*AMPERE, *SM12),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    unknown=True,
    fires_on={"gpu": "RTX 5090", "head_dim_qk": 256, **_4},
    passes={"gpu": "RTX 5090", **_4},
)
def four_head_dims_unchecked(p: AttentionParams, env: Environment) -> None:
    """On sm8x and sm12x nothing checks FlashAttention 4's head dimensions

    Why: can_implement of the kernel is there and never called; above 128 its tiles may not fit the shared
    memory of a block, which is then found when the kernel is compiled or launched.
    Fix: flash_attn.2 and sdpa.flash go to 256 there.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 850 to 852 ("TODO: check @can_implement";
    4.0.0b20: 453), flash_fwd.py, can_implement.
    """


@rule(
    "FLASH414",
    arch=HOPPER,
    fires_on={"head_dim_qk": 192, "head_dim_v": 128, "num_gqa_groups": 4, **_4},
    passes={"head_dim_qk": 192, "head_dim_v": 128, **_4},
)
def four_grouped_heads_apart(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper the backward takes grouped heads with equal head dimensions only

    Fix: attnsel pads head_dim_v and cuts the output.
    Source: flash_bwd_sm90.py, line 116 (4.0.0b20 and 4.0.0b36).
    """
    if not p.is_training or not p.gqa or p.head_dim_v == p.head_dim_qk:
        return None
    if p.head_dim_v < p.head_dim_qk:
        return limit(p, "head_dim_v", EqualTo("head_dim_qk"))
    return limit(p, "head_dim_qk", EqualTo("head_dim_v"))


# Features.


@rule(
    "FLASH420",
    when=BEFORE_B36,
    device=CUDA,
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"softmax_type": "learnable", **OLD},
    passes={"softmax_type": "learnable", **_4},
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
    arch=SM12,
    requires={"softmax_type": OneOf("vanilla")},
    fires_on={"gpu": "RTX 5090", "softmax_type": "learnable", **_4},
    passes={"gpu": "RTX 5090", "softmax_type": "learnable", "is_training": False, **_4},
)
def four_sinks_on_sm12(p: AttentionParams, env: Environment) -> bool:
    """On sm12x FlashAttention 4 has sinks for inference only

    Fix: triton trains with sinks.
    Source: flash_attn/cute/interface.py 4.0.0b36, assert "Learnable sink backward is supported on SM90
    and SM100/SM110", line 2297.
    """
    return p.is_training


@rule(
    "FLASH422",
    arch=(*AMPERE, *SM12),
    requires={"kv_cache": OneOf("none")},
    fires_on={"gpu": "RTX 5090", **PAGED, **_4},
    passes={"gpu": "H100", **PAGED, **_4},
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
    fires_on={**PAGED, "head_dim_qk": 72, **_4},
    passes={**PAGED, "head_dim_qk": 80, **_4},
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
    fires_on={"gpu": "RTX 5090", "deterministic": True, **_4},
    passes={"gpu": "RTX 5090", "deterministic": True, "is_training": False, **_4},
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


@rule(
    "FLASH426",
    arch=SM12,
    requires={"softcap": OneOf(0.0)},
    unknown=True,
    fires_on={"gpu": "RTX 5090", "softcap": 30.0, **_4},
    passes={"gpu": "RTX 5090", "softcap": 30.0, "is_training": False, **_4},
)
def four_softcap_on_sm12(p: AttentionParams, env: Environment) -> bool:
    """On sm12x nobody says whether FlashAttention 4's backward has softcap

    Why: its check against score_mod comes before softcap is made into one.
    Fix: flash_attn.2.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 2350 to 2600 of 4.0.0b36.
    """
    return p.is_training


# head_dim 256 on datacentre Blackwell has kernels of its own.


@rule(
    "FLASH430",
    arch=DATACENTRE,
    fires_on={"gpu": "B200", "head_dim_qk": 256, "softcap": 30.0, **_4},
    passes={"gpu": "B200", "head_dim_qk": 256, **_4},
)
def four_wide_on_blackwell(p: AttentionParams, env: Environment) -> Violation | None:
    """On datacentre Blackwell head_dim 256 trains without softcap, sinks and windows

    Why: its backward is a kernel of its own, which has none of them. In 4.0.0b20 its forward has none either,
    takes no lengths, and gives no deterministic backward.
    Fix: cudnn or triton; or head dimensions up to 128.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 2454 and 2958 of 4.0.0b36, 887 to 899 and 1841 to
    1846 of 4.0.0b20; sm100_hd256_2cta_fmha_backward.py, lines 60 and 70.
    """
    if max(p.head_dim_qk, p.head_dim_v) != 256:
        return None
    old = env.flash_attn_4 is not None and env.flash_attn_4 < Version.parse("4.0.0b36")
    if not (old or p.is_training):
        return None
    if p.softcap:
        return Violation("softcap", p.softcap, OneOf(0.0))
    if p.softmax_type != "vanilla":
        return Violation("softmax_type", p.softmax_type, OneOf("vanilla"))
    if p.windowed:
        return Violation("window_size", p.window_size, OneOf((-1, -1)))
    if old and p.kv_cache == "paged":
        return Violation("kv_cache", "paged", OneOf("none"))
    if old and p.deterministic and p.is_training:
        return Violation("deterministic", True, OneOf(False))
    return None


@rule(
    "FLASH431",
    when=BEFORE_B36,
    arch=DATACENTRE,
    requires={"flash_attn_4": NEWER},
    unknown=True,
    fires_on={"gpu": "B200", "head_dim_qk": 256, "attn_mask_type": "padding", **OLD},
    passes={"gpu": "B200", "head_dim_qk": 256, **OLD},
)
def four_wide_with_lengths(p: AttentionParams, env: Environment) -> bool:
    """What head_dim 256 does with lengths on datacentre Blackwell in 4.0.0b20 was not settled

    Fix: pip install --pre 'flash-attn-4>=4.0.0b36'.
    Source: flash_attn/cute/interface.py 4.0.0b36, lines 887 to 899 of 4.0.0b20 (seqused is refused,
    cu_seqlens is not).
    """
    return max(p.head_dim_qk, p.head_dim_v) == 256 and (p.padding or p.qkv_format == "thd")

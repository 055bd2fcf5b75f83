"""Which attention TransformerEngine 2.20 documents that it runs: its filters and its order, as they stand in
``get_attention_backend`` (pytorch/attention/dot_product_attention/utils.py at d0067d0da, 2026-08-22).

The library of cuDNN is not asked here: whether its fused attention takes a call is given.
"""

from __future__ import annotations

from typing import Any

from attnsel import AttentionParams, Environment
from attnsel.environment.versions import Version

FLASH = ("flash_attn.2", "flash_attn.3", "flash_attn.4")
HALF = ("bf16", "fp16")


def choice(p: AttentionParams, env: Environment, fused: bool, off: tuple[str, ...] = ()) -> str:
    """``flash_attn.N``, ``fused``, ``unfused`` or ``none``. ``off``: what NVTE_… variables switch off."""
    assert env.arch is not None
    arch = env.arch
    flash = [name for name in FLASH if "flash" not in off and FILTERS[name](p, env, arch)]
    if not _any_flash(p):
        flash = []
    if arch == 90 and "flash_attn.3" in flash:
        flash = [name for name in flash if name != "flash_attn.4"]  # lines 588 to 596
    takes_fused = fused and "fused" not in off and _fused(p, arch)
    takes_unfused = "unfused" not in off and _unfused(p)
    if flash and takes_fused and arch >= 90:
        flash = []  # lines 1647 to 1653
    if flash:
        return max(flash)  # 4 before 3 before 2: lines 1626 to 1631
    return "fused" if takes_fused else "unfused" if takes_unfused else "none"


def _any_flash(p: AttentionParams) -> bool:
    """The filters that concern every FlashAttention."""
    square = p.max_seqlen_q == p.max_seqlen_kv
    if p.return_max_logit or p.softmax_type != "vanilla" or p.attn_mask_type == "arbitrary":
        return False
    if p.attn_mask_type in ("causal", "padding_causal") and not square:
        return False  # lines 1311 to 1321: bottom right only
    if p.windowed and not p.bottom_right and not square:
        return False
    if p.core_attention_bias_type not in ("no_bias", "alibi"):
        return False
    return p.cp_size == 1 or not (p.fp8_attention or p.bottom_right_diagonal)


def _two(p: AttentionParams, env: Environment, arch: int) -> bool:
    oldest = Version(2, 7, 3) if arch >= 100 else Version(2, 1, 1)  # backends.py, lines 101 to 143
    if env.flash_attn is None or not oldest <= env.flash_attn < Version(2, 8, 4):
        return False
    if arch < 80 or p.dtype not in HALF or p.fp8_attention or (p.qkv_format == "thd" and p.pad_between_seqs):
        return False
    widest = max(p.head_dim_qk, p.head_dim_v)
    if widest > 256 or p.head_dim_qk % 8 or p.head_dim_v % 8:
        return False
    if widest > 192 and arch not in (80, 90, 100, 120):
        return False
    if p.kv_cache == "paged" and (p.page_size or 0) % 256:
        return False
    return p.kv_cache != "dense" or not p.max_seqlen_kv % 256


def _three(p: AttentionParams, env: Environment, arch: int) -> bool:
    if env.flash_attn_3 is None or arch != 90 or p.attention_dropout or p.core_attention_bias_type == "alibi":
        return False
    if p.fp8_attention and (p.is_training or getattr(p.recipe, "kind", "") not in ("delayed", "current", "")):
        return False
    if not p.fp8_attention and p.dtype not in HALF:
        return False
    wide = p.head_dim_qk > 256 or p.num_heads % p.num_gqa_groups
    if wide or (p.deterministic and p.is_training and max(p.head_dim_qk, p.head_dim_v) >= 256):
        return False
    unlike = p.head_dim_qk != p.head_dim_v
    mla = 128 < p.head_dim_qk <= 192 and 96 < p.head_dim_v <= 128
    return not unlike or mla or (p.head_dim_qk <= 64 and p.head_dim_v <= 512)


def _four(p: AttentionParams, env: Environment, arch: int) -> bool:
    if env.flash_attn_4 is None or arch < 90 or p.dtype not in HALF or p.fp8_attention:
        return False
    if p.kv_cache != "none" or p.attention_dropout or p.core_attention_bias_type == "alibi" or p.cp_size > 1:
        return False
    if p.qkv_format == "thd" and p.pad_between_seqs:
        return False
    d, dv = p.head_dim_qk, p.head_dim_v
    if arch == 90:
        return 8 <= d <= 256 and 8 <= dv <= 256 and not d % 8 and not dv % 8
    if arch < 110:  # lines 986 to 1069, and the package's own validator
        small = 8 <= d <= 128 and 8 <= dv <= 128 and not d % 8 and not dv % 8
        square256 = d == dv == 256 and p.max_seqlen_q == p.max_seqlen_kv and not p.windowed
        return small or (d, dv) == (192, 128) or (dv == 512 and d == 64) or square256
    return True


FILTERS: dict[str, Any] = {"flash_attn.2": _two, "flash_attn.3": _three, "flash_attn.4": _four}


def _fused(p: AttentionParams, arch: int) -> bool:
    """What Python refuses of what the library takes."""
    if arch < 80 or p.attn_mask_type == "arbitrary" or (p.kv_cache != "none" and arch in (89, 120)):
        return False
    if p.windowed and (p.attention_dropout or p.max_seqlen_q > p.max_seqlen_kv):
        return False
    if p.softmax_type != "vanilla" and p.cp_size > 1 and p.cp_comm_type != "a2a":
        return False
    if p.fp8_attention:
        return arch != 120 and not (getattr(p.recipe, "kind", "") == "current" and arch < 100)
    trains_exactly = p.deterministic and p.is_training
    return not (trains_exactly and (arch < 90 or p.core_attention_bias_requires_grad))


def _unfused(p: AttentionParams) -> bool:
    return not p.fp8_attention and p.cp_size == 1 and not (p.qkv_format == "thd" and p.pad_between_seqs)

"""TransformerEngine's filters in Python, each with every kernel that it takes away.

Read: NVIDIA/TransformerEngine pytorch/attention/dot_product_attention/utils.py, get_attention_backend, at
d0067d0da (2.20.0.dev0, 2026-08-22), where the line numbers are from; and at the tags v2.3 to v2.18, which say
since when and until when a filter is there.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from attnsel.dispatchers.te.asked import (
    EVERY,
    FLASH,
    FLASH_2,
    FLASH_3,
    FLASH_4,
    FUSED,
    HALF,
    UNFUSED,
    Asked,
    Check,
    Filter,
)
from attnsel.environment.versions import Version

FILTERS: list[Filter] = []

_BEFORE_MLA_PADS = Version(2, 17)
_WIDE_HEADS = (80, 90, 100, 120)  # sm: where FlashAttention 2 goes beyond head_dim 192
_PAGE = 256


def refuses(
    *kernels: str, lines: str, since: str = "", until: str = "", told: str = "", switch: str = ""
) -> Callable[[Check], Check]:
    """The check below takes these kernels away."""

    def add(check: Check) -> Check:
        found = Filter(
            kernels,
            check,
            lines,
            Version.parse(since) if since else None,
            Version.parse(until) if until else None,
            switch=switch,
        )
        FILTERS.append(found._replace(told=told) if told else found)
        return check

    return add


# ---- variables ----------------------------------------------------------------------------------------


def _switched_off(name: str, *kernels: str, lines: str, since: str = "") -> None:
    def check(a: Asked) -> str:
        return "" if a.enabled(name) else f"{name} is 0"

    check.__name__ = name.lower()
    refuses(*kernels, lines=lines, since=since, switch=f"{name}=0")(check)


_switched_off("NVTE_FLASH_ATTN", *FLASH, lines="538-541")
_switched_off("NVTE_FLASH_ATTN_V2", FLASH_2, lines="539", since="2.17")
_switched_off("NVTE_FLASH_ATTN_V3", FLASH_3, lines="540", since="2.17")
_switched_off("NVTE_FLASH_ATTN_V4", FLASH_4, lines="541", since="2.17")
_switched_off("NVTE_FUSED_ATTN", FUSED, lines="543")
_switched_off("NVTE_UNFUSED_ATTN", UNFUSED, lines="544")


# ---- what is installed --------------------------------------------------------------------------------


@refuses(FLASH_2, lines="1617-1623; backends.py, 101-143")
def no_flash_attn_2(a: Asked) -> str:
    version = a.env.flash_attn
    if version is None:
        return "flash-attn is not installed"
    oldest = Version(2, 7, 3) if a.arch >= 100 else Version(2, 1, 1)
    before = _newest_flash_attn(a.te).after
    if oldest <= version < before:
        return ""
    return f"flash-attn is {version}, at least {oldest} and below {before} count as installed on sm{a.arch}"


def _newest_flash_attn(te: Version) -> Version:
    """``max_version`` of FlashAttentionUtils, at the tags."""
    for since, newest in (((2, 10), (2, 8, 3)), ((2, 6), (2, 8, 1)), ((2, 0), (2, 7, 4))):
        if te >= Version(*since):
            return Version(*newest)
    return Version(2, 6, 3)


@refuses(FLASH_3, lines="1617-1623")
def no_flash_attn_3(a: Asked) -> str:
    return "flash-attn-3 is not installed" if a.env.flash_attn_3 is None else ""


@refuses(FLASH_4, lines="1617-1623", since="2.15")
def no_flash_attn_4(a: Asked) -> str:
    return "flash-attn-4 is not installed" if a.env.flash_attn_4 is None else ""


# ---- the GPU, the type --------------------------------------------------------------------------------


@refuses(FLASH_2, FUSED, lines="569-575")
def before_ampere(a: Asked) -> str:
    return f"the GPU is sm{a.arch}, at least sm80" if a.arch < 80 else ""


@refuses(FLASH_3, lines="576-579")
def not_hopper(a: Asked) -> str:
    return f"the GPU is sm{a.arch}, only sm90" if a.arch != 90 else ""


@refuses(FLASH_4, lines="v2.18, 'Compute capability'", until="2.19")
def before_ampere_of_flash_4(a: Asked) -> str:
    return f"the GPU is sm{a.arch}, at least sm80" if a.arch < 80 else ""


@refuses(FLASH_4, lines="581-584", since="2.19")
def before_hopper(a: Asked) -> str:
    return f"the GPU is sm{a.arch}, at least sm90" if a.arch < 90 else ""


@refuses(FLASH_2, FLASH_4, lines="599-613")
def no_half(a: Asked) -> str:
    return f"the type is {a.p.dtype}, only fp16 and bf16" if a.p.dtype not in HALF else ""


@refuses(FLASH_3, FUSED, lines="614-644")
def no_half_or_fp8(a: Asked) -> str:
    taken = (*HALF, "fp8_e4m3")
    return f"the type is {a.p.dtype}, only {', '.join(taken)}" if a.p.dtype not in taken else ""


# ---- attention in FP8 ---------------------------------------------------------------------------------


@refuses(FLASH_2, FLASH_4, lines="651-656")
def fp8(a: Asked) -> str:
    return "attention in FP8" if a.fp8 else ""


@refuses(FLASH_3, lines="657-660")
def fp8_training(a: Asked) -> str:
    return "attention in FP8 for training" if a.fp8 and a.p.is_training else ""


@refuses(FLASH_3, lines="661-666", since="2.15")
def fp8_recipe(a: Asked) -> str:
    told = a.fp8 and a.recipe not in ("delayed", "current")
    return f"the recipe is {a.recipe}, only delayed and current scaling" if told else ""


@refuses(UNFUSED, lines="667-674")
def fp8_is_not_emulated(a: Asked) -> str:
    emulates = a.on.get("NVTE_UnfusedDPA_Emulate_FP8") == "1"
    return (
        "attention in FP8, which NVTE_UnfusedDPA_Emulate_FP8=1 would emulate"
        if a.fp8 and not emulates
        else ""
    )


@refuses(FUSED, lines="675-685", since="2.15")
def delayed_and_deterministic(a: Asked) -> str:
    hit = a.recipe == "delayed" and a.arch >= 100 and a.deterministic and a.cudnn < Version(9, 18)
    return (
        f"delayed scaling, deterministic, on sm{a.arch}: cuDNN is {a.cudnn}, at least 9.18.0" if hit else ""
    )


@refuses(FUSED, lines="686-689")
def current_scaling_before_blackwell(a: Asked) -> str:
    return f"current scaling on sm{a.arch}, at least sm100" if a.recipe == "current" and a.arch < 100 else ""


@refuses(FUSED, lines="690-702", since="2.9")
def current_scaling_of_old_cudnn(a: Asked) -> str:
    if a.recipe != "current" or a.arch < 100:
        return ""
    if a.cudnn < Version(9, 14):
        return f"current scaling: cuDNN is {a.cudnn}, at least 9.14.0"
    hit = a.deterministic and a.cudnn < Version(9, 18)
    return f"current scaling, deterministic: cuDNN is {a.cudnn}, at least 9.18.0" if hit else ""


@refuses(FUSED, lines="703-720", since="2.15")
def mxfp8(a: Asked) -> str:
    if a.recipe != "mxfp8":
        return ""
    if a.arch < 100:
        return f"MXFP8 on sm{a.arch}, at least sm100"
    if getattr(a.p.recipe, "fp8_mha", False):
        return "MXFP8 with fp8_mha"
    if a.cudnn < Version(9, 21) or a.cudnn in (Version(9, 23, 0), Version(9, 23, 1)):
        return f"MXFP8: cuDNN is {a.cudnn}, at least 9.21.0 and neither 9.23.0 nor 9.23.1"
    return "MXFP8 with packed sequences (thd)" if a.packed else ""


@refuses(FUSED, lines="721-723", since="2.15")
def block_scaling(a: Asked) -> str:
    return "block scaling has no attention in FP8" if a.recipe == "block" else ""


@refuses(*FLASH, FUSED, lines="725-737", since="2.9")
def fp8_on_sm120(a: Asked) -> str:
    return "attention in FP8 on sm120" if a.fp8 and a.arch == 120 else ""


# ---- what is asked for --------------------------------------------------------------------------------


@refuses(*FLASH, lines="757-760", since="2.9")
def max_logit(a: Asked) -> str:
    return "max_logit is asked for" if a.p.return_max_logit else ""


@refuses(*EVERY, lines="761-765", since="2.9")
def max_logit_in_fp8(a: Asked) -> str:
    return "max_logit is asked for, with attention in FP8" if a.p.return_max_logit and a.fp8 else ""


@refuses(FUSED, UNFUSED, lines="v2.10, 'Return max_logit'", since="2.9", until="2.11")
def packed_max_logit(a: Asked) -> str:
    return "max_logit is asked for, with packed sequences" if a.p.return_max_logit and a.packed else ""


@refuses(FUSED, lines="845-847", since="2.4")
def cache_on_sm89(a: Asked) -> str:
    archs = (89, 120) if a.te >= Version(2, 14) else (89,)
    return f"a KV cache on sm{a.arch}" if a.cached and a.arch in archs else ""


@refuses(*FLASH, lines="849-851", since="2.14")
def cache_on_sm120(a: Asked) -> str:
    return "a KV cache on sm120" if a.cached and a.arch == 120 else ""


@refuses(*FLASH, FUSED, UNFUSED, lines="852-856")
def cache_over_ranks(a: Asked) -> str:
    return "a KV cache under context parallelism" if a.cached and a.p.cp_size > 1 else ""


@refuses(*FLASH, FUSED, UNFUSED, lines="858-862")
def cache_with_fp8_mha(a: Asked) -> str:
    return "a KV cache with fp8_mha" if a.cached and a.fp8 and getattr(a.p.recipe, "fp8_mha", False) else ""


@refuses(FLASH_3, lines="863-866")
def fp8_cache_unpacked(a: Asked) -> str:
    hit = a.cached and a.fp8 and a.q_format != "thd"
    return f"a KV cache in FP8: the queries are {a.q_format}, only thd" if hit else ""


@refuses(FUSED, lines="867-869")
def fp8_cache(a: Asked) -> str:
    return "a KV cache in FP8" if a.cached and a.fp8 else ""


@refuses(*FLASH, FUSED, UNFUSED, lines="870-875")
def cache_with_gaps(a: Asked) -> str:
    hit = a.cached and not a.fp8 and a.q_format == "thd" and a.p.pad_between_seqs
    return "a KV cache, with gaps between packed sequences" if hit else ""


@refuses(FLASH_2, lines="876-888")
def pages(a: Asked) -> str:
    size = a.p.page_size or 0
    if a.p.kv_cache != "paged":
        return ""
    if a.te >= Version(2, 16) and size % _PAGE:
        return f"pages of {size}, a multiple of {_PAGE}"
    if size < _PAGE:
        return f"pages of {size}, at least {_PAGE}"
    old = a.env.flash_attn is not None and a.env.flash_attn < Version(2, 5)
    return f"pages: flash-attn is {a.env.flash_attn}, at least 2.5" if old else ""


@refuses(FLASH_2, lines="889-898", since="2.16")
def length_of_a_cache(a: Asked) -> str:
    hit = a.p.kv_cache == "contiguous" and a.p.max_seqlen_kv % _PAGE
    return f"a cache of {a.p.max_seqlen_kv} keys, a multiple of {_PAGE}" if hit else ""


@refuses(FLASH_4, lines="899-901")
def any_cache(a: Asked) -> str:
    return "a KV cache" if a.cached else ""


# ---- head dimensions ----------------------------------------------------------------------------------


@refuses(FLASH_2, lines="v2.16, 'Head dimension'", since="2.8", until="2.17")
def mla_of_flash_2(a: Asked) -> str:
    return f"head_dim_v is {a.p.head_dim_v}, head_dim_qk {a.p.head_dim_qk}" if _unlike(a) else ""


def _unlike(a: Asked) -> bool:
    return a.p.head_dim_qk != a.p.head_dim_v


@refuses(FUSED, lines="904-911")
def mla_in_one_tensor(a: Asked) -> str:
    hit = _unlike(a) and a.layout_group != "hd_hd_hd"
    return (
        f"head_dim_v is not head_dim_qk, and the layout is {a.p.qkv_layout}: q, k and v must lie apart"
        if hit
        else ""
    )


@refuses(FUSED, lines="v2.12, 'Head dimension'", since="2.9", until="2.14")
def wide_training_on_sm120(a: Asked) -> str:
    d = a.p.head_dim_qk
    hit = a.arch == 120 and a.p.is_training and (d > 128 or d % 8)
    return f"head_dim_qk is {d} for training on sm120: at most 128 and a multiple of 8" if hit else ""


@refuses(FUSED, lines="912-924", since="2.14")
def mla_on_sm120(a: Asked) -> str:
    d = a.p.head_dim_qk
    hit = _unlike(a) and a.arch == 120 and a.p.is_training and (d > 128 or d % 8)
    return (
        f"head_dim_v is not head_dim_qk ({d}), for training on sm120: at most 128 and a multiple of 8"
        if hit
        else ""
    )


@refuses(FLASH_2, lines="926-949")
def heads_of_flash_2(a: Asked) -> str:
    widest = max(a.p.head_dim_qk, a.p.head_dim_v) if a.te >= _BEFORE_MLA_PADS else a.p.head_dim_qk
    if widest > 256:
        return f"the head dimension is {widest}, at most 256"
    if widest % 8:
        return f"the head dimension is {widest}, a multiple of 8"
    if widest > 192 and a.arch not in _WIDE_HEADS:
        return f"the head dimension is {widest} on sm{a.arch}, at most 192 but on sm80, sm90, sm100 and sm120"
    return ""


@refuses(FLASH_3, lines="951-984")
def heads_of_flash_3(a: Asked) -> str:
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if d > 256:
        return f"head_dim_qk is {d}, at most 256"
    if a.p.num_heads % a.p.num_gqa_groups:
        return f"{a.p.num_heads} heads are no multiple of {a.p.num_gqa_groups} groups"
    if d == dv or (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512):
        hit = d != dv and dv > 256 and a.p.dtype not in HALF
        return f"head_dim_v is {dv} in {a.p.dtype}, above 256 only in fp16 and bf16" if hit else ""
    return f"head dimensions are {d} and {dv}: equal, or (128, 192] and (96, 128], or at most 64 and 512"


@refuses(FLASH_4, lines="986-1069")
def heads_of_flash_4(a: Asked) -> str:
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if a.arch == 90:
        fits = 8 <= d <= 256 and 8 <= dv <= 256 and not d % 8 and not dv % 8
        return "" if fits else f"head dimensions are {d} and {dv}: 8 to 256, multiples of 8"
    if not 100 <= a.arch < 120:
        return ""
    small = 8 <= d <= 128 and 8 <= dv <= 128
    if (
        d % 8
        or dv % 8
        or not (small or (d, dv) == (192, 128) or (dv == 512 and d in (64, 512)) or (d, dv) == (256, 256))
    ):
        return f"head dimensions are {d} and {dv}: 8 to 128, 192 and 128, 64 and 512, or 256 twice"
    if (d, dv) == (512, 512) and not Version(2, 16) <= a.te < Version(2, 19):
        return "head dimensions are 512 and 512"
    return "head_dim 256 with unequal lengths" if (d, dv) == (256, 256) and not a.square else ""


def _whole(size: int) -> int:
    """In full tiles of 16."""
    return -(-size // 16) * 16


@refuses(FLASH_4, lines="1043-1069")
def backward_of_flash_4(a: Asked) -> str:
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if not (100 <= a.arch < 120 and a.p.is_training and d != dv and d >= 128):
        return ""
    hit = (_whole(dv) // 2) % gcd(32, _whole(d) // 2)
    return f"its backward cannot tile head dimensions {d} and {dv}" if hit else ""

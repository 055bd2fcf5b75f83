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
    LEVEL_1,
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


# --------------------------------------------------------------------------------------------------------
# TransformerEngine's filters in Python, the second half: layout, dropout, softmax, ranks, masks, windows,
# bias, determinism. Read where filters.py says.


_BIASES = ("no_bias", "post_scale_bias")


# ---- layout, dropout, softmax -------------------------------------------------------------------------


def _gaps(a: Asked) -> bool:
    return a.packed and a.p.pad_between_seqs


@refuses(UNFUSED, lines="v2.10, 'QKV layout'", until="2.11")
def packed_unfused(a: Asked) -> str:
    return "packed sequences (thd)" if a.packed else ""


@refuses(UNFUSED, lines="1072-1086", since="2.16")
def gaps_unfused(a: Asked) -> str:
    return "gaps between packed sequences" if _gaps(a) else ""


@refuses(FLASH_2, FLASH_4, lines="1072-1086")
def gaps(a: Asked) -> str:
    return "gaps between packed sequences" if _gaps(a) else ""


@refuses(FLASH_3, lines="v2.14, 'QKV layout'", until="2.15")
def gaps_of_flash_3(a: Asked) -> str:
    return "gaps between packed sequences" if _gaps(a) else ""


@refuses(FUSED, lines="v2.12, 'QKV layout'", since="2.9", until="2.14")
def any_packed_on_sm120(a: Asked) -> str:
    return "packed sequences on sm120" if a.packed and a.arch == 120 else ""


@refuses(FUSED, lines="1087-1102", since="2.14")
def packed_on_sm120(a: Asked) -> str:
    if not a.packed or a.arch != 120:
        return ""
    if a.cudnn < Version(9, 18, 1):
        return f"packed sequences on sm120: cuDNN is {a.cudnn}, at least 9.18.1"
    hit = a.p.qkv_layout in ("t3hd", "th3d")
    return f"packed sequences on sm120 in one tensor ({a.p.qkv_layout})" if hit else ""


@refuses(FLASH_3, FLASH_4, lines="1105-1111")
def dropout(a: Asked) -> str:
    return f"dropout is {a.p.attention_dropout}, only 0" if a.p.attention_dropout else ""


def _sinks(a: Asked) -> bool:
    return a.p.softmax_type != "vanilla"


@refuses(*FLASH, lines="1122-1124", since="2.8")
def sinks(a: Asked) -> str:
    return f"softmax_type is {a.p.softmax_type}, only vanilla" if _sinks(a) else ""


@refuses(UNFUSED, lines="1125-1140", since="2.8")
def sinks_in_fp8_unfused(a: Asked) -> str:
    return f"softmax_type {a.p.softmax_type} in FP8" if _sinks(a) and a.fp8 else ""


@refuses(FUSED, lines="1125-1140", since="2.8")
def sinks_in_fp8(a: Asked) -> str:
    if not (_sinks(a) and a.fp8):
        return ""
    fits = a.te >= Version(2, 14) and a.arch >= 100 and a.cudnn >= Version(9, 21)
    return "" if fits else f"softmax_type {a.p.softmax_type} in FP8: sm100 and cuDNN 9.21.0 at least"


@refuses(FUSED, lines="1141-1147", since="2.8")
def packed_sinks(a: Asked) -> str:
    if not (_sinks(a) and a.packed):
        return ""
    fits = a.te >= Version(2, 12) and a.cudnn >= Version(9, 18)
    return (
        ""
        if fits
        else f"softmax_type {a.p.softmax_type} with packed sequences: cuDNN is {a.cudnn}, at least 9.18.0"
    )


@refuses(UNFUSED, lines="v2.8, 'Softmax type'", since="2.8", until="2.12")
def packed_sinks_unfused(a: Asked) -> str:
    return f"softmax_type {a.p.softmax_type} with packed sequences" if _sinks(a) and a.packed else ""


@refuses(FUSED, lines="1148-1155", since="2.8")
def sinks_over_ranks(a: Asked) -> str:
    hit = _sinks(a) and a.p.cp_size > 1 and a.p.cp_comm_type != "a2a"
    return f"softmax_type {a.p.softmax_type} over ranks with {a.p.cp_comm_type}, only a2a" if hit else ""


# ---- context parallelism ------------------------------------------------------------------------------


def _ranks(a: Asked) -> bool:
    return a.p.cp_size > 1


@refuses(UNFUSED, FLASH_4, lines="1169-1176")
def over_ranks(a: Asked) -> str:
    return "context parallelism" if _ranks(a) else ""


@refuses(*FLASH, lines="1177-1214")
def flash_over_ranks(a: Asked) -> str:
    p = a.p
    if not _ranks(a):
        return ""
    if a.fp8:
        return "context parallelism with attention in FP8"
    return _mask_over_ranks(a) or (
        f"context parallelism with {p.core_attention_bias_type}"
        if p.core_attention_bias_type not in _BIASES or (a.packed and p.has_bias)
        else ""
    )


def _mask_over_ranks(a: Asked) -> str:
    if "bottom_right" in a.p.attn_mask_type:
        return f"context parallelism with the mask {a.p.attn_mask_type}"
    hit = "causal" in a.p.attn_mask_type and not a.square
    return "context parallelism with a causal mask between unequal lengths" if hit else ""


@refuses(FUSED, lines="1216-1280")
def fused_over_ranks(a: Asked) -> str:
    p = a.p
    if not _ranks(a):
        return ""
    said = _mask_over_ranks(a)
    if said:
        return said
    kind, comm, packed = p.core_attention_bias_type, p.cp_comm_type, a.packed
    if kind not in _BIASES or (packed and kind != "no_bias"):
        return f"context parallelism with {kind}{' and packed sequences' if packed else ''}"
    if a.te < Version(2, 15):
        return (
            "context parallelism in FP8 with head_dim_v unlike head_dim_qk"
            if a.fp8 and p.head_dim_qk != p.head_dim_v
            else ""
        )
    if a.fp8 and (packed or kind != "no_bias"):
        return f"context parallelism in FP8 with {'packed sequences' if packed else kind}"
    if kind != "no_bias" and comm != "p2p":
        return f"context parallelism by {comm} with {kind}, only by p2p"
    if a.packed and comm == "a2a+p2p" and a.te < Version(2, 19):
        return f"context parallelism by {comm} with packed sequences"
    if a.windowed and comm in ("p2p", "a2a+p2p"):
        return f"context parallelism by {comm} with a window"
    odd = comm in ("a2a", "a2a+p2p") and (p.num_heads % 2 or p.num_gqa_groups % 2)
    return f"context parallelism by {comm} with an odd number of heads or groups" if odd else ""


# ---- masks and windows --------------------------------------------------------------------------------


@refuses(*FLASH, FUSED, lines="1300-1310")
def arbitrary_mask(a: Asked) -> str:
    return "a mask given as a tensor (arbitrary)" if a.p.attn_mask_type == "arbitrary" else ""


@refuses(*FLASH, lines="1311-1321", told=LEVEL_1)
def causal_from_the_top_left(a: Asked) -> str:
    hit = a.p.attn_mask_type in ("causal", "padding_causal") and not a.square
    return (
        "a causal mask from the top left between unequal lengths: flash-attn's is from the bottom right"
        if hit
        else ""
    )


@refuses(FLASH_4, lines="1332-1343", since="2.18")
def window_of_256(a: Asked) -> str:
    hit = 100 <= a.arch < 120 and a.p.head_dim_qk == a.p.head_dim_v == 256 and a.windowed
    return "a window with head_dim 256" if hit else ""


@refuses(FUSED, lines="1344-1366")
def window_of_cudnn(a: Asked) -> str:
    p = a.p
    if not a.windowed:
        return ""
    in_fp8 = p.fp8 and p.recipe is not None and (p.recipe.fp8_dpa or p.recipe.fp8_mha)
    if in_fp8:
        fits = a.te >= Version(2, 14) and a.arch >= 100 and a.cudnn >= Version(9, 21)
        return "" if fits else "a window in FP8: sm100 and cuDNN 9.21.0 at least"
    if p.attention_dropout:
        return "a window with dropout"
    if a.te < Version(2, 12) and a.window[1] != 0:
        return f"the window is {a.window}, only (left, 0)"
    return "a window with more queries than keys" if p.max_seqlen_q > p.max_seqlen_kv else ""


@refuses(FLASH_2, lines="1367-1373")
def window_of_old_flash(a: Asked) -> str:
    version = a.env.flash_attn
    return (
        f"a window: flash-attn is {version}, at least 2.3"
        if a.windowed and version and version < Version(2, 3)
        else ""
    )


@refuses(*FLASH, lines="1374-1380", since="2.12")
def window_from_the_top_left(a: Asked) -> str:
    hit = a.windowed and not a.p.bottom_right_diagonal and not a.square
    return "a window from the top left between unequal lengths" if hit else ""


# ---- bias ---------------------------------------------------------------------------------------------


@refuses(FLASH_3, FLASH_4, lines="1391-1397")
def alibi(a: Asked) -> str:
    return "ALiBi" if a.p.core_attention_bias_type == "alibi" else ""


@refuses(FLASH_2, lines="1398-1411")
def alibi_of_flash_2(a: Asked) -> str:
    if a.p.core_attention_bias_type != "alibi":
        return ""
    version = a.env.flash_attn
    if version is not None and version < Version(2, 4):
        return f"ALiBi: flash-attn is {version}, at least 2.4"
    hit = a.te >= Version(2, 12) and not a.p.bottom_right_diagonal and not a.square
    return "ALiBi from the top left between unequal lengths" if hit else ""


@refuses(*FLASH, lines="1413-1423")
def added_bias(a: Asked) -> str:
    kind = a.p.core_attention_bias_type
    return f"the bias is {kind}, only alibi" if kind not in ("no_bias", "alibi") else ""


@refuses(FUSED, lines="1445-1455", since="2.13", told=LEVEL_1)
def gradient_of_one_row(a: Asked) -> str:
    hit = a.bias == "post_scale_bias" and a.p.core_attention_bias_shape == "111s" and _bias_trains(a)
    return "the gradient of a bias of shape [1, 1, 1, s]" if hit else ""


@refuses(FUSED, lines="v2.12, 'Attention bias'", until="2.13")
def gradient_of_a_bias(a: Asked) -> str:
    hit = a.bias == "post_scale_bias" and a.p.core_attention_bias_shape != "1hss" and _bias_trains(a)
    return f"the gradient of a bias of shape {a.p.core_attention_bias_shape}, only 1hss" if hit else ""


def _bias_trains(a: Asked) -> bool:
    return a.p.core_attention_bias_requires_grad and a.p.core_attention_bias_type != "alibi"


# ---- determinism --------------------------------------------------------------------------------------


@refuses(FLASH_2, lines="1516-1525", told=LEVEL_1)
def deterministic_flash_2(a: Asked) -> str:
    version = a.env.flash_attn
    hit = a.deterministic and version is not None and version < Version(2, 4, 1)
    return f"deterministic: flash-attn is {version}, at least 2.4.1" if hit else ""


@refuses(FLASH_3, lines="1526-1534", since="2.15")
def deterministic_flash_3(a: Asked) -> str:
    hit = a.deterministic and a.p.is_training and max(a.p.head_dim_qk, a.p.head_dim_v) >= 256
    return "deterministic training with a head dimension of 256 or more" if hit else ""


@refuses(FUSED, lines="1535-1544", since="2.12")
def deterministic_sinks(a: Asked) -> str:
    hit = a.deterministic and a.p.softmax_type != "vanilla"
    return f"deterministic, with softmax_type {a.p.softmax_type}" if hit else ""


@refuses(FUSED, lines="1545-1555")
def deterministic_fp8(a: Asked) -> str:
    if not (a.deterministic and a.fp8 and a.p.is_training):
        return ""
    fits = a.te >= Version(2, 12) and a.arch >= 90 and a.cudnn >= Version(9, 19)
    return (
        ""
        if fits
        else f"deterministic training in FP8: cuDNN is {a.cudnn}, at least 9.19.0 with TransformerEngine 2.12"
    )


@refuses(FUSED, lines="1556-1567")
def deterministic_training(a: Asked) -> str:
    if not (a.deterministic and a.p.is_training) or a.fp8:
        return ""
    if a.arch < 90:
        return f"deterministic training on sm{a.arch}, at least sm90"
    if a.p.core_attention_bias_requires_grad:
        return "deterministic training with the gradient of a bias"
    return f"deterministic training: cuDNN is {a.cudnn}, at least 8.9.5" if a.cudnn < Version(8, 9, 5) else ""


@refuses(FUSED, lines="v2.8, 'Determinism'", since="2.5", until="2.12")
def deterministic_on_blackwell(a: Asked) -> str:
    first = a.te >= Version(2, 9) and a.arch == 120
    hit = a.deterministic and a.p.is_training and a.arch >= 100 and (first or a.cudnn <= Version(9, 14))
    return f"deterministic training on sm{a.arch}: cuDNN is {a.cudnn}, above 9.14.0" if hit else ""

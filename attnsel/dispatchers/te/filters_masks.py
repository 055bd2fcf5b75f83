"""TransformerEngine's filters in Python, the second half: layout, dropout, softmax, ranks, masks, windows,
bias, determinism. Read where filters.py says.
"""

from __future__ import annotations

from attnsel.dispatchers.te.asked import FLASH, FLASH_2, FLASH_3, FLASH_4, FUSED, LEVEL_1, UNFUSED, Asked
from attnsel.dispatchers.te.filters import refuses
from attnsel.environment.versions import Version

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

"""TransformerEngine's filters in Python, each with every kernel that it takes away, in its order.

Read: pytorch/attention/dot_product_attention/utils.py, get_attention_backend, of 2.20.2 (PyPI, 2026-10-05),
where the line numbers are from; and of 1.11 to 2.19.0 (up to 2.1 it lies in pytorch/attention.py), which say
since when and until when a filter is there. What takes several steps is a function above the table.
"""

from __future__ import annotations

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
    Filter,
    FilterInput,
    refuses,
)
from attnsel.dispatchers.te.query import sub_backend
from attnsel.environment.versions import Version

_BEFORE_MLA_PADS = Version(2, 17)
_APART = Version(2, 2)
"""From here on FlashAttention 2 and 3 have a flag each."""
_WIDE_HEADS = (80, 90, 100, 120)  # sm: where FlashAttention 2 goes beyond head_dim 192
_PAGE = 256
_MOST_SCORES = 2**30
_BIASES = ("no_bias", "post_scale_bias")
_ONE_TENSOR = ("t3hd", "th3d")


def _switched_off(name: str, *kernels: str, lines: str, since: str = "") -> Filter:
    return refuses(
        kernels, lines, f"{name} is 0", lambda a: not a.enabled(name), since=since, switch=f"{name}=0"
    )


# ---- what is installed, the type ----------------------------------------------------------------------


def _no_flash_attn_2(a: FilterInput) -> str:
    """``max_version`` of FlashAttentionUtils, at the tags."""
    version = a.env.flash_attn
    if version is None:
        return "flash-attn is not installed"
    oldest, before = flash_attn_2_range(a)
    if oldest <= version < before:
        return ""
    return f"flash-attn is {version}, at least {oldest} and below {before} count as installed on sm{a.arch}"


_NEWEST_FLASH_2 = (
    (Version(2, 10), Version(2, 8, 3)),
    (Version(2, 6), Version(2, 8, 1)),
    (Version(2, 1), Version(2, 7, 4)),
    (Version(2, 0), Version(2, 7, 3)),
)


def flash_attn_2_range(a: FilterInput) -> tuple[Version, Version]:
    """The oldest release of flash-attn that counts as installed, and the first above that does not."""
    oldest = Version(2, 1, 1) if a.te >= Version(1, 12) else Version(2, 0, 6)
    if a.arch >= 100 and a.te >= Version(2):
        oldest = Version(2, 7, 3)
    newest = next((newest for since, newest in _NEWEST_FLASH_2 if a.te >= since), Version(2, 6, 3))
    return oldest, newest.after


def _flash_3_of_old(a: FilterInput) -> bool:
    """Before 2.2 FlashAttention 2 and 3 share one flag, and this one turns the kernel (v2.1 attention.py,
    _use_flash_attn_3): whether 3 is there and its GPU is new enough."""
    return a.te < _APART and a.env.flash_attn_3 is not None and a.arch >= 90


# ---- attention in FP8 ---------------------------------------------------------------------------------


def _current_scaling_of_old_cudnn(a: FilterInput) -> str:
    if a.recipe != "current" or a.arch < 100:
        return ""
    if a.cudnn < Version(9, 14):
        return f"current scaling: cuDNN is {a.cudnn}, at least 9.14.0"
    hit = a.deterministic and a.cudnn < Version(9, 18)
    return f"current scaling, deterministic: cuDNN is {a.cudnn}, at least 9.18.0" if hit else ""


def _mxfp8(a: FilterInput) -> str:
    if a.recipe != "mxfp8":
        return ""
    if a.arch < 100:
        return f"MXFP8 on sm{a.arch}, at least sm100"
    if getattr(a.p.recipe, "fp8_mha", False):
        return "MXFP8 with fp8_mha"
    if a.cudnn < Version(9, 21):
        return f"MXFP8: cuDNN is {a.cudnn}, at least 9.21.0"
    if a.te >= Version(2, 17) and a.cudnn in (Version(9, 23, 0), Version(9, 23, 1)):  # v2.17 utils.py:632
        return f"MXFP8: cuDNN is {a.cudnn}, which has known bugs with it: neither 9.23.0 nor 9.23.1"
    return "MXFP8 with packed sequences (thd)" if a.packed else ""


# ---- caches, head dimensions --------------------------------------------------------------------------


def _cache_on_sm89(a: FilterInput) -> str:
    """v2.4 utils.py:437 (before 9.11), v2.5:437 (before 9.12), v2.6:438 (up to 9.12), v2.7:434 (up to
    9.13)."""
    if not a.cached or a.arch != 89:
        return ""
    above = {4: Version(9, 11), 5: Version(9, 12), 6: Version(9, 12).after, 7: Version(9, 13).after}[
        a.te.minor
    ]
    return f"a KV cache on sm89: cuDNN is {a.cudnn}, at least {above}" if a.cudnn < above else ""


def _pages(a: FilterInput) -> str:
    size = a.p.page_size or 0
    if a.p.kv_cache != "paged":
        return ""
    if a.te >= Version(2, 16) and size % _PAGE:
        return f"pages of {size}, a multiple of {_PAGE}"
    if size < _PAGE:
        return f"pages of {size}, at least {_PAGE}"
    old = a.env.flash_attn is not None and a.env.flash_attn < Version(2, 5)
    return f"pages: flash-attn is {a.env.flash_attn}, at least 2.5" if old else ""


def _unlike(a: FilterInput) -> bool:
    return a.p.head_dim_qk != a.p.head_dim_v


def _wide_training(a: FilterInput) -> bool:
    return a.arch == 120 and a.p.is_training and (a.p.head_dim_qk > 128 or a.p.head_dim_qk % 8 != 0)


def _heads_of_flash_2(a: FilterInput) -> str:
    widest = max(a.p.head_dim_qk, a.p.head_dim_v) if a.te >= _BEFORE_MLA_PADS else a.p.head_dim_qk
    if widest > 256:
        return f"the head dimension is {widest}, at most 256"
    if widest % 8:
        return f"the head dimension is {widest}, a multiple of 8"
    wide = _WIDE_HEADS if a.te >= Version(2, 1) else _WIDE_HEADS[:2]
    if widest > 192 and a.arch not in wide:
        on = ", ".join(f"sm{arch}" for arch in wide)
        return f"the head dimension is {widest} on sm{a.arch}, at most 192 but on {on}"
    return ""


def _heads_of_flash_3(a: FilterInput) -> str:
    """Before 2.2 those of FlashAttention 2, to 2.7 at most 128 (v2.7 utils.py:510), then flash-attn-3's
    own."""
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if a.te < _APART:
        return _heads_of_flash_2(a)
    if a.te < Version(2, 8):
        return f"head dimensions are {d} and {dv}, at most 128" if max(d, dv) > 128 else ""
    if d > 256:
        return f"head_dim_qk is {d}, at most 256"
    if a.p.num_heads % a.p.num_gqa_groups:
        return f"{a.p.num_heads} heads are no multiple of {a.p.num_gqa_groups} groups"
    if d == dv or (128 < d <= 192 and 96 < dv <= 128) or (d <= 64 and dv <= 512):
        hit = d != dv and dv > 256 and a.p.dtype not in HALF
        return f"head_dim_v is {dv} in {a.p.dtype}, above 256 only in fp16 and bf16" if hit else ""
    return f"head dimensions are {d} and {dv}: equal, or (128, 192] and (96, 128], or at most 64 and 512"


def _heads_of_flash_4(a: FilterInput) -> str:
    """2.15 has limits of its own (v2.15 utils.py:795-805); from 2.16 on flash-attn-4 is asked."""
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if a.te < Version(2, 16):
        datacenter = 100 <= a.arch < 120
        if (d, dv) == (192, 128) or max(d, dv) <= (128 if datacenter else 256):
            return ""
        most = "at most 128, or 192 and 128" if datacenter else "at most 256"
        return f"head dimensions are {d} and {dv}, {most} on sm{a.arch}"
    if a.arch == 90:
        fits = 8 <= d <= 256 and 8 <= dv <= 256 and not d % 8 and not dv % 8
        return "" if fits else f"head dimensions are {d} and {dv}: 8 to 256, multiples of 8"
    if not 100 <= a.arch < 120:
        return ""
    small = 8 <= d <= 128 and 8 <= dv <= 128
    known = small or (d, dv) in ((192, 128), (64, 512), (512, 512), (256, 256))
    if d % 8 or dv % 8 or not known:
        return f"head dimensions are {d} and {dv}: 8 to 128, 192 and 128, 64 and 512, or 256 twice"
    if (d, dv) == (512, 512) and a.te >= Version(2, 19):
        return "head dimensions are 512 and 512"
    return "head_dim 256 with unequal lengths" if (d, dv) == (256, 256) and not a.square else ""


def _untiled_backward(a: FilterInput) -> bool:
    """Whether head dimensions in full tiles of 16 are no multiples of the tiles of FlashAttention 4."""
    d, dv = (-(-size // 16) * 16 for size in (a.p.head_dim_qk, a.p.head_dim_v))
    about = 100 <= a.arch < 120 and a.p.is_training and _unlike(a) and a.p.head_dim_qk >= 128
    return about and (dv // 2) % gcd(32, d // 2) != 0


# ---- layout, softmax ----------------------------------------------------------------------------------


def _gaps(a: FilterInput) -> bool:
    return a.packed and a.p.pad_between_seqs


def _packed_on_sm120(a: FilterInput) -> str:
    if not a.packed or a.arch != 120:
        return ""
    if a.cudnn < Version(9, 18, 1):
        return f"packed sequences on sm120: cuDNN is {a.cudnn}, at least 9.18.1"
    one = a.p.qkv_layout in _ONE_TENSOR
    return f"packed sequences on sm120 in one tensor ({a.p.qkv_layout})" if one else ""


def _sinks(a: FilterInput) -> bool:
    return a.p.softmax_type != "vanilla"


def _fp8_since_2_14(a: FilterInput) -> bool:
    """What 2.14 lets through in FP8 on new GPUs and cuDNN."""
    return a.te >= Version(2, 14) and a.arch >= 100 and a.cudnn >= Version(9, 21)


# ---- context parallelism ------------------------------------------------------------------------------


def _ranks(a: FilterInput) -> bool:
    return a.p.cp_size > 1


def _flash_over_ranks(a: FilterInput) -> str:
    p = a.p
    if not _ranks(a):
        return ""
    if a.fp8:
        return "context parallelism with attention in FP8"
    other = p.core_attention_bias_type not in _BIASES or (a.packed and p.has_bias)
    biased = f"context parallelism with {p.core_attention_bias_type}" if other else ""
    return _mask_over_ranks(a) or biased


def _mask_over_ranks(a: FilterInput) -> str:
    if "bottom_right" in a.p.attn_mask_type:
        return f"context parallelism with the mask {a.p.attn_mask_type}"
    hit = "causal" in a.p.attn_mask_type and not a.square
    return "context parallelism with a causal mask between unequal lengths" if hit else ""


def _fused_over_ranks(a: FilterInput) -> str:
    p = a.p
    if not _ranks(a):
        return ""
    said = _mask_over_ranks(a)
    if said:
        return said
    kind, comm, packed = p.core_attention_bias_type, p.cp_comm_type, a.packed
    if kind not in _BIASES or (packed and kind != "no_bias"):
        return f"context parallelism with {kind}{' and packed sequences' if packed else ''}"
    if a.te < Version(2, 5):
        return "context parallelism with head_dim_v unlike head_dim_qk" if _unlike(a) else ""
    if a.te < Version(2, 15):
        hit = (a.fp8 if a.te >= Version(2, 6) else p.fp8) and _unlike(a)
        return "context parallelism in FP8 with head_dim_v unlike head_dim_qk" if hit else ""
    if a.fp8 and packed and a.te < Version(2, 19):
        return "context parallelism in FP8 with packed sequences"
    if a.fp8 and kind != "no_bias":
        return f"context parallelism in FP8 with {kind}"
    if kind != "no_bias" and comm != "p2p":
        return f"context parallelism by {comm} with {kind}, only by p2p"
    closed = {"a2a+p2p": Version(2, 19), "all_gather": Version(2, 18)}
    if packed and a.te < closed.get(comm, a.te):
        return f"context parallelism by {comm} with packed sequences"
    if a.windowed and comm in ("p2p", "a2a+p2p"):
        return f"context parallelism by {comm} with a window"
    odd = comm in ("a2a", "a2a+p2p") and (p.num_heads % 2 or p.num_gqa_groups % 2)
    return f"context parallelism by {comm} with an odd number of heads or groups" if odd else ""


# ---- windows, bias, determinism -----------------------------------------------------------------------


def _window_of_cudnn(a: FilterInput) -> str:
    p = a.p
    if not a.windowed:
        return ""
    if p.fp8 and p.recipe is not None and (p.recipe.fp8_dpa or p.recipe.fp8_mha):
        return (
            ""
            if _fp8_since_2_14(a)
            else "a window in FP8: TransformerEngine 2.14, sm100 and cuDNN 9.21.0 at least"
        )
    if p.attention_dropout:
        return "a window with dropout"
    if a.te < Version(2, 12) and a.window[1] != 0:
        return f"the window is {a.window}, only (left, 0)"
    if a.te < Version(2):
        return _window_of_old_cudnn(a)
    return "a window with more queries than keys" if p.max_seqlen_q > p.max_seqlen_kv else ""


def _window_of_old_cudnn(a: FilterInput) -> str:
    """v1.13 attention.py:668-710."""
    kind = a.p.attn_mask_type
    if a.q_format == "thd":
        return "a window with packed sequences"
    if a.p.padding:
        return f"a window with the mask {kind}"
    crossed = not a.square and kind in ("no_mask", "causal_bottom_right")
    return f"a window with the mask {kind} between unequal lengths" if crossed else ""


def _before_2_1(a: FilterInput) -> bool:
    return a.te < Version(1, 12) and _flash_attn_before(a, 2, 1)


def _window_from_top_left(a: FilterInput) -> bool:
    return a.windowed and not a.p.bottom_right_diagonal and not a.square


def _flash_2_reaches_windows(a: FilterInput) -> bool:
    """Whether no filter before that of windows takes FlashAttention 2 away: only then is the window looked
    at."""
    for one in FILTERS:
        if one.check is _OLD_WINDOW.check:
            return not one.check(a)
        if FLASH_2 in one.kernels and one.holds(a.te) and one.check(a):
            return False
    return True


def _flash_attn_before(a: FilterInput, *release: int) -> bool:
    return a.env.flash_attn is not None and a.env.flash_attn < Version(*release)


def _alibi(a: FilterInput) -> bool:
    return a.p.core_attention_bias_type == "alibi"


def _alibi_of_flash_2(a: FilterInput) -> str:
    """1.11 looks at flash-attn's release only where FlashAttention 3 is on (v1.11 attention.py:664-670)."""
    if not _alibi(a) or (a.te < Version(1, 12) and not _flash_3_is_on(a)):
        return ""
    if _flash_attn_before(a, 2, 4):
        return f"ALiBi: flash-attn is {a.env.flash_attn}, at least 2.4"
    hit = a.te >= Version(2, 12) and not a.p.bottom_right_diagonal and not a.square
    return "ALiBi from the top left between unequal lengths" if hit else ""


def _flash_3_is_on(a: FilterInput) -> bool:
    """Whether 1.11 has not turned FlashAttention 3 off before it looks at ALiBi."""
    crossed = a.p.attn_mask_type in ("causal", "padding_causal") and not a.square
    return _flash_3_of_old(a) and not (a.p.attention_dropout or _ranks(a) or crossed or a.windowed)


def _bias_trains(a: FilterInput) -> bool:
    return a.p.core_attention_bias_requires_grad and not _alibi(a) and a.bias == "post_scale_bias"


def _one_query(a: FilterInput) -> bool:
    """From 2.20 on a bias is told by its sizes, and with one query [1, 1, 1, s] is [1, 1, s, s]."""
    return a.te >= Version(2, 20) and a.p.max_seqlen_q == 1


def _deterministic_training(a: FilterInput) -> str:
    """Of its sub-backend for sequences of any length; that for short ones is deterministic."""
    if not (a.deterministic and a.p.is_training) or sub_backend(a) != 1:
        return ""
    if a.arch < 90:
        return f"deterministic training on sm{a.arch}, at least sm90"
    if a.p.core_attention_bias_requires_grad:
        return "deterministic training with the gradient of a bias"
    return f"deterministic training: cuDNN is {a.cudnn}, at least 8.9.5" if a.cudnn < Version(8, 9, 5) else ""


def _deterministic_on_blackwell(a: FilterInput) -> bool:
    return a.deterministic and a.p.is_training and a.arch >= 100


def _workspace_of_packed(a: FilterInput) -> bool:
    """From 2^30 scores on cuDNN's deterministic backward wants more memory than an H100 has."""
    p = a.p
    scores = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv
    packed = a.packed and a.arch == 90 and sub_backend(a) == 1
    return packed and a.deterministic and p.is_training and scores >= _MOST_SCORES


# ---- the table ----------------------------------------------------------------------------------------


_OLD_WINDOW = refuses(
    FLASH_2,
    "1466-1472",
    "a window: flash-attn is {a.env.flash_attn}, at least 2.3",
    lambda a: a.windowed and _flash_attn_before(a, 2, 3),
)

FILTERS: tuple[Filter, ...] = (
    _switched_off("NVTE_FLASH_ATTN", *FLASH, lines="609-612"),
    _switched_off("NVTE_FLASH_ATTN_V2", FLASH_2, lines="610", since="2.18"),
    _switched_off("NVTE_FLASH_ATTN_V3", FLASH_3, lines="611", since="2.18"),
    _switched_off("NVTE_FLASH_ATTN_V4", FLASH_4, lines="612", since="2.18"),
    _switched_off("NVTE_FUSED_ATTN", FUSED, lines="614"),
    _switched_off("NVTE_UNFUSED_ATTN", UNFUSED, lines="615"),
    # What is installed.
    refuses(FLASH_2, "1862-1868; backends.py, 107-150", _no_flash_attn_2),
    refuses(FLASH_3, "1862-1868", "flash-attn-3 is not installed", lambda a: a.env.flash_attn_3 is None),
    refuses(
        FLASH_4,
        "1862-1868",
        "flash-attn-4 is not installed",
        lambda a: a.env.flash_attn_4 is None,
        since="2.15",
    ),
    # The GPU, the type.
    refuses((FLASH_2, FUSED), "640-646", "the GPU is sm{a.arch}, at least sm80", lambda a: a.arch < 80),
    refuses(
        FLASH_3,
        "647-650",
        "the GPU is sm{a.arch}, only sm90",
        lambda a: a.arch != 90 and (a.te >= _APART or a.arch < 90),
    ),
    refuses(
        FLASH_3,
        "v2.1 attention.py:989",
        lambda a: (found := _no_flash_attn_2(a)) and f"it counts only beside FlashAttention 2: {found}",
        until="2.2",
    ),
    refuses(
        FLASH_4,
        "v2.18, 'Compute capability'",
        "the GPU is sm{a.arch}, at least sm80",
        lambda a: a.arch < 80,
        until="2.19",
    ),
    refuses(FLASH_4, "652-655", "the GPU is sm{a.arch}, at least sm90", lambda a: a.arch < 90, since="2.19"),
    refuses(
        (FLASH_2, FLASH_4),
        "670-684",
        "the type is {p.dtype}, only fp16 and bf16",
        lambda a: a.p.dtype not in HALF,
    ),
    refuses(
        (FLASH_3, FUSED),
        "685-715",
        "the type is {p.dtype}, only bf16, fp16, fp8_e4m3",
        lambda a: a.p.dtype not in (*HALF, "fp8_e4m3"),
        since="2.2",
    ),
    refuses(
        (FLASH_3, FUSED),
        "v2.1 attention.py:471-491",
        "the type is {p.dtype}, only bf16 and fp16",
        lambda a: a.p.dtype not in HALF,
        until="2.2",
    ),
    # Attention in FP8.
    refuses(
        (FLASH_2, FLASH_4),
        "722-727",
        "attention in FP8",
        lambda a: a.fp8 and not (_flash_3_of_old(a) and not a.p.is_training),
    ),
    refuses(
        FLASH_3,
        "v2.1 attention.py:702-710",
        "attention in FP8 with the mask {p.attn_mask_type}",
        lambda a: a.fp8 and a.p.padding,
        since="1.12",
        until="2.2",
    ),
    refuses(FLASH_3, "728-731", "attention in FP8 for training", lambda a: a.fp8 and a.p.is_training),
    refuses(
        FLASH_3,
        "732-737",
        "the recipe is {a.recipe}, only delayed and current scaling",
        lambda a: a.fp8 and a.recipe not in ("delayed", "current"),
        since="2.15",
    ),
    refuses(
        UNFUSED,
        "738-745",
        "attention in FP8, which NVTE_UnfusedDPA_Emulate_FP8=1 would emulate",
        lambda a: a.fp8 and a.on.get("NVTE_UnfusedDPA_Emulate_FP8") != "1",
        since="2.8",
    ),
    refuses(UNFUSED, "v2.7 utils.py:415-417", "attention in FP8", lambda a: a.fp8, until="2.8"),
    refuses(
        FUSED,
        "746-756",
        "delayed scaling, deterministic, on sm{a.arch}: cuDNN is {a.cudnn}, at least 9.18.0",
        lambda a: a.recipe == "delayed" and a.arch >= 100 and a.deterministic and a.cudnn < Version(9, 18),
        since="2.15",
    ),
    refuses(
        FUSED,
        "757-760",
        "current scaling on sm{a.arch}, at least sm100",
        lambda a: a.recipe == "current" and a.arch < 100,
        since="2.8",
    ),
    refuses(FUSED, "761-773", _current_scaling_of_old_cudnn, since="2.9"),
    refuses(FUSED, "774-791", _mxfp8, since="2.15"),
    refuses(
        FUSED, "792-794", "block scaling has no attention in FP8", lambda a: a.recipe == "block", since="2.15"
    ),
    refuses(
        (*FLASH, FUSED),
        "796-808",
        "attention in FP8 on sm120",
        lambda a: a.fp8 and a.arch == 120,
        since="2.9",
    ),
    # What is asked for.
    refuses(FLASH, "828-831", "max_logit is asked for", lambda a: a.p.return_max_logit, since="2.9"),
    refuses((FUSED, FLASH_4), "840-848", "softcap", lambda a: a.p.softcap),
    refuses(
        FLASH_3,
        "849-858",
        "softcap with head dimensions above 256 or over ranks",
        lambda a: a.p.softcap and (max(a.p.head_dim_qk, a.p.head_dim_v) > 256 or _ranks(a)),
    ),
    refuses(
        FLASH_2,
        "859-861",
        "softcap: flash-attn is {a.env.flash_attn}, at least 2.6",
        lambda a: a.p.softcap and _flash_attn_before(a, 2, 6),
    ),
    refuses(
        FLASH_2,
        "862-866",
        "softcap for training with dropout",
        lambda a: a.p.softcap and a.p.attention_dropout and a.p.is_training,
    ),
    refuses(
        EVERY,
        "832-836",
        "max_logit is asked for, with attention in FP8",
        lambda a: a.p.return_max_logit and a.fp8,
        since="2.9",
    ),
    refuses(
        (FUSED, UNFUSED),
        "v2.10, 'Return max_logit'",
        "max_logit is asked for, with packed sequences",
        lambda a: a.p.return_max_logit and a.packed,
        since="2.9",
        until="2.11",
    ),
    refuses(
        FUSED,
        "946-948",
        "a KV cache on sm{a.arch}",
        lambda a: a.cached and a.arch in ((89, 120) if a.te >= Version(2, 14) else (89,)),
        since="2.8",
    ),
    refuses(FUSED, "v2.7 utils.py:434-437", _cache_on_sm89, since="2.4", until="2.8"),
    refuses(FLASH, "950-952", "a KV cache on sm120", lambda a: a.cached and a.arch == 120, since="2.14"),
    refuses(
        EVERY,
        "953-957",
        "a KV cache under context parallelism",
        lambda a: a.cached and _ranks(a),
        since="2.2",
    ),
    refuses(
        EVERY,
        "959-963",
        "a KV cache with fp8_mha",
        lambda a: a.cached and a.fp8 and getattr(a.p.recipe, "fp8_mha", False),
        since="2.2",
    ),
    refuses(
        FLASH_3,
        "964-967",
        "a KV cache in FP8: the queries are {a.q_format}, only thd",
        lambda a: a.cached and a.fp8 and a.q_format != "thd",
        since="2.2",
    ),
    refuses(FUSED, "968-970", "a KV cache in FP8", lambda a: a.cached and a.fp8, since="2.2"),
    refuses(
        EVERY,
        "971-976",
        "a KV cache, with gaps between packed sequences",
        lambda a: a.cached and not a.fp8 and a.q_format == "thd" and a.p.pad_between_seqs,
        since="2.2",
    ),
    refuses(FLASH_2, "977-989", _pages),
    refuses(
        FLASH_2,
        "990-999",
        f"a cache of {{p.max_seqlen_kv}} keys, a multiple of {_PAGE}",
        lambda a: a.p.kv_cache == "contiguous" and a.p.max_seqlen_kv % _PAGE,
        since="2.16",
    ),
    refuses(FLASH_4, "1000-1002", "a KV cache", lambda a: a.cached),
    # Head dimensions.
    refuses(
        FLASH_2,
        "v2.16, 'Head dimension'",
        "head_dim_v is {p.head_dim_v}, head_dim_qk {p.head_dim_qk}",
        _unlike,
        until="2.17",
    ),
    refuses(
        FLASH_3,
        "v2.7 utils.py:477-482",
        "head_dim_v is {p.head_dim_v}, head_dim_qk {p.head_dim_qk}",
        _unlike,
        until="2.8",
    ),
    refuses(
        FUSED,
        "1005-1012",
        "head_dim_v is not head_dim_qk, and the layout is {p.qkv_layout}: q, k and v must lie apart",
        lambda a: _unlike(a) and a.layout_group != "hd_hd_hd",
    ),
    refuses(
        FUSED,
        "v2.12, 'Head dimension'",
        "head_dim_qk is {p.head_dim_qk} for training on sm120: at most 128 and a multiple of 8",
        _wide_training,
        since="2.9",
        until="2.14",
    ),
    refuses(
        FUSED,
        "1013-1025",
        "head_dim_v is not head_dim_qk ({p.head_dim_qk}), for training on sm120: at most 128 and a multiple "
        "of 8",
        lambda a: _unlike(a) and _wide_training(a),
        since="2.14",
    ),
    refuses(FLASH_2, "1027-1050", _heads_of_flash_2),
    refuses(FLASH_3, "1052-1085", _heads_of_flash_3),
    refuses(FLASH_4, "1087-1170", _heads_of_flash_4),
    refuses(
        FLASH_4,
        "1144-1170",
        "its backward cannot tile head dimensions {p.head_dim_qk} and {p.head_dim_v}",
        _untiled_backward,
    ),
    # Layout, dropout, softmax.
    refuses(UNFUSED, "v2.10, 'QKV layout'", "packed sequences (thd)", lambda a: a.packed, until="2.11"),
    refuses(UNFUSED, "1173-1186", "gaps between packed sequences", _gaps, since="2.16"),
    refuses(FLASH_2, "1173-1186", "gaps between packed sequences", _gaps),
    refuses(FLASH_4, "v2.18 utils.py:978-987", "gaps between packed sequences", _gaps, until="2.19"),
    refuses(FLASH_3, "v2.15 utils.py:845", "gaps between packed sequences", _gaps, until="2.16"),
    refuses(
        FUSED,
        "v2.12, 'QKV layout'",
        "packed sequences on sm120",
        lambda a: a.packed and a.arch == 120,
        since="2.9",
        until="2.14",
    ),
    refuses(FUSED, "1187-1202", _packed_on_sm120, since="2.14"),
    refuses(
        (FLASH_3, FLASH_4),
        "1205-1211",
        "dropout is {p.attention_dropout}, only 0",
        lambda a: a.p.attention_dropout,
    ),
    refuses(FLASH, "1222-1224", "softmax_type is {p.softmax_type}, only vanilla", _sinks, since="2.8"),
    refuses(
        UNFUSED,
        "1225-1240",
        "softmax_type {p.softmax_type} in FP8",
        lambda a: _sinks(a) and a.fp8,
        since="2.8",
    ),
    refuses(
        FUSED,
        "1225-1240",
        "softmax_type {p.softmax_type} in FP8: TransformerEngine 2.14, sm100 and cuDNN 9.21.0 at least",
        lambda a: _sinks(a) and a.fp8 and not _fp8_since_2_14(a),
        since="2.8",
    ),
    refuses(
        FUSED,
        "v2.8 utils.py:641, v2.9:706, v2.10:726, v2.11:720",
        "softmax_type {p.softmax_type} with packed sequences, whatever cuDNN, before TransformerEngine 2.12",
        lambda a: _sinks(a) and a.packed,
        since="2.8",
        until="2.12",
    ),
    refuses(
        FUSED,
        "1241-1247",
        "softmax_type {p.softmax_type} with packed sequences: cuDNN is {a.cudnn}, at least 9.18.0",
        lambda a: _sinks(a) and a.packed and a.cudnn < Version(9, 18),
        since="2.12",
    ),
    refuses(
        UNFUSED,
        "v2.8, 'Softmax type'",
        "softmax_type {p.softmax_type} with packed sequences",
        lambda a: _sinks(a) and a.packed,
        since="2.8",
        until="2.12",
    ),
    refuses(
        FUSED,
        "1248-1255",
        "softmax_type {p.softmax_type} over ranks with {p.cp_comm_type}, only a2a",
        lambda a: _sinks(a) and _ranks(a) and a.p.cp_comm_type != "a2a",
        since="2.8",
    ),
    # Context parallelism.
    refuses(UNFUSED, "1269-1273", "context parallelism", _ranks),
    refuses(FLASH_4, "v2.18 utils.py:1079-1081", "context parallelism", _ranks, until="2.19"),
    refuses(
        FLASH_4,
        "1274-1280",
        "context parallelism by {p.cp_comm_type}, only p2p, all_gather and a2a",
        lambda a: _ranks(a) and a.p.cp_comm_type not in ("p2p", "all_gather", "a2a"),
        since="2.19",
    ),
    refuses(FLASH_3, "v1.11 attention.py:464", "context parallelism", _ranks, until="1.12"),
    refuses(FLASH, "1282-1319", _flash_over_ranks),
    refuses(FUSED, "1321-1379", _fused_over_ranks),
    # Masks and windows.
    refuses(
        (*FLASH, FUSED),
        "1399-1409",
        "a mask given as a tensor (arbitrary)",
        lambda a: a.p.attn_mask_type == "arbitrary",
    ),
    refuses(
        FLASH,
        "1410-1420",
        "a causal mask from the top left between unequal lengths: flash-attn's is from the bottom right",
        lambda a: a.p.attn_mask_type in ("causal", "padding_causal") and not a.square and not _before_2_1(a),
        told=LEVEL_1,
    ),
    refuses(
        FLASH_3,
        "v1.11 attention.py:553-568",
        "a causal mask from the top left between unequal lengths",
        lambda a: a.p.attn_mask_type in ("causal", "padding_causal") and not a.square,
        until="1.12",
        told=LEVEL_1,
    ),
    refuses(
        (FLASH_2, FLASH_3),
        "v1.11 attention.py:581-592",
        "a bottom-right causal mask between unequal lengths: flash-attn is {a.env.flash_attn}, at least 2.1",
        lambda a: a.p.bottom_right and not a.square and _before_2_1(a),
        until="1.12",
        told=LEVEL_1,
    ),
    refuses(
        FLASH_4,
        "1431-1442",
        "a window with head_dim 256",
        lambda a: 100 <= a.arch < 120 and a.p.head_dim_qk == a.p.head_dim_v == 256 and a.windowed,
        since="2.18",
    ),
    refuses(FUSED, "1443-1465", _window_of_cudnn),
    refuses(FLASH_3, "v2.1 attention.py:744-748", "a window", lambda a: a.windowed, until="2.2"),
    _OLD_WINDOW,
    refuses(
        FLASH_2,
        "1474-1484",
        "a window from the top left between unequal lengths",
        _window_from_top_left,
        since="2.12",
    ),
    refuses(
        (FLASH_3, FLASH_4),
        "v2.19.0 utils.py:1365-1380, behind FlashAttention 2's; from 2.20 on 1474-1484",
        "a window from the top left between unequal lengths",
        lambda a: _window_from_top_left(a) and (a.te >= Version(2, 20) or _flash_2_reaches_windows(a)),
        since="2.12",
    ),
    # Bias.
    refuses((FLASH_3, FLASH_4), "1495-1501", "ALiBi", _alibi),
    refuses(FLASH_2, "1502-1515", _alibi_of_flash_2),
    refuses(
        FLASH,
        "1517-1527",
        "the bias is {p.core_attention_bias_type}, only alibi",
        lambda a: a.p.core_attention_bias_type not in ("no_bias", "alibi"),
    ),
    refuses(
        FUSED,
        "1569-1579",
        "the gradient of a bias of shape [1, 1, 1, s]",
        lambda a: _bias_trains(a) and a.p.core_attention_bias_shape == "111s" and not _one_query(a),
        since="2.13",
        told=LEVEL_1,
    ),
    refuses(
        FUSED,
        "v2.12, 'Attention bias'",
        "the gradient of a bias of shape {p.core_attention_bias_shape}, only 1hss",
        lambda a: _bias_trains(a) and a.p.core_attention_bias_shape != "1hss",
        until="2.13",
    ),
    # Determinism.
    refuses(
        FLASH_2,
        "1741-1750",
        "deterministic: flash-attn is {a.env.flash_attn}, at least 2.4.1",
        lambda a: a.deterministic and _flash_attn_before(a, 2, 4, 1),
        told=LEVEL_1,
    ),
    refuses(
        FLASH_3,
        "v1.11 attention.py:780-787",
        "deterministic: flash-attn is {a.env.flash_attn}, at least 2.4.1",
        lambda a: a.deterministic and _flash_attn_before(a, 2, 4, 1),
        until="1.12",
        told=LEVEL_1,
    ),
    refuses(
        FLASH_3,
        "1751-1759",
        "deterministic training with a head dimension of 256 or more",
        lambda a: a.deterministic and a.p.is_training and max(a.p.head_dim_qk, a.p.head_dim_v) >= 256,
        since="2.16",
    ),
    refuses(
        FLASH_3,
        "v2.15 utils.py:1308-1312",
        "deterministic with head_dim_qk of 256 or more",
        lambda a: a.deterministic and a.p.head_dim_qk >= 256,
        since="2.15",
        until="2.16",
    ),
    refuses(
        FUSED,
        "1760-1769",
        "deterministic, with softmax_type {p.softmax_type}",
        lambda a: a.deterministic and _sinks(a),
        since="2.12",
    ),
    refuses(
        FUSED,
        "1770-1780",
        "deterministic training in FP8: TransformerEngine 2.13, sm90 and cuDNN 9.19.0 at least",
        lambda a: (
            (a.deterministic and sub_backend(a) == 2 and a.p.is_training)
            and not (a.te >= Version(2, 13) and a.arch >= 90 and a.cudnn >= Version(9, 19))
        ),
    ),
    refuses(FUSED, "1781-1812", _deterministic_training),
    refuses(
        FUSED,
        "v2.7 utils.py:593, v2.8:1019",
        "deterministic training on sm{a.arch}: cuDNN is {a.cudnn}, above 9.14.0",
        lambda a: _deterministic_on_blackwell(a) and a.cudnn <= Version(9, 14),
        since="2.7",
        until="2.9",
    ),
    refuses(
        FUSED,
        "v2.9 utils.py:1052, v2.10:1073, v2.11:1067",
        "deterministic training on sm{a.arch} with TransformerEngine 2.9 to 2.11, whatever cuDNN",
        _deterministic_on_blackwell,
        since="2.9",
        until="2.12",
    ),
    refuses(
        FUSED,
        "v2.2 utils.py:784, v2.14:1033",
        "a window in FP8: cuDNN's sub-backend for 16 bits alone has one",
        lambda a: a.window[0] != -1 and sub_backend(a) == 2,
        since="2.2",
        until="2.15",
    ),
    refuses(
        FUSED,
        "2.19.0 utils.py:1566-1585, 2.20.2:1789-1808",
        "deterministic training of packed sequences on sm90: batch_size * num_heads * max_seqlen_q * "
        "max_seqlen_kv is at least 2^30",
        _workspace_of_packed,
        since="2.19",
    ),
)

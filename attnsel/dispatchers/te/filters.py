"""TransformerEngine's filters in Python, each with every kernel that it takes away, in its order.

They are rows of data/filters.csv; what takes several steps is a function here.

Read: pytorch/attention/dot_product_attention/utils.py, get_attention_backend, of 2.20.2 (PyPI, 2026-10-05),
where the line numbers are from; and of 1.11 to 2.19.0 (up to 2.1 it lies in pytorch/attention.py), which say
since when and until when a filter is there.
"""

from __future__ import annotations

from math import gcd

from attnsel.dispatchers.te.asked import FLASH_2, HALF, FilterInput, filters
from attnsel.dispatchers.te.query import sub_backend
from attnsel.environment.versions import Version

_BEFORE_MLA_PADS = Version(2, 17)
_APART = Version(2, 2)
"""From here on FlashAttention 2 and 3 have a flag each."""
_WIDE_HEADS = (80, 90, 100, 120)  # sm: where FlashAttention 2 goes beyond head_dim 192
_PAGE = 256
_MOST_SCORES = 2**30
_OF_WINDOWS = "1466-1472"
OLDEST_CUDNN = Version(9, 12)
"""From 2.20 on; before, no release looks at it."""
_BIASES = ("no_bias", "post_scale_bias")
_ONE_TENSOR = ("t3hd", "th3d")


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


def _beside_no_flash_attn(a: FilterInput) -> str:
    """1.11 is not imported without it."""
    missing = _no_flash_attn_2(a)
    oldest, before = flash_attn_2_range(a)
    text = f"TransformerEngine {a.te} needs flash-attn, at least {oldest} and below {before}"
    return missing and f"{text}: it is {a.env.flash_attn or 'not installed'}."


def _beside_old_cudnn(a: FilterInput) -> str:
    text = f"TransformerEngine {a.te} needs cuDNN {OLDEST_CUDNN} and raises at import"
    return f"{text}: it is {a.env.cudnn or 'not installed'}." if a.cudnn < OLDEST_CUDNN else ""


def _only_beside_flash_2(a: FilterInput) -> str:
    found = _no_flash_attn_2(a)
    return found and f"it counts only beside FlashAttention 2: {found}"


def _flash_3_of_old(a: FilterInput) -> bool:
    """Before 2.2 FlashAttention 2 and 3 share one flag, and this one turns the kernel (v2.1 attention.py,
    _use_flash_attn_3): whether 3 is there and its GPU is new enough."""
    return a.te < _APART and a.env.flash_attn_3 is not None and a.arch >= 90


# ---- attention in FP8 ---------------------------------------------------------------------------------


def _inference_of_old_flash_3(a: FilterInput) -> bool:
    return _flash_3_of_old(a) and not a.p.is_training


def _emulates_fp8(a: FilterInput) -> bool:
    return a.on.get("NVTE_UnfusedDPA_Emulate_FP8") == "1"


def _fp8_mha(a: FilterInput) -> bool:
    return bool(getattr(a.p.recipe, "fp8_mha", False))


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
    if _fp8_mha(a):
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


def _part_of_a_page(a: FilterInput) -> bool:
    return a.p.max_seqlen_kv % _PAGE != 0


def _widest(a: FilterInput) -> int:
    return max(a.p.head_dim_qk, a.p.head_dim_v)


def _softcap_of_flash_3(a: FilterInput) -> bool:
    return a.p.softcap != 0 and (_widest(a) > 256 or _ranks(a))


def _unlike(a: FilterInput) -> bool:
    return a.p.head_dim_qk != a.p.head_dim_v


def _wide_training(a: FilterInput) -> bool:
    return a.arch == 120 and a.p.is_training and (a.p.head_dim_qk > 128 or a.p.head_dim_qk % 8 != 0)


def _heads_of_flash_2(a: FilterInput) -> str:
    widest = _widest(a) if a.te >= _BEFORE_MLA_PADS else a.p.head_dim_qk
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


def _left_bound(a: FilterInput) -> bool:
    return a.window[0] != -1


def _window_from_top_left(a: FilterInput) -> bool:
    return a.windowed and not a.p.bottom_right_diagonal and not a.square


def _flash_2_reaches_windows(a: FilterInput) -> bool:
    """Whether no filter before that of windows takes FlashAttention 2 away: only then is the window looked
    at."""
    for one in FILTERS:
        if one.lines == _OF_WINDOWS:
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


def _deterministic_in_fp8(a: FilterInput) -> bool:
    return a.te >= Version(2, 13) and a.arch >= 90 and a.cudnn >= Version(9, 19)


def _workspace_of_packed(a: FilterInput) -> bool:
    """From 2^30 scores on cuDNN's deterministic backward wants more memory than an H100 has."""
    p = a.p
    scores = p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv
    packed = a.packed and a.arch == 90 and sub_backend(a) == 1
    return packed and a.deterministic and p.is_training and scores >= _MOST_SCORES


# ---- the table ----------------------------------------------------------------------------------------


FILTERS = filters(
    "python",
    *(_no_flash_attn_2, _only_beside_flash_2, _inference_of_old_flash_3, _emulates_fp8, _fp8_mha, _mxfp8),
    *(_current_scaling_of_old_cudnn, _softcap_of_flash_3, _cache_on_sm89, _pages, _part_of_a_page, _unlike),
    *(_wide_training, _widest, _heads_of_flash_2, _heads_of_flash_3, _heads_of_flash_4, _untiled_backward),
    *(_gaps, _packed_on_sm120, _sinks, _fp8_since_2_14, _ranks, _flash_over_ranks, _fused_over_ranks),
    *(_window_of_cudnn, _before_2_1, _window_from_top_left, _flash_2_reaches_windows, _left_bound, _alibi),
    *(_alibi_of_flash_2, _bias_trains, _one_query, _deterministic_in_fp8, _deterministic_training),
    *(_workspace_of_packed, sub_backend),
)
UNASKED = filters("unasked", _beside_no_flash_attn, _beside_old_cudnn, _ranks)
"""Where the first of these holds nothing is asked: a release has no such thing, or does not run there."""

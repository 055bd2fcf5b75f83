"""TransformerEngine's query of cuDNN: the clauses of ``nvte_get_fused_attn_backend``, each with a text.

Up to 2.19 TransformerEngine asks it for a number and gets no reason. It is a table of its own, not the
library: some calls that libcudnn takes are refused here. From 2.20 on it has few conditions of its own and
asks cuDNN, through cudnn-frontend, whose answer attnsel's rules (rules/cudnn/) give; it logs that answer.

Read: NVIDIA/TransformerEngine common/fused_attn/fused_attn.cpp at v2.18, where the line numbers are from,
and at v1.11 to v2.17; what differs stands with the release that has it. Of 2.19.0 and 2.20.2, whose C++ is
in no package, the libraries in the wheels of transformer-engine-cu12 were asked (tests/proof/te_function.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from attnsel.dispatchers.conditions import Filter
from attnsel.dispatchers.te.asked import HALF, LEVEL_2, FilterInput, filters
from attnsel.environment.versions import Version
from attnsel.selection.evaluate import findings
from attnsel.verdicts.dispatch import Refusal

_NO_HOLE = Version(2, 12)
"""Releases before take (-1, -1) and (-1, 0) from cuDNN 9.2 on (TransformerEngine#2477)."""
_ASKS_CUDNN = Version(2, 20)
_TRAINING_ASKED = Version(2, 5)
"""Releases before do not say whether it is training (v2.4 fused_attn.cpp:95-100)."""
_LARGEST = 2**31 - 1


def sub_backend(a: FilterInput) -> int:
    """As TransformerEngine numbers them: 0 for short sequences that 1 refuses, 1 for fp16 and bf16, 2 for
    FP8."""
    if a.fp8_query and (a.te < _ASKS_CUDNN or a.fp8):
        return 2
    return 0 if _short(a) and any(True for _ in _failing(a)) else 1


def refusals(a: FilterInput) -> Iterator[Refusal]:
    """One for every clause that fails; none where the kernel for short sequences takes the call."""
    if a.te >= _ASKS_CUDNN:
        yield from _refusals_of_cudnn(a)
    elif (a.fp8_query or a.p.dtype in HALF) and not _short(a):
        for clause, text in _failing(a):
            yield Refusal(text, clause.lines, told=clause.told)


def raised(a: FilterInput) -> str:
    """What FusedAttention raises when it runs although it was taken: before 2.20 nobody asks about the steps
    of context parallelism, and each of them asks for itself. By all_gather a causal mask is
    causal_bottom_right there (v1.11 attention.py:3039, v2.18 context_parallel.py:3078). "" where it raises
    nothing."""
    if a.te >= _ASKS_CUDNN or a.fp8_query or a.p.cp_size == 1 or a.p.cp_comm_type != "all_gather":
        return ""
    if not a.p.causal or a.p.bottom_right:
        return ""
    for step in _steps(a):
        for _, text in _failing(step):
            lengths = f"{step.p.max_seqlen_q} queries and {step.p.max_seqlen_kv} keys"
            return f"a step of all_gather runs {_mask(step)} on {lengths}: {text}"
    return ""


def _failing(a: FilterInput) -> Iterator[tuple[Filter, str]]:
    for clause in FP8_CLAUSES if a.fp8_query else CLAUSES:
        if clause.holds(a.te):
            text = clause.check(a)
            if text:
                yield clause, text


_SHORT_LAYOUTS = ("sb3hd", "sbhd_sb2hd", "bs3hd", "bshd_bs2hd", "bshd_bshd_bshd")


def _short(a: FilterInput) -> bool:
    """Sub-backend 0, up to 2.15: sequences of at most 512 (v2.8 fused_attn.cpp, lines 200-221)."""
    p = a.p
    lengths = (p.max_seqlen_q, p.max_seqlen_kv)
    masks = ("causal", "padding", "no_mask", *(("padding_causal",) if a.square else ()))
    return (
        a.te < Version(2, 16)
        and not a.fp8_query
        and not (a.p.return_max_logit and a.te >= Version(2, 9))
        and a.arch in (80, 90)
        and _cudnn(a, 8, 9, 1)
        and all(n <= 512 and not n % 64 for n in lengths)
        and (p.head_dim_qk, p.head_dim_v) == (64, 64)
        and not p.gqa
        and p.softmax_type == "vanilla"
        and a.bias in ("no_bias", "post_scale_bias")
        and (a.bias == "no_bias" or a.bias_shape == "1hss")
        and p.attn_mask_type in masks
        and p.qkv_layout in _SHORT_LAYOUTS
        and a.window[0] == -1
        and a.window[1] in (-1, 0)
    )


def _cudnn(a: FilterInput, *at_least: int) -> bool:
    return a.cudnn >= Version(*at_least)


def _mask(a: FilterInput) -> str:
    return a.p.attn_mask_type


def _dense(a: FilterInput) -> bool:
    return a.p.qkv_format in ("bshd", "sbhd")


def _paged(a: FilterInput) -> bool:
    return a.p.qkv_layout.startswith("paged_kv")


# ---- fp16, bf16 ---------------------------------------------------------------------------------------


def _architecture(a: FilterInput) -> str:
    if a.arch < 80:
        return f"the GPU is sm{a.arch}, at least sm80"
    if not _cudnn(a, 8, 9, 3) and a.arch not in (80, 90):
        return f"sm{a.arch} needs cuDNN 8.9.3, not {a.cudnn}"
    hit = a.te >= _TRAINING_ASKED and a.arch >= 100 and not _cudnn(a, 9, 7)
    return f"sm{a.arch} needs cuDNN 9.7.0, not {a.cudnn}" if hit else ""


def _head_dims(a: FilterInput) -> str:
    p, d, dv = a.p, a.p.head_dim_qk, a.p.head_dim_v
    if d % 8 or dv % 8:
        return f"head dimensions are {d} and {dv}, multiples of 8"
    if max(d, dv) <= 128:
        return ""
    if a.te < _TRAINING_ASKED:
        small = a.te >= Version(2) and (a.arch >= 100 if a.te >= Version(2, 1) else a.arch == 100)
        if max(d, dv) <= 256 and a.arch >= 90 and _cudnn(a, 9) and not small:
            return ""
        return f"head dimensions are {d} and {dv}, at most 128 on sm{a.arch} with cuDNN {a.cudnn}"
    first = Version(9, 5) if p.is_training else Version(9, 1)
    if max(d, dv) <= 256 and a.arch == 90 and a.cudnn >= first:
        return ""
    if p.is_training:
        if (d, dv) == (192, 128) and a.arch >= 100 and _cudnn(a, 9, 11):
            return ""
        if a.te >= Version(2, 18) and (d, dv) == (256, 256) and 100 <= a.arch < 110 and _takes_256(a):
            return ""
        return (
            f"head dimensions are {d} and {dv}, at most 128 for training on sm{a.arch} with cuDNN {a.cudnn}"
        )
    if a.arch >= 100 and _cudnn(a, 9, 9) and p.max_seqlen_q > 1 and not _paged(a):
        return ""
    single = p.max_seqlen_q == 1 and _mask(a) in ("causal", "padding_causal") and not _paged(a)
    if _cudnn(a, 9, 10, 2 if a.te >= Version(2, 6) else 0) and not single:
        return ""
    return (
        f"head dimensions are {d} and {dv}, at most 128 for such inference on sm{a.arch} with cuDNN {a.cudnn}"
    )


def _takes_256(a: FilterInput) -> bool:
    first = Version(9, 25) if a.p.qkv_format == "thd" else Version(9, 23)
    plain = a.p.attention_dropout == 0 and a.bias == "no_bias" and a.p.softmax_type == "vanilla"
    window = a.window == (-1, -1) or (a.p.causal and a.window[1] in (-1, 0))
    return a.cudnn >= first and plain and window and not _paged(a)


def _unlike_heads_on_hopper(a: FilterInput) -> bool:
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    hit = a.cudnn in (Version(9, 11), Version(9, 12)) or (a.te >= Version(2, 7) and a.cudnn == Version(9, 13))
    hit = hit or (a.te >= Version(2, 8) and _cudnn(a, 9, 11))
    about = a.p.is_training and a.arch == 90 and hit
    return about and min(d, dv) >= 128 and d != dv and (d, dv) != (192, 128)


def _bias_of_cudnn(a: FilterInput) -> str:
    kind = a.bias
    if kind == "no_bias":
        return ""
    if kind == "pre_scale_bias":
        return "pre_scale_bias"
    if (
        kind == "alibi"
        and _cudnn(a, 8, 9, 6)
        and a.arch >= 90
        and _mask(a) in ("causal", "causal_bottom_right")
    ):
        return ""
    if kind == "post_scale_bias" and (
        (_cudnn(a, 8, 9, 6) and a.arch >= 90) or (_cudnn(a, 9) and a.arch >= 80)
    ):
        return ""
    return f"{kind} with the mask {_mask(a)} on sm{a.arch} with cuDNN {a.cudnn}"


def _masks(a: FilterInput) -> Iterator[bool]:
    kind, plain = _mask(a), a.bias == "no_bias" and a.p.attention_dropout == 0
    ordered = a.p.max_seqlen_q <= a.p.max_seqlen_kv
    even = ordered and not a.p.max_seqlen_q % 64 and not a.p.max_seqlen_kv % 64
    yield not _cudnn(a, 8, 9, 6) and kind == "causal"
    old = a.te < Version(2)
    yield (
        _cudnn(a, 8, 9, 6)
        and (old or _dense(a))
        and not a.mixed
        and kind in ("causal", "padding", "padding_causal", "no_mask")
    )
    yield (
        _cudnn(a, 9, 1) and a.p.qkv_format == "thd" and not a.mixed and kind in ("padding", "padding_causal")
    )
    yield _cudnn(a, 9, 3) and _dense(a) and not a.mixed and kind == "causal_bottom_right" and even and plain
    if old:
        return
    paged = kind in ("padding", "padding_causal") or (kind == "padding_causal_bottom_right" and even)
    yield _cudnn(a, 9, 5) and _paged(a) and paged and plain
    yield _cudnn(a, 9, 6) and kind == "padding_causal_bottom_right" and even and plain
    if _cudnn(a, 9, 7) and a.te >= Version(2, 2):
        yield kind in ("no_mask", "causal")
        yield kind in ("padding", "padding_causal", "padding_causal_bottom_right") and plain
        yield kind in ("causal_bottom_right", "padding_causal_bottom_right") and ordered


def _mask_refused(a: FilterInput) -> str:
    if any(_masks(a)):
        return ""
    if _mask(a) == "causal_bottom_right" and not _cudnn(a, 9, 3):
        return f"the mask {_mask(a)}: cuDNN is {a.cudnn}, at least 9.3.0"
    return f"the mask {_mask(a)} in {a.p.qkv_layout} with cuDNN {a.cudnn}, this bias and dropout"


def _layout(a: FilterInput) -> str:
    if a.mixed:
        return "" if _cudnn(a, 9, 7) else f"the layout {a.p.qkv_layout} needs cuDNN 9.7.0, not {a.cudnn}"
    if a.p.qkv_format != "thd":
        return ""
    grouped = _cudnn(a, 9, 6) and a.te >= Version(1, 13)
    if a.arch >= 90 and (grouped or (_cudnn(a, 9, 1) and not a.p.gqa)):
        return ""
    groups = "9.6.0 with groups" if a.te >= Version(1, 13) else "and no groups"
    return f"packed sequences on sm{a.arch} with cuDNN {a.cudnn}: sm90 and 9.1.0, {groups}"


def _window_refused(a: FilterInput) -> str:
    if any(_windows(a)):
        return ""
    text = f"the window {a.window} with the mask {_mask(a)} and cuDNN {a.cudnn}"
    hole = a.te >= _NO_HOLE and _cudnn(a, 9, 2) and not _cudnn(a, 9, 6)
    why = ": from 9.2.0 to 9.5 it takes few masks (taken up to 9.1 and from 9.6.0 on)" if hole else ""
    return text + why


def _windows(a: FilterInput) -> Iterator[bool]:
    left, right = a.window
    kind, whole = _mask(a), left == -1 and right in (-1, 0)
    plain = a.bias == "no_bias" and a.p.attention_dropout == 0
    plain = plain and (a.p.max_seqlen_q <= a.p.max_seqlen_kv or a.te < Version(2))
    yield not _cudnn(a, 9, 2) and whole
    if not _cudnn(a, 9, 2):
        return
    old = a.te < _NO_HOLE
    yield old and whole
    yield not old and (left, right) == (-1, -1) and kind == "no_mask"
    first = ("causal",) if old else ("no_mask", "causal")
    square = kind == "causal_bottom_right" and a.square
    yield right == 0 and (kind in first or square) and plain and _dense(a) and not a.mixed
    if not _cudnn(a, 9, 6) or a.te < Version(2):
        return
    yield whole
    fits = a.arch < 100 or (
        (a.arch == 100 or a.te >= Version(2, 1)) and (a.square or a.cudnn > Version(9, 7))
    )
    bottom = kind.endswith("bottom_right") and fits
    if old:
        yield right == 0 and (kind == "padding_causal" or bottom) and plain
    else:
        unmasked = kind == "no_mask" and a.te >= Version(2, 16)
        yield (kind in ("padding", "padding_causal") or unmasked or bottom) and plain


def _even_lengths(a: FilterInput) -> bool:
    return not (a.p.max_seqlen_q % 64 or a.p.max_seqlen_kv % 64)


def _far_offsets(a: FilterInput) -> bool:
    p, group = a.p, a.layout_group
    heads, groups = p.num_heads * p.head_dim_qk, p.num_gqa_groups * p.head_dim_qk
    q, k, v = (
        heads * p.max_seqlen_q,
        groups * p.max_seqlen_kv,
        p.num_gqa_groups * p.head_dim_v * p.max_seqlen_kv,
    )
    if group in ("3hd", "h3d"):
        q = k = v = 3 * heads * p.max_seqlen_q
    elif group in ("hd_2hd", "hd_h2d"):
        k = v = 2 * groups * p.max_seqlen_kv
    return max(q, k, v, heads * p.max_seqlen_q) > _LARGEST


def _training_on_blackwell(a: FilterInput) -> str:
    if a.arch < 100 or not a.p.is_training:
        return ""
    dropout, biased = a.p.attention_dropout != 0, a.bias != "no_bias"
    if a.deterministic:
        fits = _cudnn(a, 9, 18, 1) and not dropout and not biased
        return "" if fits else f"deterministic training on sm{a.arch}: cuDNN 9.18.1, no bias and no dropout"
    return f"training on sm{a.arch} with a bias and dropout" if dropout and biased else ""


def _wide_window_of_9_14(a: FilterInput) -> bool:
    windowed = a.window[0] != -1 and _mask(a) not in ("causal", "causal_bottom_right")
    return a.cudnn == Version(9, 14) and a.p.max_seqlen_kv > 1024 and windowed


def _graph_of_uneven_lengths(a: FilterInput) -> bool:
    uneven = _dense(a) and a.p.max_seqlen_kv % 128 != 0 and not a.p.padding
    return a.p.cuda_graph and a.p.is_training and a.cudnn <= Version(9, 15) and uneven


def _sm120(a: FilterInput) -> str:
    if a.arch != 120:
        return ""
    if not _cudnn(a, 9, 18, 1):
        return f"sm120 needs cuDNN 9.18.1, not {a.cudnn}"
    if a.deterministic and a.p.is_training:
        return "deterministic training on sm120"
    return f"the layout {a.p.qkv_layout} on sm120" if a.p.qkv_layout in ("t3hd", "th3d") else ""


# ---- FP8 ----------------------------------------------------------------------------------------------


def _fp8_shapes(a: FilterInput) -> Iterator[bool]:
    p, d, dv = a.p, a.p.head_dim_qk, a.p.head_dim_v
    kind, before = _mask(a), a.arch < 100
    even = not p.max_seqlen_q % 128 and not p.max_seqlen_kv % 128
    if a.te < Version(2):
        short = p.qkv_layout == "t3hd" and kind == "padding" and a.square and p.max_seqlen_q <= 512
        yield _cudnn(a, 8, 9) and short and (d, dv) == (64, 64)
        dense = _dense(a) and even and (d, dv) == (128, 128)
        yield _cudnn(a, 9, 2, 1) and dense and kind in ("causal", "no_mask")
        return
    yield _cudnn(a, 9, 2, 1) and before and even and (d, dv) == (128, 128) and kind in ("causal", "no_mask")
    sixteen = not d % 16 and not dv % 16
    fits = max(d, dv) <= (256 if before else 128)
    if before and p.is_training and a.te >= Version(2, 8):
        fits = (d, dv) == (128, 128)
    kinds: tuple[str, ...] = ("no_mask", "causal", "padding", "padding_causal")
    if a.te >= Version(2, 19) and not before:
        kinds += ("padding_causal_bottom_right",)
    yield _cudnn(a, 9, 7) and fits and sixteen and kind in kinds
    new = a.te >= Version(2, 15) and _cudnn(a, 9, 21) and not before and sixteen and d <= 192 and dv <= 128
    yield new and kind in ("no_mask", "causal", "causal_bottom_right")


def _fp8_shape(a: FilterInput) -> bool:
    return any(_fp8_shapes(a))


def _fp8_packed(a: FilterInput) -> bool:
    """Packed sequences as 2.19 takes them."""
    return a.te >= Version(2, 19) and a.packed and _cudnn(a, 9, 23)


def _fp8_layout(a: FilterInput) -> str:
    if _fp8_packed(a):
        return _fp8_packed_limits(a)
    newer = a.te >= Version(2, 15) and _cudnn(a, 9, 21)
    if a.te < Version(2):
        return ""  # one of the shapes above
    if a.p.softmax_type != "vanilla" and not newer:
        return f"softmax_type {a.p.softmax_type} in FP8 with cuDNN {a.cudnn}"
    fits = (_dense(a) or (newer and a.p.qkv_format == "bhsd")) and not a.mixed
    return "" if fits else f"the layout {a.p.qkv_layout} in FP8"


def _fp8_packed_limits(a: FilterInput) -> str:
    d, dv = a.p.head_dim_qk, a.p.head_dim_v
    if a.arch < 100:
        return (
            f"training in FP8 with packed sequences on sm{a.arch}, at least sm100" if a.p.is_training else ""
        )
    if max(d, dv) > 128:
        return f"head dimensions are {d} and {dv}, at most 128 with packed sequences in FP8 on sm{a.arch}"
    sink = a.p.softmax_type != "vanilla" and a.p.is_training and not _cudnn(a, 9, 26)
    return (
        f"training with a sink and packed sequences in FP8 needs cuDNN 9.26.0, not {a.cudnn}" if sink else ""
    )


def _fp8_packed_of_2_20(a: FilterInput) -> str:
    return _fp8_packed_limits(a) if a.p.qkv_format == "thd" else ""


# ---- from 2.20 on -------------------------------------------------------------------------------------


def _refusals_of_cudnn(a: FilterInput) -> Iterator[Refusal]:
    """The conditions of 2.20, then what attnsel's rules say of each step that context parallelism runs."""
    found: dict[str, Refusal] = {}
    for step in _steps(a):
        for clause in FP8_OWN if step.fp8 else OWN:
            if text := clause.check(step):
                found.setdefault(text, Refusal(text, clause.lines, told=clause.told))
        for reason in findings(step.p, step.env, among=("cudnn",))["cudnn"]:
            if not reason.unknown and reason.code.startswith("CUDNN"):
                refusal = Refusal(reason.message, reason.source, reason.code, told=LEVEL_2)
                found.setdefault(reason.code, refusal)
    yield from found.values()


def _bias_beside_packed(a: FilterInput) -> bool:
    """A packed graph has one batch of all tokens, in a length of its own that the bias has to have too: that
    of one sequence of a power of two from 1024 on. Below sm90 and on sm120 the graph is not packed."""
    if a.p.qkv_format != "thd" or a.bias != "post_scale_bias" or a.arch < 90 or a.arch == 120:
        return False
    length = max(a.p.max_seqlen_q, a.p.max_seqlen_kv)
    one = a.p.batch_size == 1 and a.square and length >= 1024 and not length & (length - 1)
    return length > 1 and not one


def _steps(a: FilterInput) -> Iterator[FilterInput]:
    """Each call that cuDNN is asked about (2.20.2 context_parallel.py:5404-5514, cp_per_step_configs)."""
    p, ranks, mask = a.p, a.p.cp_size, _mask(a)
    plain = p.replace(
        cp_size=1,
        deterministic=a.deterministic,
        dtype=p.dtype if a.fp8 or p.dtype in HALF else "bf16",
        core_attention_bias_type=a.bias,
        softcap=0.0,
        alibi_slopes_shape=None,
    )
    if ranks == 1:
        yield a._replace(p=plain)
        return
    around = 2 if p.cp_comm_type == "a2a+p2p" else ranks if p.cp_comm_type == "a2a" else 1
    count = p.num_heads // around or 1
    heads = {"num_heads": count, "num_gqa_groups": gcd(count, p.num_gqa_groups // around or 1)}
    q, kv = p.max_seqlen_q, p.max_seqlen_kv
    if p.cp_comm_type == "a2a":
        sizes = [(mask, q, kv, True)]
    elif p.cp_comm_type == "all_gather":
        bottom = f"{mask}_bottom_right" if p.causal and "bottom_right" not in mask else mask
        sizes = [(bottom, q // (2 * ranks), one, True) for one in (kv // (2 * ranks), kv)]
    else:
        q, kv = q // (ranks // around), kv // (ranks // around)
        off = "padding" if p.padding else "no_mask"
        sizes = [(mask, q, kv, True)]
        if p.causal:
            sizes += [(off, q, kv // 2, False), (off, q // 2, kv, False)]
    for one, queries, keys, windowed in sizes:
        lengths = {"max_seqlen_q": max(queries, 1), "max_seqlen_kv": max(keys, 1), "attn_mask_type": one}
        kept = {} if windowed else {"window_size": (-1, -1)}
        corner = {} if one == mask else {"bottom_right_diagonal": None}
        yield a._replace(p=plain.replace(**heads, **lengths, **kept, **corner))


# ---- the tables ---------------------------------------------------------------------------------------


_EACH = (_bias_beside_packed, _graph_of_uneven_lengths, _paged)
CLAUSES = filters(
    "fused_attn",
    *(_architecture, _even_lengths, _head_dims, _unlike_heads_on_hopper, _bias_of_cudnn, _mask_refused),
    *(_layout, _window_refused, _far_offsets, _training_on_blackwell, _wide_window_of_9_14, _sm120),
    *_EACH,
)
FP8_CLAUSES = filters("fused_attn_fp8", _fp8_shape, _fp8_layout)
OWN = filters("own", *_EACH)
FP8_OWN = filters("own_fp8", _fp8_packed_of_2_20)

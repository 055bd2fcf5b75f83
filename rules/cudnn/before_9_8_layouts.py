"""FP16/BF16 attention in cuDNN below 9.8: packed (thd) layouts, paged caches, and TransformerEngine's gap.

Sources as in ``before_9_8_forward``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.words import AMPERE_ADA, PACKED, PAGED
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtMost, EqualTo, FreeText, OneOf

rule = rules_about("cudnn", fp8=False, when=cudnn("<9.8.0"))

LARGEST_INT32 = 2**31 - 1


def packed(p: AttentionParams) -> bool:
    """Some tensor is packed, so that the kernel needs ragged offsets."""
    return "thd" in (p.layout.q_format, p.layout.kv_format)


def largest_ragged_offset(p: AttentionParams, tokens_q: int, tokens_kv: int) -> int:
    """In elements, of q, k, v or the output, when so many tokens are packed."""
    widest = max(p.head_dim_qk, p.head_dim_v)
    if p.layout.group in ("3hd", "h3d"):
        return 3 * p.num_heads * widest * max(tokens_q, tokens_kv)
    interleaved = 2 if p.layout.group in ("hd_2hd", "hd_h2d") else 1
    return widest * max(p.num_heads * tokens_q, interleaved * p.num_gqa_groups * tokens_kv)


# Packed sequences.


@rule("CUDNN430", when=cudnn("<9.1.0"), fires_on=PACKED, passes={"attn_mask_type": "padding_causal"})
def packed_from_9_1(p: AttentionParams, env: Environment) -> Violation | None:
    """Packed sequences (thd) need cuDNN 9.1.0

    Fix: cuDNN 9.1.0 or newer, or padded sequences (bshd).
    Source: TransformerEngine v2.18, fused_attn.cpp ("9.1: adds thd + {padding, padding_causal}"). The
    frontend's tests (v1.3.0 to v1.8.0) begin at 9.0.0, with exceptions until 9.1; the later start is
    followed.
    """
    if packed(p):
        return Violation("qkv_layout", p.qkv_layout, OneOf("bshd_bshd_bshd"))
    return None


@rule("CUDNN431", arch=AMPERE_ADA, requires={"qkv_layout": OneOf("bshd_bshd_bshd")}, fires_on=PACKED)
def packed_on_ampere(p: AttentionParams, env: Environment) -> bool:
    """Packed sequences (thd) need Hopper or newer

    Fix: padded sequences (bshd), or cuDNN 9.18.1, which brings it to Ampere and Ada.
    Source: TransformerEngine v2.18, fused_attn.cpp, "qkv format", and TransformerEngine#1821; cudnn-frontend
    v1.10.0 ("THD (ragged offset) is only supported in Hopper and above"). TransformerEngine lets packed
    queries with a padded cache pass from 9.7 on; the frontend counts any packed tensor and is followed.
    """
    return packed(p)


@rule(
    "CUDNN432",
    when=cudnn(">=9.1.0,<9.6.0"),
    requires={"num_gqa_groups": EqualTo("num_heads")},
    unknown=True,
    fires_on={**PACKED, "num_gqa_groups": 4, "is_training": False},
    passes={**PACKED, "is_training": False},
)
def packed_grouped_heads(p: AttentionParams, env: Environment) -> bool:
    """Packed inference with grouped heads is in doubt below cuDNN 9.6.0

    Why: TransformerEngine asks for 9.6.0 in every case; the frontend refuses the backward pass only
    (CUDNN214).
    Fix: cuDNN 9.6.0 or newer, or repeat the key and value heads.
    Source: TransformerEngine v2.18, fused_attn.cpp, "qkv format"; cudnn-frontend v1.8.0 to 1.32 (backward
    node).
    """
    return packed(p) and not p.is_training


@rule(
    "CUDNN433",
    when=cudnn("<9.7.0"),
    fires_on={"qkv_layout": "thd_bshd_bshd", "attn_mask_type": "padding", "is_training": False},
    passes={**PACKED, "is_training": False},
)
def packed_queries_dense_keys(p: AttentionParams, env: Environment) -> Violation | None:
    """Packed queries over padded or paged keys need cuDNN 9.7.0

    Fix: cuDNN 9.7.0 or newer, or padded queries.
    Source: TransformerEngine v2.18, fused_attn.cpp, "qkv format" (mixed formats from 9.7); cudnn-frontend
    1.32, sdpa_support_surface.h (paged with ragged offsets). TransformerEngine treats sbhd queries over bshd
    keys alike; the library only sees strides there, so that mix is not refused.
    """
    if packed(p) and p.layout.q_format != p.layout.kv_format:
        return Violation("qkv_layout", p.qkv_layout, FreeText("one format for queries and keys"))
    return None


@rule(
    "CUDNN434",
    when=cudnn("<9.5.0"),
    fires_on={**PACKED, "qkv_layout": "t3hd", "num_heads": 64, "max_seqlen_q": 131072},
    passes=PACKED,
)
def ragged_offsets_of_32_bits(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """Below cuDNN 9.5.0 packed tensors end at 2^31-1 elements

    Why: ragged offsets are 32-bit integers. The longest sequence alone may be too much; otherwise the tokens
    that are really packed decide, at most batch_size * max_seqlen: unknown until q is described in
    ``tensors``.
    Fix: cuDNN 9.5.0 or newer, fewer tokens in a batch, or separate q, k and v.
    Source: TransformerEngine v2.18, utils.cu, get_ragged_offset_dtype, and fused_attn.cpp, "64-bit ragged
    offset". TransformerEngine counts one longest sequence; packed offsets run over the whole batch, so the
    rest is Unknown.
    """
    if not packed(p):
        return None
    at_least = (p.max_seqlen_q, p.max_seqlen_kv)
    at_most = (p.batch_size * p.max_seqlen_q, p.batch_size * p.max_seqlen_kv)
    if p.tensors.q is not None and p.tensors.k is not None:
        at_least = at_most = (p.tensors.q.shape[0], p.tensors.k.shape[0])
    required = FreeText("no ragged offset above 2147483647 elements")
    if largest_ragged_offset(p, *at_least) > LARGEST_INT32:
        return Violation("max_seqlen_q", p.max_seqlen_q, required)
    if largest_ragged_offset(p, *at_most) > LARGEST_INT32:
        return Unknown("batch_size", p.batch_size, required)
    return None


# Paged caches.


@rule("CUDNN435", when=cudnn("<9.5.0"), evidence="documented", fires_on=PAGED, passes={"is_training": False})
def paged_from_9_5(p: AttentionParams, env: Environment) -> Violation | None:
    """A paged cache needs cuDNN 9.5.0

    Fix: cuDNN 9.5.0 or newer, or gather the pages.
    Source: cudnn-frontend v1.8.0 release notes and v1.8.0 to 1.32 ("For cuDNN version below 9.5.0, paged
    caches are not supported"). TransformerEngine's clauses let paged layouts of one format pass at 9.1; the
    frontend is followed.
    """
    if p.layout.paged:
        return Violation("kv_cache", p.kv_cache, FreeText("contiguous keys and values"))
    return None


@rule("CUDNN436", when=cudnn(">=9.5.0,<9.8.0"), fires_on={**PAGED, "attn_mask_type": "no_mask"}, passes=PAGED)
def paged_needs_padding(p: AttentionParams, env: Environment) -> Violation | None:
    """A paged cache needs a padding mask, for the length of each sequence

    Fix: padding, padding_causal or padding_causal_bottom_right.
    Source: cudnn-frontend v1.8.0 to 1.32 ("Paged caches can only be used in combination with padding mask");
    TransformerEngine d0067d0, dot_product_attention.py line 1813.
    """
    if p.layout.paged and not p.padding:
        with_lengths = "padding" if p.attn_mask_type == "no_mask" else f"padding_{p.attn_mask_type}"
        return Violation("attn_mask_type", p.attn_mask_type, OneOf(with_lengths))
    return None


@rule(
    "CUDNN437",
    when=cudnn(">=9.5.0,<9.8.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={**PAGED, "head_dim_qk": 256},
    passes=PAGED,
)
def paged_head_dim(p: AttentionParams, env: Environment) -> bool:
    """With a paged cache the head dimension is at most 128

    Fix: cuDNN 9.10 or newer, or a contiguous cache on Hopper.
    Source: cudnn-frontend 1.23 and 1.32, sdpa_support_surface.h ("Paged attention only supported with d_qk
    and d_v <= 128 for backend version 9.9 or below"). TransformerEngine would allow 256 on Hopper; the
    frontend refuses.
    """
    return p.layout.paged


@rule("CUDNN438", when=cudnn(">=9.5.0,<9.8.0"), arch={89}, fires_on=PAGED, passes={"is_training": False})
def paged_on_ada(p: AttentionParams, env: Environment) -> Unknown | None:
    """A paged cache on Ada: TransformerEngine says no, without a reason

    Why: TransformerEngine gives no cache of any kind to cuDNN on sm89. The library accepts it there from 9.8,
    the first release that can be asked; for older ones nobody knows.
    Fix: cuDNN 9.8 or newer.
    Source: TransformerEngine d0067d0, utils.py line 845.
    """
    if p.layout.paged:
        return Unknown("kv_cache", p.kv_cache, FreeText("contiguous keys and values"))
    return None


# TransformerEngine's gap.


@rule(
    "CUDNN440",
    when=cudnn(">=9.2.0,<9.6.0"),
    fires_on={"attn_mask_type": "padding"},
    passes={"attn_mask_type": "no_mask", "attention_dropout": 0.1},
)
def transformer_engine_gap(p: AttentionParams, env: Environment) -> Unknown | None:
    """From 9.2 to 9.5 TransformerEngine lets plain attention through only

    Why: since v2.12 its table takes these releases with no mask, or with a causal mask without dropout, bias
    or more queries than keys. Versions 2.3 to 2.11 took everything that 9.1 took. The change came with a pull
    request about sliding windows and looks like a side effect: the frontend of each release has no such check
    and tests these features. But the makers' own framework no longer goes there, so: unknown.
    Fix: cuDNN 9.6.0 or newer; 9.1 is older and accepted by both.
    Source: TransformerEngine v2.18, fused_attn.cpp, "9.2: SWA (left, 0)", changed by PR #2477 (c6a92a4dc,
    first in v2.12), against v2.3 to v2.11; cudnn-frontend v1.5.2 to v1.8.0, support checks and test_mhas.py.
    """
    if p.windowed:
        return None  # the window rules: CUDNN411 to 418
    if p.padding:
        return Unknown("attn_mask_type", p.attn_mask_type, FreeText("no_mask or causal, without padding"))
    if not p.causal:
        return None
    if p.dropout:
        return Unknown("attention_dropout", p.attention_dropout, OneOf(0.0))
    if p.core_attention_bias_type != "no_bias":
        return Unknown("core_attention_bias_type", p.core_attention_bias_type, OneOf("no_bias"))
    if p.max_seqlen_q > p.max_seqlen_kv or (p.bottom_right and p.max_seqlen_q != p.max_seqlen_kv):
        return Unknown("max_seqlen_q", p.max_seqlen_q, FreeText(f"max_seqlen_kv ({p.max_seqlen_kv})"))
    return None

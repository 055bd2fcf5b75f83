"""FP16/BF16/FP32 attention in cuDNN 9.8 and newer: devices, element types, head dimensions, layouts.

Sources as in ``since_9_8_masks``. What training needs beyond this is in ``since_9_8_backward``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.vocabulary import (
    AMPERE_ADA,
    BLACKWELL,
    BLACKWELL_THOR,
    CONSUMER_BLACKWELL,
    HOPPER,
    PACKED,
    PAGED,
    any_precision,
    half_precision,
    wider_than,
)
from attnsel.verdict import AtLeast, AtMost, Bad, Multiple, OneOf, Words
from attnsel.versions import Version, cudnn, cudnn_frontend

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams


FP32 = {"dtype": "fp32", "is_training": False}
FP8 = {"dtype": "fp8_e4m3"}


# The library and the device.


@half_precision("CUDNN001", when=cudnn("==9.10.0", "==9.10.1"), evidence="source", trips={}, passes=FP8)
def broken_releases(p: AttentionParams, env: Environment) -> Bad | None:
    """cuDNN 9.10.0 and 9.10.1 are blocked for attention

    Why: known bugs of these two releases.
    Fix: cuDNN 9.10.2.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("not supported on cuDNN 9.10.0/9.10.1 due to known
    bugs"); TransformerEngine v2.18, fused_attn.cpp, refuses them too.
    """
    return Bad("cudnn", env.cudnn, AtLeast(Version(9, 10, 2)))


@half_precision("CUDNN002", when=SINCE_9_8, arch=range(80), evidence="library", trips={}, passes=FP8)
def needs_ampere(p: AttentionParams, env: Environment) -> Bad | None:
    """Fused attention needs an Ampere GPU (sm80) or newer

    Fix: another candidate; on these cards triton, sdpa.efficient and tiled are left.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("requires SM80"); asked 9.8.0, 9.10.2, 9.13.0,
    9.18.1, 9.28.0 with a T4, all refuse.
    """
    return Bad("arch", env.arch, AtLeast(80))


# Element types.


@half_precision("CUDNN003", when=SINCE_9_8, evidence="library", trips={"dtype": "fp64"})
def double_precision(p: AttentionParams, env: Environment) -> Bad | None:
    """There is no FP64 attention

    Fix: bf16 or fp16; sdpa.math and tiled take fp64.
    Source: asked 9.8.0, 9.14.0, 9.18.1, 9.25.1 and 9.28.0 through frontend 1.28.0, all refuse.
    """
    if p.dtype == "fp64":
        return Bad("dtype", "fp64", OneOf("bf16", "fp16"))
    return None


@half_precision("CUDNN150", when=cudnn(">=9.8.0,<9.9.0"), evidence="library", trips=FP32)
def fp32_from_9_9(p: AttentionParams, env: Environment) -> Bad | None:
    """FP32 inference needs cuDNN 9.9.0

    Fix: bf16 or fp16; or cuDNN 9.9.0.
    Source: asked 9.8.0 (no engine), 9.9.0 (accepted).
    """
    if p.dtype == "fp32":
        return Bad("dtype", "fp32", OneOf("bf16", "fp16"))
    return None


@half_precision(
    "CUDNN151",
    when=cudnn(">=9.9.0,<9.10.0"),
    evidence="library",
    trips={**FP32, "head_dim_qk": 160},
    passes=FP32,
)
def fp32_head_dim_9_9(p: AttentionParams, env: Environment) -> Bad | None:
    """In cuDNN 9.9 FP32 inference ends at head dimension 128

    Fix: bf16 or fp16; or cuDNN 9.10.2.
    Source: asked 9.9.0 (144 refused on H100 and B200), 9.10.2 (accepted).
    """
    return wider_than(p, 128) if p.dtype == "fp32" else None


@half_precision(
    "CUDNN152",
    when=(cudnn(">=9.26.0"), cudnn_frontend("<1.27.0")),
    evidence="library",
    trips=FP32,
)
def fp32_and_older_frontend(p: AttentionParams, env: Environment) -> Bad | None:
    """From cuDNN 9.26 on FP32 inference needs cudnn-frontend 1.27

    Why: older frontends send FP32 to the newer of two implementations, which takes it no longer.
    Fix: cudnn-frontend 1.27 or newer; or bf16, fp16.
    Source: asked 9.26.1 and 9.28.0 through frontends 1.23, 1.25, 1.26 (no engine), 1.27, 1.28 (accepted);
    9.25.1 accepts through all of them.
    """
    if p.dtype == "fp32":
        return Bad("dtype", "fp32", OneOf("bf16", "fp16"))
    return None


_FP32_HEAD_DIM = {80: 256, 87: 256, 86: 128, 89: 128, 120: 128, 121: 128}


@half_precision(
    "CUDNN153",
    when=cudnn(">=9.10.2"),
    evidence="library",
    trips={**FP32, "head_dim_qk": 512},
    passes=FP32,
)
def fp32_head_dim(p: AttentionParams, env: Environment) -> Bad | None:
    """FP32 inference ends at a head dimension that depends on the GPU

    Why: the limits follow the shared memory of a block: 128 columns of queries and keys on sm86, sm89 and
    sm12x, 256 on sm80 and sm87, 384 on sm90, sm10x and sm110.
    Fix: bf16 or fp16.
    Source: asked 9.18.1 with every multiple of 8 up to 512, causal. Without mask, bias and window some
    releases accept more through the other implementation; those few are refused here too.
    """
    if p.dtype == "fp32":
        limit = _FP32_HEAD_DIM.get(env.arch or 0, 384)
        if p.head_dim_qk > limit:
            return Bad("head_dim_qk", p.head_dim_qk, AtMost(limit))
    return None


# Head dimensions.


@half_precision("CUDNN005", when=SINCE_9_8, evidence="library", trips={"head_dim_qk": 100, "head_dim_v": 128})
def head_dim_qk_multiple(p: AttentionParams, env: Environment) -> Bad | None:
    """The head dimension of queries and keys must be a multiple of 8

    Why: rows are read 16 bytes at a time.
    Fix: pad the last dimension of q and k with zeros; the scale stays that of the true dimension.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("hidden_dim should be multiple of 8"); asked 9.8.0
    to 9.28.0, all refuse.
    """
    if p.head_dim_qk % 8:
        return Bad("head_dim_qk", p.head_dim_qk, Multiple(8))
    return None


@half_precision("CUDNN006", when=SINCE_9_8, evidence="library", trips={"head_dim_v": 100})
def head_dim_v_multiple(p: AttentionParams, env: Environment) -> Bad | None:
    """The head dimension of values must be a multiple of 8

    Why: rows are read 16 bytes at a time.
    Fix: pad the last dimension of v with zeros and drop the same columns of the output.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("hidden_dim should be multiple of 8"); asked 9.8.0
    to 9.28.0, all refuse.
    """
    if p.head_dim_v % 8:
        return Bad("head_dim_v", p.head_dim_v, Multiple(8))
    return None


@half_precision(
    "CUDNN160",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=AMPERE_ADA,
    evidence="library",
    trips={"head_dim_qk": 192, "is_training": False},
)
def head_dim_ampere(p: AttentionParams, env: Environment) -> Bad | None:
    """On Ampere and Ada the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h; asked 9.8.0 and 9.9.0 (refused), 9.10.2 (accepted).
    """
    return wider_than(p, 128)


@half_precision(
    "CUDNN161",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=HOPPER,
    evidence="library",
    trips={"head_dim_qk": 512, "is_training": False},
    passes={"head_dim_qk": 256},
)
def head_dim_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper the head dimension is at most 256 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h; asked 9.8.0 and 9.9.0 (refused), 9.10.2 (accepted).
    """
    return wider_than(p, 256)


@half_precision(
    "CUDNN162",
    when=cudnn(">=9.8.0,<9.9.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={"head_dim_qk": 192, "is_training": False},
)
def head_dim_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell the head dimension is at most 128 in cuDNN 9.8

    Fix: cuDNN 9.9.0 or newer, for inference.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h; asked 9.8.0 (refused), 9.9.0 (accepted), on B200,
    B300 and Thor.
    """
    return wider_than(p, 128)


@half_precision(
    "CUDNN163",
    when=cudnn(">=9.8.0,<9.10.0"),
    arch=CONSUMER_BLACKWELL,
    evidence="library",
    trips={"head_dim_qk": 192, "is_training": False},
)
def head_dim_consumer_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On sm120 the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer, for inference.
    Source: asked 9.8.0 and 9.9.0 (no engine for 136 or more), 9.10.2 (accepted).
    """
    return wider_than(p, 128)


@half_precision(
    "CUDNN164",
    when=cudnn(">=9.9.0,<9.10.0"),
    arch=BLACKWELL_THOR,
    evidence="library",
    trips={
        "head_dim_qk": 192,
        "is_training": False,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "attn_mask_type": "no_mask",
    },
    passes={"head_dim_qk": 192, "is_training": False},
)
def head_dim_one_query(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell in cuDNN 9.9 a single query ends at head dimension 128

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("decode only mode … for backend version 9.9 or
    below"); asked 9.9.0 (refused), 9.10.2 (accepted).
    """
    return wider_than(p, 128) if p.max_seqlen_q == 1 else None


@half_precision(
    "CUDNN165",
    when=cudnn(">=9.13.0"),
    arch=BLACKWELL,
    evidence="library",
    trips={
        "head_dim_qk": 192,
        "head_dim_v": 128,
        "max_seqlen_q": 1,
        "max_seqlen_kv": 4096,
        "attention_dropout": 0.1,
    },
    passes={"head_dim_qk": 192, "head_dim_v": 128, "attention_dropout": 0.1},
)
def one_query_wide_dropout(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell one query above head dimension 128 takes no dropout

    Fix: attention_dropout=0.0.
    Source: asked 9.10.2 to 9.12.0 (accepted), 9.13.0 to 9.28.0 (no engine). Thor (sm110) accepts.
    """
    if p.max_seqlen_q == 1 and p.dropout and wider_than(p, 128):
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


# Layouts.


@any_precision(
    "CUDNN007",
    when=SINCE_9_8,
    evidence="source",
    trips={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 1, 524288, 4096)}}},
    passes={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 2048, 128, 1)}}},
)
def innermost_stride(p: AttentionParams, env: Environment) -> Bad | None:
    """The head dimension must be the innermost one of q, k and v

    Fix: .contiguous() on the tensor named, or lay it out with the head dimension last.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("The stride for the last dimension …
    should be 1").
    """
    for name in ("q", "k", "v"):
        spec = getattr(p.tensors, name)
        if spec is not None and spec.last_stride != 1:
            return Bad(f"tensors.{name}", spec.stride, Words("an innermost stride of 1"))
    return None


@half_precision("CUDNN170", when=cudnn(">=9.8.0,<9.18.1"), arch=AMPERE_ADA, evidence="library", trips=PACKED)
def packed_ampere(p: AttentionParams, env: Environment) -> Bad | None:
    """On Ampere and Ada packed sequences (thd) need cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer; or bshd with a padding mask.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("THD (ragged offset) is only supported in Hopper
    and above"); asked 9.8.0 to 9.18.0 (refused), 9.18.1 (accepted).
    """
    if p.qkv_format == "thd":
        return Bad("qkv_layout", p.qkv_layout, Words("bshd, sbhd or bhsd"))
    return None


@any_precision(
    "CUDNN171",
    when=SINCE_9_8,
    evidence="library",
    trips={**PAGED, "attn_mask_type": "causal"},
    passes=PAGED,
)
def paged_padding(p: AttentionParams, env: Environment) -> Bad | None:
    """A paged cache needs a padding mask, for the length of each sequence

    Fix: padding, padding_causal or padding_causal_bottom_right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged caches can only be used in combination with
    padding mask"); asked 9.8.0 to 9.28.0, all refuse.
    """
    if p.layout.paged and not p.padding:
        wanted = "padding" if p.attn_mask_type == "no_mask" else f"padding_{p.attn_mask_type}"
        return Bad("attn_mask_type", p.attn_mask_type, OneOf(wanted))
    return None


@any_precision("CUDNN172", when=SINCE_9_8, evidence="library", trips={**PAGED, "page_size": 48}, passes=PAGED)
def page_size_power(p: AttentionParams, env: Environment) -> Bad | None:
    """Pages hold a power of two of tokens

    Fix: another page size; 1 to 256 were accepted.
    Source: asked 9.8.0 to 9.28.0: cudnnBackendFinalize answers "block size needs to be non-zero and a power
    of 2".
    """
    if p.page_size is not None and p.page_size & (p.page_size - 1):
        return Bad("page_size", p.page_size, OneOf(1 << p.page_size.bit_length()))
    return None


@half_precision(
    "CUDNN173",
    when=cudnn(">=9.8.0,<9.10.0"),
    evidence="library",
    trips={**PAGED, "head_dim_qk": 192},
    passes=PAGED,
)
def paged_head_dim(p: AttentionParams, env: Environment) -> Bad | None:
    """With a paged cache the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged attention only supported with d_qk and d_v
    <= 128"); asked 9.8.0 and 9.9.0 (refused), 9.10.2 (accepted).
    """
    return wider_than(p, 128) if p.layout.paged else None

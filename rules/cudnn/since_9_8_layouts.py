"""FP16/BF16/FP32 attention in cuDNN 9.8 and newer: strides, packed (thd) layouts and paged caches.

Sources as in ``since_9_8_masks``. What training with packed sequences needs beyond this is in
``since_9_8_backward_modes``.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.cudnn.since_9_8_masks import SINCE_9_8
from attnsel.rules.cudnn.vocabulary import AMPERE_ADA, PACKED, PAGED
from attnsel.verdicts.requirements import AtMost, FreeText, OneOf
from attnsel.verdicts.verdict import Violation

rule = rules_about("cudnn", fp8="both", when=SINCE_9_8)


@rule(
    "CUDNN007",
    fires_on={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 1, 524288, 4096)}}},
    passes={"tensors": {"k": {"shape": (2, 4096, 16, 128), "stride": (8388608, 2048, 128, 1)}}},
)
def innermost_stride(p: AttentionParams, env: Environment) -> Violation | None:
    """The head dimension must be the innermost one of q, k and v

    Fix: .contiguous() on the tensor named, or lay it out with the head dimension last.
    Source: cudnn-frontend 1.23, scaled_dot_product_flash_attention.h ("The stride for the last dimension …
    should be 1").
    """
    for name in ("q", "k", "v"):
        spec = getattr(p.tensors, name)
        if spec is not None and spec.last_stride != 1:
            return Violation(f"tensors.{name}", spec.stride, FreeText("an innermost stride of 1"))
    return None


@rule(
    "CUDNN170", fp8=False, when=cudnn(">=9.8.0,<9.18.1"), arch=AMPERE_ADA, evidence="library", fires_on=PACKED
)
def packed_ampere(p: AttentionParams, env: Environment) -> Violation | None:
    """On Ampere and Ada packed sequences (thd) need cuDNN 9.18.1

    Fix: cuDNN 9.18.1 or newer; or bshd with a padding mask.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("THD (ragged offset) is only supported in Hopper
    and above"); asked 9.8.0 to 9.18.0 (refused), 9.18.1 (accepted).
    """
    if p.qkv_format == "thd":
        return Violation("qkv_layout", p.qkv_layout, FreeText("bshd, sbhd or bhsd"))
    return None


@rule("CUDNN171", evidence="library", fires_on={**PAGED, "attn_mask_type": "causal"}, passes=PAGED)
def paged_padding(p: AttentionParams, env: Environment) -> Violation | None:
    """A paged cache needs a padding mask, for the length of each sequence

    Fix: padding, padding_causal or padding_causal_bottom_right.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged caches can only be used in combination with
    padding mask"); asked 9.8.0 to 9.28.0, all refuse.
    """
    if p.layout.paged and not p.padding:
        wanted = "padding" if p.attn_mask_type == "no_mask" else f"padding_{p.attn_mask_type}"
        return Violation("attn_mask_type", p.attn_mask_type, OneOf(wanted))
    return None


@rule("CUDNN172", evidence="library", fires_on={**PAGED, "page_size": 48}, passes=PAGED)
def page_size_power(p: AttentionParams, env: Environment) -> Violation | None:
    """Pages hold a power of two of tokens

    Fix: another page size; 1 to 256 were accepted.
    Source: asked 9.8.0 to 9.28.0: cudnnBackendFinalize answers "block size needs to be non-zero and a power
    of 2".
    """
    if p.page_size is not None and p.page_size & (p.page_size - 1):
        return Violation("page_size", p.page_size, OneOf(1 << p.page_size.bit_length()))
    return None


@rule(
    "CUDNN173",
    fp8=False,
    when=cudnn(">=9.8.0,<9.10.0"),
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    evidence="library",
    fires_on={**PAGED, "head_dim_qk": 192},
    passes=PAGED,
)
def paged_head_dim(p: AttentionParams, env: Environment) -> bool:
    """With a paged cache the head dimension is at most 128 up to cuDNN 9.9

    Fix: cuDNN 9.10.2 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h ("Paged attention only supported with d_qk and d_v
    <= 128"); asked 9.8.0 and 9.9.0 (refused), 9.10.2 (accepted).
    """
    return p.layout.paged

"""FP8 attention in cuDNN: head dimensions, lengths, masks, windows, layouts and the rest.

Sources and the meaning of "FP8 question" as in ``fp8``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnsel.rules.cudnn.fp8 import DELAYED, bottom_right, fp8
from attnsel.rules.cudnn.vocabulary import CONSUMER_BLACKWELL, HOPPER
from attnsel.verdict import AtMost, Bad, Multiple, OneOf, Required, Unknown, Words
from attnsel.versions import cudnn

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

INFERENCE = {**DELAYED, "is_training": False}


# Head dimensions and lengths.


@fp8("CUDNN320", evidence="library", trips={**DELAYED, "head_dim_qk": 72, "head_dim_v": 128}, passes=DELAYED)
def head_dim_qk_of_16(p: AttentionParams, env: Environment) -> Bad | None:
    """For FP8 the head dimension of queries and keys must be a multiple of 16

    Fix: pad q and k with zeros (keep the softmax scale of the original dimension).
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h; TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    if p.head_dim_qk % 16:
        return Bad("head_dim_qk", p.head_dim_qk, Multiple(16))
    return None


@fp8("CUDNN321", evidence="library", trips={**DELAYED, "head_dim_v": 72}, passes=DELAYED)
def head_dim_v_of_16(p: AttentionParams, env: Environment) -> Bad | None:
    """For FP8 the head dimension of values must be a multiple of 16

    Fix: pad v with zeros and cut the output.
    Source: as for queries and keys (CUDNN320).
    """
    if p.head_dim_v % 16:
        return Bad("head_dim_v", p.head_dim_v, Multiple(16))
    return None


@fp8(
    "CUDNN322",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    evidence="source",
    trips={**INFERENCE, "head_dim_qk": 64},
    passes=DELAYED,
)
def head_dim_128_before_9_7(p: AttentionParams, env: Environment) -> Bad | None:
    """Below cuDNN 9.7.0 FP8 attention has head dimension 128 only

    Fix: pad to 128, or cuDNN 9.7.0 or newer for inference.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch ("9.2.1: ... d=128").
    """
    return not_128(p)


@fp8(
    "CUDNN323",
    when=cudnn(">=9.7.0"),
    arch=HOPPER,
    evidence="library",
    trips={**DELAYED, "head_dim_qk": 64},
    passes={**INFERENCE, "head_dim_qk": 64},
)
def training_head_dim_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 training has head dimension 128 only

    Fix: pad to 128.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8_bwd.h ("should be equal to 128"); TransformerEngine
    v2.18, fused_attn.cpp, FP8 branch.
    """
    return not_128(p) if p.is_training else None


def not_128(p: AttentionParams) -> Bad | None:
    for field in ("head_dim_qk", "head_dim_v"):
        width = getattr(p, field)
        if width != 128:
            required: Required = Multiple(128) if width < 128 else AtMost(128)
            return Bad(field, width, required)
    return None


@fp8(
    "CUDNN324",
    when=cudnn(">=9.7.0"),
    arch=HOPPER,
    evidence="library",
    trips={**INFERENCE, "head_dim_qk": 512},
    passes={**INFERENCE, "head_dim_qk": 256},
)
def head_dim_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 attention has head dimensions up to 256

    Why: the frontend refuses a wider FP8 graph before any engine sees it.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h; TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    field = "head_dim_qk" if p.head_dim_qk > 256 else "head_dim_v"
    width = getattr(p, field)
    return Bad(field, width, AtMost(256)) if width > 256 else None


@fp8(
    "CUDNN325",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    evidence="library",
    trips={**INFERENCE, "head_dim_qk": 256},
    passes=INFERENCE,
)
def head_dim_blackwell(p: AttentionParams, env: Environment) -> Bad | Unknown | None:
    """On Blackwell FP8 takes head dimensions up to 128, datacentre also 192/128 from 9.19

    Why: 256/256 for inference came with 9.26 and needs a frontend newer than attnsel uses, hence unknown.
    Fix: for 192/128 cuDNN 9.19.0 or newer.
    Source: cudnn-frontend 1.23, sdpa_support_surface.h (192/128 from 9.19; 1.32 adds 256/256 from 9.26) and
    sdpa_fp8_bwd.h; libcudnn 9.26 and 9.28 asked without a GPU take 192/128 on sm100 and refuse it on sm120.
    TransformerEngine v2.18 waits for 9.21 and then takes every pair up to 192/128; the frontend, which names
    9.19 and just this pair, is followed.
    """
    sizes = (p.head_dim_qk, p.head_dim_v)
    if max(sizes) <= 128 or env.cudnn is None:
        return None
    if sizes == (192, 128) and env.cudnn >= (9, 19, 0) and env.arch not in CONSUMER_BLACKWELL:
        return None
    field = "head_dim_qk" if p.head_dim_qk > 128 else "head_dim_v"
    newest = sizes == (256, 256) and not p.is_training and env.cudnn >= (9, 26, 0)
    return (Unknown if newest else Bad)(field, getattr(p, field), AtMost(128))


@fp8(
    "CUDNN326",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    evidence="source",
    trips={**DELAYED, "max_seqlen_q": 1000, "max_seqlen_kv": 1024},
    passes=DELAYED,
)
def query_length_of_128(p: AttentionParams, env: Environment) -> Bad | None:
    """Below cuDNN 9.7.0 FP8 attention needs a query length multiple of 128

    Fix: pad the queries, or cuDNN 9.7.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    if p.max_seqlen_q % 128:
        return Bad("max_seqlen_q", p.max_seqlen_q, Multiple(128))
    return None


@fp8(
    "CUDNN327",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    evidence="source",
    trips={**DELAYED, "max_seqlen_q": 1024, "max_seqlen_kv": 1000},
    passes=DELAYED,
)
def key_length_of_128(p: AttentionParams, env: Environment) -> Bad | None:
    """Below cuDNN 9.7.0 FP8 attention needs a key length multiple of 128

    Fix: cuDNN 9.7.0 or newer, which also takes a padding mask.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    if p.max_seqlen_kv % 128:
        return Bad("max_seqlen_kv", p.max_seqlen_kv, Multiple(128))
    return None


# Masks and windows.


@fp8("CUDNN330", evidence="source", trips={**DELAYED, "attn_mask_type": "arbitrary"}, passes=DELAYED)
def no_arbitrary_mask(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 attention takes no arbitrary mask, and no bias to write one into

    Fix: attention in bf16 (fp8_dpa off).
    Source: TransformerEngine d0067d0, utils.py line 1300; cudnn-frontend 1.23 ("SDPA FP8 does not support
    bias").
    """
    if p.attn_mask_type == "arbitrary":
        return Bad("attn_mask_type", "arbitrary", Words("a mask type other than arbitrary"))
    return None


@fp8(
    "CUDNN331",
    when=cudnn("<9.7.0"),
    arch=HOPPER,
    evidence="source",
    trips={**DELAYED, "attn_mask_type": "padding"},
    passes=DELAYED,
)
def padding_from_9_7(p: AttentionParams, env: Environment) -> Bad | Unknown | None:
    """Padding masks with FP8 need cuDNN 9.7.0

    Why: the frontend announced them for 9.5.0; TransformerEngine waits for 9.7.0. In between: unknown.
    Fix: cuDNN 9.7.0 or newer.
    Source: TransformerEngine v2.18, fused_attn.cpp, FP8 branch; cudnn-frontend v1.8.0 release notes ("fp8
    sdpa attention now allows dropout and padding mask. Requires cudnn 9.5.0").
    """
    if not p.padding:
        return None
    finding = Unknown if env.cudnn is not None and env.cudnn >= (9, 5, 0) else Bad
    return finding("attn_mask_type", p.attn_mask_type, Words("no_mask or causal"))


@fp8(
    "CUDNN332",
    arch=HOPPER,
    evidence="library",
    trips={**DELAYED, "attn_mask_type": "causal_bottom_right"},
    passes=DELAYED,
)
def bottom_right_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper FP8 attention has no bottom-right diagonal

    Why: neither a mask's nor that of a window with a right bound, which is anchored there unless
    bottom_right_diagonal is False.
    Fix: with equal lengths and no padding the top-left diagonal is the same.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h (Blackwell and 9.7 only); libcudnn 9.8 to 9.28 asked
    without a GPU; TransformerEngine v2.18, fused_attn.cpp, FP8 branch.
    """
    if not bottom_right(p):
        return None
    if not p.bottom_right:
        return Bad("bottom_right_diagonal", True, OneOf(False))
    same = p.max_seqlen_q == p.max_seqlen_kv and not p.padding
    return Bad("attn_mask_type", p.attn_mask_type, OneOf("causal") if same else Words("causal"))


@fp8(
    "CUDNN333",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(100, 130),
    evidence="source",
    trips={**INFERENCE, "attn_mask_type": "causal_bottom_right"},
    passes=INFERENCE,
)
def bottom_right_blackwell(p: AttentionParams, env: Environment) -> Unknown | None:
    """Below 9.8 nobody has seen FP8 with a bottom-right mask

    Why: the frontend takes it on Blackwell from 9.7.0 and has a sample; TransformerEngine waits for 9.21.0.
    Fix: cuDNN 9.8.0 or newer.
    Source: cudnn-frontend v1.10.0, sdpa_fp8.h and samples/cpp/sdpa/fp8_fwd_bottom_right_causal_mask.cpp;
    TransformerEngine v2.18, fused_attn.cpp, FP8 branch ("9.21"); libcudnn asked without a GPU takes it from
    9.8 on.
    """
    if p.bottom_right:
        return Unknown("attn_mask_type", p.attn_mask_type, Words("a top-left mask"))
    return None


@fp8(
    "CUDNN335",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    evidence="library",
    trips={**INFERENCE, "attn_mask_type": "causal_bottom_right", "max_seqlen_kv": 1024},
    passes=INFERENCE,
)
def bottom_right_more_queries(p: AttentionParams, env: Environment) -> Bad | None:
    """For FP8 a bottom-right diagonal cannot have more queries than keys

    Why: without a padding mask, which knows the true lengths, the forward refuses; the backward always does.
    Fix: cut off the queries that see no key.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8.h and sdpa_fp8_bwd.h; libcudnn 9.8 to 9.28 asked without
    a GPU.
    """
    certain = p.is_training or not p.padding
    if certain and bottom_right(p) and p.max_seqlen_q > p.max_seqlen_kv:
        return Bad("max_seqlen_q", p.max_seqlen_q, Words(f"at most max_seqlen_kv ({p.max_seqlen_kv})"))
    return None


@fp8(
    "CUDNN336",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    evidence="library",
    trips={**DELAYED, "attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1000, "max_seqlen_kv": 2048},
    passes={**DELAYED, "attn_mask_type": "causal_bottom_right"},
)
def bottom_right_query_length(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 training with a bottom-right mask needs a query length multiple of 64

    Fix: pad the queries at the front.
    Source: cudnn-frontend v1.10.0 to 1.32, sdpa_fp8_bwd.h (the forward lost the clause by 1.23).
    """
    if p.is_training and bottom_right(p) and p.max_seqlen_q % 64:
        return Bad("max_seqlen_q", p.max_seqlen_q, Multiple(64))
    return None


@fp8(
    "CUDNN337",
    when=cudnn(">=9.7.0"),
    arch=range(100, 130),
    evidence="library",
    trips={**DELAYED, "attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 2000},
    passes={**DELAYED, "attn_mask_type": "causal_bottom_right"},
)
def bottom_right_key_length(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 training with a bottom-right mask needs a key length multiple of 64

    Fix: pad keys and values, masked out; or upgrade as for queries (CUDNN336).
    Source: as for queries (CUDNN336).
    """
    if p.is_training and bottom_right(p) and p.max_seqlen_kv % 64:
        return Bad("max_seqlen_kv", p.max_seqlen_kv, Multiple(64))
    return None


@fp8(
    "CUDNN338",
    when=cudnn("<9.8.0"),
    arch=HOPPER,
    evidence="source",
    trips={**DELAYED, "window_size": (128, 0)},
    passes=DELAYED,
)
def window_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper a sliding window with FP8 needs cuDNN 9.8.0

    Fix: cuDNN 9.8.0 or newer, or attention in bf16 for windowed layers.
    Source: libcudnn 9.8 to 9.28 asked without a GPU take it, older ones cannot be asked. TransformerEngine
    d0067d0, utils.py lines 1344 to 1366, refuses it on Hopper at every version, which is followed below 9.8.
    """
    if p.windowed:
        return Bad("window_size", p.window_size, OneOf((-1, -1)))
    return None


@fp8(
    "CUDNN339",
    when=cudnn(">=9.7.0,<9.8.0"),
    arch=range(100, 130),
    evidence="source",
    trips={**INFERENCE, "window_size": (128, 0)},
    passes=INFERENCE,
)
def window_blackwell(p: AttentionParams, env: Environment) -> Bad | None:
    """On Blackwell a sliding window with FP8 needs cuDNN 9.8.0

    Fix: cuDNN 9.8.0 or newer.
    Source: libcudnn 9.8 to 9.28 asked without a GPU take it, older ones cannot be asked. TransformerEngine
    d0067d0, utils.py lines 1344 to 1366, waits for 9.21, which is followed below 9.8.
    """
    if p.windowed:
        return Bad("window_size", p.window_size, OneOf((-1, -1)))
    return None


@fp8(
    "CUDNN340",
    when=cudnn(">=9.8.0"),
    arch=range(90, 130),
    evidence="library",
    trips={**DELAYED, "window_size": (128, 0), "max_seqlen_kv": 1024},
    passes={**DELAYED, "window_size": (128, 0)},
)
def window_more_queries(p: AttentionParams, env: Environment) -> Bad | None:
    """FP8 training with a left bound cannot have more queries than keys

    Why: the frontend refuses the backward; a padding mask, which knows the true lengths, lifts it.
    Fix: cut off the queries that see no key.
    Source: cudnn-frontend 1.23, sdpa_fp8_bwd.h; libcudnn 9.8 to 9.28 asked without a GPU.
    """
    if p.is_training and p.window_size[0] >= 0 and not p.padding and p.max_seqlen_q > p.max_seqlen_kv:
        return Bad("max_seqlen_q", p.max_seqlen_q, Words(f"at most max_seqlen_kv ({p.max_seqlen_kv})"))
    return None

"""SDPA306 to SDPA316: head dimensions of cuDNN's attention as PyTorch builds it.

The frontend inside each torch and the library decide together.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.rules.sdpa.common import CUDA, widest
from attnsel.verdict import AtMost, Bad, EqualTo, Multiple, OneOf
from attnsel.versions import cudnn, torch

CUDNN = "sdpa.cudnn"
HOPPER = frozenset({90})
BLACKWELL = range(100, 110)
SERVER = HOPPER | frozenset(BLACKWELL)
OTHERS = frozenset(range(80, 130)) - SERVER
DEEPSEEK = (192, 128)


def wider_than(p: AttentionParams, limit: int) -> Bad | None:
    """An objection to the larger head dimension when it is above ``limit``."""
    field = widest(p)
    width = getattr(p, field)
    return Bad(field, width, AtMost(limit)) if width > limit else None


def head_dims(p: AttentionParams) -> tuple[int, int]:
    return (p.head_dim_qk, p.head_dim_v)


@rule("SDPA306", CUDNN, device=CUDA, evidence="source", trips={"head_dim_qk": 60})
def cudnn_head_dim_multiple(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel wants head dimensions that are multiples of 8

    Fix: pad the head dimension with zeros and keep the softmax scale of the true one.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C).
    """
    for field in ("head_dim_qk", "head_dim_v"):
        if getattr(p, field) % 8:
            return Bad(field, getattr(p, field), Multiple(8))
    return None


@rule("SDPA307", CUDNN, when=torch("<2.8.0"), device=CUDA, evidence="source", trips={"head_dim_qk": 192})
def wide_heads_since_torch_2_8(p: AttentionParams, env: Environment) -> Bad | None:
    """Before PyTorch 2.8 SDPA's cuDNN kernel stops at head_dim 128

    Fix: newer PyTorch has 256 on H100; sdpa.flash has 256 on every card from Ampere on.
    Source: check_cudnn_tensor_shapes in A (constant 128) and B; pytorch#149904 (2025-03) raised it. That 2.8
    is the first release with it was inferred from the date.
    """
    return wider_than(p, 128)


@rule("SDPA308", CUDNN, arch=HOPPER, when=cudnn("<9.10.0"), evidence="source", trips={"head_dim_qk": 256})
def wide_heads_on_hopper(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper SDPA's cuDNN kernel goes beyond head_dim 128 from cuDNN 9.10 on

    Fix: install a newer cuDNN; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in B (cudnn_version >= 91000).
    """
    return wider_than(p, 128)


@rule("SDPA309", CUDNN, arch=SERVER, evidence="source", trips={"head_dim_qk": 320})
def widest_heads(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel never goes beyond head_dim 256

    Fix: sdpa.efficient has no limit.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (B, C).
    """
    return wider_than(p, 256)


@rule("SDPA310", CUDNN, arch=OTHERS, evidence="source", trips={"gpu": "A100", "head_dim_qk": 256})
def wide_heads_elsewhere(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel stops at head_dim 128 except on Hopper and B200

    Fix: sdpa.flash has 256 on these cards, sdpa.efficient has no limit.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C).
    """
    return wider_than(p, 128)


@rule(
    "SDPA311",
    CUDNN,
    arch=BLACKWELL,
    when=torch("<2.11.0"),
    evidence="source",
    trips={"torch": "2.10.0", "cudnn": "9.12.0", "head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_heads_before_2_11(p: AttentionParams, env: Environment) -> Bad | None:
    """On B200 SDPA's cuDNN kernel stops at head_dim 128 before PyTorch 2.11

    Fix: PyTorch 2.11 has the pair 192/128.
    Source: check_cudnn_tensor_shapes in B (about 2.9) has no exception for Blackwell; a fork of about 2.11
    has. The release between the two was inferred.
    """
    return wider_than(p, 128)


@rule(
    "SDPA312",
    CUDNN,
    arch=BLACKWELL,
    when=(torch(">=2.11.0,<2.14.0"),),
    evidence="source",
    trips={"head_dim_qk": 256},
    passes={"head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_pair(p: AttentionParams, env: Environment) -> Bad | None:
    """On B200 SDPA's cuDNN kernel has head_dim up to 128 and the pair 192/128

    Why: the pair is DeepSeek's; the frontend of that time has no other wide kernel for Blackwell.
    Fix: PyTorch 2.14 with cuDNN above 9.22 has 256; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in a fork of about 2.11 (d_qk == 192 && d_v == 128, cuDNN >= 9.11).
    """
    return None if head_dims(p) == DEEPSEEK else wider_than(p, 128)


@rule(
    "SDPA313",
    CUDNN,
    arch=BLACKWELL,
    when=cudnn("<9.11.0"),
    evidence="source",
    trips={"head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_pair_library(p: AttentionParams, env: Environment) -> Bad | None:
    """On B200 head_dim 192/128 needs cuDNN 9.11

    Fix: install a newer cuDNN.
    Source: check_cudnn_tensor_shapes in C and in a fork of about 2.11; TransformerEngine v2.18,
    fused_attn.cpp.
    """
    return wider_than(p, 128)


@rule(
    "SDPA314",
    CUDNN,
    arch=SERVER,
    when=(torch(">=2.14.0"), cudnn("<=9.22.0")),
    evidence="source",
    trips={"head_dim_qk": 256},
    passes={"head_dim_qk": 192, "head_dim_v": 128, "cudnn": "9.20.0"},
)
def wide_heads_in_torch_2_14(p: AttentionParams, env: Environment) -> Bad | None:
    """From PyTorch 2.14 on head_dim 256 needs a cuDNN above 9.22.0

    Why: the check was tightened on Hopper when Blackwell came in; 192/128 stays.
    Fix: install a newer cuDNN; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in C. That 2.14 is the first release with it was inferred: C is later
    than 2.13.
    """
    return None if head_dims(p) == DEEPSEEK else wider_than(p, 128)


@rule(
    "SDPA315",
    CUDNN,
    arch=SERVER,
    when=torch(">=2.14.0"),
    evidence="source",
    trips={"head_dim_qk": 192, "cudnn": "9.24.0"},
    passes={"head_dim_qk": 256, "cudnn": "9.24.0"},
)
def wide_backward(p: AttentionParams, env: Environment) -> Bad | None:
    """From PyTorch 2.14 on the wide backward is for 192/128 and 256/256 only

    Fix: pad both head dimensions to 256, or use sdpa.flash.
    Source: check_cudnn_tensor_shapes in C (requires_grad).
    """
    if not p.is_training or max(head_dims(p)) <= 128 or head_dims(p) in (DEEPSEEK, (256, 256)):
        return None
    field = "head_dim_v" if p.head_dim_v < p.head_dim_qk else "head_dim_qk"
    note = "both head dimensions; or 192/128 (head_dim_qk/head_dim_v), or at most 128"
    return Bad(field, getattr(p, field), OneOf(256), note)


@rule(
    "SDPA316",
    CUDNN,
    arch=HOPPER,
    when=cudnn(">=9.11.0"),
    evidence="source",
    trips={"head_dim_qk": 256, "head_dim_v": 128},
    passes={"head_dim_qk": 192, "head_dim_v": 128, "cudnn": "9.12.0"},
)
def unequal_wide_backward(p: AttentionParams, env: Environment) -> Bad | None:
    """On Hopper the cuDNN backward with unequal wide heads is 192/128 only

    Fix: pad head_dim_v to head_dim_qk.
    Source: TransformerEngine v2.18, fused_attn.cpp, lines 349-353 (cuDNN >= 9.11).
    """
    d, e = head_dims(p)
    if not p.is_training or d == e or min(d, e) < 128 or (d, e) == DEEPSEEK:
        return None
    field, other = ("head_dim_v", "head_dim_qk") if e < d else ("head_dim_qk", "head_dim_v")
    return Bad(field, getattr(p, field), EqualTo(other, max(d, e)), "or 192/128")

"""SDPA306 to SDPA317: head dimensions of cuDNN's attention as PyTorch builds it.

The frontend inside each torch and the library decide together.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import cudnn, torch
from attnsel.params import AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.sdpa.common import CUDA
from attnsel.verdicts.requirements import AtMost, EqualTo, Multiple, OneOf
from attnsel.verdicts.verdict import Violation

CUDNN = "sdpa.cudnn"
rule = rules_about(CUDNN)
HOPPER = frozenset({90})
BLACKWELL = range(100, 110)
SERVER = HOPPER | frozenset(BLACKWELL)
OTHERS = frozenset(range(80, 130)) - SERVER
DEEPSEEK = (192, 128)


def head_dims(p: AttentionParams) -> tuple[int, int]:
    return (p.head_dim_qk, p.head_dim_v)


@rule(
    "SDPA306",
    device=CUDA,
    requires={("head_dim_qk", "head_dim_v"): Multiple(8)},
    fires_on={"head_dim_qk": 60},
)
def cudnn_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel wants head dimensions that are multiples of 8

    Fix: pad the head dimension with zeros and keep the softmax scale of the true one.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule(
    "SDPA307",
    when=torch("<2.8.0"),
    device=CUDA,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 192},
)
def wide_heads_since_torch_2_8(p: AttentionParams, env: Environment) -> None:
    """Before PyTorch 2.8 SDPA's cuDNN kernel stops at head_dim 128

    Fix: newer PyTorch has 256 on H100; sdpa.flash has 256 on every card from Ampere on.
    Source: check_cudnn_tensor_shapes in A (constant 128) and B; pytorch#149904 (2025-03) raised it: in the
    machine code of the wheel of 2.8.0 and not in that of 2.7.1.
    """


@rule(
    "SDPA308",
    when=(torch(">=2.9.0"), cudnn("<9.10.0")),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256, "torch": "2.13.0", "cudnn": "9.7.0"},
    passes={"head_dim_qk": 128, "torch": "2.13.0", "cudnn": "9.7.0"},
)
def wide_heads_on_hopper(p: AttentionParams, env: Environment) -> None:
    """On Hopper SDPA's cuDNN kernel needs cuDNN 9.10 above head_dim 128

    Why: PyTorch asks for it since 2.9; 2.8 took anything above 9.5.0 (SDPA317).
    Fix: install a newer cuDNN; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in B (cudnn_version >= 91000) and in the machine code of the wheels of
    2.9.1 to 2.13.0 (> 90999), not in that of 2.8.0.
    """


@rule(
    "SDPA317",
    when=(torch(">=2.8.0,<2.9.0"), cudnn("<=9.5.0")),
    arch=HOPPER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes={"head_dim_qk": 128},
)
def wide_heads_in_torch_2_8(p: AttentionParams, env: Environment) -> None:
    """In PyTorch 2.8 SDPA's cuDNN kernel needs cuDNN above 9.5.0 for wide heads

    Why: 2.8 is the first that takes more than 128, on Hopper, and it asks for no more than this.
    Fix: install a newer cuDNN; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in the machine code of the wheel of 2.8.0 (> 90500).
    """


@rule(
    "SDPA309",
    arch=SERVER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(256)},
    fires_on={"head_dim_qk": 320},
)
def widest_heads(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel never goes beyond head_dim 256

    Fix: sdpa.efficient has no limit.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (B, C).
    """


@rule(
    "SDPA310",
    arch=OTHERS,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"gpu": "A100", "head_dim_qk": 256},
)
def wide_heads_elsewhere(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel stops at head_dim 128 except on Hopper and B200

    Fix: sdpa.flash has 256 on these cards, sdpa.efficient has no limit.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule(
    "SDPA311",
    when=torch("<2.11.0"),
    arch=BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"torch": "2.10.0", "cudnn": "9.12.0", "head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_heads_before_2_11(p: AttentionParams, env: Environment) -> None:
    """On B200 SDPA's cuDNN kernel stops at head_dim 128 before PyTorch 2.11

    Fix: PyTorch 2.11 has the pair 192/128.
    Source: check_cudnn_tensor_shapes: its machine code in the wheel of 2.10.0 has no exception for Blackwell,
    that in 2.11.0 has.
    """


@rule(
    "SDPA312",
    when=(torch(">=2.11.0,<2.14.0"),),
    arch=BLACKWELL,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes={"head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_pair(p: AttentionParams, env: Environment) -> bool:
    """On B200 SDPA's cuDNN kernel has head_dim up to 128 and the pair 192/128

    Why: the pair is DeepSeek's; the frontend of that time has no other wide kernel for Blackwell.
    Fix: PyTorch 2.14 with cuDNN above 9.22 has 256; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes, machine code of the wheels of 2.11.0, 2.12.0 and 2.13.0 (192 and 128,
    cuDNN > 9.10.99).
    """
    return head_dims(p) != DEEPSEEK


@rule(
    "SDPA313",
    when=cudnn("<9.11.0"),
    arch=SERVER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"gpu": "B200", "head_dim_qk": 192, "head_dim_v": 128},
    passes={"gpu": "H100", "torch": "2.13.0", "head_dim_qk": 192, "head_dim_v": 128},
)
def blackwell_pair_library(p: AttentionParams, env: Environment) -> bool:
    """On B200, and from PyTorch 2.14 on Hopper, 192/128 heads need cuDNN 9.11

    Fix: install a newer cuDNN.
    Source: check_cudnn_tensor_shapes in C and in the machine code of the wheels of 2.11.0 to 2.14.1;
    TransformerEngine v2.18, fused_attn.cpp.
    """
    return env.arch != 90 or (env.torch is not None and env.torch >= (2, 14))


@rule(
    "SDPA314",
    when=(torch(">=2.14.0"), cudnn("<=9.22.0")),
    arch=SERVER,
    requires={("head_dim_qk", "head_dim_v"): AtMost(128)},
    fires_on={"head_dim_qk": 256},
    passes={"head_dim_qk": 192, "head_dim_v": 128, "cudnn": "9.20.0"},
)
def wide_heads_in_torch_2_14(p: AttentionParams, env: Environment) -> bool:
    """From PyTorch 2.14 on head_dim 256 needs a cuDNN above 9.22.0

    Why: the check was tightened on Hopper when Blackwell came in; 192/128 stays.
    Fix: install a newer cuDNN; sdpa.flash has 256.
    Source: check_cudnn_tensor_shapes in C and in the machine code of the wheel of 2.14.1 (> 92200, sm107 >
    92500), not in that of 2.13.0.
    """
    return head_dims(p) != DEEPSEEK


@rule(
    "SDPA315",
    arch=SERVER,
    when=torch(">=2.14.0"),
    fires_on={"head_dim_qk": 192, "cudnn": "9.24.0"},
    passes={"head_dim_qk": 256, "cudnn": "9.24.0"},
)
def wide_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """From PyTorch 2.14 on the wide backward is for 192/128 and 256/256 only

    Fix: pad both head dimensions to 256, or use sdpa.flash.
    Source: check_cudnn_tensor_shapes in C (requires_grad).
    """
    if not p.is_training or max(head_dims(p)) <= 128 or head_dims(p) in (DEEPSEEK, (256, 256)):
        return None
    field = "head_dim_v" if p.head_dim_v < p.head_dim_qk else "head_dim_qk"
    note = "both head dimensions; or 192/128 (head_dim_qk/head_dim_v), or at most 128"
    return Violation(field, min(head_dims(p)), OneOf(256), note)


@rule(
    "SDPA316",
    when=cudnn(">=9.11.0"),
    arch=HOPPER,
    fires_on={"head_dim_qk": 256, "head_dim_v": 128},
    passes={"head_dim_qk": 192, "head_dim_v": 128, "cudnn": "9.12.0"},
)
def unequal_wide_backward(p: AttentionParams, env: Environment) -> Violation | None:
    """On Hopper the cuDNN backward with unequal wide heads is 192/128 only

    Fix: pad head_dim_v to head_dim_qk.
    Source: TransformerEngine v2.18, fused_attn.cpp, lines 349-353 (cuDNN >= 9.11).
    """
    if not p.is_training or min(head_dims(p)) < 128 or head_dims(p) == DEEPSEEK:
        return None
    if p.head_dim_v < p.head_dim_qk:
        return limit(p, "head_dim_v", EqualTo("head_dim_qk"), "or 192/128")
    return limit(p, "head_dim_qk", EqualTo("head_dim_v"), "or 192/128")

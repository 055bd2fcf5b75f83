"""SDPA3xx: cuDNN's attention as PyTorch builds it. What libcudnn itself gets wrong is in ``bugs``.

PyTorch builds the graph with the cudnn-frontend it was compiled with, so ``env.torch`` stands for the
frontend and ``env.cudnn`` for the library that is loaded.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, cudnn, torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about, same_head_dims
from attnsel.rules.sdpa.common import CUDA, GRID, MASK_GRADIENT, mask_gradient
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, Installed, Multiple, OneOf

CUDNN = "sdpa.cudnn"
rule = rules_about(CUDNN, device=CUDA)
BLACKWELL = range(100, 110)


@rule(
    "SDPA300", requires={"device": OneOf("cuda")}, evidence="measured", fires_on={"gpu": "cpu"}, device=None
)
def cudnn_needs_cuda(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel exists on NVIDIA GPUs only

    Fix: sdpa.math and tiled run on every device, sdpa.flash also on CPUs.
    Source: torch 2.13 on a CPU raises "Could not run aten::_scaled_dot_product_cudnn_attention".
    """


@rule("SDPA301", requires={"cudnn": Installed(Version(9))}, fires_on={"cudnn": None})
def cudnn_must_be_there(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel needs libcudnn

    Fix: install the cuDNN package that the torch wheel names.
    Source: can_use_cudnn_attention, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule(
    "SDPA302", requires={"cudnn": AtLeast(Version(9))}, fires_on={"cudnn": "8.9.0"}, passes={"cudnn": "9.0.0"}
)
def cudnn_nine(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel needs cuDNN 9.0

    Why: PyTorch compiles it in from cuDNN 9 on.
    Fix: PyTorch 2.5 or newer brings a cuDNN 9.
    Source: can_use_cudnn_attention, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule("SDPA303", requires={"arch": AtLeast(80)}, fires_on={"gpu": "T4"}, passes={"gpu": "A100"}, device=None)
def cudnn_needs_ampere(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel needs Ampere or newer (sm80)

    Fix: sdpa.efficient runs on Turing and Volta; triton on Turing.
    Source: check_cudnn_hardware_support, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule(
    "SDPA304",
    arch=range(100, 130),
    requires={"cudnn": AtLeast(Version(9, 7))},
    fires_on={"cudnn": "9.6.0"},
    passes={"cudnn": "9.7.0"},
)
def cudnn_blackwell(p: AttentionParams, env: Environment) -> None:
    """cuDNN attention runs on Blackwell from cuDNN 9.7 on

    Fix: install a newer cuDNN.
    Source: TransformerEngine v2.18, fused_attn.cpp, comment "architecture".
    """


@rule("SDPA305", requires={"dtype": OneOf("bf16", "fp16")}, fires_on={"dtype": "fp32"})
def cudnn_half_precision(p: AttentionParams, env: Environment) -> bool:
    """SDPA's cuDNN kernel computes in fp16 or bf16

    Fix: cast q, k and v; autocast does.
    Source: check_dtypes_low_precision, PyTorch sdp_utils.cpp (A, B, C).
    """
    return not p.dtype.startswith("fp8")  # SDPA003


# Lengths, dropout, determinism.


@rule(
    "SDPA320",
    requires={"max_seqlen_kv": AtLeast(2)},
    fires_on={"max_seqlen_kv": 1},
    passes={"max_seqlen_kv": 2},
)
def more_than_one_key(p: AttentionParams, env: Environment) -> bool:
    """SDPA's cuDNN kernel wants more than one key

    Fix: sdpa.flash and sdpa.efficient take one.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C); pytorch#138531.
    """
    return p.max_seqlen_kv > 0  # DEVICE002


@rule(
    "SDPA321",
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.125},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096},
)
def one_query_without_dropout(p: AttentionParams, env: Environment) -> bool:
    """SDPA's cuDNN kernel takes a single query only without dropout

    Fix: leave dropout out, or use sdpa.efficient.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (B, C); A refuses a single query altogether.
    """
    return p.dropout and p.max_seqlen_q == 1


@rule(
    "SDPA322",
    when=torch("<2.9.0"),
    requires={"max_seqlen_q": AtLeast(2)},
    fires_on={"max_seqlen_q": 1, "max_seqlen_kv": 4096},
)
def one_query(p: AttentionParams, env: Environment) -> bool:
    """Before PyTorch 2.9 SDPA's cuDNN kernel takes no single query

    Why: 2.5 does not check it and fails; 2.6 to 2.8 check it.
    Fix: install a newer PyTorch, or use sdpa.flash.
    Source: pytorch#138531; "cudnn SDPA does not support sequence length 1" in libtorch_cuda.so of the wheels
    2.6.0, 2.7.1 and 2.8.0; check_cudnn_tensor_shapes in A and B.
    """
    return p.max_seqlen_q > 0  # DEVICE002


@rule(
    "SDPA323",
    when=cudnn(">9.11.0,<9.14.0"),
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"attention_dropout": 0.125},
)
def dropout_heuristics(p: AttentionParams, env: Environment) -> bool:
    """cuDNN 9.11 to 9.13 have no dropout for SDPA

    Why: their heuristics refuse these graphs, which ends in an exception.
    Fix: cuDNN 9.14 or newer.
    Source: can_use_cudnn_attention in B and C (91100 < version < 91400); pytorch#163903.
    """
    return p.dropout


@rule("SDPA324", fires_on={"attention_dropout": 0.1}, passes={"attention_dropout": 0.125, "cudnn": "9.20.0"})
def dropout_in_sixteenths(p: AttentionParams, env: Environment) -> Violation | None:
    """SDPA's cuDNN kernel has dropout probabilities in steps of 1/16

    Why: some of its kernels round the probability silently: 0.1 becomes another rate. F.sdpa avoids cuDNN
    then from 2.12 on; a direct call must do so for all.
    Fix: 0.0625 or 0.125; sdpa.flash and sdpa.efficient take any probability.
    Source: check_cudnn_dropout in C and among the symbols of the wheels since 2.12.0; pytorch#174245.
    """
    if not p.dropout or (p.attention_dropout * 16).is_integer():
        return None
    lower = int(p.attention_dropout * 16) / 16
    return Violation("attention_dropout", p.attention_dropout, OneOf(lower, lower + 1 / 16), "steps of 1/16")


@rule("SDPA325", requires={"deterministic": OneOf(False)}, fires_on={"deterministic": True})
def cudnn_is_not_deterministic(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel promises no determinism

    Why: PyTorch builds the graph without cuDNN's deterministic flag, and rules it out under
    torch.use_deterministic_algorithms(True), forward included.
    Fix: attnsel's own cudnn candidate asks for the deterministic backward; triton and tiled have one.
    Source: check_cudnn_deterministic, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule("SDPA326", **MASK_GRADIENT)
def cudnn_mask_gradient(p: AttentionParams, env: Environment) -> Violation | None:
    """SDPA's cuDNN kernel gives no gradient to a bias

    Why: PyTorch asks cuDNN for no dBias. A mask of any length trains: that cuDNN below 9.5 refuses "dBias"
    for lengths that are no multiple of 64 was said of every mask by the cudnn-frontend 1.7 of some nightlies
    before 2.6; the frontend of the 2.6.0 wheel says it of a dBias only.
    Fix: detach the bias if it is not trained; sdpa.efficient gives its gradient.
    Source: check_attn_mask_shape, torch 2.13 sdp_utils_cpp.h; derivatives.yaml has no formula for attn_bias.
    pytorch#137347; cudnn-frontend v1.7.0, scaled_dot_product_flash_attention.h, line 873 (is_bias), and
    v1.8.0, line 1021 (is_dbias); the 2.6.0 wheel has texts that begin with v1.8.0 ("below 9.6.0").
    """
    return mask_gradient(p)


@rule(
    "SDPA327",
    requires=GRID,
    fires_on={"batch_size": 65536, "max_seqlen_q": 16},
    passes={"batch_size": 65535, "max_seqlen_q": 16},
)
def cudnn_grid(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel takes at most 65535 sequences and 65535 heads

    Fix: split the batch.
    Source: check_cudnn_tensor_shapes in C, and since 2.13.0 in the wheels.
    """


@rule(
    "SDPA328",
    arch=BLACKWELL,
    requires={"attention_dropout": OneOf(0.0)},
    fires_on={"attn_mask_type": "arbitrary", "attention_dropout": 0.125},
    passes={"attn_mask_type": "arbitrary"},
)
def blackwell_mask_and_dropout(p: AttentionParams, env: Environment) -> bool:
    """On B200 cuDNN trains with a mask tensor or with dropout, not with both

    Why: PyTorch hands the mask to cuDNN as a bias, and the Blackwell backward has no bias with dropout.
    Fix: leave dropout out, or use sdpa.efficient.
    Source: TransformerEngine v2.18, fused_attn.cpp, lines 480-488.
    """
    return p.dropout and p.attn_mask_type == "arbitrary"


@rule(
    "SDPA329",
    when=(torch(">=2.14.0"), cudnn(">=9.19.0,<9.24.1", ">=9.25.0,<9.25.1")),
    arch=range(100, 120),
    requires={"max_seqlen_q": AtLeast(2)},
    fires_on={"torch": "2.14.1", "cudnn": "9.20.0", "max_seqlen_q": 1, "max_seqlen_kv": 4096},
    passes={"torch": "2.14.1", "cudnn": "9.20.0"},
)
def blackwell_decoding(p: AttentionParams, env: Environment) -> bool:
    """PyTorch 2.14 does not decode with cuDNN 9.19 to 9.25.0 on B200 and Thor

    Why: cuDNN 9.19 to 9.25.0 gives wrong numbers for a single query there, 9.24.1 and what follows it within
    9.24 excepted; PyTorch refuses it since.
    Fix: cuDNN 9.24.1 or above 9.25.0, or sdpa.flash.
    Source: is_cudnn_attention_decode_disabled in libtorch_cuda.so of the 2.14.1 wheel (91900 to 92500 but
    92401 to 92499; major 10 and 11); its text "cuDNN SDPA decode is disabled for cuDNN versions 9.19-9.25.0
    (except 9.24.1) on SM 10.x and 11.x."; pytorch#193893, pytorch#194927.
    """
    return p.max_seqlen_q > 0  # DEVICE002


# ---- SDPA306 to SDPA317: head dimensions of cuDNN's attention as PyTorch builds it ---------------------
# The frontend inside each torch and the library decide together.

HOPPER = frozenset({90})
SERVER = HOPPER | frozenset(BLACKWELL)
OTHERS = frozenset(range(80, 130)) - SERVER
DEEPSEEK = (192, 128)


def head_dims(p: AttentionParams) -> tuple[int, int]:
    return (p.head_dim_qk, p.head_dim_v)


@rule("SDPA306", requires={("head_dim_qk", "head_dim_v"): Multiple(8)}, fires_on={"head_dim_qk": 60})
def cudnn_head_dim_multiple(p: AttentionParams, env: Environment) -> None:
    """SDPA's cuDNN kernel wants head dimensions that are multiples of 8

    Fix: pad the head dimension with zeros and keep the softmax scale of the true one.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C).
    """


@rule(
    "SDPA307",
    when=torch("<2.8.0"),
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
    training=True,
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
    if max(head_dims(p)) <= 128 or head_dims(p) in (DEEPSEEK, (256, 256)):
        return None
    by_field = {"head_dim_qk": p.head_dim_qk, "head_dim_v": p.head_dim_v}
    field = min((name for name, size in by_field.items() if size != 256), key=by_field.__getitem__)
    note = "both head dimensions; or 192/128 (head_dim_qk/head_dim_v), or at most 128"
    return Violation(field, by_field[field], OneOf(256), note)


@rule(
    "SDPA316",
    training=True,
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
    if min(head_dims(p)) < 128 or head_dims(p) == DEEPSEEK:
        return None
    return same_head_dims(p, "or 192/128")

"""SDPA3xx: cuDNN's attention as PyTorch builds it. What libcudnn itself gets wrong is in ``bugs``.

PyTorch builds the graph with the cudnn-frontend it was compiled with, so ``env.torch`` stands for the
frontend and ``env.cudnn`` for the library that is loaded.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import Version, cudnn, torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.sdpa.common import CUDA, GRID, MASK_GRADIENT, mask_gradient
from attnsel.verdicts.requirements import AtLeast, Installed, OneOf
from attnsel.verdicts.verdict import Violation

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

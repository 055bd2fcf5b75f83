"""SDPA3xx: cuDNN's attention as PyTorch builds it. What libcudnn itself gets wrong is in ``bugs``.

PyTorch builds the graph with the cudnn-frontend it was compiled with, so ``env.torch`` stands for the
frontend and ``env.cudnn`` for the library that is loaded.
"""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.rules.sdpa.common import CUDA, MASK_GRADIENT, mask_gradient
from attnsel.rules.sdpa.flash import grid_limit
from attnsel.verdict import AtLeast, Bad, OneOf
from attnsel.versions import Version, cudnn, torch

CUDNN = "sdpa.cudnn"
BLACKWELL = range(100, 110)


@rule("SDPA300", CUDNN, evidence="measured", trips={"gpu": "cpu"})
def cudnn_needs_cuda(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel exists on NVIDIA GPUs only

    Fix: sdpa.math and tiled run on every device, sdpa.flash also on CPUs.
    Source: torch 2.13 on a CPU raises "Could not run aten::_scaled_dot_product_cudnn_attention".
    """
    return None if env.device.type == "cuda" else Bad("device", env.device.type, OneOf("cuda"))


@rule("SDPA301", CUDNN, device=CUDA, evidence="source", trips={"cudnn": None})
def cudnn_must_be_there(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel needs libcudnn

    Fix: install the cuDNN package that the torch wheel names.
    Source: can_use_cudnn_attention, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Bad("cudnn", None, AtLeast(Version(9))) if env.cudnn is None else None


@rule("SDPA302", CUDNN, device=CUDA, when=cudnn("<9.0.0"), evidence="source", passes={"cudnn": "9.0.0"})
def cudnn_nine(p: AttentionParams, env: Environment) -> Bad:
    """SDPA's cuDNN kernel needs cuDNN 9.0

    Why: PyTorch compiles it in from cuDNN 9 on.
    Fix: PyTorch 2.5 or newer brings a cuDNN 9.
    Source: can_use_cudnn_attention, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Bad("cudnn", env.cudnn, AtLeast(Version(9)))


@rule(
    "SDPA303",
    CUDNN,
    arch=range(50, 80),
    evidence="source",
    trips={"gpu": "T4"},
    passes={"gpu": "A100"},
)
def cudnn_needs_ampere(p: AttentionParams, env: Environment) -> Bad:
    """SDPA's cuDNN kernel needs Ampere or newer (sm80)

    Fix: sdpa.efficient runs on Turing and Volta; triton on Turing.
    Source: check_cudnn_hardware_support, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Bad("arch", env.arch, AtLeast(80))


@rule(
    "SDPA304", CUDNN, arch=range(100, 130), when=cudnn("<9.7.0"), evidence="source", passes={"cudnn": "9.7.0"}
)
def cudnn_blackwell(p: AttentionParams, env: Environment) -> Bad:
    """cuDNN attention runs on Blackwell from cuDNN 9.7 on

    Fix: install a newer cuDNN.
    Source: TransformerEngine v2.18, fused_attn.cpp, comment "architecture".
    """
    return Bad("cudnn", env.cudnn, AtLeast(Version(9, 7)))


@rule("SDPA305", CUDNN, device=CUDA, evidence="source", trips={"dtype": "fp32"})
def cudnn_half_precision(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel computes in fp16 or bf16

    Fix: cast q, k and v; autocast does.
    Source: check_dtypes_low_precision, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Bad("dtype", p.dtype, OneOf("bf16", "fp16")) if p.dtype in ("fp32", "fp64") else None


# Lengths, dropout, determinism.


@rule(
    "SDPA320", CUDNN, device=CUDA, evidence="source", trips={"max_seqlen_kv": 1}, passes={"max_seqlen_kv": 2}
)
def more_than_one_key(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel wants more than one key

    Fix: sdpa.flash and sdpa.efficient take one.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (A, B, C); pytorch#138531.
    """
    return Bad("max_seqlen_kv", 1, AtLeast(2)) if p.max_seqlen_kv == 1 else None


@rule(
    "SDPA321",
    CUDNN,
    device=CUDA,
    evidence="source",
    trips={"max_seqlen_q": 1, "max_seqlen_kv": 4096, "attention_dropout": 0.125},
    passes={"max_seqlen_q": 1, "max_seqlen_kv": 4096},
)
def one_query_without_dropout(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel takes a single query only without dropout

    Fix: leave dropout out, or use sdpa.efficient.
    Source: check_cudnn_tensor_shapes, PyTorch sdp_utils.cpp (B, C); A refuses a single query altogether.
    """
    if p.max_seqlen_q == 1 and p.dropout:
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None


@rule(
    "SDPA322",
    CUDNN,
    device=CUDA,
    when=torch("<2.6.0"),
    evidence="source",
    trips={"max_seqlen_q": 1, "max_seqlen_kv": 4096},
)
def one_query(p: AttentionParams, env: Environment) -> Bad | None:
    """PyTorch 2.5's cuDNN kernel takes no single query

    Fix: install a newer PyTorch, or use sdpa.flash.
    Source: check_cudnn_tensor_shapes in A (2.5.1).
    """
    return Bad("max_seqlen_q", 1, AtLeast(2)) if p.max_seqlen_q == 1 else None


@rule(
    "SDPA323",
    CUDNN,
    device=CUDA,
    when=cudnn(">9.11.0,<9.14.0"),
    evidence="source",
    trips={"attention_dropout": 0.125},
)
def dropout_heuristics(p: AttentionParams, env: Environment) -> Bad | None:
    """cuDNN 9.11 to 9.13 have no dropout for SDPA

    Why: their heuristics refuse these graphs, which ends in an exception.
    Fix: cuDNN 9.14 or newer.
    Source: can_use_cudnn_attention in B and C (91100 < version < 91400); pytorch#163903.
    """
    return Bad("attention_dropout", p.attention_dropout, OneOf(0.0)) if p.dropout else None


@rule(
    "SDPA324",
    CUDNN,
    device=CUDA,
    evidence="source",
    trips={"attention_dropout": 0.1},
    passes={"attention_dropout": 0.125, "cudnn": "9.20.0"},
)
def dropout_in_sixteenths(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel has dropout probabilities in steps of 1/16

    Why: some of its kernels round the probability silently: 0.1 becomes another rate. Newer releases of
    F.sdpa avoid cuDNN then; a direct call must do so for all.
    Fix: 0.0625 or 0.125; sdpa.flash and sdpa.efficient take any probability.
    Source: can_use_cudnn_attention in C; pytorch#174245.
    """
    if not p.dropout or (p.attention_dropout * 16).is_integer():
        return None
    lower = int(p.attention_dropout * 16) / 16
    return Bad("attention_dropout", p.attention_dropout, OneOf(lower, lower + 1 / 16), "steps of 1/16")


@rule(
    "SDPA325",
    CUDNN,
    device=CUDA,
    evidence="source",
    trips={"deterministic": True},
)
def cudnn_is_not_deterministic(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel promises no determinism

    Why: PyTorch builds the graph without cuDNN's deterministic flag, and rules it out under
    torch.use_deterministic_algorithms(True), forward included.
    Fix: attnsel's own cudnn candidate asks for the deterministic backward; triton and tiled have one.
    Source: check_cudnn_deterministic, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Bad("deterministic", True, OneOf(False)) if p.deterministic else None


@rule("SDPA326", CUDNN, device=CUDA, **MASK_GRADIENT)
def cudnn_mask_gradient(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel gives no gradient to a bias

    Fix: detach the bias if it is not learnt; sdpa.efficient gives its gradient.
    Source: check_attn_mask_shape, torch 2.13 sdp_utils_cpp.h; derivatives.yaml has no formula for attn_bias.
    """
    return mask_gradient(p)


@rule(
    "SDPA327",
    CUDNN,
    device=CUDA,
    evidence="source",
    trips={"batch_size": 65536, "max_seqlen_q": 16},
    passes={"batch_size": 65535, "max_seqlen_q": 16},
)
def cudnn_grid(p: AttentionParams, env: Environment) -> Bad | None:
    """SDPA's cuDNN kernel takes at most 65535 sequences and 65535 heads

    Fix: split the batch.
    Source: the dense constraints of can_use_cudnn_attention in C.
    """
    return grid_limit(p)


@rule(
    "SDPA328",
    CUDNN,
    arch=BLACKWELL,
    evidence="source",
    trips={"attn_mask_type": "arbitrary", "attention_dropout": 0.125},
    passes={"attn_mask_type": "arbitrary"},
)
def blackwell_mask_and_dropout(p: AttentionParams, env: Environment) -> Bad | None:
    """On B200 cuDNN trains with a mask tensor or with dropout, not with both

    Why: PyTorch hands the mask to cuDNN as a bias, and the Blackwell backward has no bias with dropout.
    Fix: leave dropout out, or use sdpa.efficient.
    Source: TransformerEngine v2.18, fused_attn.cpp, lines 480-488.
    """
    if p.dropout and p.attn_mask_type == "arbitrary":
        return Bad("attention_dropout", p.attention_dropout, OneOf(0.0))
    return None

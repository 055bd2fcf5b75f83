"""SDPA2xx: PyTorch's memory-efficient (CUTLASS) kernel."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import torch
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.rules.api import limit, rule, rules_about
from attnsel.rules.sdpa.common import CUDA, GPUS, GRID_MOST, VECTOR, mask_of
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.requirements import AtLeast, EqualTo, Multiple, OneOf

EFFICIENT = "sdpa.efficient"
rule_of_efficient = rules_about(EFFICIENT, device=CUDA)
MASK_OF_FP32 = mask_of(1, 1, 1, 1, dtype="fp32")


@rule_of_efficient("SDPA200", evidence="measured", fires_on={"gpu": "cpu"}, device=None)
def efficient_needs_cuda(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel exists on NVIDIA's and AMD's GPUs

    Why: its op has no implementation for CPUs, MPS or XPU. ROCm builds run AOTriton under the same op.
    Fix: sdpa.math and tiled run on every device, sdpa.flash also on CPUs.
    Source: torch 2.13 on a CPU raises "Could not run aten::_scaled_dot_product_efficient_attention".
    """
    needed = OneOf("cuda", "rocm")
    return None if needed.holds(env.device.type, p) else Violation("device", env.device.type, needed)


@rule_of_efficient("SDPA201", device=GPUS, fires_on={"dtype": "fp64"}, passes={"dtype": "fp32"})
def efficient_dtypes(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel computes in fp16, bf16 or fp32

    Fix: cast, or use sdpa.math or tiled for fp64.
    Source: can_use_mem_efficient_attention, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Violation("dtype", p.dtype, OneOf("fp32")) if p.dtype == "fp64" else None


@rule_of_efficient(
    "SDPA202",
    arch=range(50, 80),
    requires={"dtype": OneOf("fp16", "fp32")},
    fires_on={"gpu": "T4", "dtype": "bf16"},
    passes={"gpu": "T4", "dtype": "fp16"},
)
def efficient_bf16_needs_ampere(p: AttentionParams, env: Environment) -> bool:
    """The memory-efficient kernel has bf16 from Ampere on

    Why: Turing and Volta multiply matrices in fp16 only.
    Fix: cast to fp16.
    Source: can_use_mem_efficient_attention, PyTorch sdp_utils.cpp (A, B, C).
    """
    return p.dtype == "bf16"


@rule_of_efficient(
    "SDPA207",
    requires={"arch": AtLeast(50)},
    fires_on={"gpu": "K80", "dtype": "fp16"},
    passes={"gpu": "M60", "dtype": "fp16"},
)
def efficient_needs_maxwell(p: AttentionParams, env: Environment) -> None:
    """The memory-efficient kernel needs Maxwell or newer (sm50)

    Fix: sdpa.math and tiled run on a K80.
    Source: check_mem_efficient_hardware_support, PyTorch sdp_utils.cpp (A, B, C): "sm_version" from sm50 on.
    """


@rule_of_efficient("SDPA203", device=GPUS, fires_on={"head_dim_qk": 60})
def efficient_head_dims(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel wants head dimensions of whole 16 bytes

    Why: its tiles load 128 bits at a time: 8 half-precision numbers or 4 of fp32.
    Fix: pad the head dimension with zeros and keep the softmax scale of the true one.
    Source: minimum_gemm_alignment and check_head_dim_size_mem_efficient, PyTorch sdp_utils.cpp (A, B, C).
    PyTorch asks less of fp32 below sm80; attnsel's own guard does not.
    """
    whole = Multiple(VECTOR // ITEMSIZE[p.dtype])
    return limit(p, "head_dim_qk", whole) or limit(p, "head_dim_v", whole)


@rule_of_efficient(
    "SDPA204",
    device=GPUS,
    requires={"num_gqa_groups": EqualTo("num_heads")},
    fires_on={"num_gqa_groups": 4},
)
def efficient_equal_heads(p: AttentionParams, env: Environment) -> None:
    """The memory-efficient kernel wants as many key/value heads as query heads

    Why: before PyTorch 2.14 it has no notion of groups. From 2.14 on it groups heads itself; attnsel expands
    them for every version. Called through F.sdpa, enable_gqa=True then means the math kernel, without a word,
    wherever flash and cuDNN refuse: fp32, a mask where cuDNN is not chosen, Turing. cuDNN does take groups,
    from 2.5 on. Without the flag F.sdpa raises.
    Fix: attnsel repeats the heads (adaptation "expand_gqa"), which costs memory; with F.sdpa do the same
    (repeat_interleave) where flash cannot run.
    Source: check_batch_size_and_num_heads_dense<false> in A and B; pytorch#191085; pytorch#181528,
    pytorch#139586, transformers#46960, ComfyUI#15135 (what F.sdpa does); q_heads_per_kv appears in
    kernel_forward.h of the 2.14.1 wheel and is absent from 2.13.0; attnsel/backends/sdpa/ops.py.
    """


@rule_of_efficient(
    "SDPA206",
    device=GPUS,
    evidence="reported",
    fires_on={"attn_mask_type": "arbitrary", "tensors": MASK_OF_FP32},
    passes={"attn_mask_type": "arbitrary", "dtype": "fp32", "tensors": MASK_OF_FP32},
)
def efficient_mask_dtype(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel wants a mask of the query's type

    Why: F.sdpa turns a bool mask into it and passes others on: with fp32 beside half precision it chooses
    this kernel and raises "invalid dtype for bias - should match query's dtype". On ROCm it goes elsewhere.
    Fix: mask.to(query.dtype).
    Source: TORCH_CHECK in _efficient_attention_forward, v2.4.0 attention.cu, line 1241; C (ROCm);
    pytorch#191612.
    """
    mask = p.tensors.mask
    if mask is None or mask.dtype != "fp32" or p.dtype == "fp32":
        return None
    return Violation("tensors.mask", mask.dtype, OneOf("bool", p.dtype))


@rule_of_efficient(
    "SDPA205",
    fires_on={"num_heads": 65536, "max_seqlen_q": 16},
    passes={"num_heads": 65535, "max_seqlen_q": 16},
)
def efficient_grid(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """The memory-efficient kernel takes at most 65535 heads

    Why: heads and sequences are the y and z dimensions of its launch grid, which CUDA limits. Newer releases
    split larger batches themselves; since which one was not read.
    Fix: split the batch.
    Source: getBlocksGrid, torch 2.13 kernel_forward.h; pytorch#191085 tests a chunked batch of 65536.
    """
    found = limit(p, "num_heads", GRID_MOST)
    if found is None and (batch := limit(p, "batch_size", GRID_MOST)) is not None:
        return Unknown(*batch)
    return found


# ---- SDPA4xx: PyTorch's plain operations. They store all scores and run everywhere ---------------------


@rule(
    "SDPA401",
    "sdpa.math",
    requires={"return_lse": OneOf(False)},
    evidence="measured",
    fires_on={"return_lse": True},
)
def math_has_no_lse(p: AttentionParams, env: Environment) -> None:
    """The math kernel gives no log-sum-exp

    Why: its second result is the probabilities.
    Fix: every other kernel gives it; tiled does on every device.
    Source: torch 2.13, _scaled_dot_product_attention_math returns (output, probabilities).
    """


@rule(
    "SDPA402",
    "sdpa.math",
    when=torch("<2.10.0"),
    evidence="reported",
    fires_on={"attn_mask_type": "arbitrary", "tensors": mask_of(1, 1, 1, 1, dtype="fp32")},
    passes={"attn_mask_type": "arbitrary", "tensors": mask_of(1, 1, 1, 1, dtype="bf16")},
)
def math_with_a_wide_mask(p: AttentionParams, env: Environment) -> Unknown | None:
    """Before PyTorch 2.10 an fp32 mask beside 16 bits may fail in sdpa.math

    Why: the sum is fp32 then, and the second product raises "expected mat1 and mat2 to have the same dtype".
    Fix: mask.to(query.dtype).
    Source: pytorch#161489 (2025-08); measured on CPU, torch 2.13: it runs.
    """
    mask = p.tensors.mask
    if mask is None or mask.dtype != "fp32" or p.dtype not in ("fp16", "bf16"):
        return None
    return Unknown("tensors.mask", mask.dtype, OneOf("bool", p.dtype))

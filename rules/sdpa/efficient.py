"""SDPA2xx: PyTorch's memory-efficient (CUTLASS) kernel."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.rules.api import limit, rules_about
from attnsel.rules.sdpa.common import CUDA, GRID_MOST, VECTOR
from attnsel.selection.requirements import EqualTo, Multiple, OneOf
from attnsel.selection.verdict import Unknown, Violation

EFFICIENT = "sdpa.efficient"
rule = rules_about(EFFICIENT, device=CUDA)


@rule("SDPA200", evidence="measured", fires_on={"gpu": "cpu"}, device=None)
def efficient_needs_cuda(p: AttentionParams, env: Environment) -> Violation | Unknown | None:
    """The memory-efficient kernel exists on NVIDIA GPUs

    Why: its op has no implementation for CPUs, MPS or XPU. ROCm builds run AOTriton under the same op, whose
    limits were not read.
    Fix: sdpa.math and tiled run on every device, sdpa.flash also on CPUs.
    Source: torch 2.13 on a CPU raises "Could not run aten::_scaled_dot_product_efficient_attention".
    """
    needed = OneOf("cuda")
    if needed.holds(env.device.type, p):
        return None
    finding = Unknown if env.device.type == "rocm" else Violation
    return finding("device", env.device.type, needed)


@rule("SDPA201", fires_on={"dtype": "fp64"}, passes={"dtype": "fp32"})
def efficient_dtypes(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel computes in fp16, bf16 or fp32

    Fix: cast, or use sdpa.math or tiled for fp64.
    Source: can_use_mem_efficient_attention, PyTorch sdp_utils.cpp (A, B, C).
    """
    return Violation("dtype", p.dtype, OneOf("fp32")) if p.dtype == "fp64" else None


@rule(
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


@rule("SDPA203", fires_on={"head_dim_qk": 60})
def efficient_head_dims(p: AttentionParams, env: Environment) -> Violation | None:
    """The memory-efficient kernel wants head dimensions of whole 16 bytes

    Why: its tiles load 128 bits at a time: 8 half-precision numbers or 4 of fp32.
    Fix: pad the head dimension with zeros and keep the softmax scale of the true one.
    Source: minimum_gemm_alignment and check_head_dim_size_mem_efficient, PyTorch sdp_utils.cpp (A, B, C).
    PyTorch asks less of fp32 below sm80; attnsel's own guard does not.
    """
    whole = Multiple(VECTOR // ITEMSIZE[p.dtype])
    return limit(p, "head_dim_qk", whole) or limit(p, "head_dim_v", whole)


@rule("SDPA204", requires={"num_gqa_groups": EqualTo("num_heads")}, fires_on={"num_gqa_groups": 4})
def efficient_equal_heads(p: AttentionParams, env: Environment) -> None:
    """The memory-efficient kernel wants as many key/value heads as query heads

    Why: before PyTorch 2.14 it has no notion of groups, and F.sdpa silently goes to the math kernel with
    enable_gqa. From 2.14 on it groups heads itself; attnsel expands them for every version.
    Fix: attnsel repeats the heads (adaptation "expand_gqa"), which costs memory.
    Source: check_batch_size_and_num_heads_dense<false> in A and B; pytorch#191085; q_heads_per_kv appears in
    kernel_forward.h of the 2.14.1 wheel and is absent from 2.13.0; attnsel/backends/sdpa/ops.py.
    """


@rule(
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

"""What the five ``sdpa.*`` candidates are: PyTorch's kernels, by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attnsel.backends.cudnn.candidate import CUDNN_EFFICIENCY, EXACT_CHANGES, workspace_in_pytorch
from attnsel.backends.flash_attention.candidate import FLASH_2_EFFICIENCY, WRITTEN_FOR_FLASH_2
from attnsel.params import ITEMSIZE
from attnsel.verdicts.record import CandidateRecord, Memory, Proven

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams

_ALL = (
    "bf16", "fp16", "cuda", "training", "causal", "top_left", "bottom_right", "dropout", "strides",
    "cuda_graph",
)  # fmt: skip
# What an additive mask says: the kernel takes a mask, and ``fold_mask`` writes the rest into one.
_BY_MASK = ("mask", "window", "padding", "bias", "alibi")
_MATH = (
    "rocm", "cpu", "mps", "xpu", "fp32", "fp64", "head_dim_v", "gqa", "bias_grad", "deterministic", "empty",
)  # fmt: skip

_FLOAT32 = 4


def score_tensors(p: AttentionParams, env: Environment) -> Memory:
    """What ``sdpa.math`` holds of size [b, h, s_q, s_kv] at its peak.

    Half precision is computed in float32. Forward: the scores, their softmax, and one byte each to find rows
    that see nothing. With a backward: the probabilities and two gradients; dropout adds its mask.
    Source: peaks of torch 2.13's CPU allocator for s = 1024, forward 9 bytes a score in bf16 and fp32,
    training 12 and 12, with dropout 16 and 16; _scaled_dot_product_attention_math on CUDA is the same code.
    """
    wide = max(_FLOAT32, ITEMSIZE[p.dtype])
    held = 2 * wide + 1
    if p.is_training:
        held = (4 if p.dropout else 3) * wide
    return "scores", held * p.batch_size * p.num_heads * p.max_seqlen_q * p.max_seqlen_kv


_sdpa = partial(
    CandidateRecord,
    family="SDPA",
    rules=("attnsel.rules.sdpa",),
    limits="rules",
    adaptations=(*EXACT_CHANGES, "fold_mask"),
    dropout="generator",
    trusted=True,
)

_ON_HOPPER = Proven(
    "sm90",
    frozenset({
        "bf16", "bottom_right", "causal", "deterministic", "dropout", "fp16", "gaps", "gqa", "lse",
        "padding", "thd", "top_left", "training", "window",
    }),
    256,
)  # fmt: skip
"""What benchmarks/results/gpu-h200.json shows, and tests/benchmarks/test_proven.py holds it to."""

CANDIDATES = (
    _sdpa(
        name="sdpa.cudnn",
        title="PyTorch SDPA, cuDNN kernel",
        kernel="attnsel.backends.sdpa.run:CUDNN_KERNEL",
        takes=(*_ALL, *_BY_MASK, "lse", "head_dim_v", "gqa"),
        memory=workspace_in_pytorch,
        library="cudnn",
        explain_refusal="attnsel.rules.cudnn.words:rules_that_say",
        kernel_family="cudnn",
        plan_per_length=True,
        efficiency=CUDNN_EFFICIENCY,
    ),
    _sdpa(
        name="sdpa.flash",
        title="PyTorch SDPA, flash kernel",
        kernel="attnsel.backends.sdpa.run:FLASH_KERNEL",
        takes=(*_ALL, *_BY_MASK, "lse", "fp32", "fp64", "cpu", "gqa", "deterministic"),
        kernel_family="flash",
        efficiency=FLASH_2_EFFICIENCY,  # its kernels are FlashAttention-2's
        written_for=WRITTEN_FOR_FLASH_2,
    ),
    _sdpa(
        name="sdpa.varlen",
        title="PyTorch's flash kernel, with lengths and windows",
        kernel="attnsel.backends.sdpa.varlen",
        takes=(*_ALL, "window", "padding", "thd", "gaps", "paged", "lse", "gqa", "deterministic"),
        adaptations=("drop_mask", "pad_head_dim_qk", "pad_head_dim_v", "contiguous", "pack"),
        trusted=False,
        library="torch",
        proven=(_ON_HOPPER,),
        unproven_last=False,  # PyTorch's kernels; the code around them is checked on its first call
        kernel_family="flash",
        efficiency=FLASH_2_EFFICIENCY,  # its kernels are FlashAttention-2's
        written_for=WRITTEN_FOR_FLASH_2,
    ),
    _sdpa(
        name="sdpa.efficient",
        title="PyTorch SDPA, memory-efficient kernel",
        kernel="attnsel.backends.sdpa.run:EFFICIENT_KERNEL",
        takes=(*_ALL, *_BY_MASK, "lse", "fp32", "head_dim_v", "bias_grad", "deterministic"),
        kernel_family="efficient",
    ),
    _sdpa(
        name="sdpa.math",
        title="PyTorch SDPA, plain operations, stores the scores",
        kernel="attnsel.backends.sdpa.run:MATH_KERNEL",
        takes=(*_ALL, *_BY_MASK, *_MATH),
        memory=score_tensors,
        explicit_backward=False,
        last_resort=True,
    ),
)

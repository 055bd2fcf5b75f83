"""What ``cudnn`` is."""

from __future__ import annotations

from attnsel.backends.cudnn.workspace import ORDERED, workspace
from attnsel.verdicts.record import CandidateRecord, Efficiency

# Every call that nvidia-cudnn-frontend has a graph for; which of them a release runs, rules/cudnn/ knows.
_TAKES = (
    "bf16", "fp16", "fp32", "fp8", "cuda",
    "training", "causal", "window", "top_left", "bottom_right", "padding", "thd", "gaps", "paged", "gqa",
    "head_dim_v", "bias", "bias_grad", "alibi", "sinks", "dropout", "deterministic", "lse", "max_logit",
    "strides", "cuda_graph",
)  # fmt: skip

EXACT_CHANGES = (
    "drop_mask", "unpack", "zero_padding", "pad_sequence", "pad_head_dim_qk", "pad_head_dim_v", "expand_gqa",
    "contiguous",
)  # fmt: skip

CUDNN_EFFICIENCY = (
    Efficiency({90}, 0.62, "617 of 989 TFLOP/s on an H100 (FlashAttention-3 paper)"),
    Efficiency({100, 103}, 0.68, "1708 of 2500 TFLOP/s on a GB200, cuDNN 9.22 (cudnn-frontend's benchmarks)"),
)

CANDIDATES = (
    CandidateRecord(
        name="cudnn",
        title="cuDNN fused attention",
        family="CUDNN",
        kernel="attnsel.backends.cudnn.run",
        takes=_TAKES,
        rules=("attnsel.rules.cudnn",),
        limits="rules",
        needs=("torch", "cudnn", "cudnn_frontend"),
        adaptations=EXACT_CHANGES,
        memory=workspace,
        less_memory=(ORDERED,),
        dropout="own",
        library="cudnn",
        explain_refusal="attnsel.rules.cudnn.words:rules_that_say",
        unproven_last=False,  # the kernels are NVIDIA's; the code around them is checked on its first call
        kernel_family="cudnn",
        plan_per_length=True,
        efficiency=CUDNN_EFFICIENCY,
    ),
)

"""What ``triton`` is."""

from __future__ import annotations

from attnsel.verdicts.record import CandidateRecord, Executed, Proven

_TAKES = (
    "bf16", "fp16", "fp32", "cuda", "cpu",
    "training", "causal", "window", "top_left", "bottom_right", "padding", "mask", "thd", "gaps", "paged",
    "gqa", "head_dim_v", "bias", "bias_grad", "alibi", "softcap", "sinks", "dropout", "deterministic", "lse",
    "max_logit", "strides", "cuda_graph", "offsets",
)  # fmt: skip

_ON_HOPPER = Proven(
    "sm90",
    frozenset({
        "alibi", "bf16", "bias", "bias_grad", "bottom_right", "causal", "cuda_graph",
        "deterministic", "dropout", "fp16", "fp32", "gaps", "gqa", "head_dim_v", "lse", "mask",
        "max_logit", "offsets", "padding", "paged", "sinks", "softcap", "strides", "thd",
        "top_left", "training", "window",
    }),
    576,
)  # fmt: skip
"""What benchmarks/results/gpu-h200.json shows, and tests/benchmarks/test_proven.py holds it to."""

CANDIDATES = (
    CandidateRecord(
        name="triton",
        title="attnsel's Triton flash attention",
        family="TRITON",
        kernel="attnsel.backends.triton.run",
        takes=_TAKES,
        rules=("attnsel.rules.triton",),
        limits="rules",
        needs=("torch", "triton"),
        adaptations=("drop_mask", "contiguous"),
        # Triton's interpreter runs the same kernels on the CPU, and the suite holds them to float64 there.
        # Features on an architecture are added by benchmarks/results/gpu-*.json, which `attnsel prove` makes
        # and tests/benchmarks/test_proven.py holds this to.
        proven=("cpu", _ON_HOPPER),
        # What benchmarks/results/triton-executed.json shows; the same test holds this to it.
        executed=Executed(
            frozenset({"sm75", "sm80", "sm86", "sm89", "sm90", "sm120"}), frozenset({"bf16", "fp16"}), 576
        ),
        unproven_note="compiled only",
        kernel_family="flash",
        compiled_here=True,
        written_for=range(90, 120),
        slower_on=(90,),
    ),
)

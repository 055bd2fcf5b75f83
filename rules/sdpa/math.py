"""SDPA4xx: PyTorch's plain operations. They store all scores and run everywhere."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.environment.versions import torch
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.rules.sdpa.common import mask_of
from attnsel.verdicts.requirements import OneOf
from attnsel.verdicts.verdict import Unknown


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

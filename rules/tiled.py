"""TILED0xx: what flash attention in plain PyTorch operations cannot do. It is a short list on purpose."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.verdicts.reasons import Violation
from attnsel.verdicts.requirements import FreeText, OneOf


@rule("TILED001", "tiled", evidence="measured", fires_on={"dtype": "fp8_e4m3"})
def no_fp8(p: AttentionParams, env: Environment) -> Violation | None:
    """tiled does not run attention in FP8

    Why: plain PyTorch operations have no scaled FP8 matrix product for attention's shapes.
    Fix: cast q, k, v to bf16, or use a recipe without fp8_dpa.
    Source: attnsel/backends/tiled/kernel.py: accumulation in float32 or float64 from 16-bit inputs and up.
    """
    if p.dtype.startswith("fp8"):
        return Violation("dtype", p.dtype, OneOf("bf16", "fp16", "fp32"))
    return Violation("fp8", True, FreeText("a recipe with fp8_dpa=False")) if p.fp8_attention else None

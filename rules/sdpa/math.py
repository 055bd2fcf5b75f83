"""SDPA4xx: PyTorch's plain operations. They store all scores and run everywhere."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rule
from attnsel.selection.requirements import OneOf


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

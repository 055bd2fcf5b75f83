"""SDPA5xx: PyTorch's flash kernel for CPUs. Everything here was measured with torch 2.13."""

from __future__ import annotations

from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import rules_about
from attnsel.rules.sdpa.common import MASK_GRADIENT, mask_gradient
from attnsel.verdicts.requirements import FreeText, OneOf
from attnsel.verdicts.verdict import Violation

rule = rules_about("sdpa.flash")

CPU = {"cpu"}


@rule(
    "SDPA501",
    device=CPU,
    requires={"attention_dropout": OneOf(0.0)},
    evidence="measured",
    fires_on={"attention_dropout": 0.1},
    passes={"attention_dropout": 0.1, "is_training": False},
)
def cpu_flash_no_dropout(p: AttentionParams, env: Environment) -> bool:
    """The CPU flash kernel has no dropout

    Fix: sdpa.math and tiled have it.
    Source: torch 2.13 raises "Currently do not support dropout > 0"; check_for_dropout, sdp_utils_cpp.h.
    """
    return p.dropout


@rule("SDPA502", device=CPU, **MASK_GRADIENT)
def cpu_flash_mask_gradient(p: AttentionParams, env: Environment) -> Violation | None:
    """The CPU flash kernel gives no gradient to a bias

    Fix: detach the bias if it is not trained; sdpa.math and tiled give its gradient.
    Source: torch 2.13 raises "not differentiable with respect to argument 'attn_mask'";
    check_attn_mask_shape, sdp_utils_cpp.h.
    """
    return mask_gradient(p)


@rule(
    "SDPA503",
    device=CPU,
    evidence="measured",
    fires_on={"attn_mask_type": "causal_bottom_right", "max_seqlen_q": 1024, "max_seqlen_kv": 4096},
    passes={"max_seqlen_q": 1024, "max_seqlen_kv": 4096},
)
def cpu_flash_causal_corner(p: AttentionParams, env: Environment) -> Violation | None:
    """The CPU flash kernel's causal flag starts at the top left

    Why: unlike the CUDA kernel of the same name it keeps F.sdpa's meaning for unequal lengths.
    Fix: attnsel folds the bottom-right mask into a mask tensor.
    Source: torch 2.13 against sdpa.math, s_q 5 and 9, s_kv 9 and 5, forward and backward.
    """
    if p.bottom_right and not p.padding and 1 < p.max_seqlen_q != p.max_seqlen_kv:
        return Violation(
            "attn_mask_type", p.attn_mask_type, FreeText("causal from the top left, or equal lengths")
        )
    return None

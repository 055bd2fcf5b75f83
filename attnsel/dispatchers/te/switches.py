"""TransformerEngine's variables that decide which attention runs."""

from __future__ import annotations

import os

from attnsel.environment import Environment
from attnsel.verdicts.dispatch import Switch

_UTILS = "dot_product_attention/utils.py at d0067d0da"


def _on_off(name: str, meaning: str, lines: str) -> Switch:
    return Switch(name, ("0", "1"), meaning, f"{_UTILS}, lines {lines}")


SWITCHES: tuple[Switch, ...] = (
    _on_off("NVTE_FLASH_ATTN", "0 takes away FlashAttention 2, 3 and 4", "538-541"),
    _on_off("NVTE_FLASH_ATTN_V2", "0 takes away FlashAttention 2 (from 2.17 on)", "539"),
    _on_off("NVTE_FLASH_ATTN_V3", "0 takes away FlashAttention 3 (from 2.17 on)", "540"),
    _on_off("NVTE_FLASH_ATTN_V4", "0 takes away FlashAttention 4 (from 2.17 on)", "541"),
    _on_off("NVTE_FUSED_ATTN", "0 takes away FusedAttention, which is cuDNN", "543"),
    _on_off("NVTE_UNFUSED_ATTN", "0 takes away UnfusedDotProductAttention", "544"),
    _on_off(
        "NVTE_UnfusedDPA_Emulate_FP8",
        "1 lets UnfusedDotProductAttention emulate attention in FP8",
        "667-671",
    ),
    Switch(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        ("0", "1"),
        "0 asks for deterministic kernels, as torch.use_deterministic_algorithms does; read once, when the "
        "module is made",
        "dot_product_attention.py at d0067d0da, lines 761-764",
    ),
    Switch(
        "NVTE_FUSED_ATTN_USE_FAv2_BWD",
        ("0", "1"),
        "1 runs FlashAttention 2's backward behind FusedAttention's forward on sm90, without a bias",
        "dot_product_attention/backends.py at d0067d0da, lines 2051-2053",
    ),
)


def held(env: Environment) -> dict[str, str]:
    """The variables that are set in this process and have one of their values."""
    values = {switch.name: os.environ.get(switch.name) for switch in SWITCHES}
    return {s.name: value for s in SWITCHES if (value := values[s.name]) is not None and value in s.values}

"""What ComfyUI says of SageAttention and of the attention that it uses.

Read: Comfy-Org/ComfyUI comfy/ldm/modules/attention.py (attention_sage) and thu-ml/SageAttention core.py, as
quoted in the issues named.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, Message, error

_MESSAGES = (
    error(
        pattern=r"Error running sage attention: (?:Unsupported head_dim: (?P<head_dim_qk>\d{1,9})|headdim "
        r"should be in (?P<sizes>\[[\d, ]{1,40}\]))",
        known="SageAttention has head dimensions 64, 96 and 128 (some builds up to 128); ComfyUI calls "
        "PyTorch's attention for this layer instead",
        fix="nothing to repair: the layers that fit keep SageAttention; without the flag the lines stop",
        source="ComfyUI comfy/ldm/modules/attention.py, attention_sage; Comfy-Org/ComfyUI#7352, #10689",
    ),
    error(
        pattern=r"Error running sage attention: SM(?P<sm>\d{1,9}) kernel is not available",
        known="this build of SageAttention was compiled without its sm{sm} kernels; every call goes to "
        "PyTorch's attention, so that the flag makes nothing faster",
        fix="a SageAttention wheel for this torch and CUDA, built with the card's architecture (12.0 for "
        "RTX 50)",
        source="SageAttention core.py; Comfy-Org/ComfyUI#9671, woct0rdho/SageAttention#50",
    ),
    error(
        "Error running sage attention: Input tensors must be in dtype",
        params={"dtype": "fp32"},
        known="SageAttention computes in fp16 and bf16, and these tensors are fp32",
        codes=("HINT005",),
        fix="no --force-fp32 and no --fp32-text-enc",
        source="SageAttention core.py",
    ),
    error(
        pattern=r"Error running sage attention: (?P<why>[^\n]{3,160}?), using pytorch attention instead",
        known="SageAttention fails ({why}), and ComfyUI calls PyTorch's attention instead",
        fix="--use-pytorch-cross-attention, or a SageAttention built for this torch and GPU",
        source="ComfyUI comfy/ldm/modules/attention.py, attention_sage",
    ),
    Message(
        pattern=r"^\W*Using (?P<backend>sage|xformers|pytorch|split|sub quadratic|flash) (?:optimization for "
        r")?attention",
        kind="chosen",
        source="ComfyUI comfy/ldm/modules/attention.py",
    ),
)


LIBRARIES = (FirstOf("ComfyUI", "'Error running sage attention'", _MESSAGES),)

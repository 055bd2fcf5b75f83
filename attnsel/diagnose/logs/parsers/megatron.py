"""What Megatron says of the variables that choose TransformerEngine's kernel.

Read: NVIDIA/Megatron-LM 00c2c0ad, megatron/core/models/common/language_module/language_module.py.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, error

_MESSAGES = (
    error(
        pattern=r"(?P<variable>NVTE_(?:FLASH|FUSED|UNFUSED)_ATTN) set to (?P<value>\w{1,60}), but expected "
        r"(?P<expected>\d) for attention backend type (?P<backend>\w{1,60})",
        known="{variable}={value} is set, and Megatron's --attention-backend {backend} wants it to be "
        "{expected}",
        fix="unset NVTE_FLASH_ATTN NVTE_FUSED_ATTN NVTE_UNFUSED_ATTN and choose by --attention-backend alone",
        source="Megatron-LM 00c2c0ad, megatron/core/models/common/language_module/language_module.py, "
        "_set_attention_backend",
    ),
    error(
        "FlashAttention m",
        r"FlashAttention (?:maximum|minimum) version (?P<bound>[\d.]{1,40}\w{0,60}) is (?:supported|"
        r"required)",
        known="TransformerEngine takes flash-attn up to (or from) {bound} only",
        fix="pip install flash-attn=={bound} --no-build-isolation, or NVTE_FLASH_ATTN=0",
        source="TransformerEngine 1.5 to 1.9, pytorch/attention.py:3099; NVIDIA/TransformerEngine#1123",
    ),
)

LIBRARIES = (FirstOf("Megatron-LM", "NVTE_* beside --attention-backend", _MESSAGES),)

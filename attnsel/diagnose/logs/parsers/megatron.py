"""What Megatron says of the variables that choose TransformerEngine's kernel.

Read: NVIDIA/Megatron-LM 00c2c0ad, megatron/core/models/common/language_module/language_module.py.
"""

from __future__ import annotations

from attnsel.diagnose.logs.message import FirstOf, declared

_MESSAGES = declared("megatron", "Megatron-LM")

LIBRARIES = (FirstOf("Megatron-LM", "NVTE_* beside --attention-backend", _MESSAGES),)

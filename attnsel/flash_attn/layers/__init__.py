"""The part of ``flash_attn.layers`` that programs import for their attention."""

"""What of ``flash_attn.layers`` clients of attention import."""

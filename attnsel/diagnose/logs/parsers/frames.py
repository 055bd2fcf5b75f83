"""Whose code a log shows: the frames of a traceback, by library. Nothing of their paths is kept."""

from __future__ import annotations

from attnsel.diagnose.logs.message import SEEN, Library, Message

_SEP = r"[/\\]"


def _seen(name: str, quick: str, pattern: str = "") -> Message:
    return Message(quick, pattern, kind="machine", read=lambda match: {"text": name})


LIBRARY = Library(
    SEEN,
    "",
    (
        _seen("flash_attn", "flash_attn_interface"),
        _seen("flash_attn", "flash-attention", rf"flash-attention{_SEP}"),
        _seen("flash_attn", "mha_fwd", r"\bmha_(?:varlen_)?fwd"),
        _seen("flash_attn_3", "hopper", rf"flash-attention{_SEP}hopper"),
        _seen("flash_attn_3", "flash_attn_3"),
        _seen("transformers", "transformers", rf"{_SEP}transformers{_SEP}"),
        _seen("F.sdpa", "scaled_dot_product_attention("),
        _seen("F.sdpa", "sdpa_attention.py"),
    ),
)

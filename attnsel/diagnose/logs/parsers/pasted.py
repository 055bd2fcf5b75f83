"""What people write beside an error: the name of the card, and packages with their versions."""

from __future__ import annotations

import re

from attnsel.diagnose.logs.message import Facts, Library, Message
from attnsel.environment import describe_device
from attnsel.errors import InvalidInput

_CARD = (
    r"(?P<card>(?:RTX|GTX) (?:PRO )?\d{4}(?: (?:Ti|SUPER|Super|D|Ada|Laptop GPU)\b){0,2}|"
    r"[ABHLTV]\d{1,3}[SX]?\b"
    r"|GB?[23]00\b|GB10\b)"
)
_BEFORE = r"(?:(?:NVIDIA |GeForce |Tesla |Quadro ){1,2}|\bGPU(?: \d)?: ?(?:NVIDIA )?)"


def _card(match: re.Match[str]) -> Facts | None:
    """The card, if there is one of that name."""
    for name in (f"Quadro {match['card']}" if "Quadro" in match[0] else match["card"], match["card"]):
        try:
            describe_device(name)
        except InvalidInput:
            continue
        return {"environment": {"gpu": name}}
    return None


def _version(quick: str, component: str) -> Message:
    return Message(
        quick,
        rf"(?:^|[\s*(-]){re.escape(quick)}(?: ?==? ?| ?: ?| "
        rf"{{1,30}})(?P<{component}>\d+\.\d+[\w.+]{{0,40}}(?<!\.))",
        kind="machine",
    )


LIBRARY = Library(
    "the machine",
    "",
    (
        Message("NVIDIA ", _BEFORE + _CARD, kind="machine", read=_card),
        Message("GPU", _BEFORE + _CARD, kind="machine", read=_card),
        Message("Tesla ", _BEFORE + _CARD, kind="machine", read=_card),
        Message("Quadro ", _BEFORE + _CARD, kind="machine", read=_card),
        _version("torch", "torch"),
        _version("PyTorch Version", "torch"),
        _version("PyTorch", "torch"),
        _version("flash-attn", "flash_attn"),
        _version("flash_attn", "flash_attn"),
    ),
)

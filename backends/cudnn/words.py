"""What libcudnn says when it refuses, brought to what a person can use.

"No valid engine configs" comes with a stack of warnings for each engine that was tried; the first of a stack
is the engine's own reason, the rest is the way up.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class EngineRefusal(NamedTuple):
    """One engine's reason. ``arch`` is 90 for sm90."""

    engine: int
    arch: int
    status: str  # CUDNN_STATUS_… without that beginning
    reason: str


_ENGINE = re.compile(r'"engineId":(\d+),"smVersion":(\d+)')
_REASON = re.compile(r"CUDNN_STATUS_(\w+); Reason: (.*)")
_SHOWN = 3


def engine_refusals(message: str) -> tuple[EngineRefusal, ...]:
    """Each engine's own reason, in the order in which they were tried."""
    found = []
    engine: re.Match[str] | None = None
    for line in message.splitlines():
        engine = _ENGINE.search(line) or engine
        reason = _REASON.search(line)
        if engine is not None and reason is not None:
            # " at: " introduces the condition in the library's source.
            text = reason[2].split(" at: ")[0].strip()
            found.append(EngineRefusal(int(engine[1]), int(engine[2]) // 10, reason[1], text))
            engine = None
    return tuple(found)


def in_short(message: str) -> str:
    """A refusal in one line: the frontend's own words, or the reasons of the engines, at most three."""
    first = " ".join(message.split("\n", 1)[0].split())
    refusals = engine_refusals(message)
    if not refusals:
        return first
    by_reason: dict[str, list[int]] = {}
    for refusal in refusals:
        by_reason.setdefault(refusal.reason, []).append(refusal.engine)
    told = [f"engine {', '.join(map(str, engines))}: {reason}" for reason, engines in by_reason.items()]
    more = len(told) - _SHOWN
    rest = f"; {more} more" if more > 0 else ""
    return f"no engine takes it ({'; '.join(told[:_SHOWN])}{rest})"

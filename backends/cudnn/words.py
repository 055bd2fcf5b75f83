"""What libcudnn says when it refuses, brought to what a person can use.

"No valid engine configs" comes with a stack of warnings for each engine that was tried; the first of a stack
is the engine's own reason, the rest is the way up. Engines made for another GPU, or for a call of another
shape, always refuse: their reasons tell something only where there are no others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class EngineRefusal(NamedTuple):
    """One engine's reason. ``arch`` is 90 for sm90."""

    engine: int
    arch: int
    status: str  # CUDNN_STATUS_… without that beginning
    reason: str


_ENGINE = re.compile(r'"engineId":(\d+),"smVersion":(\d+)')
_REASON = re.compile(r"CUDNN_STATUS_(\w+); Reason: (.*)")
_OF_COURSE = re.compile(r"only \w+ is supported for this engine|KERNEL_CFG knob must be set")
_FUNCTION = re.compile(r"function (\w+)\(\)")
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
    for refused in refusals:
        by_reason.setdefault(refused.reason, []).append(refused.engine)
    telling = {reason: engines for reason, engines in by_reason.items() if not _OF_COURSE.match(reason)}
    shown = telling or by_reason
    groups = [f"engine {', '.join(map(str, engines))}: {reason}" for reason, engines in shown.items()]
    more = len(by_reason) - min(len(groups), _SHOWN)
    rest = f"; {more} more" if more > 0 else ""
    return f"no engine takes it ({'; '.join(groups[:_SHOWN])}{rest})"


def refusal(node: str, stage: str, message: str, logged: Sequence[str] = ()) -> str:
    """Why no plan came out of a graph: which direction, where, the library's reason and what it logged."""
    direction = "backward" if node.endswith("backward") else "forward"
    text = f"cuDNN builds no {direction} plan ({stage}): {in_short(message) or 'no reason given'}"
    log = log_in_short(logged)
    return f"{text}; its log: {log}" if log else text


def log_in_short(logged: Sequence[str]) -> str:
    """What a log adds to an error's message, in one line; a bare list of calls becomes their names."""
    functions = [found[1] for found in map(_FUNCTION.search, logged) if found is not None]
    reasons = [found[2].split(" at: ")[0].strip() for found in _REASON.finditer("\n".join(logged))]
    unique = list(dict.fromkeys(reasons))[:_SHOWN]
    if functions:
        unique.append("in " + ", ".join(dict.fromkeys(functions)))
    return "; ".join(unique)

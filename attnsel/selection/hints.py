"""What is remarked on a question: the hints that it meets, and what the engine says of what may be meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules.hint import Advice, Hint, every_hint


class Remark(NamedTuple):
    """One hint about one question. ``first``: the candidate that would be chosen with ``instead``."""

    hint: Hint
    advice: Advice
    first: str | None

    @property
    def code(self) -> str:
        return self.hint.code

    @property
    def message(self) -> str:
        """The text, with who would be first instead."""
        return f"{self.advice.text} ({self.first} first)" if self.first else self.advice.text

    @property
    def instead(self) -> Mapping[str, Any]:
        return self.advice.instead

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "code": self.code,
            "title": self.hint.title,
            "message": self.message,
            "instead": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in self.instead.items()
            },
            "first": self.first,
            "source": self.hint.source,
        }


def remarks_on(
    p: AttentionParams, env: Environment, policy: Policy, chooses: Callable[[AttentionParams], str | None]
) -> tuple[Remark, ...]:
    """Every hint that has something to say, each with what ``chooses`` answers to its other question."""
    found = []
    for page in every_hint():
        advice = page.advice(p, env)
        if advice is not None:
            first = _first(p, advice, chooses) if policy.backend is None else None
            found.append(Remark(page, advice, first))
    return tuple(found)


def _first(
    p: AttentionParams, advice: Advice, chooses: Callable[[AttentionParams], str | None]
) -> str | None:
    if not advice.instead:
        return None
    try:
        return chooses(p.replace(**advice.instead))
    except InvalidInput:
        return None  # another field contradicts it

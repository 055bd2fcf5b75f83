"""What running has taught this process: kernels that refused a call, or gave wrong numbers for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from attnsel.params import AttentionParams

REFUSED = "RUNTIME001"
WRONG_NUMBERS = "RUNTIME002"


class Refusal(NamedTuple):
    """A kernel refused this very call when it was prepared or launched, in these words.

    ``likely``: codes of rules that may explain it, the likeliest first. ``code`` RUNTIME002: it ran, and its
    numbers were wrong.
    """

    candidate: str
    params: AttentionParams
    message: str
    likely: tuple[str, ...] = ()
    code: str = REFUSED

    @property
    def hint(self) -> str:
        return f"closest to {', '.join(self.likely)}" if self.likely else ""


@dataclass(frozen=True)
class Evidence:
    """What this process has found by running. Immutable: a new finding makes a new one."""

    refusals: tuple[Refusal, ...] = ()
    many_lengths: bool = False  # the call came in many lengths already, and this is a new one

    def plus(self, refusal: Refusal) -> Evidence:
        return self if refusal in self.refusals else replace(self, refusals=(*self.refusals, refusal))

    def of_many_lengths(self) -> Evidence:
        return self if self.many_lengths else replace(self, many_lengths=True)


NO_EVIDENCE = Evidence()

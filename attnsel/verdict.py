"""The values a decision is made of: what a rule found, and what it would have wanted instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from attnsel.rules.api import Page

Verdict = Literal["eligible", "unknown", "refused"]

EVIDENCE: dict[str, str] = {
    "library": "checked against the real libcudnn",
    "compiler": "checked with the real Triton compiler",
    "source": "read in the component's source",
    "documented": "documented by the component's makers",
    "reported": "reported in an issue",
    "measured": "seen in a test of ours",
    "policy": "you asked for it",
    "runtime": "the kernel itself refused in this process",
}


def size(count: int) -> str:
    """Bytes for people."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


class Required:
    """What a field should have been. ``repairs`` proposes values, each to be re-checked by the engine."""

    __slots__ = ()

    def repairs(self, observed: Any) -> Iterator[Any]:
        """Values that would satisfy this, nearest first; none when nothing sensible can be proposed."""
        yield from ()


class AtMost(NamedTuple("_AtMost", [("limit", Any)]), Required):
    __slots__ = ()

    def __str__(self) -> str:
        return f"at most {self.limit}"


class AtLeast(NamedTuple("_AtLeast", [("limit", Any)]), Required):
    __slots__ = ()

    def __str__(self) -> str:
        return f"at least {self.limit}"

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.limit


class Multiple(NamedTuple("_Multiple", [("of", int)]), Required):
    __slots__ = ()

    def __str__(self) -> str:
        return f"a multiple of {self.of}"

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield -(-observed // self.of) * self.of


class AtLeastBytes(NamedTuple("_AtLeastBytes", [("bytes", int)]), Required):
    """An amount of memory, in bytes; said in units."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"at least {size(self.bytes)}"

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.bytes


class OneOf(Required):
    """One of a few values, the most natural repair first."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " or ".join(str(value) for value in self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneOf) and other.values == self.values

    def __hash__(self) -> int:
        return hash(self.values)

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield from self.values


class EqualTo(NamedTuple("_EqualTo", [("field", str), ("value", Any)]), Required):
    """Equal to another field, whose value is given."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self.field} ({self.value})"

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.value


class Words(NamedTuple("_Words", [("text", str)]), Required):
    """A requirement that no single value satisfies, in words."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.text


class Bad(NamedTuple):
    """A rule's objection: this field has this value, and would need to be that."""

    field: str
    observed: Any
    required: Required
    note: str = ""


class Unknown(NamedTuple):
    """A rule cannot tell: nobody has looked, or no source says. Neither yes nor no."""

    field: str
    observed: Any
    required: Required
    note: str = ""


class Adaptation(NamedTuple):
    """An exact change of the call that lets a candidate run it, and what it costs every time.

    ``changes``: fields and the values they are brought to, where a change can be made in several ways.
    """

    name: str
    text: str
    bytes: int  # memory that the change makes in a forward
    quadratic: bool = False  # grows with s_q * s_kv
    flops: int = 0  # operations that the kernel does more, forward and, in training, backward
    changes: tuple[tuple[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {**self._asdict(), "changes": dict(self.changes)}


class Standing(NamedTuple):
    """A candidate on its way into the ranking: all that preferences may read of it and of the question.

    So little of it that equal rankings are common, and remembered.
    """

    name: str
    verdict: Verdict
    overhead: int  # what adaptations add, in sixteenths of the attention's own work
    unproven: bool  # a kernel of ours that no result shows running here
    large_scores: bool  # one [b, h, s_q, s_kv] tensor is more than a GiB


class Reason(NamedTuple):
    """Why a candidate cannot run (or nobody knows). Texts are made when they are read."""

    rule: Page
    finding: Bad | Unknown

    @property
    def code(self) -> str:
        return self.rule.code

    @property
    def field(self) -> str:
        return self.finding.field

    @property
    def observed(self) -> Any:
        return self.finding.observed

    @property
    def required(self) -> str:
        return str(self.finding.required)

    @property
    def evidence(self) -> str:
        return self.rule.evidence

    @property
    def source(self) -> str:
        return self.rule.source

    @property
    def unknown(self) -> bool:
        return isinstance(self.finding, Unknown)

    @property
    def message(self) -> str:
        finding = self.finding
        observed = finding.observed
        if observed is None:
            observed = "not known" if finding.field == "arch" else "not installed"
        text = f"{self.rule.title} — {finding.field} is {observed}, needs {finding.required}"
        return f"{text} ({finding.note})" if finding.note else text

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "code": self.code,
            "verdict": "unknown" if self.unknown else "refused",
            "field": self.field,
            "observed": _plain(self.observed),
            "required": self.required,
            "message": self.message,
            "title": self.rule.title,
            "evidence": self.evidence,
            "source": self.source,
        }


def _plain(value: Any) -> Any:
    """A value JSON can hold; versions and odd things as text."""
    if isinstance(value, tuple) and type(value) is tuple:
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)

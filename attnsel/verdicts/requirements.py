"""What a field should have been: the one place where a bound is written.

A requirement is condition, text and way out in one. ``holds`` decides, ``str`` says what is needed, and
``repairs`` proposes values; a rule that names a requirement cannot say one bound and test another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, lcm
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from attnsel.environment.releases import Build
    from attnsel.environment.versions import Version
    from attnsel.params import AttentionParams


def size(count: int) -> str:
    """Bytes for people."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"


class Requirement:
    """The base: what no value satisfies by itself. A value of None is none to object to."""

    __slots__ = ()

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        """Whether ``value`` satisfies this in the question ``p``, which only other fields are read from."""
        raise NotImplementedError

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        """``holds`` in two steps, for the engine's inner loop: what to read of a question, and the test."""
        return attrgetter(field), lambda value: self.holds(value, None)

    def resolved(self, p: AttentionParams) -> Requirement:
        """Itself, with the values of other fields filled in."""
        return self

    def repairs(self, observed: Any) -> Iterator[Any]:
        """Values that would satisfy this, nearest first; none when nothing sensible can be proposed.

        Each is put to the engine again before it is shown.
        """
        yield from ()


class AtMost(NamedTuple("_AtMost", [("limit", Any)]), Requirement):
    """``AtMost(limit)``: a number, a size or a version that is no larger."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"at most {self.limit}"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return value is None or bool(value <= self.limit)

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        limit = self.limit
        return attrgetter(field), lambda value: value is None or value <= limit


class AtLeast(NamedTuple("_AtLeast", [("limit", Any)]), Requirement):
    """``AtLeast(limit)``: a number, a size or a version that is no smaller."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"at least {self.limit}"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return value is None or bool(value >= self.limit)

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.limit


class Installed(NamedTuple("_Installed", [("limit", "Version"), ("known", "Version | None")]), Requirement):
    """Some version of a component; ``limit`` is the oldest that will do, which other rules hold it to. One
    older than ``known`` is as good as none."""

    __slots__ = ()

    def __new__(cls, limit: Version, known: Version | None = None) -> Installed:
        return super().__new__(cls, limit, known)

    def __str__(self) -> str:
        return f"at least {self.limit}"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return value is not None and (self.known is None or bool(value >= self.known))

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.limit


class Multiple(NamedTuple("_Multiple", [("of", int)]), Requirement):
    """``Multiple(of)``: an integer that ``of`` divides."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"a multiple of {self.of}"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return value is None or not value % self.of

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        of = self.of
        return attrgetter(field), lambda value: value is None or not value % of

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield -(-observed // self.of) * self.of


class OneOf(Requirement):
    """One of a few values, the most natural repair first."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __str__(self) -> str:
        return " or ".join(str(value) for value in self.values)

    def __repr__(self) -> str:
        return f"OneOf({', '.join(map(repr, self.values))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneOf) and other.values == self.values

    def __hash__(self) -> int:
        return hash(self.values)

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return value in self.values

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        return attrgetter(field), self.values.__contains__

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield from self.values


class EqualTo(NamedTuple("_EqualTo", [("field", str), ("value", Any)]), Requirement):
    """Equal to another field of the question: a rule names it, and ``value`` is filled in when it fires."""

    __slots__ = ()

    def __new__(cls, field: str, value: Any = None) -> EqualTo:
        return super().__new__(cls, field, value)

    def __str__(self) -> str:
        return self.field if self.value is None else f"{self.field} ({self.value})"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return bool(value == getattr(p, self.field))

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        return attrgetter(field, self.field), lambda pair: pair[0] == pair[1]

    def resolved(self, p: AttentionParams) -> EqualTo:
        return EqualTo(self.field, getattr(p, self.field))

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.value


class AtMostField(NamedTuple("_AtMostField", [("field", str), ("value", Any)]), Requirement):
    """No more than another field of the question, such as queries under a bottom-right diagonal."""

    __slots__ = ()

    def __new__(cls, field: str, value: Any = None) -> AtMostField:
        return super().__new__(cls, field, value)

    def __str__(self) -> str:
        return f"at most {self.field}" + ("" if self.value is None else f" ({self.value})")

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return bool(value <= getattr(p, self.field))

    def fast(self, field: str) -> tuple[Callable[[Any], Any], Callable[[Any], bool]]:
        return attrgetter(field, self.field), lambda pair: pair[0] <= pair[1]

    def resolved(self, p: AttentionParams) -> AtMostField:
        return AtMostField(self.field, getattr(p, self.field))


class AtLeastBytes(NamedTuple("_AtLeastBytes", [("bytes", int)]), Requirement):
    """An amount of memory, in bytes; said in units."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"at least {size(self.bytes)}"

    def holds(self, value: Any, p: AttentionParams | None) -> bool:
        return bool(value >= self.bytes)

    def repairs(self, observed: Any) -> Iterator[Any]:
        yield self.bytes


class AnyBuild(NamedTuple("_AnyBuild", [("builds", "tuple[Build, ...]")]), Requirement):
    """One of a few wheels of torch, the smallest change first. The rule's body alone decides."""

    __slots__ = ()

    def __str__(self) -> str:
        where = {True: "PyPI", False: "PyTorch's index"}
        return "torch " + " or ".join(f"{build.name} ({where[not build.index]})" for build in self.builds)

    def repairs(self, observed: Any) -> Iterator[Any]:
        for build in self.builds:
            yield {"torch": build.torch, "cuda": build.cuda}


class FreeText(NamedTuple("_FreeText", [("text", str)]), Requirement):
    """A requirement that no single value satisfies, in words. The rule's body alone decides."""

    __slots__ = ()

    def __str__(self) -> str:
        return self.text


class _Newer(Requirement):
    """A version above those of the rule's own ``when``, which is the only place where the bound stands."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "NEWER"


NEWER = _Newer()


def holds_together(requirements: tuple[Requirement, ...]) -> Callable[[Any], bool] | None:
    """A test that holds only where all of these do, for requirements on one field; None where only asking
    each of them tells."""
    low, high, of = -inf, inf, 1
    allowed: frozenset[Any] | None = None
    for requirement in requirements:
        if isinstance(requirement, AtMost):
            high = min(high, requirement.limit)
        elif isinstance(requirement, AtLeast):
            low = max(low, requirement.limit)
        elif isinstance(requirement, Multiple):
            of = lcm(of, requirement.of)
        elif isinstance(requirement, OneOf):
            values = frozenset(requirement.values)
            allowed = values if allowed is None else allowed & values
        elif len(requirements) > 1:
            return lambda value: False
        else:
            return None
    numeric = (low, high, of) != (-inf, inf, 1)
    if allowed is None:
        return lambda value: value is None or (low <= value <= high and not value % of)
    if not numeric:
        return allowed.__contains__
    return lambda value: value in allowed and low <= value <= high and not value % of

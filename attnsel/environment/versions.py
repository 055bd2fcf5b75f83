"""Versions and the sets of versions a constraint holds for.

Support is not monotone: cuDNN took padding masks at 9.1, lost them at 9.2 and took them again at 9.6.
So a constraint carries a *set* of versions (a union of intervals), never a minimum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion
from packaging.version import Version as _PackagingVersion

from attnsel.errors import short

COMPONENT_NAMES = {
    "cudnn": "cuDNN",
    "cudnn_frontend": "cudnn-frontend",
    "cuda": "CUDA",
    "transformer_engine": "TransformerEngine",
}
"""As they are written, where that is another way."""


def component_name(component: str) -> str:
    """``cuDNN``, ``flash-attn-3``: a component as people write it."""
    return COMPONENT_NAMES.get(component, component.replace("_", "-"))


_FINAL = 10_000
"""The beta of a final release, which comes after all of them."""


class Version(NamedTuple):
    """``major.minor.patch``, and of a beta its number: 4.0.0b36.

    What follows otherwise (cuDNN's build, ``.post1``, ``+cu128``, alphas and candidates) is dropped.
    """

    major: int
    minor: int = 0
    patch: int = 0
    beta: int = _FINAL

    @classmethod
    def parse(cls, text: str | int | tuple[int, ...] | Version) -> Version:
        """Read ``"9.1.0"``, ``"2.13.0+cu128"``, ``(9, 1)`` or ``cudnnGetVersion()``'s 8907 / 90100.

        Raises ValueError naming the value when it is none of these.
        """
        if isinstance(text, tuple):
            if text and len(text) <= 4 and all(isinstance(n, int) and 0 <= n < 2**31 for n in text):
                return cls(*text[:3])
            raise ValueError(f"not a version: {short(text)}; allowed: up to four non-negative integers")
        if isinstance(text, str) and len(text) > 64:
            raise ValueError("not a version: it is too long; allowed: numbers and dots such as 9.1.0")
        if isinstance(text, int) or (
            isinstance(text, str) and text.strip().isdecimal() and int(text) >= 1000
        ):
            return cls._from_cudnn_number(int(text))
        try:
            written = _PackagingVersion(text if isinstance(text, str) else "")
        except InvalidVersion:
            raise ValueError(
                f"not a version: {short(text)}; allowed: numbers and dots such as 9.1.0"
            ) from None
        version = cls(*written.release[:3])
        kind, number = written.pre or ("", 0)
        return version._replace(beta=min(number, _FINAL - 1)) if kind == "b" else version

    @classmethod
    def _from_cudnn_number(cls, number: int) -> Version:
        # cudnnGetVersion(): major*1000 + minor*100 + patch before 9, major*10000 + … since.
        if not 1000 <= number < 1_000_000:
            raise ValueError(f"not a version: {short(number)}; allowed: 9.1.0, or cudnnGetVersion()'s 90100")
        base = 10_000 if number >= 90_000 else 1_000
        return cls(number // base, number % base // 100, number % 100)

    def __str__(self) -> str:
        beta = "" if self.beta == _FINAL else f"b{self.beta}"
        return f"{self.major}.{self.minor}.{self.patch}{beta}"

    @property
    def after(self) -> Version:
        """The first version above this one."""
        if self.beta < _FINAL:
            return self._replace(beta=self.beta + 1)
        return Version(self.major, self.minor, self.patch + 1)

    @property
    def before(self) -> Version | None:
        """One that is below: the release before, or the beta before; None for the first patch of a minor."""
        if self.beta < _FINAL:
            return self._replace(beta=self.beta - 1) if self.beta else None
        return self._replace(patch=self.patch - 1) if self.patch else None


@dataclass(frozen=True, slots=True)
class Versions:
    """A set of versions of one component: a union of half-open intervals ``[low, high)``.

    ``low`` or ``high`` None is unbounded. Build it with a component's factory: ``cudnn("<9.5.0")``,
    ``cudnn("==9.10.0", "==9.10.1")`` (several texts are joined by *or*, commas inside one by *and*).
    """

    component: str
    intervals: tuple[tuple[Version | None, Version | None], ...]

    def __contains__(self, version: Version | None) -> bool:
        if version is None:
            return False
        return any(
            (low is None or version >= low) and (high is None or version < high)
            for low, high in self.intervals
        )

    def edges(self) -> Iterator[Version]:
        """Every version at which membership may change, lowest first."""
        yield from sorted({edge for interval in self.intervals for edge in interval if edge is not None})

    def sample(self) -> Version:
        """Some member, for examples and tests."""
        low, high = self.intervals[0]
        if low is not None:
            return low
        if high is None:
            return Version(0)
        if high.before is not None:
            return high.before
        major, minor = high[:2]
        return Version(major, minor - 1, 0) if minor else Version(major - 1, 9, 0)

    def __str__(self) -> str:
        whole = list(self.intervals)
        while len(whole) > 1 and whole[0][0] is None and whole[0][1] == whole[1][0]:
            whole[:2] = [(None, whole[1][1])]  # what a rule tells apart is one to a reader
        return " or ".join(_interval_text(low, high) for low, high in whole)


def _interval_text(low: Version | None, high: Version | None) -> str:
    if low is None:
        return "any version" if high is None else f"< {high}"
    if high is None:
        return f">= {low}"
    if high == low.after:
        return str(low)
    return f"{low} to < {high}"


def _interval(spec: str) -> tuple[Version | None, Version | None]:
    """``">=9.2,<9.6"`` as one interval. packaging checks the grammar; we keep comparisons cheap."""
    try:
        terms = list(SpecifierSet(spec))
    except InvalidSpecifier as error:
        raise ValueError(f"not a version specifier: {spec!r}") from error
    low: Version | None = None
    high: Version | None = None
    for term in terms:
        op = term.operator
        if op not in (">=", "<=", "==", "<", ">") or not re.fullmatch(r"[0-9.]+(b[0-9]+)?", term.version):
            raise ValueError(f"version specifier {spec!r}: only >=, <=, ==, < and > are allowed")
        version = Version.parse(term.version)
        if op in (">=", ">", "=="):
            edge = version.after if op == ">" else version
            low = edge if low is None else max(low, edge)
        if op in ("<=", "<", "=="):
            edge = version if op == "<" else version.after
            high = edge if high is None else min(high, edge)
    if low is not None and high is not None and low >= high:
        raise ValueError(f"version specifier {spec!r} holds for no version")
    return low, high


def versions_of(component: str, *specs: str) -> Versions:
    """The versions of a component that one of ``specs`` names; all of them without any."""
    return Versions(component, tuple(_interval(spec) for spec in specs) or ((None, None),))


def meets(facts: Mapping[str, object], wanted: str) -> bool:
    """Whether a release that is stated is one of ``torch>=2.5,<2.6``; of one that is not stated never."""
    name, spec = re.fullmatch(r"(\w+)(.+)", wanted).groups()  # type: ignore[union-attr]  # rows are written so
    stated = re.match(r"v?\d{1,9}(\.\d{1,9}){0,3}(b\d{1,9})?", str(facts.get(name, "")))  # of "2.5.1+..."
    return stated is not None and Version.parse(stated[0]) in versions_of(name, spec)


torch = partial(versions_of, "torch")
triton = partial(versions_of, "triton")
cuda = partial(versions_of, "cuda")
"""The CUDA toolkit that torch was built with (``torch.version.cuda``)."""
cudnn = partial(versions_of, "cudnn")
"""cuDNN as loaded at run time (``cudnnGetVersion``), not as built against."""
cudnn_frontend = partial(versions_of, "cudnn_frontend")
flash_attn = partial(versions_of, "flash_attn")
"""FlashAttention 2, the package flash-attn."""
flash_attn_3 = partial(versions_of, "flash_attn_3")
"""FlashAttention 3, built from hopper/ of its repository."""
flash_attn_4 = partial(versions_of, "flash_attn_4")
"""FlashAttention 4, the package flash-attn-4."""
transformer_engine = partial(versions_of, "transformer_engine")
"""TransformerEngine, which attnsel only has notes about."""

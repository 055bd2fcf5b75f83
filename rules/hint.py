"""How a hint is written down: a remark on a question that may not be what was meant.

A hint is a page like a rule's, with a code, a source and two examples. It refuses nothing and ranks nothing:
its text stands beside the answer. The body returns an ``Advice`` for the questions that it is about; where
another question would say what was probably meant, ``instead`` holds its fields, and the engine says who
would be first then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from attnsel.environment import Environment
from attnsel.environment.versions import Versions
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Example, gate_text, page_fields
from attnsel.verdicts.verdict import EVIDENCE, Page

_SAME: Mapping[str, Any] = MappingProxyType({})


class Advice(NamedTuple):
    """What is said of one question: some 140 characters, so that it fits two lines."""

    text: str
    instead: Mapping[str, Any] = _SAME  # fields of AttentionParams of the question that may have been meant


Body = Callable[[AttentionParams, Environment], "Advice | None"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Hint(Page):
    """A remark on what is asked. ``of_tensors``: it is seen in real tensors alone, and has no examples."""

    when: tuple[Versions, ...]
    arch: Container[int] | None
    body: Body
    of_tensors: bool = False
    fires_on: Example = field(default_factory=dict)
    passes: Example = field(default_factory=dict)
    device: None = None

    def advice(self, p: AttentionParams, env: Environment) -> Advice | None:
        """What it has to say about a question on a machine."""
        if self.arch is not None and (env.arch is None or env.arch not in self.arch):
            return None
        if any(getattr(env, versions.component) not in versions for versions in self.when):
            return None
        return self.body(p, env)


def hint(
    code: str,
    *,
    when: Versions | Iterable[Versions] = (),
    arch: Container[int] | None = None,
    evidence: str = "documented",
    of_tensors: bool = False,
    fires_on: Example | None = None,
    passes: Example | None = None,
) -> Callable[[Body], Body]:
    """Register a hint; the arguments are those of :func:`attnsel.rules.rule`.

    Raises ValueError at import for one that could not be explained.
    """
    if evidence not in EVIDENCE:
        raise ValueError(f"{code}: evidence {evidence!r}; allowed: {', '.join(EVIDENCE)}")
    gates = (when,) if isinstance(when, Versions) else tuple(when)

    def register(body: Body) -> Body:
        page = Hint(
            **page_fields(code, body, evidence),
            when=gates,
            arch=arch,
            body=body,
            of_tensors=of_tensors,
            fires_on=dict(fires_on or {}),
            passes=dict(passes or {}),
            when_text=gate_text(gates, arch, ()),
        )
        REGISTRY.add(page)
        return body

    return register


def every_hint() -> list[Hint]:
    """All hints, in order of their codes' files."""
    return [page for page in REGISTRY.pages.values() if isinstance(page, Hint)]

"""How a constraint is written down.

::

    rule = rules_about("cudnn", fp8=False)  # what the rules of this file share

    @rule("CUDNN204", training=True, when=cudnn("<9.5.0"), arch={90},
          requires={("head_dim_qk", "head_dim_v"): AtMost(128)}, fires_on={"head_dim_qk": 192})
    def backward_head_dim(p, env):
        '''Backward above head_dim 128 needs cuDNN 9.5.0 (Hopper)

        Why: the Hopper backward engine of that era keeps one tile of 128 columns.
        Fix: upgrade cuDNN.
        Source: TransformerEngine#1591
        '''

The bound is written once, in ``requires``: it is the condition, the text and the way out. The body says
which calls it is about; a rule without a body is about all of them. Where no bound can be named the body
decides alone and returns a ``Violation`` (or ``Unknown``, or None); ``limit`` is ``requires`` for a bound
that depends on the call.

Gates (``when``, ``arch``, ``device``, ``fp8``, ``over_ranks``, ``training``) are folded away once per
environment and kind of question; only requirements and bodies run per question. A body reads its two
arguments alone and never raises. ``fires_on`` and ``passes`` are examples: the page shows them, the tests run
them.

A code lives as long as the project: ``preview`` (shown, and refusing only where the policy says so), active,
deprecated (``replaced_by`` names what took over), removed (``removed``). None is ever used again.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, cast

from attnsel.backends.registry import CANDIDATES, Selector
from attnsel.base.model import lazy
from attnsel.environment import COMPONENT_NAMES, COMPONENTS, Environment
from attnsel.environment.versions import Version, Versions, versions_of
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.verdicts.reasons import EVIDENCE, Page, RankKey, Unknown, Violation
from attnsel.verdicts.record import CandidateRecord
from attnsel.verdicts.requirements import NEWER, AtLeast, EqualTo, FreeText, Requirement

Finding = Violation | Unknown
Body = Callable[["AttentionParams", "Environment"], "Finding | bool | None"]
Example = Mapping[str, Any]
Fields = str | tuple[str, ...]
P = TypeVar("P", bound=Page)

OF_ENVIRONMENT = frozenset({"arch", "device", "platform", "torch_flash", *COMPONENTS})
"""What of an environment a requirement may be about; every other field is the question's."""


class Limit(NamedTuple):
    """One requirement on one field, or on each of several."""

    fields: tuple[str, ...]
    requirement: Requirement

    @property
    def of_environment(self) -> bool:
        return self.fields[0] in OF_ENVIRONMENT

    def lacking(self, value: Any) -> bool:
        """Whether a value does not satisfy it by itself."""
        return not self.requirement.holds(value, None)

    def broken(self, p: AttentionParams | None, env: Environment) -> tuple[str, Any] | None:
        """The field that does not satisfy it, and its value; of several the one with the largest value."""
        found: tuple[str, Any] | None = None
        for field in self.fields:
            value = value_of(field, p, env)
            if not self.requirement.holds(value, p) and (found is None or value > found[1]):
                found = field, value
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule(Page):
    """One constraint on what is asked, where it would run."""

    candidates: tuple[str, ...]
    selectors: tuple[Selector, ...]  # of these too, those that are added later
    when: tuple[Versions, ...]
    arch: Container[int] | None
    device: Container[str] | None
    fp8: bool | None
    over_ranks: bool
    training: bool
    limits: tuple[Limit, ...]
    unknown: bool
    note: str
    body: Body
    fires_on: Example
    passes: Example

    def concerns(self, p: AttentionParams) -> bool:
        """Whether it is about this kind of question."""
        return self.is_about(p.fp8_attention, p.context_parallel, p.is_training)

    def is_about(self, fp8: bool, over_ranks: bool, training: bool) -> bool:
        """Whether it is about FP8 attention or other, over ranks or not, with a backward or without."""
        return self.fp8 in (None, fp8) and over_ranks >= self.over_ranks and training >= self.training

    @lazy
    def gates(self) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
        """Fields of an environment, and for which of their values it has something to say: each looks at one
        field, so that environments which share a value share what it opens."""
        found: list[tuple[str, Callable[[Any], bool]]] = []
        device, arch = self.device, self.arch
        if device is not None:
            found.append(("device", lambda kind: kind in device))
        if arch is not None:
            found.append(("arch", lambda number: number is not None and number in arch))
        found += [(versions.component, versions.__contains__) for versions in self.when]
        found += [(limit.fields[0], limit.lacking) for limit in self.limits if limit.of_environment]
        return tuple(found)

    def applies(self, env: Environment) -> bool:
        """Whether it can say anything in this environment: its gates are open, and what it requires of the
        environment is not there."""
        return all(opens(value_of(field, None, env)) for field, opens in self.gates)

    def find(self, p: AttentionParams, env: Environment) -> Finding | None:
        """What it has to say about a question that it concerns, in an environment where it applies."""
        if not self.limits:
            return self.body(p, env)  # type: ignore[return-value]
        found = self.violation(p, env)
        about = None if found is None else self.body(p, env)
        return found if about is None or about else None

    def violation(self, p: AttentionParams, env: Environment) -> Finding | None:
        """The first of its requirements that does not hold, whether or not it is about this call."""
        for limit in self.limits:
            broken = limit.broken(p, env)
            if broken is not None:
                kind = Unknown if self.unknown else Violation
                return kind(*broken, limit.requirement.resolved(p), self.note)
        return None

    def edges(self, component: str) -> Iterable[Version]:
        """Versions of a component at which it may change its mind."""
        for versions in self.when:
            if versions.component == component:
                yield from versions.edges()
        for limit in self.limits:
            if limit.fields == (component,) and isinstance(limit.requirement, AtLeast):
                yield limit.requirement.limit


def value_of(field: str, p: AttentionParams | None, env: Environment) -> Any:
    """A field of the question or of the environment, by the name a requirement has for it."""
    if field == "device":
        return env.device.type
    if field in OF_ENVIRONMENT:
        return getattr(env, field)
    return getattr(p, field)


def limit(p: AttentionParams, field: str, requirement: Requirement, note: str = "") -> Violation | None:
    """A violation of ``requirement`` by ``field``, or None: for bounds that depend on the call."""
    value = getattr(p, field)
    if requirement.holds(value, p):
        return None
    return Violation(field, value, requirement.resolved(p), note)


def same_head_dims(p: AttentionParams, note: str = "") -> Violation | None:
    """A violation where the two head dimensions differ, of the smaller one: zeros can widen it."""
    if p.head_dim_v < p.head_dim_qk:
        return limit(p, "head_dim_v", EqualTo("head_dim_qk"), note)
    return limit(p, "head_dim_qk", EqualTo("head_dim_v"), note)


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyRule(Page):
    """A refusal that rests on what the user asked for, on how much memory there is, or on what happened in
    this process."""

    body: Callable[..., Violation | None]  # (name, policy), and what one call takes where that matters
    fires_on: tuple[str, Example]  # a candidate, and the fields of a Policy that refuses it


@dataclass(frozen=True, eq=False, kw_only=True)
class Placing(Page):
    """A reason to put one candidate before another. ``short``: why one stands below, in a few words."""

    short: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Preference(Placing):
    """One by which all candidates are compared: the lower value goes first."""

    value: Callable[[RankKey, int | None, Policy], int]


class Removed(NamedTuple):
    """A code that was in use once: in which release it went, what to read instead, and why."""

    code: str
    release: str
    replaced_by: str
    why: str


class Registry:
    """Everything that was written down, in order. Codes are unique across kinds, and over time.

    A plug-in makes one for its own rules and says which ``candidate`` they are about.
    """

    def __init__(self, candidate: str | None = None) -> None:
        self.pages: dict[str, Page] = {}
        self.removed: dict[str, Removed] = {}
        self.candidate = candidate
        self._kinds: dict[type[Page], tuple[Any, Any]] = {}

    def add(self, page: Page) -> None:
        if page.code in self.pages:
            raise ValueError(f"{page.code} is taken: {page.name} needs a code of its own")
        if page.code in self.removed:
            raise ValueError(f"{page.code} was in use once: {page.name} needs a code of its own")
        if self.candidate is not None and not page.source:  # of ours a test reads every page
            raise ValueError(f"{page.code}: 'Source:' says nothing")
        self.pages[page.code] = page

    def add_candidate(self, record: CandidateRecord) -> None:
        """The rules about every candidate of its kind are about this one too."""
        for page in self.rules.values():
            if record.name not in page.candidates and any(s.test(record) for s in page.selectors):
                object.__setattr__(page, "candidates", (*page.candidates, record.name))

    @property
    def rules(self) -> Mapping[str, Rule]:
        return self._of_kind(Rule)

    @property
    def policy_rules(self) -> Mapping[str, PolicyRule]:
        return self._of_kind(PolicyRule)

    @property
    def preferences(self) -> Mapping[str, Preference]:
        return self._of_kind(Preference)

    @property
    def edition(self) -> tuple[int, Page | None]:
        """What changes with every page that comes in, which is behind the others."""
        return len(self.pages), next(reversed(self.pages.values()), None)

    def _of_kind(self, kind: type[P]) -> Mapping[str, P]:
        """The pages of a kind, looked through once in every edition."""
        edition, _ = self._kinds.get(kind, (None, None))
        if edition != self.edition:
            found = {code: page for code, page in self.pages.items() if isinstance(page, kind)}
            self._kinds[kind] = self.edition, found
        return cast("Mapping[str, P]", self._kinds[kind][1])


REGISTRY = Registry()

INTERPRETED = "TRITON007"
"""The one rule a forced backend lifts: backend="triton" on CPU tensors asks for the interpreter."""

_CODE = re.compile(r"[A-Z]+\d{3}$")


def rule(
    code: str,
    *candidates: str | Selector,
    requires: Mapping[Fields, Requirement] | None = None,
    when: Versions | Iterable[Versions] = (),
    arch: Container[int] | None = None,
    device: Container[str] | None = None,
    fp8: bool | Literal["both"] | None = None,
    over_ranks: bool = False,
    training: bool = False,
    evidence: str = "source",
    note: str = "",
    unknown: bool = False,
    status: Literal["active", "preview"] = "active",
    replaced_by: str = "",
    fires_on: Example | None = None,
    passes: Example | None = None,
    registry: Registry | None = None,
) -> Callable[[Body], Body]:
    """Register a constraint on ``candidates``: names, or kinds of them (``every``, ``needing("torch")``).

    ``requires``: fields and what they must be; then the body returns whether a call is one of those it is
    about (None: every call is). A field is one of AttentionParams, a component, ``arch``, ``device``,
    ``platform`` or ``torch_flash``; a tuple of fields means each of them, and the largest that does not fit
    is blamed. ``NEWER`` is a version above those in ``when``. ``note``: added to the message in brackets.
    ``unknown``: nobody has looked, or no source says.

    ``when``: version sets that must all hold. ``arch``: architectures, e.g. ``{90}`` or ``range(80, 90)``.
    ``device``: device types, e.g. ``{"cuda"}``; a rule with ``arch`` is about CUDA already. ``fp8``: only
    questions that run attention in FP8 (True), only others (False), or "both", which rules of a candidate
    that plans FP8 have to say. ``over_ranks``: only calls over several ranks. ``training``: only calls that
    need a backward. ``evidence``: what it rests on, a key of EVIDENCE. ``status``: "preview" for one that is
    tried out. ``replaced_by``: the code that took over; the rule is then deprecated. ``fires_on`` and
    ``passes``: fields of AttentionParams, or ``gpu`` and component versions, that differ from the defaults
    inside the gates. ``registry``: a plug-in's own; None is attnsel's.

    Raises ValueError at import for a rule that could not be explained: no docstring, no ``Source:``.
    """
    if not _CODE.match(code):
        raise ValueError(f"rule code {code!r}: capital letters and three digits, such as CUDNN204")
    target = REGISTRY if registry is None else registry
    allowed = tuple(CANDIDATES) if target.candidate is None else (target.candidate,)
    selectors = tuple(c for c in candidates if isinstance(c, Selector))
    names = tuple(n for c in candidates for n in (c.names if isinstance(c, Selector) else (c,)))
    unknown_names = [name for name in names if name not in allowed]
    if unknown_names or not candidates:
        raise ValueError(f"{code}: candidates {unknown_names or 'missing'}; allowed: {', '.join(allowed)}")
    if evidence not in EVIDENCE:
        raise ValueError(f"{code}: evidence {evidence!r}; allowed: {', '.join(EVIDENCE)}")
    family = code.rstrip("0123456789")
    if fp8 is None and any(r.family == family and r.plans_fp8 for r in CANDIDATES.values()):
        raise ValueError(f'{code}: fp8 must be said: True, False or "both"')
    gates = (when,) if isinstance(when, Versions) else tuple(when)
    limits = tuple(_limit(code, fields, needed, gates) for fields, needed in (requires or {}).items())
    if len(limits) > 1 and any(limit.of_environment for limit in limits):
        raise ValueError(f"{code}: requires: a requirement on the environment stands alone")

    def register(body: Body) -> Body:
        page = Rule(
            **page_fields(code, body, evidence),
            candidates=tuple(dict.fromkeys(names)),
            selectors=selectors,
            when=gates,
            arch=arch,
            device=device,
            fp8=None if fp8 == "both" else fp8,
            over_ranks=over_ranks,
            training=training,
            limits=limits,
            unknown=unknown,
            note=note,
            body=body,
            fires_on=dict(fires_on or {}),
            passes=dict(passes or {}),
            when_text=gate_text(gates, arch, limits),
            status="deprecated" if replaced_by else status,
            replaced_by=replaced_by,
        )
        target.add(page)
        return body

    return register


def rules_about(*candidates: str | Selector, **shared: Any) -> Callable[..., Callable[[Body], Body]]:
    """``rule`` for one file, with what its rules share; a rule that names other candidates, or gives one of
    these arguments itself, goes its own way."""

    def rule_of_file(code: str, *others: str | Selector, **own: Any) -> Callable[[Body], Body]:
        return rule(code, *(others or candidates), **{**shared, **own})

    return rule_of_file


def policy_rule(
    code: str, *, evidence: str = "policy", fires_on: tuple[str, Example]
) -> Callable[[Any], Any]:
    """Register a refusal by policy: ``fn(candidate_name, policy) -> Violation | None``."""

    def register(fn: Callable[[str, Policy], Violation | None]) -> Any:
        REGISTRY.add(PolicyRule(**page_fields(code, fn, evidence), body=fn, fires_on=fires_on))
        return fn

    return register


def preference(code: str, *, short: str, evidence: str) -> Callable[[Any], Any]:
    """Register an ordering: ``fn(rank_key, arch, policy) -> int``; lower first, first code decides.

    ``short``: why a candidate that loses here stands below the other, in a few words.

    The value must not be lower for a candidate that is unknown or adapted than for the same one that is
    neither: the choice stops looking when nothing can be better (attnsel/decision.py).
    """

    def register(fn: Callable[[RankKey, int | None, Policy], int]) -> Any:
        REGISTRY.add(Preference(**page_fields(code, fn, evidence), value=fn, short=short))
        return fn

    return register


def removed(
    code: str, *, release: str, why: str, replaced_by: str = "", registry: Registry | None = None
) -> None:
    """Retire a code for good: its page says so, and no other rule can take it. See data/removed.csv."""
    target = REGISTRY if registry is None else registry
    if not _CODE.match(code) or not why:
        raise ValueError(f"{code!r} cannot be removed: a code and the reason are needed")
    if code in target.pages or code in target.removed:
        raise ValueError(f"{code} is taken: it cannot be removed")
    target.removed[code] = Removed(code, release, replaced_by, why)


def _limit(code: str, fields: Fields, requirement: Requirement, gates: tuple[Versions, ...]) -> Limit:
    """Raises ValueError for a requirement that nothing could be held to."""
    names = (fields,) if isinstance(fields, str) else fields
    for name in names:
        if name not in OF_ENVIRONMENT and name not in AttentionParams.model_fields:
            raise ValueError(f"{code}: requires {name!r}: no field of a question or an environment")
    if len(names) > 1 and any(name in OF_ENVIRONMENT for name in names):
        raise ValueError(f"{code}: requires {names}: only fields of a question may stand together")
    if isinstance(requirement, FreeText):
        raise ValueError(f"{code}: requires {requirement!r}: words decide nothing; return a Violation")
    if requirement is NEWER:
        ends = [high for gate in gates if gate.component == fields for _, high in gate.intervals]
        if not ends or None in ends:
            raise ValueError(f"{code}: NEWER needs a `when` of {fields} that ends somewhere")
        requirement = AtLeast(max(end for end in ends if end is not None))
    return Limit(names, requirement)


def page_fields(code: str, fn: Callable[..., Any], evidence: str) -> dict[str, Any]:
    """What every kind of page is made of: its docstring is read with the page."""
    doc = fn.__doc__
    if not doc and sys.flags.optimize >= 2:
        doc = f"{fn.__name__.replace('_', ' ')}\n\nSource: dropped by Python's -OO; read this page without it"
    if not doc:
        raise ValueError(f"{code}: a rule needs a docstring; it is what users read")
    return {"code": code, "name": fn.__name__, "doc": doc, "evidence": evidence, "module": fn.__module__}


def archs_of(text: str) -> frozenset[int]:
    """Architectures as a row has them: ``80-89 120``."""
    ends = [part.partition("-") for part in text.split()]
    return frozenset(arch for low, _, high in ends for arch in range(int(low), int(high or low) + 1))


def gates_of(text: str) -> tuple[Versions, ...]:
    """Releases as a row has them: ``cudnn >=9.22; flash_attn_4 >=4.0.0b30``."""
    return tuple(versions_of(*part.split()) for part in text.split(";") if part)


def gate_text(gates: tuple[Versions, ...], arch: Container[int] | None, limits: tuple[Limit, ...]) -> str:
    parts = [f"{COMPONENT_NAMES.get(gate.component, gate.component)} {gate}" for gate in gates]
    for (field, *_), requirement in limits:
        if isinstance(requirement, AtLeast) and not any(gate.component == field for gate in gates):
            if field in COMPONENTS:
                parts.append(f"{COMPONENT_NAMES.get(field, field)} < {requirement.limit}")
            elif field == "arch":
                parts.append(f"below sm{requirement.limit}")
    if isinstance(arch, (range, set, frozenset, tuple)):
        parts.append("/".join(_arch_runs(sorted(arch))))
    return ", ".join(parts)


def _arch_runs(archs: list[int]) -> list[str]:
    """``[80, 81, …, 89, 110]`` as ``sm80 to sm89`` and ``sm110``."""
    runs: list[list[int]] = []
    for arch in archs:
        if runs and arch == runs[-1][-1] + 1:
            runs[-1].append(arch)
        else:
            runs.append([arch])
    return [f"sm{run[0]}" if len(run) == 1 else f"sm{run[0]} to sm{run[-1]}" for run in runs]


# ---- How a hint is written down: a remark on a question that may not be what was meant -----------------
# A hint is a page like a rule's, with a code, a source and two examples. It refuses nothing and ranks
# nothing: its text stands beside the answer. The body returns an ``Advice`` for the questions that it is
# about; where another question would say what was probably meant, ``instead`` holds its fields, and the
# engine says who would be first then.


_SAME: Mapping[str, Any] = MappingProxyType({})


class Advice(NamedTuple):
    """What is said of one question: some 140 characters, so that it fits two lines."""

    text: str
    instead: Mapping[str, Any] = _SAME  # fields of AttentionParams of the question that may have been meant


HintBody = Callable[[AttentionParams, Environment], "Advice | None"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Hint(Page):
    """A remark on what is asked. ``of_tensors``: it is seen in real tensors alone, and has no examples."""

    when: tuple[Versions, ...]
    arch: Container[int] | None
    body: HintBody
    of_tensors: bool = False
    fires_on: Example = dataclasses.field(default_factory=dict)
    passes: Example = dataclasses.field(default_factory=dict)
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
) -> Callable[[HintBody], HintBody]:
    """Register a hint; the arguments are those of :func:`attnsel.rules.rule`.

    Raises ValueError at import for one that could not be explained.
    """
    if evidence not in EVIDENCE:
        raise ValueError(f"{code}: evidence {evidence!r}; allowed: {', '.join(EVIDENCE)}")
    gates = (when,) if isinstance(when, Versions) else tuple(when)

    def register(body: HintBody) -> HintBody:
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


_WRONG_BESIDE = frozenset({"FLASH214", "FLASH225", "SDPA023", "SDPA720", "TE003", "TE004", "TE005"})
"""What is said elsewhere of kernels that run a call and give wrong numbers."""


def is_known_bug(code: str) -> bool:
    """Whether what the page says is a known bug: whoever calls the kernel all the same gets wrong numbers,
    NaN or a crash."""
    return code.startswith(("BUG", "TORCH")) or code in _WRONG_BESIDE

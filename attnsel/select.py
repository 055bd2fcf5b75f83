"""The decision: a pure function from a question to a ranked list of candidates with every reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from attnsel.adapt import adapt_to, overhead
from attnsel.candidates import CANDIDATES, OLDEST_TORCH, CandidateInfo
from attnsel.environment import Environment
from attnsel.errors import NoBackendError
from attnsel.evaluate import findings, findings_again, over_memory, wishes
from attnsel.layout import Layout
from attnsel.params import AttentionParams
from attnsel.plugins import load_plugins
from attnsel.policy import Policy
from attnsel.report import render
from attnsel.rules import REGISTRY
from attnsel.rules.api import INTERPRETED
from attnsel.rules.preferences import PROVEN
from attnsel.unlock import Unlock, find_unlocks
from attnsel.verdict import Adaptation, Bad, Reason, Standing, Verdict, Words


class Refusal(NamedTuple):
    """A kernel refused this very call when it was prepared or launched, in these words.

    ``likely``: codes of rules that may explain it, the likeliest first. ``code`` RUNTIME002: it ran, and its
    numbers were wrong.
    """

    candidate: str
    params: AttentionParams
    message: str
    likely: tuple[str, ...] = ()
    code: str = "RUNTIME001"

    @property
    def hint(self) -> str:
        return f"closest to {', '.join(self.likely)}" if self.likely else ""


@dataclass(frozen=True)
class Evidence:
    """What this process has learnt by running. Immutable: learning makes a new one."""

    refusals: tuple[Refusal, ...] = ()

    def plus(self, refusal: Refusal) -> Evidence:
        return self if refusal in self.refusals else Evidence((*self.refusals, refusal))

    def against(self, name: str, p: AttentionParams) -> list[Reason]:
        wanted = {"RUNTIME001": "a kernel that accepts this call", "RUNTIME002": "the numbers tiled gives"}
        return [
            Reason(
                REGISTRY.pages[refusal.code],
                Bad("kernel", refusal.message, Words(wanted[refusal.code]), refusal.hint),
            )
            for refusal in self.refusals
            if refusal.candidate == name and refusal.params == p
        ]


NO_EVIDENCE = Evidence()
DEFAULT_POLICY = Policy()


class Candidate(NamedTuple):
    """One candidate's verdict on one question.

    ``reasons`` say why not (or why nobody knows). ``adaptations`` are exact changes that make it
    eligible. ``plan_only`` says why attnsel cannot run it itself yet; None when it can.
    ``placed_by`` is the code of the preference that put it below the one above.
    """

    name: str
    verdict: Verdict
    reasons: tuple[Reason, ...]
    adaptations: tuple[Adaptation, ...]
    plan_only: str | None
    unproven: bool
    placed_by: str | None = None

    @property
    def eligible(self) -> bool:
        return self.verdict == "eligible"

    @property
    def executable(self) -> bool:
        return self.plan_only is None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": CANDIDATES[self.name].title,
            "verdict": self.verdict,
            "eligible": self.eligible,
            "executable": self.executable,
            "plan_only": self.plan_only,
            "unproven": self.unproven,
            "placed_by": self.placed_by,
            "adaptations": [adaptation.as_dict() for adaptation in self.adaptations],
            "reasons": [reason.as_dict() for reason in self.reasons],
        }


@dataclass(frozen=True, eq=False)
class Selection:
    """The answer. ``candidates`` stand best first, refused ones last; ``backend`` names the choice.

    ``layout``: where the tensors of the call lie, if there were tensors and they are not plainly dense.
    """

    params: AttentionParams
    environment: Environment
    policy: Policy
    evidence: Evidence
    candidates: tuple[Candidate, ...]
    backend: str | None
    layout: Layout | None = None

    def __getitem__(self, name: str) -> Candidate:
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{name!r} is no candidate; allowed: {', '.join(CANDIDATES)}")

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __repr__(self) -> str:
        return f"<Selection backend={self.backend!r} on {self.environment.device.name}>"

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Those that are not refused, best first."""
        return tuple(c for c in self.candidates if c.verdict != "refused")

    @cached_property
    def unlocks(self) -> tuple[Unlock, ...]:
        """Smallest sets of changes that make refused candidates eligible, each re-checked by the engine.

        Searched when first asked for; ``unlock.apply(params, environment, policy)`` makes one.
        """
        return find_unlocks(self, _ask, _ask_about)

    def report(self, width: int = 80) -> str:
        """The whole answer as text: what ATTNSEL_DEBUG=2 prints and NoBackendError carries."""
        return render(self, width)

    def located(self, layout: Layout) -> Selection:
        """The same answer, to be told together with where the tensors lie."""
        return replace(self, layout=layout)

    def require(self) -> Selection:
        """Itself, if something can run. Raises NoBackendError with the report otherwise."""
        if self.backend is None:
            raise NoBackendError(self._headline() + "\n\n" + self.report(), self)
        return self

    def _headline(self) -> str:
        if self.policy.backend is not None:
            return f"backend {self.policy.backend!r} was asked for and cannot run this attention call."
        return "no attention backend can run this call."

    def as_dict(self, *, unlocks: bool = True) -> dict[str, Any]:
        """The JSON form of everything above."""
        out: dict[str, Any] = {
            "backend": self.backend,
            "params": self.params.model_dump(mode="json"),
            "environment": {
                **self.environment.model_dump(mode="json"),
                "warnings": list(self.environment.warnings),
            },
            "policy": self.policy.model_dump(mode="json"),
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }
        if self.layout is not None:
            out["layout"] = self.layout.as_dict()
        if unlocks:
            out["unlocks"] = [unlock.as_dict() for unlock in self.unlocks]
        return out

    def to_json(self, *, unlocks: bool = True, indent: int | None = None) -> str:
        return json.dumps(self.as_dict(unlocks=unlocks), indent=indent)


def select(
    params: AttentionParams,
    environment: Environment | None = None,
    *,
    policy: Policy = DEFAULT_POLICY,
    evidence: Evidence = NO_EVIDENCE,
) -> Selection:
    """Which candidate runs ``params`` in ``environment``, and every reason why the others do not.

    Pure and memoised: equal arguments give the same object. ``environment`` None is this machine.
    A selection with ``backend`` None is an answer too; ``selection.require()`` turns it into an error.
    """
    return _select(params, environment or Environment.detect(), policy, evidence)


@lru_cache(maxsize=8192)
def _select(p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence) -> Selection:
    load_plugins()
    asked, ignored = _as_wished(p, policy)
    found = findings(asked, env, ignored)
    changed: dict[Any, Any] = {}
    answers: dict[tuple[AttentionParams, tuple[str, ...]], dict[str, list[Reason]]] = {}

    def again(name: str, q: AttentionParams) -> list[Reason]:
        """Reasons against a changed question; candidates that may be changed alike share the work."""
        alike = _changed_alike(CANDIDATES[name].adaptations)
        if (q, alike) not in answers:
            answers[q, alike] = findings_again(q, asked, found, env, ignored, alike)
        return answers[q, alike][name]

    judged = [
        _judge(info, asked, env, policy, evidence, found[info.name], again, changed)
        for info in CANDIDATES.values()
    ]
    candidates = _rank(judged, asked, env, policy)
    return Selection(asked, env, policy, evidence, candidates, _choose(candidates, env))


def _as_wished(p: AttentionParams, policy: Policy) -> tuple[AttentionParams, tuple[str, ...]]:
    """The question under a policy, and the codes of rules that the policy overrides."""
    asked = p.derive(deterministic=True) if policy.deterministic and not p.deterministic else p
    ignored = policy.allow_known_bugs
    return asked, (*ignored, INTERPRETED) if policy.backend == "triton" else ignored


@lru_cache(maxsize=64)
def _changed_alike(adaptations: tuple[str, ...]) -> tuple[str, ...]:
    """The candidates for which just these changes may be made."""
    return tuple(info.name for info in CANDIDATES.values() if info.adaptations == adaptations)


def _ask(p: AttentionParams, env: Environment, policy: Policy) -> Selection:
    """A hypothetical question for the search for ways out; kept out of the memo of real ones."""
    return _select.__wrapped__(p, env, policy, NO_EVIDENCE)


def _ask_about(name: str, p: AttentionParams, env: Environment, policy: Policy) -> Candidate:
    """One candidate's part of :func:`_ask`, at a fraction of its price."""
    asked, ignored = _as_wished(p, policy)

    def about(name: str, q: AttentionParams) -> list[Reason]:
        return findings(q, env, ignored, (name,))[name]

    return _judge(CANDIDATES[name], asked, env, policy, NO_EVIDENCE, about(name, asked), about, {})


def _judge(
    info: CandidateInfo,
    p: AttentionParams,
    env: Environment,
    policy: Policy,
    evidence: Evidence,
    reasons: list[Reason],
    again: Callable[[str, AttentionParams], list[Reason]],
    changed: dict[Any, Any],
) -> Candidate:
    """Rules, then adaptations, then wishes and what was learnt: one candidate's verdict."""
    name = info.name
    adaptations: tuple[Adaptation, ...] = ()
    if (reasons or p.tensors.mask_hides_nothing) and info.adaptations and policy.adapt == "auto":
        applied, left = adapt_to(info.adaptations, p, reasons, partial(again, name), changed)
        if all(reason.unknown for reason in left):
            adaptations, reasons = applied, left
        elif applied:  # what stands in the way even after every change is a reason too
            known = {reason.code for reason in reasons}
            reasons = reasons + [reason for reason in left if reason.code not in known]
    unwanted = wishes(policy)[name]
    if unwanted:
        reasons = [*reasons, *unwanted]
    if policy.memory_limit is not None:
        reasons = [*reasons, *over_memory(name, p, env, policy, adaptations)]
    if evidence.refusals:
        reasons = reasons + evidence.against(name, p)
    verdict: Verdict = "eligible"
    if reasons:
        verdict = "unknown" if all(reason.unknown for reason in reasons) else "refused"
    # What is ours is proven per architecture; without a GPU there is none to be unproven on.
    ours = info.owned or info.called
    unproven = ours and env.arch is not None and (name, env.arch) not in PROVEN
    if info.plugin:
        unproven = env.target not in info.proven_on
    return Candidate(name, verdict, tuple(reasons), adaptations, _plan_only(info, p, env), unproven)


def _plan_only(info: CandidateInfo, p: AttentionParams, env: Environment) -> str | None:
    """Why attnsel can plan this and not run it; None when it can run it."""
    if not info.runs_here:
        return "attnsel does not run it yet"
    if env.torch is not None and env.torch < OLDEST_TORCH:
        return f"attnsel runs on torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer"
    if p.fp8_attention:
        return "FP8 attention is planned, not run"
    if p.kv_cache == "contiguous":
        return "contiguous KV caches are planned, not run"
    return None


def _rank(
    judged: list[Candidate], p: AttentionParams, env: Environment, policy: Policy
) -> tuple[Candidate, ...]:
    """Standing candidates by preference, each told which preference put it below the one above."""
    large = p.score_bytes > _GIB
    standing: list[Candidate] = []
    refused: list[Candidate] = []
    for candidate in judged:
        (refused if candidate.verdict == "refused" else standing).append(candidate)
    seen = tuple(
        [
            Standing(
                c.name,
                c.verdict,
                overhead(c.adaptations, p) if c.adaptations else 0,
                c.unproven and not CANDIDATES[c.name].called,
                large,
            )
            for c in standing
        ]
    )
    ranked = [
        standing[i] if code is None else Candidate._make((*standing[i][:-1], code))  # placed_by stands last
        for i, code in _order(seen, env.arch, policy)
    ]
    return (*ranked, *refused)


_GIB = 1 << 30


@lru_cache(maxsize=4096)
def _order(
    standing: tuple[Standing, ...], arch: int | None, policy: Policy
) -> tuple[tuple[int, str | None], ...]:
    """Indices best first, each with the code of the first preference in which it loses to the one above."""
    pages = tuple(REGISTRY.preferences.values())
    keys = [[page.value(c, arch, policy) for page in pages] for c in standing]
    order = sorted(range(len(standing)), key=keys.__getitem__)
    codes: list[str | None] = [None]
    for above, below in pairwise(order):
        lost = (page.code for page, a, b in zip(pages, keys[above], keys[below], strict=True) if a != b)
        codes.append(next(lost, None))
    return tuple(zip(order, codes, strict=False))


def _choose(candidates: tuple[Candidate, ...], env: Environment) -> str | None:
    """The first that stands; on a detected machine, the first that attnsel can really run there."""
    for candidate in candidates:
        if candidate.verdict != "refused" and (candidate.executable or not env.detected):
            return candidate.name
    return None

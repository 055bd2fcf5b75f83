"""The decision: a pure function from a question to a choice, and to a ranked list with every reason.

The choice is made first and needs little: candidates are judged in the order in which they could win, until
none that is left can be better. Everything else, the other candidates with all their reasons, adaptations and
ways out, is worked out when somebody looks at it, from the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

from attnsel._schemas import stamped
from attnsel.adaptations.search import adapt_to, within_reach
from attnsel.candidates import CANDIDATES, OLDEST_TORCH, CandidateRecord
from attnsel.candidates.proof import unproven
from attnsel.context_parallel.step import steps_against
from attnsel.environment import Environment
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.layout import Layout
from attnsel.params import AttentionParams
from attnsel.plugins import load_plugins
from attnsel.policy import Policy
from attnsel.report import render
from attnsel.rules.api import INTERPRETED
from attnsel.selection.evaluate import (
    Waivers,
    always_refuses,
    findings,
    fold,
    over_memory,
    policy_reasons,
    reasons_within,
    reevaluate,
    warn_of_retired,
)
from attnsel.selection.evidence import NO_EVIDENCE, Evidence
from attnsel.selection.f_sdpa import BY_F_SDPA, OLDEST, f_sdpa_order
from attnsel.selection.rank import asked, at_best, key_of, order, rank_key
from attnsel.selection.verdict import Adaptation, Candidate, Reason, Verdict
from attnsel.unlock import Unlock, find_unlocks

DEFAULT_POLICY = Policy()
_MASKED = AttentionParams(attn_mask_type="arbitrary")


class Selection:
    """The answer. ``backend`` names the choice and ``chosen`` is the verdict on it; both None if nothing
    runs.

    ``candidates`` stand best first, refused ones last. ``layout``: where the tensors of the call lie, if
    there were tensors and they are not plainly dense.
    """

    __slots__ = ("_candidates", "_inquiry", "_unlocks", "backend", "chosen", "layout")

    def __init__(self, inquiry: Inquiry, chosen: Candidate | None, layout: Layout | None = None) -> None:
        self._inquiry = inquiry
        self._candidates: tuple[Candidate, ...] | None = None
        self._unlocks: tuple[Unlock, ...] | None = None
        self.chosen = chosen
        self.backend = None if chosen is None else chosen.name
        self.layout = layout

    @property
    def params(self) -> AttentionParams:
        return self._inquiry.p

    @property
    def environment(self) -> Environment:
        return self._inquiry.env

    @property
    def policy(self) -> Policy:
        return self._inquiry.policy

    @property
    def evidence(self) -> Evidence:
        return self._inquiry.evidence

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate's verdict, best first, refused ones last. Worked out when first asked for."""
        if self._candidates is None:
            self._candidates = self._inquiry.ranked()
        return self._candidates

    def __getitem__(self, name: str) -> Candidate:
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{name!r} is no candidate; allowed: {', '.join(CANDIDATES)}")

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.candidates)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.params, self.environment, self.policy, self.evidence, self.layout)

    def __repr__(self) -> str:
        return f"<Selection backend={self.backend!r} on {self.environment.device.name}>"

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Those that are not refused, best first."""
        return tuple(c for c in self.candidates if c.verdict != "refused")

    @property
    def unlocks(self) -> tuple[Unlock, ...]:
        """Smallest sets of changes that make refused candidates eligible, each re-checked by the engine.

        Searched when first asked for; ``unlock.apply(params, environment, policy)`` makes one.
        """
        if self._unlocks is None:
            self._unlocks = find_unlocks(self, _ask, _ask_about)
        return self._unlocks

    def report(self, width: int = 80, sources: bool = False) -> str:
        """The whole answer as text: what ATTNSEL_DEBUG=2 prints and NoBackendError carries.

        ``sources``: below each reason where it is written: file, line and release, or an issue.
        """
        return render(self, width, sources)

    def located(self, layout: Layout) -> Selection:
        """The same answer, to be shown together with where the tensors lie."""
        return self._with(self.chosen, self._candidates, layout)

    def narrowed(self, candidates: tuple[Candidate, ...]) -> Selection:
        """The same question after more was asked of its candidates, which stand in ``candidates``."""
        standing = (c for c in candidates if c.verdict != "refused")
        chosen = next((c for c in standing if _can_run(c, self.environment)), None)
        return self._with(chosen, candidates, self.layout)

    def about(self, params: AttentionParams) -> Selection:
        """The same choice for another question, which the caller knows to be answered alike."""
        inquiry = Inquiry(params, self.environment, self.policy, self.evidence)
        made = Selection(inquiry, self.chosen, self.layout)
        made._candidates = self._candidates
        return made

    def _with(
        self, chosen: Candidate | None, candidates: tuple[Candidate, ...] | None, layout: Layout | None
    ) -> Selection:
        made = Selection(self._inquiry, chosen, layout)
        made._candidates = candidates
        return made

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
        return stamped("selection", out)

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
    if environment is None:
        environment = Environment.detect()
    kinds = type(params), type(environment), type(policy), type(evidence)
    if kinds != (AttentionParams, Environment, Policy, Evidence):
        _check_kinds(params=params, environment=environment, policy=policy, evidence=evidence)
    if policy.allow_known_bugs:
        warn_of_retired(policy.allow_known_bugs)
    return _select(params, environment, policy, evidence)


def _check_kinds(**given: Any) -> None:
    """Raises InvalidInput for the first that is of another kind."""
    kinds = (AttentionParams, Environment, Policy, Evidence)
    for (name, value), kind in zip(given.items(), kinds, strict=True):
        if not isinstance(value, kind):
            raise InvalidInput(name, value, f"must be an instance of {kind.__name__}")


@lru_cache(maxsize=8192)
def _select(p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence) -> Selection:
    load_plugins()
    inquiry = Inquiry(p, env, policy, evidence)
    return Selection(inquiry, inquiry.decide())


def _restored(
    p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence, layout: Layout | None
) -> Selection:
    """A selection that was pickled: the question travels, and is answered again."""
    selection = _select(p, env, policy, evidence)
    return selection if layout is None else selection.located(layout)


def _ask(p: AttentionParams, env: Environment, policy: Policy) -> Selection:
    """A hypothetical question for the search for ways out; kept out of the memo of real ones."""
    return _select.__wrapped__(p, env, policy, NO_EVIDENCE)


def _ask_about(name: str, p: AttentionParams, env: Environment, policy: Policy) -> Candidate:
    """One candidate's part of :func:`_ask`, at a fraction of its price."""
    return Inquiry(p, env, policy, NO_EVIDENCE).judge(name)


@lru_cache(maxsize=256)
def _waivers(policy: Policy) -> Waivers:
    """What a policy changes about the rules. A forced backend lifts one: see ``INTERPRETED``."""
    forced = (INTERPRETED,) if policy.backend == "triton" else ()
    return Waivers((*policy.allow_known_bugs, *forced), policy.preview)


class Inquiry:
    """One question, answered as far as somebody looks: verdicts are made one by one and kept."""

    __slots__ = (
        "_changed",
        "_judged",
        "_may_adapt",
        "_reasons",
        "_steps",
        "_waivers",
        "env",
        "evidence",
        "p",
        "policy",
    )

    def __init__(
        self, p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence, *, steps: bool = True
    ) -> None:
        """``steps`` False leaves out what ranks would ask of a kernel: the whole sequence alone is judged."""
        self.p = p.derive(deterministic=True) if policy.deterministic and not p.deterministic else p
        self.env, self.policy, self.evidence = env, policy, evidence
        self._waivers = _waivers(policy)
        self._steps = steps and p.context_parallel
        # A rank hands its tensors on as they are.
        self._may_adapt = policy.adapt == "auto" and not p.context_parallel
        self._judged: dict[str, Candidate] = {}
        self._changed: dict[Any, Any] = {}  # questions that adaptations made of this one
        self._reasons: dict[Any, Any] = {}  # and the reasons against them

    def decide(self) -> Candidate | None:
        """The first candidate that stands; on a detected machine, the first that attnsel can run there."""
        p, env, policy = self.p, self.env, self.policy
        of = asked(p, self.evidence.many_lengths, f_sdpa_order(p, env))
        unwanted = policy_reasons(policy)
        best: Candidate | None = None
        best_key: tuple[int, ...] = ()
        for bound, name in at_best(env, policy, of):
            if best is not None and best_key < bound:
                break  # neither this one nor those behind it can be better
            if unwanted[name]:
                continue
            candidate = self._judge_unless_refused(name)
            if candidate is None or candidate.verdict == "refused" or not _can_run(candidate, env):
                continue
            key = bound
            # What is unproven may be proven, or was executed, for other calls there and not for this one.
            if candidate.adaptations or candidate.verdict != "eligible" or candidate.unproven:
                key = key_of(rank_key(candidate, p, of), env.arch, policy)
            if best is None or key < best_key:
                best, best_key = candidate, key
        return best

    def ranked(self) -> tuple[Candidate, ...]:
        """Eligible ones best first, each with the preference that puts it there; then the rest."""
        p, env = self.p, self.env
        if len(self._judged) < len(CANDIDATES):
            found = findings(p, env, self._waivers)
            for name, record in CANDIDATES.items():
                if name not in self._judged:
                    again = partial(self._again, found, _changed_alike(record.adaptations))
                    self._judged[name] = self._verdict(name, found[name], again)
        standing: list[Candidate] = []
        refused: list[Candidate] = []
        for name in CANDIDATES:
            candidate = self._judged[name]
            (refused if candidate.verdict == "refused" else standing).append(candidate)
        of = asked(p, self.evidence.many_lengths, f_sdpa_order(p, env))
        keys = tuple([rank_key(candidate, p, of) for candidate in standing])
        ranked = [
            standing[i] if code is None else Candidate._make((*standing[i][:-1], code))  # placed_by is last
            for i, code in order(keys, env.arch, self.policy)
        ]
        return (*ranked, *refused)

    def judge(self, name: str) -> Candidate:
        """One candidate's verdict."""
        candidate = self._judged.get(name)
        if candidate is None:
            candidate = self._judge(name, findings(self.p, self.env, self._waivers, (name,))[name])
        return candidate

    def _judge_unless_refused(self, name: str) -> Candidate | None:
        """The same, or None where a look at the first reason that no adaptation answers is enough."""
        candidate = self._judged.get(name)
        if candidate is None:
            p = self.p
            if p.tensors.mask_hides_nothing:  # what goes with the mask is not known before it is gone
                return self.judge(name)
            reach = frozenset[str]()
            if self._may_adapt:
                reach = _reach(name, self.env, p.fp8_attention, p.context_parallel, self._waivers)
            reasons = reasons_within(name, p, self.env, self._waivers, reach)
            candidate = None if reasons is None else self._judge(name, reasons)
        return candidate

    def _judge(self, name: str, reasons: list[Reason]) -> Candidate:
        again = partial(self._again, {name: reasons}, (name,))
        candidate = self._judged[name] = self._verdict(name, reasons, again)
        return candidate

    def _again(
        self, found: dict[str, list[Reason]], alike: tuple[str, ...], name: str, q: AttentionParams
    ) -> list[Reason]:
        """Reasons for a question that an adaptation made; candidates that may be changed alike share them."""
        answers = self._reasons.get((q, alike))
        if answers is None:
            answers = self._reasons[q, alike] = reevaluate(q, self.p, found, self.env, self._waivers, alike)
        return answers[name]

    def _verdict(
        self, name: str, reasons: list[Reason], again: Callable[[str, AttentionParams], list[Reason]]
    ) -> Candidate:
        """Rules, then adaptations, then policy and what running showed."""
        p, env, policy, record = self.p, self.env, self.policy, CANDIDATES[name]
        adaptations: tuple[Adaptation, ...] = ()
        if self._may_adapt and record.adaptations and (reasons or p.tensors.mask_hides_nothing):
            applied, left = adapt_to(record.adaptations, p, reasons, partial(again, name), self._changed)
            if all(reason.unknown for reason in left):
                adaptations, reasons = applied, left
            elif applied:  # what stands in the way even after every change is a reason too
                known = {reason.code for reason in reasons}
                reasons = reasons + [reason for reason in left if reason.code not in known]
        if self._steps and all(reason.unknown for reason in reasons):
            reasons = [*reasons, *self._against_steps(name)]
        unwanted = policy_reasons(policy)[name]
        if unwanted:
            reasons = [*reasons, *unwanted]
        too_much = over_memory(name, p, env, policy, adaptations)
        if too_much:
            reasons = [*reasons, *too_much]
        if self.evidence.refusals:
            reasons = reasons + self.evidence.against(name, p)
        verdict: Verdict = "eligible"
        if reasons:
            verdict = "unknown" if all(reason.unknown for reason in reasons) else "refused"
        executed = record.executed_for(p, env.target)
        new = unproven(record, p, env.target)
        return Candidate(
            name, verdict, tuple(reasons), adaptations, _plan_only(record, p, env), new, executed
        )

    def _against_steps(self, name: str) -> list[Reason]:
        """Why the calls that ranks would make refuse a candidate, with the step that does."""
        refusal = steps_against(name, CANDIDATES[name].offsets, self.p, self.judge_step)
        return [] if refusal is None else list(refusal.noted_reasons)

    def judge_step(self, name: str, step: AttentionParams) -> Candidate:
        """A candidate's verdict on one call of a rank's, whichever other candidate the policy forces."""
        policy = _step_policy(self.policy, name)
        return Inquiry(step, self.env, policy, self.evidence).judge(name)


@lru_cache(maxsize=256)
def _step_policy(policy: Policy, name: str) -> Policy:
    if policy.adapt == "never" and policy.backend in (None, name):
        return policy
    return policy.replace(adapt="never", backend=policy.backend if policy.backend == name else None)


@lru_cache(maxsize=2048)
def _reach(name: str, env: Environment, fp8: bool, over_ranks: bool, waivers: Waivers) -> frozenset[str]:
    """Fields of a call without a mask to drop that adaptations can do something about, for one candidate: a
    mask is not worth folding where no mask is taken."""
    names = [made for made in CANDIDATES[name].adaptations if made != "drop_mask"]
    rules = fold(env, fp8, over_ranks, waivers, (name,))
    if "fold_mask" in names and always_refuses("attn_mask_type", _MASKED, rules, env):
        names.remove("fold_mask")
    return within_reach(tuple(names))


@lru_cache(maxsize=64)
def _changed_alike(adaptations: tuple[str, ...]) -> tuple[str, ...]:
    """The candidates for which just these changes may be made."""
    return tuple(name for name, record in CANDIDATES.items() if record.adaptations == adaptations)


def _can_run(candidate: Candidate, env: Environment) -> bool:
    """Whether it may be chosen: on a machine that is here, only what attnsel runs."""
    return candidate.executable or not env.detected


def _plan_only(record: CandidateRecord, p: AttentionParams, env: Environment) -> str | None:
    """Why attnsel can plan this and not run it; None when it can run it."""
    if env.torch is not None and env.torch < OLDEST_TORCH:
        return BY_F_SDPA if record.f_sdpa else f"attnsel runs on torch {OLDEST} or newer"
    if p.fp8_attention:
        return "FP8 attention is planned, not run"
    if p.kv_cache == "contiguous":
        return "contiguous KV caches are planned, not run"
    return None

"""The decision: a pure function from a question to a choice, and to a ranked list with every reason.

The choice is made first and needs little: candidates are judged in the order in which they could win, until
none that is left can be better. Everything else, the other candidates with all their reasons, adaptations and
ways out, is worked out when somebody looks at it, from the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import to_json
from attnsel.base.schemas import stamped
from attnsel.base.suggestions import unknown_argument
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.environment import COMPONENTS, Environment
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.params import AttentionParams
from attnsel.params.layout import Layout
from attnsel.plugins import load_plugins
from attnsel.policy import Policy
from attnsel.report import difference, report_document, to_text
from attnsel.selection.assumed import Assumption, assumptions, settled
from attnsel.selection.evaluate import warn_of_retired
from attnsel.selection.inquiry import Inquiry, Remark, can_run, remarks_on, waivers_of
from attnsel.selection.unlock import Unlock, find_unlocks
from attnsel.verdicts.reasons import NO_EVIDENCE, Candidate, Evidence

DEFAULT_POLICY = Policy()
_TAKEN = ("params", "environment", "policy", "evidence", "dispatcher", "switches")


class Selection:
    """The answer. ``backend`` names the choice and ``chosen`` is the verdict on it; both None if nothing
    runs.

    ``candidates`` stand best first, refused ones last. ``layout``: where the tensors of the call lie, if
    there were tensors and they are not plainly dense. ``dispatched``: what another library's chooser would
    take, if that was asked.
    """

    __slots__ = ("_candidates", "_hints", "_inquiry", "_unlocks", "backend", "chosen", "dispatched", "layout")

    def __init__(
        self,
        inquiry: Inquiry,
        chosen: Candidate | None,
        layout: Layout | None = None,
        dispatched: Dispatch | None = None,
    ) -> None:
        self._inquiry = inquiry
        self._candidates: tuple[Candidate, ...] | None = None
        self._unlocks: tuple[Unlock, ...] | None = None
        self._hints: tuple[Remark, ...] | None = None
        self.chosen = chosen
        self.backend = None if chosen is None else chosen.name
        self.layout = layout
        self.dispatched = dispatched

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
        question = self.params, self.environment, self.policy, self.evidence
        return _restored, (*question, self.layout, self.dispatched)

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

    @property
    def hints(self) -> tuple[Remark, ...]:
        """What may not be meant as it was asked; nothing is refused or ranked by it. Looked up when asked."""
        if self._hints is None:
            p, env, policy = self.params, self.environment, self.policy
            self._hints = remarks_on(p, env, policy, lambda q: _ask(q, env, policy).backend)
        return self._hints

    @property
    def difference(self) -> str:
        """What the other chooser takes and attnsel does not, in a sentence; empty where none was asked."""
        return difference(self)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The verdicts that another value of what nobody stated would change. Worked out when asked for."""
        asked = self._inquiry
        if not asked.env.assumed:
            return ()
        return tuple(assumptions(asked.env, self.candidates, asked.judge_elsewhere))

    def report(self, width: int = 80, sources: bool = False) -> str:
        """The whole answer as text: what ATTNSEL_DEBUG=2 prints and NoBackendError carries.

        ``sources``: below each reason where it is written: file, line and release, or an issue.
        """
        return to_text(report_document(self, sources), width)

    def located(self, layout: Layout) -> Selection:
        """The same answer, to be shown together with where the tensors lie."""
        return self._with(self.chosen, self._candidates, layout)

    def beside(self, dispatched: Dispatch) -> Selection:
        """The same answer, beside that of another library's chooser."""
        made = self._with(self.chosen, self._candidates, self.layout)
        made.dispatched = dispatched
        return made

    def alone(self) -> Selection:
        """The same answer, beside no other."""
        return Selection(self._inquiry, self.chosen, self.layout)

    def narrowed(self, candidates: tuple[Candidate, ...]) -> Selection:
        """The same question after more was asked of its candidates, which stand in ``candidates``."""
        standing = (c for c in candidates if c.verdict != "refused")
        chosen = next((c for c in standing if can_run(c, self.environment)), None)
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
        made = Selection(self._inquiry, chosen, layout, self.dispatched)
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
            "environment": to_json(self.environment),
            "policy": self.policy.model_dump(mode="json"),
            "candidates": [
                {"name": one.name, "title": CANDIDATES[one.name].title, **to_json(one)}
                for one in self.candidates
            ],
            "assumptions": to_json(self.assumptions),
        }
        out["hints"] = to_json(self.hints)
        if self.layout is not None:
            out["layout"] = to_json(self.layout)
        if self.dispatched is not None:
            out["dispatched"] = {**to_json(self.dispatched), "difference": self.difference}
        if unlocks:
            out["unlocks"] = to_json(self.unlocks)
        return stamped("selection", out)

    def to_json(self, *, unlocks: bool = True, indent: int | None = None) -> str:
        return json.dumps(self.as_dict(unlocks=unlocks), indent=indent)


def select(
    params: AttentionParams,
    environment: Environment | None = None,
    *,
    policy: Policy = DEFAULT_POLICY,
    evidence: Evidence = NO_EVIDENCE,
    dispatcher: str | None = None,
    switches: Mapping[str, str] | None = None,
    **unknown: NoReturn,
) -> Selection:
    """Which candidate runs ``params`` in ``environment``, and every reason why the others do not.

    Pure and memoised: equal arguments give the same object. ``environment`` None is this machine.
    A selection with ``backend`` None is an answer too; ``selection.require()`` turns it into an error.

    ``dispatcher``: "torch", "te" or "transformers" puts what that library would choose beside it, as
    ``selection.dispatched``. ``switches``: its variables, toggles and arguments by name
    (``attnsel.dispatchers.switches_of``); None takes those that hold in this process.
    """
    if unknown:
        raise _unknown(next(iter(unknown)))
    if environment is None:
        environment = Environment.detect()
    kinds = type(params), type(environment), type(policy), type(evidence)
    if kinds != (AttentionParams, Environment, Policy, Evidence):
        _check_kinds(params=params, environment=environment, policy=policy, evidence=evidence)
    if policy.allow_known_bugs:
        warn_of_retired(policy.allow_known_bugs)
    if dispatcher is None and switches is None:
        return _select(params, environment, policy, evidence)
    if dispatcher is None:
        raise InvalidInput("switches", switches, "go with a dispatcher, which reads them")
    dispatched = dispatched_by(dispatcher, params, environment, switches)
    return _beside(params, environment, policy, evidence, dispatched)


def _unknown(name: str) -> TypeError:
    """What ``name`` was meant for: one of the models that are given instead."""
    places: tuple[tuple[str, Iterable[str]], ...] = (
        ("policy=Policy(...)", Policy.model_fields.keys() - AttentionParams.model_fields.keys()),
        ("Environment.describe(...)", ("gpu", *COMPONENTS)),
    )
    for place, fields in places:
        if name in fields:
            return unknown_argument("select", name, _TAKEN, place, fields)
    return unknown_argument("select", name, _TAKEN, "AttentionParams(...)", AttentionParams.model_fields)


def _check_kinds(**given: Any) -> None:
    """Raises InvalidInput for the first that is of another kind."""
    kinds = (AttentionParams, Environment, Policy, Evidence)
    for (name, value), kind in zip(given.items(), kinds, strict=True):
        if not isinstance(value, kind):
            such = ', such as Environment.describe("H100")' if kind is Environment else ""
            raise InvalidInput(name, value, f"must be an instance of {kind.__name__}{such}")


@lru_cache(maxsize=8192)
def _select(p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence) -> Selection:
    load_plugins()
    if env.assumed and not env.settled:
        env = settled(p, env, waivers_of(policy))
    inquiry = Inquiry(p, env, policy, evidence)
    return Selection(inquiry, inquiry.decide())


@lru_cache(maxsize=1024)
def _beside(
    p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence, dispatched: Dispatch
) -> Selection:
    return _select(p, env, policy, evidence).beside(dispatched)


def _restored(
    p: AttentionParams,
    env: Environment,
    policy: Policy,
    evidence: Evidence,
    layout: Layout | None,
    dispatched: Dispatch | None,
) -> Selection:
    """A selection that was pickled: the question travels, and is answered again."""
    selection = _select(p, env, policy, evidence)
    if layout is not None:
        selection = selection.located(layout)
    return selection if dispatched is None else selection.beside(dispatched)


def _ask(p: AttentionParams, env: Environment, policy: Policy) -> Selection:
    """A hypothetical question for the search for ways out; kept out of the memo of real ones.

    Whatever is assumed holds here: a way out is checked with just these versions.
    """
    inquiry = Inquiry(p, env, policy, NO_EVIDENCE)
    return Selection(inquiry, inquiry.decide())


def _ask_about(name: str, p: AttentionParams, env: Environment, policy: Policy) -> Candidate:
    """One candidate's part of :func:`_ask`, at a fraction of its price."""
    return Inquiry(p, env, policy, NO_EVIDENCE).judge(name)

"""The decision: a pure function from a question to a choice, and to a ranked list with every reason.

The choice is made first and needs little: candidates are judged in the order in which they could win, until
none that is left can be better. Everything else, the other candidates with all their reasons, adaptations and
ways out, is worked out when somebody looks at it, from the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from attnsel.base.suggestions import unknown_argument
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.environment import COMPONENTS, Environment
from attnsel.errors import InvalidInput, NoBackendError
from attnsel.params import AttentionParams
from attnsel.params.layout import Layout
from attnsel.plugins import load_plugins
from attnsel.policy import Policy
from attnsel.report.short import difference, report_document, selection_record
from attnsel.report.text import to_text
from attnsel.selection.assumed import resolve_assumed
from attnsel.selection.evaluate import warn_of_retired
from attnsel.selection.inquiry import Inquiry, can_run, waivers_of
from attnsel.selection.view import SelectionView
from attnsel.verdicts.reasons import NO_EVIDENCE, Candidate, Evidence

DEFAULT_POLICY = Policy()
_TAKEN = ("params", "environment", "policy", "evidence", "dispatcher", "switches")


class Selection(SelectionView):
    """The answer, and how it is told: as text, as JSON, as an error."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        question = self.params, self.environment, self.policy, self.evidence
        return _restored, (*question, self.layout, self.dispatched)

    @property
    def difference(self) -> str:
        """What the other chooser takes and attnsel does not, in a sentence; empty where none was asked."""
        return difference(self)

    def report(self, width: int = 80, sources: bool = False) -> str:
        """The whole answer as text: what ATTNSEL_DEBUG=2 prints and NoBackendError carries.

        ``sources``: below each reason where it is written: file, line and release, or an issue.
        """
        return to_text(report_document(self, sources), width)

    def as_dict(self, *, unlocks: bool = True) -> dict[str, Any]:
        """The JSON form of all of it."""
        return selection_record(self, unlocks=unlocks)

    def to_json(self, *, unlocks: bool = True, indent: int | None = None) -> str:
        return json.dumps(self.as_dict(unlocks=unlocks), indent=indent)

    def require(self) -> Selection:
        """Itself, if something can run. Raises NoBackendError with the report otherwise."""
        if self.backend is None:
            headline = "no attention backend can run this call."
            if self.policy.backend is not None:
                asked_for = f"backend {self.policy.backend!r}"
                headline = f"{asked_for} was asked for and cannot run this attention call."
            raise NoBackendError(f"{headline}\n\n{self.report()}", self)
        return self

    def with_layout(self, layout: Layout) -> Selection:
        """The same answer, to be shown together with where the tensors lie."""
        return Selection(self._inquiry, self.chosen, layout, self.dispatched, self._candidates)

    def with_dispatch(self, dispatched: Dispatch) -> Selection:
        """The same answer, beside that of another library's chooser."""
        return Selection(self._inquiry, self.chosen, self.layout, dispatched, self._candidates)

    def with_candidates(self, candidates: tuple[Candidate, ...]) -> Selection:
        """The same question after more was asked of its candidates, which stand in ``candidates``."""
        standing = (c for c in candidates if c.verdict != "refused")
        chosen = next((c for c in standing if can_run(c, self.environment)), None)
        return Selection(self._inquiry, chosen, self.layout, self.dispatched, candidates)

    def for_params(self, params: AttentionParams) -> Selection:
        """The same choice for another question, which the caller knows to be answered alike."""
        inquiry = Inquiry(params, self.environment, self.policy, self.evidence)
        return Selection(inquiry, self.chosen, self.layout, None, self._candidates)


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
    if env.assumed and not env.resolved:
        env = resolve_assumed(p, env, waivers_of(policy))
    inquiry = Inquiry(p, env, policy, evidence)
    return Selection(inquiry, inquiry.decide())


@lru_cache(maxsize=1024)
def _beside(
    p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence, dispatched: Dispatch
) -> Selection:
    return _select(p, env, policy, evidence).with_dispatch(dispatched)


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
        selection = selection.with_layout(layout)
    return selection if dispatched is None else selection.with_dispatch(dispatched)

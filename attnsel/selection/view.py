"""A question and its answer, to be read: by reports, by debug output and by the search for ways out."""

from __future__ import annotations

from collections.abc import Iterator

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.environment.read import Unread
from attnsel.params import AttentionParams
from attnsel.params.layout import Layout
from attnsel.policy import Policy
from attnsel.rules.figures import Measurement, nearest
from attnsel.selection.assumed import Assumption, assumptions
from attnsel.selection.evaluate import waived_codes
from attnsel.selection.inquiry import Inquiry, Remark, remarks_on, waivers_of
from attnsel.selection.unlock import Unlock, find_unlocks
from attnsel.verdicts.dispatch import Dispatch
from attnsel.verdicts.measured import card_of
from attnsel.verdicts.reasons import NO_EVIDENCE, Candidate, Evidence, Reason


class SelectionView:
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
        candidates: tuple[Candidate, ...] | None = None,
    ) -> None:
        self._inquiry = inquiry
        self._candidates = candidates
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
        return self._inquiry.stated

    @property
    def unread(self) -> tuple[Unread, ...]:
        """What is newer than anything that was read, here and of the other chooser; it is answered as the
        newest that was, and the text of each says so."""
        theirs = None if self.dispatched is None else self.dispatched.unread
        return tuple(dict.fromkeys((*self.environment.unread, *((theirs,) if theirs is not None else ()))))

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

    def __repr__(self) -> str:
        bugs = f" known_bugs={','.join(bug.code for bug in self.known_bugs)}" if self.known_bugs else ""
        return f"<Selection backend={self.backend!r} on {self.environment.device.name}{bugs}>"

    @property
    def taken(self) -> str | None:
        """What runs: the choice, or that of the other chooser, in its own name, where one was asked."""
        if self.dispatched is None:
            return self.backend
        return None if self.dispatched.chosen is None else self.dispatched.chosen.name

    @property
    def known_bugs(self) -> tuple[Reason, ...]:
        """Known bugs that touch the choice in this very call: those that the policy allows."""
        policy = self.policy
        if self.chosen is None or not policy.allow_known_bugs:
            return ()
        strict = policy.replace(allow_known_bugs=())
        found = Inquiry(self.params, self.environment, strict, self.evidence).judge(self.chosen.name)
        against = (*found.reasons, *(reason for made in found.adaptations for reason in made.avoids))
        allowed = waived_codes(waivers_of(policy)) - waived_codes(waivers_of(strict))
        return tuple(reason for reason in against if reason.code in allowed)

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """Those that are not refused, best first."""
        return tuple(c for c in self.candidates if c.verdict != "refused")

    def keeps_away(self, name: str) -> tuple[str, ...]:
        """Codes of what keeps a candidate from being the choice: the rules that refuse it, or the preference
        that places it behind."""
        return self._inquiry.keeps_away(name, self.backend)

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
            p, env, policy = self.params, self._inquiry.env, self.policy
            self._hints = remarks_on(p, env, policy, lambda q: _ask(q, env, policy).backend)
        return self._hints

    @property
    def figures(self) -> tuple[Measurement, ...]:
        """What was measured on this machine and the choice follows; then what was published nearest to this
        call, of the choice beside another kernel."""
        env, shape = self._inquiry.env, self._inquiry.measured
        here = () if shape is None else (Measurement(shape.rows[0]["pair"], shape.rows, True),)
        standing = tuple(c.name for c in self.ranked)
        if env.arch is None:
            return here
        return (*here, *nearest(self.params, env.arch, card_of(env), standing))

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """The verdicts that another value of what nobody stated would change. Worked out when asked for."""
        asked = self._inquiry
        if not asked.env.assumed:
            return ()
        return tuple(assumptions(asked.env, self.candidates, asked.judge_elsewhere))


def _ask(p: AttentionParams, env: Environment, policy: Policy) -> SelectionView:
    """A hypothetical question for the search for ways out; kept out of the memo of real ones.

    Whatever is assumed holds here: a way out is checked with just these versions.
    """
    inquiry = Inquiry(p, env, policy, NO_EVIDENCE)
    return SelectionView(inquiry, inquiry.decide())


def _ask_about(name: str, p: AttentionParams, env: Environment, policy: Policy) -> Candidate:
    """One candidate's part of :func:`_ask`, at a fraction of its price."""
    return Inquiry(p, env, policy, NO_EVIDENCE).judge(name)

"""One question and its verdicts, each worked out when it is first read: by rules, then adaptations, policy
and what running showed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from attnsel.backends.registry import CANDIDATES, OLDEST_TORCH
from attnsel.base.records import json_fields
from attnsel.environment import Device, Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules.api import INTERPRETED, REGISTRY, Advice, Hint, every_hint
from attnsel.rules.orders import BY_SPEED, Order
from attnsel.rules.takes import unproven
from attnsel.selection.adaptations import adapt_to, overhead, refused_fields, within_reach
from attnsel.selection.evaluate import (
    Waivers,
    always_refuses,
    kind_of,
    open_rules,
    over_memory,
    policy_reasons,
    reevaluate,
)
from attnsel.selection.f_sdpa import BY_F_SDPA, OLDEST, f_sdpa_order
from attnsel.selection.rule_index import rule_index
from attnsel.selection.steps import steps_against
from attnsel.verdicts.measured import Shape
from attnsel.verdicts.reasons import (
    REFUSED,
    WRONG_NUMBERS,
    Adaptation,
    Candidate,
    Evidence,
    RankKey,
    Reason,
    Verdict,
    Violation,
)
from attnsel.verdicts.record import CandidateRecord
from attnsel.verdicts.requirements import FreeText

# --------------------------------------------------------------------------------------------------------
# The order of candidates, by preferences, and the preference that decided between two neighbours.


Key = tuple[int, ...]
"""Values of the preferences, the first that differs decides; last the place in the list of candidates."""

_LARGE = 1 << 30
_FEW = 16  # queries: tokens that are decoded, and drafts of some


class PreferenceInput(NamedTuple):
    """What preferences may read of a question: see ``RankKey``."""

    large_scores: bool
    growing: bool
    f_sdpa: tuple[str, ...] = ()
    order: Order | None = None

    def place(self, name: str) -> int:
        """Where F.sdpa tries a kernel; 0 where that is nothing to go by."""
        return self.f_sdpa.index(name) if name in self.f_sdpa else len(self.f_sdpa)


def preference_input(
    p: AttentionParams,
    many_lengths: bool = False,
    f_sdpa: tuple[str, ...] = (),
    order: Order | None = None,
) -> PreferenceInput:
    """Keys grow where their number is the tensor's own: not where lengths or pages say it, or a mask.

    ``many_lengths``: it is known that each call has another length. ``f_sdpa``: kernels as F.sdpa tries them,
    where it is what runs. ``order``: of kernel families, for such calls.
    """
    if p.is_training or p.kv_cache == "paged" or p.qkv_format == "thd":
        return PreferenceInput(p.score_bytes > _LARGE, False, f_sdpa, order)
    own = p.attn_mask_type in ("no_mask", "causal", "causal_bottom_right")
    growing = many_lengths or (own and p.max_seqlen_q <= _FEW)
    return PreferenceInput(p.score_bytes > _LARGE, growing, f_sdpa, order)


def rank_key(candidate: Candidate, p: AttentionParams, of: PreferenceInput) -> RankKey:
    """What preferences may read of a candidate."""
    adapted, copies_padding, work = candidate.adaptations, False, 0
    if adapted:  # seldom are there any, and these cost more to ask than all the rest
        work = overhead(adapted, p)
        copies = any(made.name in _PADDING for made in adapted)
        copies_padding = copies and (p.padding or p.qkv_format == "thd")
    return RankKey(
        candidate.name,
        candidate.verdict,
        work,
        candidate.unproven and CANDIDATES[candidate.name].unproven_last,
        of.large_scores,
        candidate.executed_off_gpu,
        of.growing,
        copies_padding,
        of.place(candidate.name),
        candidate.plan_only is not None,
        of.order,
    )


_PADDING = frozenset({"unpack", "zero_padding", "fold_mask"})


@lru_cache(maxsize=4096)
def key_of(key: RankKey, arch: int | None, policy: Policy) -> Key:
    """The smaller goes first."""
    place = list(CANDIDATES).index(key.name)
    return (*(page.value(key, arch, policy) for page in REGISTRY.preferences.values()), place)


@lru_cache(maxsize=1024)
def at_best(device: Device, policy: Policy, of: PreferenceInput) -> tuple[tuple[Key, str], ...]:
    """Every candidate with the key it has there if it runs as it is, best first: none can have a better one.

    One that is proven, or was executed off-GPU, for some calls there counts as that for this one.
    """
    return tuple(
        sorted(
            (
                key_of(
                    RankKey(
                        name,
                        "eligible",
                        0,
                        record.unproven_on(device.target) and record.unproven_last,
                        of.large_scores,
                        record.executed is not None and device.target in record.executed.targets,
                        of.growing,
                        False,
                        of.place(name),
                        False,
                        of.order,
                    ),
                    device.arch,
                    policy,
                ),
                name,
            )
            for name, record in CANDIDATES.items()
        )
    )


@lru_cache(maxsize=4096)
def order(keys: tuple[RankKey, ...], arch: int | None, policy: Policy) -> tuple[tuple[int, str | None], ...]:
    """Indices best first, each with the code of the first preference in which it loses to the one above."""
    values = [key_of(key, arch, policy) for key in keys]
    ranked = sorted(range(len(keys)), key=values.__getitem__)
    codes: list[str | None] = [None]
    for above, below in pairwise(ranked):
        codes.append(decided_by(keys[above], keys[below], values[above], values[below]))
    return tuple(zip(ranked, codes, strict=False))


def decided_by(above: RankKey, below: RankKey, value: Key, other: Key) -> str | None:
    """The code of the first preference in which two differ; of those by speed, the rule for such calls."""
    code = next(
        (code for code, a, b in zip(REGISTRY.preferences, value, other, strict=False) if a != b), None
    )
    if code == BY_SPEED and above.order is not None:
        families = (CANDIDATES[key.name].kernel_family for key in (above, below))
        return above.order.code(*families) or code
    return code


_MASKED = AttentionParams(attn_mask_type="arbitrary")


@lru_cache(maxsize=256)
def waivers_of(policy: Policy) -> Waivers:
    """What a policy changes about the rules. A forced backend lifts one: see ``INTERPRETED``."""
    forced = (INTERPRETED,) if policy.backend == "triton" else ()
    return Waivers((*policy.allow_known_bugs, *forced), policy.preview)


_WANTED = {REFUSED: "a kernel that accepts this call", WRONG_NUMBERS: "the numbers tiled gives"}


def reasons_by_running(evidence: Evidence, name: str, p: AttentionParams) -> list[Reason]:
    """The reasons against a candidate that rest on what it did with this very question."""
    return [
        Reason(
            REGISTRY.pages[refusal.code],
            Violation("kernel", refusal.message, FreeText(_WANTED[refusal.code]), refusal.hint),
        )
        for refusal in evidence.refusals
        if refusal.candidate == name and refusal.params == p
    ]


class Inquiry:
    """One question, answered as far as somebody looks: verdicts are made one by one and kept."""

    __slots__ = (
        "_changed",
        "_judged",
        "_kind",
        "_may_adapt",
        "_of_kind",
        "_reasons",
        "_steps",
        "_unwanted",
        "_waivers",
        "env",
        "evidence",
        "p",
        "policy",
        "stated",
    )

    def __init__(
        self, p: AttentionParams, env: Environment, policy: Policy, evidence: Evidence, *, steps: bool = True
    ) -> None:
        """``stated`` is the environment as it was given, ``env`` the one that answers for it (``as_read``).
        ``steps`` False leaves out what ranks would ask of a kernel: the whole sequence alone is judged."""
        self.p = p.derive(deterministic=True) if policy.deterministic and not p.deterministic else p
        self.stated, self.policy, self.evidence = env, policy, evidence
        self._unwanted = policy_reasons(policy)
        self._waivers = waivers_of(policy)
        self._kind = kind_of(self.p, env, self._waivers)
        self.env = self._kind.env
        self._steps = steps and p.context_parallel
        # A rank hands its tensors on as they are.
        self._may_adapt = policy.adapt == "auto" and not p.context_parallel
        # Whether rules and memory alone tell this question from others of its kind.
        self._of_kind = not (
            self.p.context_parallel or self.p.tensors.mask_hides_nothing or evidence.refusals
        )
        self._judged: dict[str, Candidate] = {}
        self._changed: dict[Any, Any] = {}  # questions that adaptations made of this one
        self._reasons: dict[Any, Any] = {}  # and the reasons against them

    def decide(self) -> Candidate | None:
        """The first candidate that stands; on a detected machine, the first that attnsel can run there."""
        p, env, policy = self.p, self.env, self.policy
        of = self._preference_input()
        unwanted = self._unwanted
        best: Candidate | None = None
        best_key: tuple[int, ...] = ()
        for bound, name in at_best(env.device, policy, of):
            if best is not None and best_key < bound:
                break  # neither this one nor those behind it can be better
            if unwanted[name]:
                continue
            candidate = self._judge_unless_refused(name)
            if candidate is None or candidate.verdict == "refused" or not can_run(candidate, env):
                continue
            key = bound
            # What is unproven may be proven, or was executed, for other calls there and not for this one.
            moved = candidate.unproven or candidate.plan_only is not None
            if moved or candidate.adaptations or candidate.verdict != "eligible":
                key = key_of(rank_key(candidate, p, of), env.arch, policy)
            if best is None or key < best_key:
                best, best_key = candidate, key
        return best

    def ranked(self) -> tuple[Candidate, ...]:
        """Eligible ones best first, each with the preference that puts it there; then the rest."""
        p, env = self.p, self.env
        if len(self._judged) < len(CANDIDATES):
            found = self._kind.rules().findings(p, env)
            for name, record in CANDIDATES.items():
                if name not in self._judged:
                    self._judged[name] = self._verdict(name, found, _changed_alike(record.adaptations))
        standing: list[Candidate] = []
        refused: list[Candidate] = []
        for name in CANDIDATES:
            candidate = self._judged[name]
            (refused if candidate.verdict == "refused" else standing).append(candidate)
        of = self._preference_input()
        keys = tuple([rank_key(candidate, p, of) for candidate in standing])
        ranked = [
            standing[i] if code is None else Candidate._make((*standing[i][:-1], code))  # placed_by is last
            for i, code in order(keys, env.arch, self.policy)
        ]
        return (*ranked, *refused)

    def _preference_input(self) -> PreferenceInput:
        order = self._kind.order(self.p, self.policy.figures)
        return preference_input(self.p, self.evidence.many_lengths, f_sdpa_order(self.env), order)

    @property
    def measured(self) -> Shape | None:
        """What was measured on this machine, and the choice follows."""
        figures = self.policy.figures
        return None if figures is None else self._kind.measured(self.p, figures)

    def judge(self, name: str) -> Candidate:
        """One candidate's verdict."""
        candidate = self._judged.get(name)
        if candidate is None:
            candidate = self._judge(name, self._kind.rules((name,)).findings(self.p, self.env)[name])
        return candidate

    def _judge_unless_refused(self, name: str) -> Candidate | None:
        """The same, or None where a look at the first reason that no adaptation answers is enough."""
        candidate = self._judged.get(name)
        if candidate is None:
            p = self.p
            beyond = CANDIDATES[name].beyond
            # What goes with the mask is not known before it is gone; what is refused may be planned.
            if p.tensors.mask_hides_nothing or (beyond is not None and beyond(p, self.env, ())):
                return self.judge(name)
            reach = self._reach(name) if self._may_adapt else frozenset[str]()
            reasons = self._kind.rules((name,)).within(name, p, self.env, reach)
            candidate = None if reasons is None else self._judge(name, reasons)
        return candidate

    def _reach(self, name: str) -> frozenset[str]:
        """Fields that adaptations of one candidate can do something about, in questions of this kind."""
        reach = self._kind.reach.get(name)
        if reach is None:
            p = self.p
            reach = _reach(name, self.env, p.fp8_attention, p.context_parallel, self._waivers)
            self._kind.reach[name] = reach
        return reach

    def _judge(self, name: str, reasons: list[Reason]) -> Candidate:
        candidate = self._judged[name] = self._verdict(name, {name: reasons}, (name,))
        return candidate

    def _again(
        self, found: dict[str, list[Reason]], alike: tuple[str, ...], name: str, q: AttentionParams
    ) -> list[Reason]:
        """Reasons for a question that an adaptation made; candidates that may be changed alike share them."""
        answers = self._reasons.get((q, alike))
        if answers is None:
            answers = self._reasons[q, alike] = reevaluate(q, self.p, found, self.env, self._waivers, alike)
        return answers[name]

    def _verdict(self, name: str, found: dict[str, list[Reason]], alike: tuple[str, ...]) -> Candidate:
        """Rules, then adaptations, then policy and what running showed.

        ``found``: what rules say of the question as it stands, by candidate. ``alike``: see ``_again``.
        """
        p, env, policy, record = self.p, self.env, self.policy, CANDIDATES[name]
        reasons, unwanted = found[name], self._unwanted[name]
        settled = self._of_kind and not unwanted  # until something else has a say
        if settled and name in self._kind.settled:
            shared, candidate = self._kind.settled[name]
            if shared is reasons and not (record.memory and over_memory(name, p, env, policy, ())):
                return candidate
        adaptations: tuple[Adaptation, ...] = ()
        objections = refused_fields(reasons)
        reached = bool(objections) and objections <= within_reach(record.adaptations)
        if self._may_adapt and record.adaptations and (reached or p.tensors.mask_hides_nothing):
            settled = False
            again = partial(self._again, found, alike, name)
            applied, left = adapt_to(record.adaptations, p, reasons, again, self._changed)
            if all(reason.unknown for reason in left):
                adaptations, reasons = applied, left
            elif applied:  # what stands in the way even after every change is a reason too
                known = {reason.code for reason in reasons}
                reasons = reasons + [reason for reason in left if reason.code not in known]
        if self._steps and all(reason.unknown for reason in reasons):
            refusal = steps_against(name, record.offsets, p, self.judge_step)
            reasons = reasons if refusal is None else [*reasons, *refusal.noted_reasons]
        counted = record.memory is not None or bool(adaptations)
        too_much = over_memory(name, p, env, policy, adaptations) if counted else []
        if unwanted or too_much:
            reasons = [*reasons, *unwanted, *too_much]
        if self.evidence.refusals:
            reasons = reasons + reasons_by_running(self.evidence, name, p)
        if reasons and record.beyond is not None and (why := record.beyond(p, env, reasons)):
            return Candidate(name, "eligible", (), (), why, True)
        verdict: Verdict = "eligible"
        if reasons:
            verdict = "unknown" if all(reason.unknown for reason in reasons) else "refused"
        standing = self._kind.standing.get(name)
        if standing is None:
            standing = self._kind.standing[name] = _standing(record, self._kind.like, env)
        planned, executed, new = standing
        of_all = new is not None
        if new is None:
            new = unproven(record, p, env.target)
        made = Candidate(name, verdict, tuple(reasons), adaptations, planned, new, executed)
        if settled and of_all and not too_much and not reached:
            self._kind.settled[name] = found[name], made
        return made

    def keeps_away(self, name: str, chosen: str | None) -> tuple[str, ...]:
        """Codes of what keeps a candidate from being ``chosen``: the rules that refuse it, or the preference
        that places it behind."""
        candidate = self.judge(name)
        if candidate.verdict == "refused" or chosen is None:
            return tuple(dict.fromkeys(reason.code for reason in candidate.reasons))
        of = self._preference_input()
        keys = rank_key(self.judge(chosen), self.p, of), rank_key(candidate, self.p, of)
        return tuple(code for _, code in order(keys, self.env.arch, self.policy) if code is not None)

    def judge_elsewhere(self, name: str, env: Environment) -> Candidate:
        """A candidate's verdict on the same call in another environment."""
        return Inquiry(self.p, env, self.policy, self.evidence).judge(name)

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
    if "fold_mask" in names:
        rules = open_rules(env, fp8, over_ranks, False, waivers)  # a gate on training is no mask's alone
        if always_refuses("attn_mask_type", _MASKED, rules & rule_index().about((name,)), env):
            names.remove("fold_mask")
    return within_reach(tuple(names))


@lru_cache(maxsize=64)
def _changed_alike(adaptations: tuple[str, ...]) -> tuple[str, ...]:
    """The candidates for which just these changes may be made."""
    return tuple(name for name, record in CANDIDATES.items() if record.adaptations == adaptations)


def can_run(candidate: Candidate, env: Environment) -> bool:
    """Whether it may be chosen: on a machine that is here, only what attnsel runs."""
    return candidate.executable or not env.detected


def _standing(
    record: CandidateRecord, p: AttentionParams, env: Environment
) -> tuple[str | None, bool, bool | None]:
    """Of every question of ``p``'s kind: why it can only be planned, whether it was executed off-GPU, and
    whether it is unproven; None where that is to be asked of each."""
    target = env.target
    new = None if target in record.proven_in_part else unproven(record, p, target)
    return _plan_only(record, p, env), record.executed_for(p, target), new


def _plan_only(record: CandidateRecord, p: AttentionParams, env: Environment) -> str | None:
    """Why attnsel can plan this and not run it; None when it can run it."""
    if env.torch is not None and env.torch < OLDEST_TORCH:
        return BY_F_SDPA if record.f_sdpa else f"attnsel runs on torch {OLDEST} or newer"
    if p.fp8_attention:
        return "FP8 attention is planned, not run"
    if p.kv_cache == "contiguous":
        return "contiguous KV caches are planned, not run"
    if env.device.type in record.planned_on:
        return f"{record.name} is planned on {env.device.type}, not run"
    return None


# --------------------------------------------------------------------------------------------------------
# What is remarked on a question: the hints that it meets, and what the engine says of what may be meant.


@json_fields("code", ("title", "hint.title"), "message", "instead", "first", ("source", "hint.source"))
class Remark(NamedTuple):
    """One hint about one question. ``first``: the candidate that would be chosen with ``instead``."""

    hint: Hint
    advice: Advice
    first: str | None

    @property
    def code(self) -> str:
        return self.hint.code

    @property
    def message(self) -> str:
        """The text, with who would be first instead."""
        return f"{self.advice.text} ({self.first} first)" if self.first else self.advice.text

    @property
    def instead(self) -> Mapping[str, Any]:
        return self.advice.instead


def remarks_on(
    p: AttentionParams, env: Environment, policy: Policy, chooses: Callable[[AttentionParams], str | None]
) -> tuple[Remark, ...]:
    """Every hint that has something to say, each with what ``chooses`` answers to its other question."""
    found = []
    for page in every_hint():
        advice = page.advice(p, env)
        if advice is not None:
            first = _first(p, advice, chooses) if policy.backend is None else None
            found.append(Remark(page, advice, first))
    return tuple(found)


def _first(
    p: AttentionParams, advice: Advice, chooses: Callable[[AttentionParams], str | None]
) -> str | None:
    if not advice.instead:
        return None
    try:
        return chooses(p.replace(**advice.instead))
    except InvalidInput:
        return None  # another field contradicts it

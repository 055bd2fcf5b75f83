"""Rules against one question: which candidates stand, and every reason against the others.

Three stages. ``fold`` keeps the rules whose gates are open, once per environment; a ``Kind`` keeps what they
say of all questions that differ in lengths, batch and tensors alone; ``findings`` runs what is left, once per
question. Requirements on one field are tested together first, by the strictest; a rule is asked by itself,
and its body run, only where that fails.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from math import prod
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from attnsel.backends.registry import CANDIDATES
from attnsel.environment import Environment
from attnsel.environment.read import as_read
from attnsel.errors import InvalidInput, caller
from attnsel.params import ITEMSIZE, AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY, load_families
from attnsel.rules.api import INTERPRETED, Limit, PolicyRule, Rule
from attnsel.rules.orders import Call, Order, lengths, order_of
from attnsel.selection.adaptations import ADAPTERS, bias_shape
from attnsel.selection.rule_index import Bits, fields_of, gate_of, rule_index
from attnsel.verdicts.measured import Figures, Shape, nearest
from attnsel.verdicts.reasons import Adaptation, Candidate, Page, Reason, Violation
from attnsel.verdicts.requirements import Requirement, holds_together

if TYPE_CHECKING:
    from attnsel.verdicts.record import Memory


# --------------------------------------------------------------------------------------------------------
# What a candidate allocates while it runs, beyond the call's own tensors, their results and gradients.
#
# Counted: what its record says it holds (stored scores, tiles, cuDNN's workspace), and what adaptations
# make (masks, copies, repeated heads). Not counted: rows of statistics such as the log-sum-exp, which grow
# with s and not with s * s. cuDNN's workspace is an estimate (attnsel/backends/cudnn/candidate.py);
# ``attnsel explain --ask-library`` has libcudnn build the plans, and prints theirs.


def memory_parts(
    name: str, p: AttentionParams, env: Environment, adaptations: tuple[Adaptation, ...] = ()
) -> tuple[Memory, ...]:
    """What candidate ``name`` allocates for ``p``, the candidate's own first; empty when nothing counts."""
    own = CANDIDATES[name].memory
    if own is None and not adaptations:
        return ()
    parts = [] if own is None else [own(p, env)]
    parts += [(ADAPTERS[made.name].makes, made.bytes) for made in adaptations]
    return tuple([part for part in parts if part[1]])


def tensor_bytes(p: AttentionParams) -> int:
    """The call's own tensors: q, k, v and what comes out; in training each has a gradient beside it. A bias
    counts as it is."""
    b, d, e = p.batch_size, p.head_dim_qk, p.head_dim_v
    elements = b * p.num_heads * p.max_seqlen_q * (d + e) + b * p.num_gqa_groups * p.max_seqlen_kv * (d + e)
    if p.is_training:
        elements *= 2
    if p.has_bias:
        copies = 2 if p.is_training and p.core_attention_bias_requires_grad else 1
        elements += copies * prod(bias_shape(p))
    return elements * ITEMSIZE[p.dtype]


def mask_bytes(p: AttentionParams, made: bool = False) -> int:
    """Of a mask of queries x keys: one that is given, without the dimensions that repeat it; one that flags
    call arbitrary; or one of truth values for each sequence, where the model's code has ``made`` it."""
    mask, pairs = p.tensors.mask, p.max_seqlen_q * p.max_seqlen_kv
    if made:
        return p.batch_size * pairs
    if mask is not None:
        own = [count for count, step in zip(mask.shape, mask.stride, strict=True) if step]
        return prod(own) * ITEMSIZE.get(mask.dtype, 1)
    return pairs if p.attn_mask_type == "arbitrary" else 0


@lru_cache(maxsize=64)
def room(p: AttentionParams, env: Environment) -> int | None:
    """Bytes that the GPU has beside the call's own tensors.

    None where that is no measure of a candidate: nobody knows how much memory there is, the tensors alone do
    not fit and no candidate could help, or each of several GPUs holds a part of the call.
    """
    total = env.device.memory
    if not total or p.context_parallel:
        return None
    left = total - tensor_bytes(p)
    return left if left > 0 else None


load_families()


class Waivers(NamedTuple):
    """What a policy changes about the rules: codes that are ignored, and whether previews refuse."""

    ignored: tuple[str, ...] = ()
    preview: bool = False


NONE_WAIVED = Waivers()
_ANY = AttentionParams()  # for rules that read nothing of a question


Findings = list[tuple[Rule, Any]]
"""What rules say, in their order."""


class Group(NamedTuple):
    """The requirements on one field: what to read of a question, a test that holds only where all of them do,
    and each by itself with its rule's body and place."""

    read: Callable[[Any], Any]
    all_hold: Callable[[Any], bool]
    checks: tuple[tuple[Callable[[Any], bool], Callable[..., Any], int], ...]


class FoldedRules(NamedTuple):
    """Rules in their order: what those say that read nothing of a question, those with requirements by field,
    and those whose body alone decides."""

    rules: tuple[Rule, ...]
    said: tuple[tuple[int, Any], ...]
    groups: tuple[Group, ...]
    bodies: tuple[tuple[Callable[..., Any], int], ...]

    def findings(self, p: AttentionParams, env: Environment) -> Findings:
        """What they have to say."""
        found: dict[int, Any] = dict(self.said)
        rules = self.rules
        for read, all_hold, checks in self.groups:
            value = read(p)
            if all_hold(value):
                continue
            for holds, concerns, place in checks:
                if holds(value) or place in found:
                    continue
                about = concerns(p, env)
                if about is None or about:
                    found[place] = rules[place].violation(p, env)
        for body, place in self.bodies:
            finding = body(p, env)
            if finding is not None:
                found[place] = finding
        if not found:
            return []
        return [(rules[place], finding) for place, finding in sorted(found.items()) if finding is not None]


@lru_cache(maxsize=1024)
def open_rules(env: Environment, fp8: bool, over_ranks: bool, training: bool, waivers: Waivers) -> Bits:
    """The rules whose gates are open in ``env`` for FP8 attention or other, over ranks or not, in training
    or not, less what a policy waives."""
    index = rule_index()
    closed = index.coded(waived_codes(waivers))
    return index.applying(env) & index.concerned(fp8, over_ranks, training) & ~closed


@lru_cache(maxsize=2048)
def fold(
    env: Environment,
    fp8: bool,
    over_ranks: bool,
    training: bool,
    waivers: Waivers = NONE_WAIVED,
    among: tuple[str, ...] = (),
    changed: frozenset[str] = frozenset(),
) -> FoldedRules:
    """``open_rules`` as they are asked. ``among``: only those that speak about one of these candidates; of
    them, those that read a field which ``changed``."""
    index, kept = rule_index(), open_rules(env, fp8, over_ranks, training, waivers)
    if among:
        kept &= index.about(among)
    if changed:
        kept = index.reading(changed, kept)
    folded, unread = _grouped(index.rules_of(kept))
    said = [(place, _of_environment(rule, env)) for place, rule in unread]
    return folded._replace(said=tuple([one for one in said if one[1] is not None]))


@lru_cache(maxsize=4096)
def _of_environment(rule: Rule, env: Environment) -> Any:
    """What a rule that reads nothing of a question says; most are about every candidate."""
    return rule.find(_ANY, env)


@lru_cache(maxsize=2048)
def _grouped(rules: tuple[Rule, ...]) -> tuple[FoldedRules, list[tuple[int, Rule]]]:
    """What is the same in all environments in which just these rules apply; and those of them that read
    nothing of a question, with their places."""
    by_read: dict[Any, tuple[Callable[[Any], Any], list[Requirement], list[Any]]] = {}
    unread: list[tuple[int, Rule]] = []
    bodies: list[Any] = []
    for place, rule in enumerate(rules):
        if rule.limits and not rule.limits[0].of_environment:
            for reads, requirement, read, holds in _tests_of(rule):
                group = by_read.setdefault(reads, (read, [], []))
                group[1].append(requirement)
                group[2].append((holds, rule.body, place))
        elif fields_of(rule) <= gate_of(rule):
            unread.append((place, rule))
        else:
            # What it requires of the environment is not there: the body alone decides.
            bodies.append((rule.find if rule.limits else rule.body, place))
    groups = [
        Group(read, holds_together(tuple(requirements)) or checks[0][0], tuple(checks))
        for read, requirements, checks in by_read.values()
    ]
    return FoldedRules(rules, (), tuple(groups), tuple(bodies)), unread


@lru_cache(maxsize=1024)
def _tests_of(rule: Rule) -> list[tuple[Any, Requirement, Callable[[Any], Any], Callable[[Any], bool]]]:
    """Its requirements on the question: the fields that one reads, itself, how to read them, and its test."""
    return [
        ((field, getattr(requirement, "field", None)), requirement, *requirement.fast(field))
        for fields, requirement in rule.limits
        for field in fields
    ]


@lru_cache(maxsize=64)
def waived_codes(waivers: Waivers) -> frozenset[str]:
    """Raises InvalidInput for a code that never was a known bug's."""
    bugs = [code for code in REGISTRY.pages if code.startswith("BUG")]
    retired = {code for code, page in REGISTRY.pages.items() if page.status == "deprecated"}
    known = {"all", INTERPRETED, *bugs, *retired, *REGISTRY.removed}
    for code in waivers.ignored:
        if code not in known:
            raise InvalidInput("allow_known_bugs", code, f"must be 'all' or among {', '.join(bugs)}")
    waived = {code for code in waivers.ignored if code in bugs or code == INTERPRETED}
    if "all" in waivers.ignored:
        waived.update(bugs)
    if not waivers.preview:
        waived.update(code for code, page in REGISTRY.pages.items() if page.status == "preview")
    return frozenset(waived)


def warn_of_retired(codes: tuple[str, ...]) -> None:
    """Warn of codes in a policy that are on their way out, or gone: the caller names what it no longer needs.

    Attributed to the first caller outside attnsel, whose code is the one to change.
    """
    for code in codes:
        page, gone = REGISTRY.pages.get(code), REGISTRY.removed.get(code)
        kind: type[Warning] = UserWarning
        if page is not None and page.status == "deprecated":
            text, kind = f"is deprecated: {page.replaced_by} took over", DeprecationWarning
        elif gone is not None:
            text = f"was removed in {gone.release}"
            text += f": {gone.replaced_by} took over" if gone.replaced_by else " and allows nothing"
        else:
            continue
        message = f"allow_known_bugs: {code} {text} (attnsel rule {code})"
        warnings.warn(message, kind, stacklevel=caller().stacklevel)


# ---- The second stage: questions that differ in their lengths, their batch and their tensors alone ------
# Such questions are of one kind. A rule that reads nothing else than what they share says the same of all of
# them, and one whose requirements are all met by what they share is silent about each.


_FIELDS = tuple(AttentionParams.model_fields)
VARYING = frozenset({"batch_size", "max_seqlen_q", "max_seqlen_kv", "tensors"})
_SHARED = tuple(name for name in _FIELDS if name not in VARYING)
_shared = itemgetter(*map(_FIELDS.index, _SHARED))


class Kind:
    """What rules say of the questions of one kind in one environment, by the candidates that are asked about.

    The first question is asked as it is, for most kinds are met once; the second one splits the rules.
    ``env``: where rules are asked, with the newest release that was read in place of any that is newer.
    ``like``: one of the kind. ``reach``, ``standing`` and ``settled``: what else was worked out of it, by
    candidate; ``voices``: by component that was assumed.
    """

    __slots__ = (
        "_measured",
        "_orders",
        "_rules",
        "env",
        "like",
        "reach",
        "settled",
        "standing",
        "voices",
        "waivers",
    )

    def __init__(self, shared: tuple[Any, ...], env: Environment, waivers: Waivers) -> None:
        self.like = _ANY.rewritten(**dict(zip(_SHARED, shared, strict=True)))
        self.env, self.waivers = as_read(env), waivers
        self.reach: dict[str, frozenset[str]] = {}
        self.standing: dict[str, tuple[str | None, bool, bool | None]] = {}
        self.settled: dict[str, tuple[list[Reason], Candidate]] = {}
        self.voices: dict[str, Any] = {}
        self._rules: dict[Any, KindRules] = {}
        self._orders: dict[tuple[bool, bool, tuple[str, ...]], Order] = {}
        self._measured: dict[Figures, tuple[Shape, ...]] = {}

    def order(self, p: AttentionParams, figures: Figures | None = None) -> Order:
        """The order of kernel families for one of its questions, and of candidates that were timed there."""
        shape = None if figures is None else self.measured(p, figures)
        key = (*lengths(p.max_seqlen_q, p.max_seqlen_kv), () if shape is None else shape.ranking)
        found = self._orders.get(key)
        if found is None:
            found = self._orders[key] = order_of(Call.of(p), self.env, key[2])
        return found

    def measured(self, p: AttentionParams, figures: Figures) -> Shape | None:
        """The row of a file that speaks for one of its questions."""
        shapes = self._measured.get(figures)
        if shapes is None:
            shapes = self._measured[figures] = figures.about(self.like, self.env)
        return nearest(shapes, p) if shapes else None

    def rules(self, among: tuple[str, ...] = (), changed: frozenset[str] = frozenset()) -> KindRules:
        """Those about some candidates, or all; of them, those that read a field which ``changed``."""
        key = (among, changed) if changed else among
        known = self._rules.get(key)
        if known is not None and (known.split or not known.first):
            return known
        against: dict[str, list[Reason]] = {name: [] for name in among or CANDIDATES}
        if known is None:
            q = self.like
            kind = q.fp8_attention, q.context_parallel, q.is_training
            known = KindRules(against, fold(self.env, *kind, self.waivers, among, changed), [], False)
        else:
            said, left = split(known.left.rules, self.like, self.env, known.first[0])
            _add(against, said, {})
            known = KindRules(against, left, [], True)
        self._rules[key] = known
        return known


class KindRules(NamedTuple):
    """``against``: by candidate, what rules say of every question of the kind. ``left``: the rules that are
    to be asked about each. ``first``: until there are two parts (``split``), what all said of the first."""

    against: dict[str, list[Reason]]
    left: FoldedRules
    first: list[Findings]
    split: bool

    def findings(self, p: AttentionParams, env: Environment) -> dict[str, list[Reason]]:
        """Every reason against every candidate, in the order of the rules; where none is about this question
        alone, the list that all of the kind share."""
        said = self.left.findings(p, env)
        if not self.split:
            self.first.append(said)
        if not said:
            return self.against
        found = dict(self.against)
        mixed = [name for name in _add(found, said, self.against) if self.against[name]]
        if mixed:
            places = rule_index().places
            for name in mixed:
                found[name].sort(key=lambda reason: places[reason.rule])
        return found

    def within(
        self, name: str, p: AttentionParams, env: Environment, reach: frozenset[str]
    ) -> list[Reason] | None:
        """The reasons against the one candidate; None where one is about something that cannot be changed:
        ``reach`` are the fields that can be."""
        if _beyond(self.against[name], reach):
            return None
        reasons = self.findings(p, env)[name]
        return None if _beyond(reasons, reach) else reasons


def _beyond(reasons: list[Reason], reach: frozenset[str]) -> bool:
    return any(isinstance(finding, Violation) and finding.field not in reach for _, finding in reasons)


_kind = lru_cache(maxsize=1024)(Kind)


def kind_of(p: AttentionParams, env: Environment, waivers: Waivers = NONE_WAIVED) -> Kind:
    """The kind of ``p``, with what is known of it there."""
    return _kind(_shared(p._key), env, waivers)


def _add(found: dict[str, list[Reason]], said: Findings, shared: dict[str, list[Reason]]) -> set[str]:
    """Each finding to the candidates it is about, which are returned; lists that are ``shared`` stay as they
    are."""
    about: set[str] = set()
    for rule, finding in said:
        reason = Reason(rule, finding)
        for name in rule.candidates:
            if name in found:
                if name not in about:
                    about.add(name)
                    found[name] = [*shared.get(name, ())]
                found[name].append(reason)
    return about


def split(
    rules: tuple[Rule, ...], q: AttentionParams, env: Environment, found: Findings | None = None
) -> tuple[Findings, FoldedRules]:
    """What rules, open in ``env``, say of every question of ``q``'s kind, and those left to be asked.

    ``found``: what they said of one of these questions, where they have been asked.
    """
    of_kind, of_each = _parts(rules)
    if found is None:
        said = [(rule, finding) for rule in of_kind if (finding := rule.find(q, env)) is not None]
    else:
        said = [one for one in found if VARYING.isdisjoint(fields_of(one[0]))]
    # One whose requirements are all met by what they share is silent about each.
    left = [
        rule
        for rule, alike in of_each
        if not alike or any(limit.broken(q, env) is not None for limit in alike)
    ]
    return said, _grouped(tuple(left))[0]


@lru_cache(maxsize=2048)
def _parts(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], tuple[tuple[Rule, tuple[Limit, ...]], ...]]:
    """Those that say the same of every question of a kind; and the others, each with its requirements where
    all of these are on what the questions of a kind share."""
    of_kind = [rule for rule in rules if VARYING.isdisjoint(fields_of(rule))]
    each = [rule for rule in rules if not VARYING.isdisjoint(fields_of(rule))]
    alike = [() if any(map(_varies, rule.limits)) else rule.limits for rule in each]
    return tuple(of_kind), tuple(zip(each, alike, strict=True))


def _varies(limit: Limit) -> bool:
    return not VARYING.isdisjoint({*limit.fields, getattr(limit.requirement, "field", None)})


def findings(
    p: AttentionParams, env: Environment, waivers: Waivers = NONE_WAIVED, among: tuple[str, ...] = ()
) -> dict[str, list[Reason]]:
    """Every reason against every candidate, as the question stands; or against some of them."""
    kind = kind_of(p, env, waivers)
    return kind.rules(among).findings(p, kind.env)


def reevaluate(
    p: AttentionParams,
    before: AttentionParams,
    found: dict[str, list[Reason]],
    env: Environment,
    waivers: Waivers,
    among: tuple[str, ...],
) -> dict[str, list[Reason]]:
    """``findings`` about some candidates for a question that another, with its findings, was changed into."""
    changed = frozenset(
        [name for name, a, b in zip(_FIELDS, p._key, before._key, strict=True) if a is not b and a != b]
    )
    again: dict[str, list[Reason]] = {}
    for name in among:
        reasons = found[name]
        again[name] = [r for r in reasons if changed.isdisjoint(fields_of(r.rule))] if reasons else []
    for name, more in kind_of(p, env, waivers).rules(among, changed).findings(p, env).items():
        again[name] += more
    return again


def always_refuses(field: str, p: AttentionParams, rules: Bits, env: Environment) -> bool:
    """Whether the value of ``p``'s field is refused whatever else is asked: by a rule that reads it alone."""
    index, only = rule_index(), frozenset({field})
    alone = index.passing(rules, ("alone", field), lambda rule: fields_of(rule) == only)
    return any(
        isinstance(rule.find(p, env), Violation) and not rule.unknown for rule in index.rules_of(alone)
    )


def over_memory(
    name: str, p: AttentionParams, env: Environment, policy: Policy, adaptations: tuple[Adaptation, ...]
) -> list[Reason]:
    """The reasons against a candidate whose call takes more memory than the policy allows, or than there
    is."""
    left, limit, own = room(p, env), policy.memory_limit, CANDIDATES[name].memory
    if left is None and limit is None:
        return []
    need = sum([made.bytes for made in adaptations], own(p, env)[1] if own else 0)
    if (left is None or need <= left) and (limit is None or need <= limit):
        return []
    parts = memory_parts(name, p, env, adaptations)
    found: list[tuple[Page, Violation | None]] = []
    if limit is not None and need > limit:
        page = _policy_rule("POLICY004")
        found.append((page, page.body(name, policy, parts)))
    if left is not None and need > left:
        page = _policy_rule("MEMORY001")
        found.append((page, page.body(name, policy, parts, env.device.memory, tensor_bytes(p))))
    return [Reason(page, finding) for page, finding in found if finding is not None]


@lru_cache(maxsize=8)
def _policy_rule(code: str) -> PolicyRule:
    return REGISTRY.policy_rules[code]


@lru_cache(maxsize=256)
def policy_reasons(policy: Policy) -> dict[str, tuple[Reason, ...]]:
    """Per candidate, the reasons that rest on the policy alone."""
    return {
        name: tuple(
            Reason(page, finding)
            for page in REGISTRY.policy_rules.values()
            if (finding := page.body(name, policy)) is not None
        )
        for name in CANDIDATES
    }

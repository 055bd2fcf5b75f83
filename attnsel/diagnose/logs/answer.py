"""What a logged call comes to: what happened, why, what helps, and where attnsel sees it another way."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from attnsel.backends.registry import CANDIDATES, OLDEST_TORCH
from attnsel.base.records import json_fields, stamped, to_json
from attnsel.decision import DEFAULT_POLICY, Selection, select
from attnsel.diagnose.logs.calls import Gathered, LoggedCall
from attnsel.diagnose.logs.message import NOTHING, Finding
from attnsel.diagnose.logs.vocabulary import Library, libraries
from attnsel.diagnose.scrub import scrub
from attnsel.dispatchers import Dispatch, dispatched_by
from attnsel.environment import COMPONENTS, Environment
from attnsel.environment.mentions import the_card
from attnsel.environment.versions import Version
from attnsel.errors import InvalidInput, short
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.report.answer import worth_showing
from attnsel.rules import find_rule
from attnsel.selection.unlock import Unlock

_T = TypeVar("_T")

GPU = "H100"  # where nothing says which, so that rules can be asked at all; no answer rests on it
_WITH_TORCH = ("cuda", "cudnn", "triton")  # what a release of torch brings

_MATTER: tuple[str, ...] = ("dtype", "qkv_layout", "batch_size", "num_heads", "max_seqlen_q")
_MATTER += ("head_dim_qk", "attn_mask_type", "is_training")
"""What a rule nearly always reads: named where it was taken for granted."""


class Stated(NamedTuple):
    """What a user says beside the log, which wins over it: fields, ``gpu`` and versions, a whole environment,
    the policy, and what becomes of the finished question (where tensors lie)."""

    params: Mapping[str, Any] = NOTHING
    machine: Mapping[str, Any] = NOTHING
    environment: Environment | None = None
    policy: Policy = DEFAULT_POLICY
    finish: Callable[[AttentionParams], AttentionParams] = lambda p: p


class Rebuilt(NamedTuple):
    """``described``: whether log or user say anything by which rules could answer. ``stated``: fields,
    ``gpu`` and components that they say, ``meant``: those that a message means without saying them (a Turing
    card). ``assumed``: in words, what was taken for what nobody says. ``unread``: what the log says and could
    not be used."""

    params: AttentionParams
    environment: Environment
    described: bool
    stated: tuple[str, ...]
    meant: tuple[str, ...]
    assumed: tuple[str, ...]
    unread: tuple[str, ...]

    @property
    def placed(self) -> bool:
        """Whether anybody says on which device it ran: without that no verdict of ours is about this call."""
        return "gpu" in self.stated

    @property
    def whole(self) -> bool:
        """Whether as much of the call is said as was assumed: else no answer of ours is about it."""
        return self.described and self.placed and len(self.assumed) <= len(_MATTER) // 2

    def says(self, field: str) -> bool:
        """Whether what a reason rests on is stated; what is computed from several counts as stated."""
        known = {*self.stated, *self.meant}
        if field in COMPONENTS:
            return field in known or (field in _WITH_TORCH and "torch" in known)
        if field in ("arch", "device"):
            return "gpu" in known
        return field in known or field not in AttentionParams.model_fields


def rebuild(call: LoggedCall, machine: Iterable[Finding], stated: Stated) -> Rebuilt:
    """The question behind a call. Raises InvalidInput where what the user states is wrong."""
    unread: list[str] = [one for finding in call.findings for one in finding.unread]
    there: dict[str, Any] = {}
    for finding in sorted(machine, key=lambda one: one.environment.get("gpu") == "cpu"):  # a card counts more
        for name, value in finding.environment.items():
            if not _same(name, there.setdefault(name, value), value):
                unread.append(f"{name} = {short(value, str)}: the log says {short(there[name], str)} before")
    supposed = call.supposed
    meant = {name: value for name, value in supposed.items() if name not in AttentionParams.model_fields}
    logged = {"gpu": GPU, **meant, **there, **call.environment}
    if "gpu" in there and _same("gpu", there["gpu"], logged["gpu"]):
        logged["gpu"] = there["gpu"]  # the card's name says more than the architecture that a message prints
    left_out: list[str] = []
    env = stated.environment or _made(_described, logged, stated.machine, left_out)
    where = {*there, *call.environment} - {one.partition(" = ")[0] for one in left_out} | {*stated.machine}
    where |= set() if stated.environment is None else {"gpu", *COMPONENTS}
    unread += left_out
    fields = {name: value for name, value in supposed.items() if name not in meant}
    fields = {"dtype": env.half, **library_of(call).usual, **fields, **call.params}
    p = stated.finish(_made(AttentionParams, fields, stated.params, unread))
    said = {*call.params, *stated.params} & p.model_fields_set
    return Rebuilt(
        p,
        env,
        bool(said - {"is_training"}),
        tuple(sorted(said | where)),
        tuple(supposed),
        tuple(_assumed(p, env, said | where, supposed)),
        tuple(dict.fromkeys(map(scrub, unread))),
    )


def _same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a log are one: a card by name or architecture, a release by its number."""
    if name == "gpu" and one != other:
        return other == "cpu" or the_card((str(one), str(other))) is not None
    if name in COMPONENTS:
        one, other = (str(value).partition("+")[0].partition(".dev")[0] for value in (one, other))
    return bool(one == other)


def library_of(call: LoggedCall) -> Library:
    """The declarations of the library whose call it is."""
    return next(library for library in libraries() if library.name == call.library)


def _described(**facts: Any) -> Environment:
    """An environment of all that a log can say of one, the platform too."""
    described = {name: value for name, value in facts.items() if name == "gpu" or name in COMPONENTS}
    more = {name: value for name, value in facts.items() if name not in described}
    return Environment.describe(**described).replace(**more)


def _made(
    make: Callable[..., _T], logged: Mapping[str, Any], stated: Mapping[str, Any], unread: list[str]
) -> _T:
    """What is made of facts; those of the log that cannot be are left out, and said."""
    try:
        return make(**{**logged, **stated})
    except InvalidInput as error:
        name, left = error.field.split(".")[0], {n: v for n, v in logged.items() if n not in stated}
        if name not in left and name not in stated:  # a contradiction of several: what was said last goes
            name = next(reversed(left), "")
        if name not in left:
            raise
        why = {"gpu": "not understood", "torch": "older than any rule"}.get(name, error.allowed)
        unread.append(f"{name} = {short(left.pop(name), str, 60)}: {why}")
    return _made(make, left, stated, unread)


def _assumed(
    p: AttentionParams, env: Environment, said: set[str], supposed: Mapping[str, Any]
) -> Iterator[str]:
    if "gpu" not in said:
        why = ", as its message needs" if "gpu" in supposed else ""
        yield f"GPU {env.device.name or env.device.type}{why}"
    for name, value in supposed.items():
        if name not in said and name != "gpu" and name in (*AttentionParams.model_fields, *COMPONENTS):
            yield f"{name} {short(getattr(p, name, value), str)}, as its message needs"
    for name in _MATTER:
        if name not in said and name not in supposed:
            yield f"{name} {short(getattr(p, name), str)}"


_PARTS = re.compile(r"; (?![^()]*\))")  # of a fix
_MOST_WAYS, _MOST_IN_ALL = 2, 4  # of each refused kernel, of all
_OUR_OWN = frozenset({"INSTALL011", "FLASH201"})  # what attnsel itself needs to run causes nothing elsewhere


@json_fields("candidates", "text", "how", ("code", lambda c: c.code or None), "link")
class Cause(NamedTuple):
    """Why a kernel did not run.

    ``candidates``: attnsel's names. ``code``: the rule that says it, "" for a known cause without one.
    ``how``: "computed", the rule refuses this very question; "said", the log's message means this rule, and
    the question as far as it is known does not show it; "known", a cause that no rule computes; "guessed",
    what a message that is not known says by its form. ``link``: where it is written.
    """

    candidates: tuple[str, ...]
    text: str
    how: str
    code: str = ""
    link: str = ""


@json_fields(
    ("library", "call.library"),
    ("count", "call.times"),
    ("lines", "call.lines"),
    ("streams", "call.ranks"),
    ("findings", "call.findings"),
    ("params", "rebuilt.params"),
    ("environment", "rebuilt.environment"),
    ("described", "rebuilt.described"),
    ("stated", "rebuilt.stated"),
    ("assumed", "rebuilt.assumed"),
    ("unread", "rebuilt.unread"),
    ("refused", lambda answer: _refused(answer.call)),
    ("chosen", "call.chosen"),
    "causes",
    "fixes",
    ("unlocks", "ways"),
    "against",
    ("attnsel", "attnsel.backend"),
)
class AnsweredCall(NamedTuple):
    """One call of the log, answered.

    ``rebuilt``: question and machine. ``plain``: the answer without adaptations, as the log's library works;
    ``attnsel``: what attnsel would run. ``fixes``: in the library's own API. ``ways``: smallest changes of
    call or machine that open what the log says was refused. ``against``: where log and rules disagree.
    """

    call: LoggedCall
    rebuilt: Rebuilt
    plain: Selection
    attnsel: Selection
    causes: tuple[Cause, ...]
    fixes: tuple[str, ...]
    ways: tuple[Unlock, ...]
    against: tuple[str, ...]


@json_fields(("calls", "answers"), "machine", "left_out")
class Explained(NamedTuple):
    """A whole log, answered."""

    answers: tuple[AnsweredCall, ...]
    machine: tuple[Finding, ...]
    left_out: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return stamped("log", to_json(self))


def explained(found: Gathered, stated: Stated) -> Explained:
    """Every call of a log, answered. Raises InvalidInput where what the user states is wrong."""
    answers = tuple(_answer(call, found.machine, stated) for call in found.calls)
    return Explained(answers, found.machine, found.left_out)


def _answer(call: LoggedCall, machine: Iterable[Finding], stated: Stated) -> AnsweredCall:
    rebuilt = rebuild(call, machine, stated)
    p, env, policy = rebuilt.params, rebuilt.environment, stated.policy
    # The kernels of other packages are asked with a torch that attnsel runs on: ways out would begin with one
    # else, which helps no program that does not use attnsel.
    own = any(name.startswith("sdpa.") for name in library_of(call).candidates)
    old = not own and env.torch is not None and env.torch < OLDEST_TORCH
    there = env.replace(torch=Version(*OLDEST_TORCH)) if old else env
    plain = select(p, there, policy=policy.replace(adapt="never"))
    causes = tuple(_causes(call, rebuilt, plain))
    answerable = rebuilt.described and rebuilt.placed
    fixes = [finding.fix for finding in call.by_weight]
    new = ([s for s in _PARTS.split(fix) if s not in "; ".join(fixes[:n])] for n, fix in enumerate(fixes))
    return AnsweredCall(
        call,
        rebuilt,
        plain,
        select(p, env, policy=policy),
        causes,
        tuple(filter(None, map("; ".join, new))),
        tuple(_ways(plain, _refused(call), rebuilt.says)) if answerable else (),
        tuple(_against(call, plain, causes)) if answerable else (),
    )


def _refused(call: LoggedCall) -> tuple[str, ...]:
    """The candidates that the log refuses, or all that its library has where it says only that none runs."""
    ours, outcome, named = library_of(call).candidates, call.outcome, call.refused
    if named:  # cuDNN's own message is about all that cuDNN runs, and this library has one of them
        return tuple(name for name in named if name in ours or name not in CANDIDATES) or named
    return ours if outcome is not None and outcome.kind == "error" else ()


def _causes(call: LoggedCall, rebuilt: Rebuilt, plain: Selection) -> Iterator[Cause]:
    """Each cause once, with all kernels that it is about: what the messages mean, then what rules compute.

    Rules are asked about kernels for which no message has a cause, and only where the call is described.
    """
    told: dict[Cause, list[str]] = {}
    for finding in call.by_weight:
        for cause in _declared(finding, plain, rebuilt):
            told.setdefault(cause, []).extend(finding.candidates)
    explained = {name for f in call.findings if f.known or f.codes for name in f.candidates}
    explained -= set(call.chosen)  # it was taken, and failed: the message tells that, the rules why
    if rebuilt.described or "gpu" in call.environment:
        chooser = library_of(call).dispatcher
        there = dispatched_by(chooser, rebuilt.params, rebuilt.environment, {}) if chooser else None
        for name in (name for name in _refused(call) if name not in explained):
            for cause in _computed(name, plain, rebuilt, there):
                told.setdefault(cause, []).append(name)
    for cause, names in told.items():
        yield cause._replace(candidates=tuple(dict.fromkeys(names)))


def _declared(finding: Finding, plain: Selection, rebuilt: Rebuilt) -> Iterator[Cause]:
    if finding.known:
        how = "guessed" if finding.known.startswith("attnsel does not know") else "known"
        yield Cause((), finding.known, how, "", finding.link)
    for code in finding.codes:
        computed = (r for c in plain for r in c.reasons if r.code == code and rebuilt.says(r.field))
        if (reason := next(computed, None)) is not None:
            yield Cause((), reason.message, "computed", code)
        else:
            yield Cause((), str(getattr(find_rule(code), "title", "")), "said", code)


def _computed(name: str, plain: Selection, rebuilt: Rebuilt, dispatch: Dispatch | None) -> Iterator[Cause]:
    """Every reason against a kernel: of attnsel's rules, and where they have none, of the library's own
    chooser, if attnsel knows it, which may have a name of its own for it."""
    reasons = plain[name].reasons if name in CANDIDATES else ()
    for reason in reasons:
        missing = reason.field in COMPONENTS and reason.observed is None
        ours = reason.code in _OUR_OWN or (missing and reason.field not in rebuilt.stated)
        if not ours and rebuilt.says(reason.field):
            yield Cause((), reason.message, "computed", reason.code)
    offers = () if reasons or dispatch is None else dispatch.offers
    offer = next((one for one in offers if name in (one.candidate, one.name)), None)
    for refusal in () if offer is None else offer.refusals:
        yield Cause((), refusal.text, "computed", refusal.code, refusal.source)


def _ways(plain: Selection, refused: Sequence[str], says: Callable[[str], bool]) -> Iterator[Unlock]:
    """The cheapest, of changes of call, package and machine; a package that is not there at all last. None
    changes what nobody said."""
    shown: Counter[str] = Counter()
    for way in plain.unlocks:
        if (
            way.candidate in refused
            and not CANDIDATES[way.candidate].last_resort
            and all(says(field) and not field.startswith("policy.") for field, _ in way.changes)
            and shown[way.candidate] < _MOST_WAYS
            and shown.total() < _MOST_IN_ALL
            and worth_showing(way, plain)
        ):
            shown[way.candidate] += 1
            yield way


def _against(call: LoggedCall, plain: Selection, causes: Iterable[Cause]) -> Iterator[str]:
    """Where log and rules disagree; what the log does not say may be why."""
    explained = {name for cause in causes for name in cause.candidates}
    for c in call.refused:
        if c in CANDIDATES and c not in explained and plain[c].verdict != "refused":
            yield f"the log refuses {c}; attnsel's rules find nothing against it as far as the call is known"
    ran = call.outcome is not None and call.outcome.kind == "chosen"
    for name in call.chosen if ran else ():
        if name in CANDIDATES and plain[name].verdict == "refused":
            codes = ", ".join(dict.fromkeys(reason.code for reason in plain[name].reasons))
            yield f"the log chose {name}, which attnsel refuses for such a call ({codes})"

"""Candidates from elsewhere: a package adds its kernel, and the rules about it, without a change here.

Three pieces, each with an example in docs/how-to/plugins.md: an entry point of the group
``attnsel.backends``; the :class:`CandidateRecord` that it names, with its rules, in a module that imports no
torch (plans are made where there is none); and the kernel, imported when the candidate is first chosen. The
record is the one that attnsel's own candidates declare: attnsel/verdicts/record.py says what each field
means, and attnsel/backends/contract.py what a kernel's functions take and give.

A plug-in that does not load, or says something that cannot be, is named in a warning and by
``attnsel doctor``, and left out. A rule that raises, or returns something else than a finding, makes its
candidate unknown for that question; a kernel that raises, or returns what the contract does not allow, gives
way to the next candidate: both are said (attnsel/plugins.py, attnsel/runtime/kernels.py).
"""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from attnsel.backends.registry import CANDIDATES
from attnsel.base.processes import ForkSafeLock
from attnsel.errors import in_words, short
from attnsel.rules import REGISTRY, Page, Registry, Rule, add_limits, load_families, rule
from attnsel.rules.takes import DEVICES, DTYPES, WORDS
from attnsel.selection.adaptations import ADAPTERS
from attnsel.verdicts.reasons import Unknown, Violation
from attnsel.verdicts.record import CandidateRecord, Proven
from attnsel.verdicts.requirements import AtLeast, AtMost, EqualTo, FreeText, Multiple, OneOf, Requirement

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams


# ---- What another package's rules and memory model say, held to what they may say ----------------------
# A plug-in is code that attnsel did not write. Where it raises, ends the process or answers with something
# else than was asked for, one candidate is in doubt and no other: the question is answered without it. Its
# kernel is held to the contract in the same way, by ``attnsel/runtime/kernels.py``.


_told: set[tuple[str, str]] = set()  # at most one entry for each rule and memory model
_lock = ForkSafeLock()


class PluginWarning(UserWarning):
    """A plug-in was left out, or part of it is broken."""


def guarded_rule(rule: Rule, distribution: str) -> Rule:
    """``rule`` with a body that always answers.

    One that does not is ``Unknown``, with the error as what was observed; in a rule with ``requires``, that
    counts as being about the call.
    """

    def unknown(trouble: str) -> Unknown:
        return Unknown(rule.code, f"broken ({trouble})", FreeText(f"a mend by {distribution}"))

    trouble_with = _trouble_with_scope if rule.limits else _trouble_with_finding
    return replace(rule, body=_guarded(rule.body, trouble_with, f"rule {rule.code}", distribution, unknown))


def guarded_memory(record: CandidateRecord) -> CandidateRecord:
    """``record`` with a memory model that always gives words and bytes; one that fails counts nothing."""
    if record.memory is None:
        return record
    part = f"memory model of {record.name}"

    def nothing(trouble: str) -> tuple[str, int]:
        return "unknown", 0

    model = _guarded(record.memory, _trouble_with_memory, part, record.distribution, nothing)
    return replace(record, memory=model)


def _guarded(
    function: Callable[[AttentionParams, Environment], Any],
    trouble_with: Callable[[Any], str],
    part: str,
    distribution: str,
    otherwise: Callable[[str], Any],
) -> Callable[[AttentionParams, Environment], Any]:
    """``function``, and ``otherwise(trouble)`` where it raises or answers what it may not."""

    @wraps(function)
    def ask(p: AttentionParams, env: Environment) -> Any:
        try:
            found = function(p, env)
            trouble = trouble_with(found)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            trouble = in_words(error)
        if not trouble:
            return found
        _warn_once(distribution, part, trouble)
        return otherwise(trouble)

    return ask


def _trouble_with_finding(found: Any) -> str:
    if found is None:
        return ""
    if not isinstance(found, (Violation, Unknown)):
        return f"it returned {short(found)}; allowed: a Violation, an Unknown or None"
    # Whatever their types are said to be.
    field, observed, required, note = cast("tuple[Any, ...]", found)
    if not isinstance(field, str) or not isinstance(note, str):
        return f"it returned field {short(field)} and note {short(note)}; allowed: text"
    if not isinstance(required, Requirement):
        return f"it returned required = {short(required)}; allowed: a requirement, such as FreeText"
    str(observed), str(required)  # may raise: now, and not when a report is written
    return ""


def _trouble_with_scope(found: Any) -> str:
    if found is None or isinstance(found, bool):
        return ""
    return f"it returned {short(found)}; allowed: True, False or None"


def _trouble_with_memory(found: Any) -> str:
    words, size = found
    if not isinstance(words, str) or type(size) is not int or size < 0:
        return f"it returned {short((words, size))}; allowed: words and bytes"
    return ""


def _warn_once(distribution: str, part: str, trouble: str) -> None:
    with _lock:
        if (distribution, part) in _told:
            return
        _told.add((distribution, part))
    warnings.warn(f"{part} of {distribution} is broken: {trouble}", PluginWarning, stacklevel=4)


__all__ = [
    "AtLeast",
    "AtMost",
    "CandidateRecord",
    "EqualTo",
    "FreeText",
    "Multiple",
    "OneOf",
    "PluginWarning",
    "Proven",
    "Registry",
    "Unknown",
    "Violation",
    "load_plugins",
    "rule",
]

GROUP = "attnsel.backends"
# What attnsel itself carries out, around any kernel; a mask is folded by the kernel that takes one.
CARRIED_OUT = tuple(name for name in ADAPTERS if name != "fold_mask")
LONGEST_NAME = 15  # columns a report has for it


class Found(NamedTuple):
    """An entry point of the group: where it comes from, and the plug-in or what is wrong with it."""

    entry: str  # "acme = acme_attention.planning:PLUGIN"
    distribution: str  # "acme-attention 1.2"
    plugin: CandidateRecord | None
    trouble: str = ""


_found: tuple[Found, ...] | None = None
_looked_at: list[Found] = []  # on the way to it
_loading = False
_load_lock = ForkSafeLock()


def load_plugins() -> tuple[Found, ...]:
    """Every plug-in that is installed, its candidate and rules in their places. Looks once per process.

    Not when attnsel is imported: a plug-in's package may be what imports it. Looking takes 3 ms where 40
    distributions are installed and 30 ms where 400 are (importlib.metadata reads each one's entry points).
    """
    return _look() if _found is None else _found


def _look() -> tuple[Found, ...]:
    global _found, _loading
    with _load_lock:
        if _found is not None:
            return _found
        if _loading:
            raise RuntimeError("attnsel was asked to choose while its plug-ins are imported")
        _loading = True
        try:
            load_families()
            points = sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: (e.name, e.value))
            _looked_at.extend(map(_load, points[len(_looked_at) :]))  # after an interrupt, where it stopped
            _found = tuple(_looked_at)
            _say_left_out([found for found in _found if found.plugin is None])
        finally:
            _loading = False
        return _found


def _load(point: importlib.metadata.EntryPoint) -> Found:
    dist = point.dist
    distribution = "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"
    entry = f"{point.name} = {point.value}"
    try:
        record = _admit(point.load(), distribution)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever another package's import raises, SystemExit included
        return Found(entry, distribution, None, in_words(error))
    return Found(entry, distribution, record)


_MOST_SAID = 3


def _say_left_out(broken: list[Found]) -> None:
    """A line for each of the first, and one for all others: hundreds would be a wall at every start."""
    told = [
        f"the attnsel plug-in {entry!r} of {distribution} is left out: {trouble}"
        for entry, distribution, _, trouble in broken[:_MOST_SAID]
    ]
    if len(broken) > _MOST_SAID:
        told.append(
            f"{len(broken) - _MOST_SAID} more attnsel plug-ins are left out: attnsel doctor names them"
        )
    for line in told:
        warnings.warn(line, PluginWarning, stacklevel=4)


def _admit(record: CandidateRecord, distribution: str) -> CandidateRecord:
    """Put it among the candidates and its rules among the rules, or raise and change nothing."""
    if not isinstance(record, CandidateRecord):
        raise TypeError(f"it loads to {type(record).__name__!r}; allowed: an attnsel.plugins.CandidateRecord")
    check_record(record)
    record = guarded_memory(replace(record, distribution=distribution))
    own = Registry(record.name)
    add_limits(record, own)
    pages: dict[str, Page] = record.rules.pages if isinstance(record.rules, Registry) else {}
    for page in pages.values():
        own.add(guarded_rule(_checked_rule(page, record), distribution))
    for code in own.pages:
        if code in REGISTRY.pages or code in REGISTRY.removed:
            raise ValueError(f"rule code {code} is taken")
    CANDIDATES[record.name] = record
    REGISTRY.pages.update(own.pages)
    REGISTRY.add_candidate(record)
    return record


def check_record(record: CandidateRecord) -> None:
    """Raises ValueError or TypeError naming the field, its value and what is allowed."""
    for field in ("name", "title", "family", "kernel", "place", "source"):
        if not isinstance(getattr(record, field), str):
            raise TypeError(f"{field} = {getattr(record, field)!r}: must be text")
    name, family = record.name, record.family
    if not re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z0-9_]+)*", name) or len(name) > LONGEST_NAME:
        raise ValueError(f"name = {name!r}: lower-case words joined by dots, {LONGEST_NAME} characters")
    if name in CANDIDATES:
        owner = CANDIDATES[name].distribution or "attnsel"
        raise ValueError(f"name = {name!r}: taken by {owner}")
    if not re.fullmatch(r"[A-Z]{2,8}", family) or family in {page.family for page in REGISTRY.pages.values()}:
        raise ValueError(f"family = {family!r}: two to eight capital letters that begin no other's codes")
    if not re.fullmatch(r"\w+(\.\w+)*(:\w+)?", record.kernel):
        raise ValueError(f"kernel = {record.kernel!r}: the name of a module, or module:name")
    _check_listed("takes", record.takes, WORDS)
    for kind, words in (("element", DTYPES), ("device", DEVICES)):
        if not set(words) & set(record.takes):
            raise ValueError(f"takes = {sorted(record.takes)}: needs a type of {kind}: {', '.join(words)}")
    _check_listed("adaptations", record.adaptations, CARRIED_OUT)
    _check_proven(record.proven)
    if record.executed is not None:
        raise ValueError(f"executed = {record.executed!r}: for attnsel's own kernels; a plug-in says proven")
    _check_place(record)
    if record.rules is not None and not isinstance(record.rules, (Registry, tuple)):
        raise TypeError(f"rules = {record.rules!r}: must be a Registry")


def _check_proven(proven: Collection[str | Proven]) -> None:
    if not isinstance(proven, (list, tuple, set, frozenset)):
        raise TypeError(f"proven = {proven!r}: must be a set or a list of words")
    parts = [known for known in proven if isinstance(known, Proven)]
    targets = [known for known in proven if not isinstance(known, Proven)]
    for known in parts:
        _check_listed("proven", known.features, WORDS)
    for target in (*_collection("proven", targets), *(known.target for known in parts)):
        if not re.fullmatch(r"sm\d+|[a-z]+", target):
            raise ValueError(f"proven = {target!r}: an architecture such as 'sm90', or 'cpu'")


def _collection(field: str, value: Collection[str]) -> Collection[str]:
    listed = isinstance(value, (list, tuple, set, frozenset))
    if not listed or not all(isinstance(word, str) for word in value):
        raise TypeError(f"{field} = {value!r}: must be a set or a list of words")
    return value


def _check_listed(field: str, value: Collection[str], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(_collection(field, value)) - set(allowed))
    if unknown:
        raise ValueError(f"{field} = {unknown[0]!r}: allowed: {', '.join(allowed)}")


def _checked_rule(page: Page, record: CandidateRecord) -> Rule:
    if not isinstance(page, Rule):
        raise TypeError(f"{page.code} is a {type(page).__name__}; a plug-in has rules only")
    if page.candidates != (record.name,):
        raise ValueError(f"{page.code} is about {', '.join(page.candidates)}; allowed: {record.name}")
    if page.family != record.family:
        raise ValueError(f"rule code {page.code}: must begin with {record.family}")
    return page


def _check_place(record: CandidateRecord) -> None:
    """Raises ValueError for anything but "before NAME" and "after NAME" of a fused kernel, or nothing."""
    if not record.place:
        return
    side, _, name = record.place.partition(" ")
    ours = [other.name for other in CANDIDATES.values() if not other.plugin and not other.last_resort]
    if side not in ("before", "after") or name not in ours:
        raise ValueError(f"place = {record.place!r}: 'before' or 'after' one of {', '.join(ours)}")

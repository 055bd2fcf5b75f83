"""What another package's rules and memory model say, held to what they may say.

A plug-in is code that attnsel did not write. Where it raises, ends the process or answers with something
else than was asked for, one candidate is in doubt and no other: the question is answered without it. Its
kernel is held to the contract in the same way, by ``attnsel/runtime/plugin_kernels.py``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from attnsel.base.lock import ForkSafeLock
from attnsel.errors import in_words, short
from attnsel.verdicts.record import CandidateRecord
from attnsel.verdicts.requirements import FreeText, Requirement
from attnsel.verdicts.verdict import Unknown, Violation

if TYPE_CHECKING:
    from attnsel.environment import Environment
    from attnsel.params import AttentionParams
    from attnsel.rules import Rule

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

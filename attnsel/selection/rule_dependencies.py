"""Which fields of a question a rule can read, from the names in its code.

A question that differs from another in fields that a rule does not read gets the same answer from it, so
the rule need not be asked again. Every name counts, also of functions that a body calls; whatever cannot be
followed counts as reading everything. tests/attnsel/selection/test_adaptations.py holds it against asking
every rule.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from attnsel.base.model import lazy
from attnsel.params import AttentionParams
from attnsel.rules.api import Rule, limit
from attnsel.verdicts.verdict import Page

ALL = frozenset(AttentionParams.model_fields)
_OPAQUE = frozenset({"getattr", "vars", "dir", "eval", "model_dump", "__dict__", "_key"})


@functools.lru_cache(maxsize=1024)
def fields_of(rule: Page) -> frozenset[str]:
    """The fields that a rule's finding may depend on: what it requires, and what its body reads."""
    if not isinstance(rule, Rule):
        return ALL
    required = {name for limit in rule.limits for name in limit.fields}
    required |= {limit.requirement.field for limit in rule.limits if hasattr(limit.requirement, "field")}
    return fields_read(rule.body) | (required & ALL)


def fields_read(body: Any) -> frozenset[str]:
    """The fields of AttentionParams whose values a rule's finding may depend on."""
    found: set[str] = set()
    return frozenset(found) if _collect(body, found, set()) else ALL


def _collect(function: Any, found: set[str], seen: set[Any]) -> bool:
    """Add what a function may read; False where that cannot be known."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return False
    if function in seen or function is limit:  # which reads the field it is named: a constant of the caller's
        return True
    seen.add(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for name in _names(function.__code__):
        if name in _OPAQUE:
            return False
        if name in AttentionParams.model_fields:
            found.add(name)
        attribute = inspect.getattr_static(AttentionParams, name, None)
        if isinstance(attribute, (lazy, property)):
            compute = attribute.compute if isinstance(attribute, lazy) else attribute.fget
            if not _collect(compute, found, seen):
                return False
        elif isinstance(attribute, FunctionType):
            return False  # a method of the question: it may read anything
        cells.append(function.__globals__.get(name))
    return all(_collect(value, found, seen) for value in cells if _may_read(value))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:  # a field may be named by a text, alone or among others
        texts = constant if isinstance(constant, tuple) else (constant,)
        yield from (text for text in texts if isinstance(text, str))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _may_read(value: Any) -> bool:
    """Something that could be handed a question: a function, or an object that can be called."""
    if isinstance(value, (FunctionType, functools.partial)) or hasattr(value, "__wrapped__"):
        return True
    return callable(value) and not isinstance(value, type) and not inspect.isbuiltin(value)

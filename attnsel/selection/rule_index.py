"""An index of the rules: which of them apply in an environment, and which read a field of a question.

A set of rules is a number here: bit i is the rule at place i. What one value of an environment leaves open (a
version, an architecture) is the same for every environment that has it, so the rules of a new environment are
a dozen such numbers, joined, and a gate is tried again only for a value that was never seen.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from attnsel.backends.registry import CANDIDATES
from attnsel.base.model import lazy
from attnsel.environment import Environment
from attnsel.params import AttentionParams
from attnsel.rules.api import REGISTRY, Rule, limit, value_of
from attnsel.verdicts.reasons import Page

Bits = int


class RuleIndex:
    """Some rules in their order, and sets of them; each of its answers is remembered."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        self.places: dict[Page, int] = {rule: place for place, rule in enumerate(self.rules)}
        self._gates: dict[str, list[tuple[Bits, Callable[[Any], bool]]]] = {}
        for place, rule in enumerate(self.rules):
            for field, opens in rule.gates:
                self._gates.setdefault(field, []).append((1 << place, opens))
        self._closed_at = lru_cache(maxsize=1024)(self._find_closed_at)
        self.applying = lru_cache(maxsize=1024)(self._find_applying)
        self.concerned = lru_cache(maxsize=16)(self._find_concerned)
        self.about = lru_cache(maxsize=256)(self._find_about)
        self.coded = lru_cache(maxsize=64)(self._find_coded)
        self._tested: dict[Any, tuple[Bits, Bits]] = {}
        self.rules_of = lru_cache(maxsize=2048)(self._find_rules_of)

    def placed(self, chosen: Bits) -> Iterator[tuple[int, Rule]]:
        """The rules of a set in their order, each with its place."""
        while chosen:
            place = (chosen & -chosen).bit_length() - 1
            yield place, self.rules[place]
            chosen &= chosen - 1

    def _find_rules_of(self, chosen: Bits) -> tuple[Rule, ...]:
        """The rules of a set in their order."""
        return tuple([rule for _, rule in self.placed(chosen)])

    def _find_applying(self, env: Environment) -> Bits:
        """Those that apply in an environment: ``Rule.applies``."""
        closed = 0
        for field in self._gates:
            closed |= self._closed_at(field, value_of(field, None, env))
        return ((1 << len(self.rules)) - 1) & ~closed

    def applying_by(self, env: Environment, field: str, values: Iterable[Any]) -> Iterator[tuple[Any, Bits]]:
        """Each value that one field may have, with those that would apply then."""
        closed = 0
        for other in self._gates.keys() - {field}:
            closed |= self._closed_at(other, value_of(other, None, env))
        for value in values:
            there = closed | self._closed_at(field, value) if field in self._gates else closed
            yield value, ((1 << len(self.rules)) - 1) & ~there

    def _find_closed_at(self, field: str, value: Any) -> Bits:
        closed = 0
        for bit, opens in self._gates[field]:
            if not opens(value):
                closed |= bit  # of a rule with two gates on this field once
        return closed

    def _find_concerned(self, fp8: bool, over_ranks: bool, training: bool) -> Bits:
        """Those about a kind of question: ``Rule.concerns``."""
        return self._where(lambda rule: rule.is_about(fp8, over_ranks, training))

    def _find_about(self, candidates: tuple[str, ...]) -> Bits:
        """Those that speak about one of these candidates."""
        named = frozenset(candidates)
        return self._where(lambda rule: not named.isdisjoint(rule.candidates))

    def _find_coded(self, codes: frozenset[str]) -> Bits:
        return self._where(lambda rule: rule.code in codes)

    def reading(self, fields: frozenset[str], chosen: Bits) -> Bits:
        """Those of a set that read one of these fields: only they may say something else when it changes."""
        return self.passing(chosen, fields, lambda rule: not fields.isdisjoint(fields_of(rule)))

    def passing(self, chosen: Bits, key: Hashable, test: Callable[[Rule], bool]) -> Bits:
        """Those of a set that pass a test, which ``key`` stands for: each rule is tested once."""
        tested, passed = self._tested.get(key, (0, 0))
        if chosen & ~tested:
            for place, rule in self.placed(chosen & ~tested):
                passed |= test(rule) << place
            if len(self._tested) >= 2048:
                self._tested = {}
            self._tested[key] = tested | chosen, passed
        return passed & chosen

    def _where(self, test: Callable[[Rule], bool]) -> Bits:
        return sum(1 << place for place, rule in enumerate(self.rules) if test(rule))


def rule_index() -> RuleIndex:
    """Of all rules that there are now: a plug-in may have brought more."""
    return _index(REGISTRY.edition, len(CANDIDATES))


@lru_cache(maxsize=1)
def _index(edition: tuple[int, Page | None], candidates: int) -> RuleIndex:
    return RuleIndex(REGISTRY.rules.values())


# ---- Which fields a rule can read, from the names in its code ------------------------------------------
# A question or an environment that differs from another in fields that a rule does not read gets the same
# answer from it, so the rule need not be asked again. Every name counts, also of functions that a body calls;
# whatever cannot be followed counts as reading everything. tests/attnsel/selection/test_adaptations.py holds
# it against asking every rule.


ALL = frozenset(AttentionParams.model_fields)
_EVERYTHING = ALL | frozenset(Environment.model_fields)
_TRAINING = frozenset({"is_training"})
_OPAQUE = frozenset({"getattr", "vars", "dir", "eval", "model_dump", "__dict__", "_key"})


@lru_cache(maxsize=1024)
def fields_of(rule: Page) -> frozenset[str]:
    """The fields of a question that a rule's finding may depend on: what it requires, and what its body
    reads."""
    if not isinstance(rule, Rule):
        return ALL
    required = {name for limit in rule.limits for name in limit.fields}
    required |= {limit.requirement.field for limit in rule.limits if hasattr(limit.requirement, "field")}
    return ((names_read(rule.body) | required) & ALL) | gate_of(rule)


def gate_of(rule: Rule) -> frozenset[str]:
    """The field of a question that its gate reads."""
    return _TRAINING if rule.training else frozenset()


@lru_cache(maxsize=1024)
def all_read_by(rule: Rule) -> frozenset[str]:
    """The fields of a question and of an environment that what a rule says may depend on, its gates too."""
    gates = {"device" if field == "arch" else field for field, _ in rule.gates}
    return names_read(rule.body) | fields_of(rule) | fields_read(Rule.concerns) | gates


def fields_read(body: Any) -> frozenset[str]:
    """The fields of AttentionParams whose values a rule's finding may depend on."""
    return names_read(body) & ALL


@lru_cache(maxsize=1024)
def names_read(body: Any) -> frozenset[str]:
    """The fields of AttentionParams and of Environment that a function may read."""
    found: set[str] = set()
    return frozenset(found) if _collect(body, found, set()) else _EVERYTHING


def _collect(function: Any, found: set[str], seen: set[Any]) -> bool:
    """Add what a function may read; False where that cannot be known."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return False
    if function in seen or function is limit:  # which reads the field it is named: a constant of the caller's
        return True
    seen.add(function)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for name in names_in(function.__code__):
        if name in _OPAQUE:
            return False
        if name in _EVERYTHING:
            found.add(name)
        for attribute in _attributes(name):
            if isinstance(attribute, FunctionType):
                return False  # a method of the question: it may read anything
            compute = attribute.compute if isinstance(attribute, lazy) else attribute.fget
            if not _collect(compute, found, seen):
                return False
        cells.append(function.__globals__.get(name))
    return all(_collect(value, found, seen) for value in cells if _may_read(value))


@lru_cache(maxsize=1024)
def _attributes(name: str) -> tuple[Any, ...]:
    """What a question and an environment have under a name beside fields: few names are read, and often."""
    kinds = (*AttentionParams.__mro__, *Environment.__mro__)
    has = (vars(kind).get(name) for kind in kinds)
    return tuple([attribute for attribute in has if isinstance(attribute, (lazy, property, FunctionType))])


def names_in(code: CodeType) -> Iterator[str]:
    """Names that a function's code loads, and those among its texts."""
    yield from code.co_names
    for constant in code.co_consts:  # a field may be named by a text, alone or among others
        texts = constant if isinstance(constant, tuple) else (constant,)
        yield from (text for text in texts if isinstance(text, str) and text.isidentifier())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def _may_read(value: Any) -> bool:
    """Something that could be handed a question: a function, or an object that can be called."""
    if isinstance(value, (FunctionType, functools.partial)) or hasattr(value, "__wrapped__"):
        return True
    return callable(value) and not isinstance(value, type) and not inspect.isbuiltin(value)

"""What is worked out once for questions that differ in lengths, batch and tensors alone holds for each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, InvalidInput
from attnsel.rules import REGISTRY
from attnsel.selection.evaluate import VARYING, Waivers, fields_of, findings, fold, kind_of, waived_codes
from attnsel.selection.inquiry import waivers_of
from attnsel.verdicts.reasons import Reason
from questions import questions


def asked_directly(p: AttentionParams, env: Environment, waivers: Waivers) -> dict[str, list[Reason]]:
    """Every rule by itself, with nothing remembered."""
    found: dict[str, list[Reason]] = {name: [] for name in findings(p, env)}
    for rule in REGISTRY.rules.values():
        if rule.concerns(p) and rule.code not in waived_codes(waivers) and rule.applies(env):
            finding = rule.find(p, env)
            for name in rule.candidates if finding is not None else ():
                found[name].append(Reason(rule, finding))
    return found


def of_its_kind(p: AttentionParams, rng: random.Random) -> Iterator[AttentionParams]:
    yield p
    for _ in range(3):
        changes: dict[str, Any] = {
            "max_seqlen_q": rng.choice((1, 64, 127, 1024, 16534, 131072)),
            "batch_size": rng.choice((1, 2, 70_000)),
        }
        if rng.random() < 0.5:
            changes["max_seqlen_kv"] = rng.choice((0, 1, 128, 1023, 16640))
        try:
            yield p.replace(**changes)
        except InvalidInput:
            continue  # a tensor's or slopes' shape says otherwise


@pytest.mark.parametrize(
    ("seed", "count"), [(51, 150), *(pytest.param(seed, 1000, marks=pytest.mark.slow) for seed in (52, 53))]
)
def test_each_is_told_what_every_rule_says_of_it(seed: int, count: int) -> None:
    """The first of a kind, the second, and those after; about all candidates, and about one."""
    rng = random.Random(seed)
    for p, env, policy in questions(seed, count):
        for q in of_its_kind(p, rng):
            for waivers in (waivers_of(policy), Waivers(("all",), preview=True)):
                expected = asked_directly(q, env, waivers)
                assert findings(q, env, waivers) == expected, (q, env)
                name = rng.choice(list(expected))
                assert findings(q, env, waivers, (name,))[name] == expected[name]
                every = frozenset(reason.field for reason in expected[name])
                rules = kind_of(q, env, waivers).rules((name,))
                assert rules.within(name, q, env, every) == expected[name]
                violated = [reason.field for reason in expected[name] if not reason.unknown]
                if violated:
                    assert rules.within(name, q, env, every - {rng.choice(violated)}) is None


def test_a_new_length_asks_only_rules_that_read_one() -> None:
    env = Environment.describe("H100")
    for length in (2048, 2049):
        findings(AttentionParams(max_seqlen_q=length), env)
    rules = kind_of(AttentionParams(max_seqlen_q=2050), env).rules()
    assert rules.split
    left = rules.left.rules
    assert 2 * len(left) < len(fold(env, False, False, True).rules)
    assert not [rule.code for rule in left if VARYING.isdisjoint(fields_of(rule))]

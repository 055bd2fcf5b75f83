"""Every rule explains itself, trips where it says and nowhere it says it does not."""

from __future__ import annotations

import inspect
import re

import pytest

from attnsel.candidates import CANDIDATES
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY, load_all
from attnsel.rules.examples import question
from attnsel.select import Evidence, Refusal, select
from attnsel.verdict import EVIDENCE, Bad, Reason, Unknown

load_all()
RULES = list(REGISTRY.rules.values())
PAGES = list(REGISTRY.pages.values())
FIELDS = set(AttentionParams.model_fields)


def by_code(page):
    return page.code


@pytest.mark.parametrize("page", PAGES, ids=by_code)
def test_a_page_has_title_reason_and_source(page):
    assert 10 < len(page.title) <= 90, page.title
    assert page.source
    assert page.evidence in EVIDENCE
    assert re.search(r"^(Why|Fix): ", page.text, re.MULTILINE), "say why, or what to do"


@pytest.mark.parametrize("rule", RULES, ids=by_code)
def test_it_trips_on_its_example_with_a_whole_reason(rule):
    p, env = question(rule, rule.trips)
    assert rule.concerns(p)
    assert rule.applies(env), f"the example's environment does not pass the gates: {rule.when_text}"
    finding = rule.body(p, env)
    assert isinstance(finding, (Bad, Unknown)), finding
    reason = Reason(rule, finding)
    told = reason.as_dict()
    for part in ("code", "field", "required", "message", "evidence", "source"):
        assert told[part], part
    assert finding.field in reason.message
    assert str(finding.required) in reason.message
    for name in rule.candidates:
        answer = select(p, env, policy=Policy(adapt="never"))[name]
        assert rule.code in [r.code for r in answer.reasons]
        assert answer.verdict == ("unknown" if all(r.unknown for r in answer.reasons) else "refused")


@pytest.mark.parametrize("rule", RULES, ids=by_code)
def test_it_passes_its_other_example(rule):
    p, env = question(rule, rule.passes)
    if rule.applies(env) and rule.concerns(p):
        assert rule.body(p, env) is None


@pytest.mark.parametrize("wish", REGISTRY.wishes.values(), ids=by_code)
def test_a_wish_refuses_and_is_told(wish):
    name, fields = wish.trips
    p, env = AttentionParams(), question(RULES[0], {"gpu": "H100", "torch": "2.13.0"})[1]
    evidence = Evidence()
    if wish.family == "RUNTIME":
        evidence = evidence.plus(Refusal(name, p, "no execution plans support the graph", code=wish.code))
    answer = select(p, env, policy=Policy(**fields), evidence=evidence)[name]
    assert answer.verdict == "refused"
    assert wish.code in [reason.code for reason in answer.reasons]
    plain = select(p, env)[name]
    assert wish.code not in [reason.code for reason in plain.reasons]


@pytest.mark.parametrize("rule", RULES, ids=by_code)
def test_a_body_reads_its_arguments_and_nothing_else(rule):
    """No clock, no environment variables: what equality ignores no rule can read."""
    names = set(_names(rule.body.__code__))
    assert not names & {"os", "environ", "time", "random", "open", "__dict__", "fp8_meta"}
    assert list(inspect.signature(rule.body).parameters)[:2] == ["p", "env"]


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def test_codes_are_grouped_by_family():
    assert {page.family for page in PAGES} == {
        "INSTALL", "DEVICE", "POLICY", "RUNTIME", "CUDNN", "TRITON", "SDPA", "TILED", "CP", "BUG", "PREF",
    }  # fmt: skip


def test_every_candidate_has_rules():
    covered = {name for rule in RULES for name in rule.candidates}
    assert covered == set(CANDIDATES)

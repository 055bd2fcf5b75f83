"""Every rule explains itself, fires where it says and nowhere it says it does not, and says a bound once."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnsel.backends.registry import CANDIDATES
from attnsel.base.records import to_json
from attnsel.decision import select
from attnsel.environment import COMPONENTS, Environment
from attnsel.pages.rule import parts_of
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY, Rule, load_all
from attnsel.rules.codes import question
from attnsel.rules.cudnn.words import what_was_asked
from attnsel.verdicts.reasons import EVIDENCE, Evidence, Reason, Refusal, Unknown, Violation
from attnsel.verdicts.requirements import AtLeast, AtMost, Multiple
from paths import IMPORTED_FROM
from tables import each

load_all()
RULES = list(REGISTRY.rules.values())
PAGES = list(REGISTRY.pages.values())
RULES_FOLDER = Path(__file__).parents[2] / "rules"
FILES = sorted(RULES_FOLDER.rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.code)
def test_a_rule(page):
    """All that holds of one, so that ``-k CODE`` is its test."""
    assert 10 < len(page.title) <= 75, page.title
    assert page.source
    assert page.evidence in EVIDENCE
    assert "libcudnn, asked" not in page.source or page.code in what_was_asked()
    assert re.search(r"^(Why|Fix): ", page.text, re.MULTILINE), "say why, or what to do"
    assert page.family == "PREF" or "Fix" in parts_of(page), "what refuses says what helps"
    if isinstance(page, Rule):
        fires_on_its_example_with_a_whole_reason(page)
        passes_its_other_example(page)
        reads_its_arguments_and_nothing_else(page)
        says_what_holds(page)


def fires_on_its_example_with_a_whole_reason(rule):
    p, env = question(rule, rule.fires_on)
    assert rule.concerns(p)
    assert rule.applies(env), f"the example's environment does not pass the gates: {rule.when_text}"
    finding = rule.find(p, env)
    assert isinstance(finding, (Violation, Unknown)), finding
    reason = Reason(rule, finding)
    told = to_json(reason)
    for part in ("code", "field", "required", "message", "evidence", "source"):
        assert told[part], part
    assert finding.field in reason.message
    assert str(finding.required) in reason.message
    selection = select(p, env, policy=Policy(adapt="never", preview=rule.status == "preview"))
    for told_reason in (reason for candidate in selection for reason in candidate.reasons):
        missing = f"{told_reason.field} is not installed" in told_reason.message
        assert missing == (told_reason.observed is None and told_reason.field in COMPONENTS)
    for name in rule.candidates:
        answer = selection[name]
        assert rule.code in [r.code for r in answer.reasons]
        assert answer.verdict == ("unknown" if all(r.unknown for r in answer.reasons) else "refused")


def passes_its_other_example(rule):
    p, env = question(rule, rule.passes)
    if rule.applies(env) and rule.concerns(p):
        assert rule.find(p, env) is None


def reads_its_arguments_and_nothing_else(rule):
    """No clock, no environment variables: what equality ignores no rule can read."""
    names = set(_names(rule.body.__code__))
    assert not names & {"os", "environ", "time", "random", "open", "__dict__", "fp8_meta"}
    assert list(inspect.signature(rule.body).parameters)[:2] == ["p", "env"]


def _names(code):
    yield from code.co_names
    for constant in code.co_consts:
        if inspect.iscode(constant):
            yield from _names(constant)


def says_what_holds(rule):
    """The condition is the text: what is said to be enough is enough, and the next value is not."""
    for limit in rule.limits:
        requirement = limit.requirement
        if limit.of_environment or not isinstance(requirement, (AtMost, AtLeast, Multiple)):
            continue
        edge = requirement[0]
        beyond = edge - 1 if isinstance(requirement, AtLeast) else edge + 1
        assert str(edge) in str(requirement)
        for field in limit.fields:
            _, holds_fast = requirement.fast(field)
            for holds in (lambda value: requirement.holds(value, None), holds_fast):  # noqa: B023
                assert holds(edge)
                assert not holds(beyond)


@pytest.mark.parametrize("rule", REGISTRY.policy_rules.values(), ids=lambda rule: rule.code)
def test_a_policy_rule_refuses_and_is_told(rule):
    name, fields = rule.fires_on
    p, env = AttentionParams(), question(RULES[0], {"gpu": "H100", "torch": "2.13.0"})[1]
    plain = select(p, env)[name]
    evidence = Evidence()
    if rule.family == "MEMORY":
        p = p.replace(max_seqlen_q=65536, max_seqlen_kv=65536)
    if rule.family == "RUNTIME":
        evidence = evidence.plus(Refusal(name, p, "no execution plans support the graph", code=rule.code))
    answer = select(p, env, policy=Policy(**fields), evidence=evidence)[name]
    assert answer.verdict == "refused"
    assert rule.code in [reason.code for reason in answer.reasons]
    assert rule.code not in [reason.code for reason in plain.reasons]


BOUNDS = {"AtMost", "AtLeast", "Multiple", "EqualTo", "AtMostField"}


@each("path", FILES)
def test_no_body_states_a_bound_beside_its_condition(path):
    """A bound inside ``Violation(...)`` needs a condition that says it again, and the two drift apart."""
    wrong = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            if node.func.id in ("Violation", "Unknown") and names & BOUNDS and "limit" not in names:
                wrong.append(f"line {node.lineno}: {ast.unparse(node)}")
    assert not wrong, "say it in requires={...} or limit(p, field, ...)"


def test_every_candidate_has_rules_and_codes_are_grouped_by_family():
    assert {name for rule in RULES for name in rule.candidates} == set(CANDIDATES)
    assert set(what_was_asked()) <= set(REGISTRY.rules)
    shared = {"INSTALL", "DEVICE", "POLICY", "MEMORY", "RUNTIME", "CP", "BUG", "PREF", "HINT", "TE", "TORCH"}
    assert {page.family for page in PAGES} == shared | {record.family for record in CANDIDATES.values()}


def test_rules_of_cudnn_below_9_8_end_there_and_leave_fp8_alone():
    rules = [rule for rule in RULES if ".before_9_8" in rule.module]
    assert len(rules) > 50
    for gpu in ("T4", "A100", "L4", "H100", "B200", "RTX 5090"):
        env = Environment.describe(gpu, cudnn="9.8.0")
        assert not [rule.code for rule in rules if rule.applies(env)]
    assert not [rule.code for rule in rules if rule.concerns(AttentionParams(dtype="fp8_e4m3"))]


def test_without_docstrings_everything_decides_and_a_page_says_why_it_is_empty():
    code = (
        f"import sys; sys.path.append({str(IMPORTED_FROM)!r})\n"
        "from attnsel import AttentionParams, Environment, select\n"
        "from attnsel.cli import main\n"
        "print(select(AttentionParams(), Environment.describe('H100')).backend)\n"
        "sys.exit(main(['rule', 'CUDNN204']))"
    )
    words = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    backend, title, *page = done.stdout.splitlines()
    assert backend == select(AttentionParams(), Environment.describe("H100")).backend
    assert title == "CUDNN204  backward head dim"
    assert "Python's -OO" in " ".join(page)

"""Where a code comes from and where it goes: ranges, previews, deprecated and removed rules."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from added_rule import as_it_was, forget
from attnsel import settings
from attnsel.cli import main
from attnsel.decision import select
from attnsel.environment import Environment
from attnsel.errors import InvalidInput
from attnsel.params import AttentionParams
from attnsel.policy import Policy
from attnsel.rules import REGISTRY, Registry, find_rule, load_all, rule
from attnsel.rules.api import removed
from attnsel.rules.codes import all_ranges, range_of, split
from attnsel.verdicts.requirements import AtMost
from tables import each

load_all()
ROOT = Path(__file__).parents[2]
PAGES = list(REGISTRY.pages.values())

P = AttentionParams(head_dim_qk=64)
ENV = Environment.describe("H100", torch="2.13.0")


# Ranges.


def test_every_rule_lies_in_a_range_of_its_own_file():
    for page in PAGES:
        of_a_record = page.module == "attnsel.rules.takes"  # what its ``takes`` says
        assert of_a_record or range_of(page) is not None, "attnsel rules --ranges says where"


@each("codes", all_ranges())
def test_a_range_is_of_a_file_and_its_next_code_is_free(codes):
    assert (ROOT / codes.file).is_file()
    assert 0 < codes.first <= codes.last <= 999
    for other in all_ranges():
        apart = other.prefix != codes.prefix or other.last < codes.first or codes.last < other.first
        assert other == codes or apart
    code = codes.next_free()
    assert code is None or codes.has(code)
    assert code not in REGISTRY.pages
    assert code not in REGISTRY.removed


def test_the_next_code_is_not_one_that_was_removed_and_a_range_can_be_full(monkeypatch):
    (codes,) = (codes for codes in all_ranges() if codes.file == "rules/tiled.py")
    before = codes.next_free()
    monkeypatch.setitem(REGISTRY.removed, before, None)
    after = codes.next_free()
    assert split(after)[1] == split(before)[1] + 1
    monkeypatch.setitem(REGISTRY.removed, f"{codes.prefix}{codes.last:03}", None)
    assert codes.next_free() is None


# A rule's life. BUG9xx: nobody will take these.


@pytest.fixture
def registered():
    """``registered("BUG900", …)`` puts a rule against ``tiled`` among attnsel's until the test ends."""

    def register(code="BUG900", registry=None, **more):
        def too_wide(p, env):
            """Nothing is wider than 32 for this rule

            Why: it is a test's.
            Source: this file.
            """
            return True

        limits = {"head_dim_qk": AtMost(32)}
        rule(code, "tiled", requires=limits, evidence="measured", registry=registry, **more)(too_wide)
        forget()
        return find_rule(code)

    with as_it_was():
        yield register


def codes_against(policy=None):
    return [reason.code for reason in select(P, ENV, policy=policy or Policy())["tiled"].reasons]


def told(capsys, *words):
    assert main(["rule", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def as_json(capsys, code):
    return json.loads(told(capsys, code, "--json"))


def test_a_preview_refuses_only_where_the_policy_or_the_environment_variable_says_so(registered, monkeypatch):
    page = registered()
    assert (page.status, page.replaced_by) == ("active", "")
    assert codes_against() == ["BUG900"]
    assert registered("BUG902", status="preview").status == "preview"
    assert codes_against() == ["BUG900"]
    assert codes_against(Policy(preview=True)) == ["BUG900", "BUG902"]
    monkeypatch.setenv("ATTNSEL_PREVIEW", "1")
    try:
        assert codes_against(settings.configure().policy) == ["BUG900", "BUG902"]
    finally:
        monkeypatch.delenv("ATTNSEL_PREVIEW")
        settings.configure()


def test_a_deprecated_rule_refuses_and_names_what_took_over(registered, capsys):
    assert registered(replaced_by="BUG006").status == "deprecated"
    assert codes_against() == ["BUG900"]
    assert "Status: deprecated: BUG006 took over" in told(capsys, "BUG900")
    page = as_json(capsys, "BUG900")
    assert (page["status"], page["replaced_by"]) == ("deprecated", "BUG006")
    assert main(["rules", "--family", "BUG"]) == 0
    assert "[measured] deprecated, see BUG006" in " ".join(capsys.readouterr().out.split())
    with pytest.warns(DeprecationWarning, match="BUG900 is deprecated: BUG006 took over") as caught:
        assert codes_against(Policy(allow_known_bugs=("BUG900",))) == []
    assert caught[0].filename == __file__, "the caller's code is what has to change"


def test_a_removed_code_still_has_a_page_and_allowing_it_is_a_warning_and_no_error(registered, capsys):
    removed("BUG901", release="0.1.0", replaced_by="BUG006", why="A test removed it.")
    forget()
    with pytest.warns(UserWarning, match=r"BUG901 was removed in 0\.1\.0: BUG006 took over"):
        assert select(P, ENV, policy=Policy(allow_known_bugs=("BUG901",)))["tiled"].eligible
    page = told(capsys, "bug901")
    assert page.startswith("BUG901 removed in 0.1.0 Why: A test removed it. Read instead: BUG006, On Hopper")
    assert as_json(capsys, "BUG901") == {
        **{"schema": "attnsel.removed-rule/1", "code": "BUG901", "family": "BUG", "status": "removed"},
        **{"release": "0.1.0", "replaced_by": "BUG006", "why": "A test removed it."},
    }


def test_allowing_a_bug_that_is_in_force_warns_of_nothing_and_one_that_never_was_is_an_error():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(P, ENV, policy=Policy(allow_known_bugs=("BUG006", "all")))
    with pytest.raises(InvalidInput, match="BUG999"):
        select(P, ENV, policy=Policy(allow_known_bugs=("BUG999",)))


def test_no_rule_takes_a_code_that_was_removed(registered):
    own = Registry("tiled")
    removed("BUG901", release="0.1.0", why="A test removed it.", registry=own)
    with pytest.raises(ValueError, match="BUG901 was in use once"):
        registered("BUG901", registry=own)
    gone = next(iter(REGISTRY.removed))
    with pytest.raises(ValueError, match=f"{gone} was in use once"):
        registered(gone, fp8=False)

    with pytest.raises(ValueError, match="BUG006 is taken"):
        removed("BUG006", release="0.1.0", why="A test tried.")


@each("gone", REGISTRY.removed.values())
def test_every_removed_code_says_why_and_what_to_read_instead(gone, capsys):
    assert any(codes.has(gone.code) for codes in all_ranges())
    assert gone.code not in REGISTRY.pages
    assert gone.why.endswith(".")
    assert not gone.replaced_by or gone.replaced_by in REGISTRY.pages
    assert gone.why in told(capsys, gone.code)


def test_what_took_over_from_a_deprecated_rule_is_in_force():
    for page in PAGES:
        if page.status == "deprecated":
            assert REGISTRY.pages[page.replaced_by].status == "active"
        else:
            assert not page.replaced_by

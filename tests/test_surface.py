"""What users write down stays: docs/explanation/versioning.md, promise by promise."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from typing import Any

import pytest

import attnsel
from attnsel.rules import REGISTRY, find_rule, load_families
from paths import ROOT
from surface import RECORD, joined, main, missing, surface

CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
HOW = "python tests/proof/surface.py adds it"


@pytest.fixture(scope="module")
def recorded():
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if importlib.util.find_spec("torch") is None:
        for name in attnsel._NEEDS_TORCH:
            record["python"].pop(name)
    return record


@pytest.fixture(scope="module")
def now():
    return surface()


KINDS = ("python", "plugins", "commands", "variables", "exit_codes", "candidates", "rules", "schemas")


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_there_is_there(kind, recorded, now):
    assert recorded[kind]
    assert missing(recorded[kind], now[kind]) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_new_is_in_the_record(kind, recorded, now):
    assert missing(now[kind], recorded[kind]) == [], HOW


@pytest.mark.parametrize(
    ("path", "gone"),
    [
        (("commands", "explain", "flags", "--gpu"), "/commands/explain/flags/--gpu"),
        (("commands", "doctor"), "/commands/doctor"),
        (("variables", "ATTNSEL_DEBUG"), "/variables/ATTNSEL_DEBUG"),
        (
            ("python", "AttentionParams", "parameters", "softcap"),
            "/python/AttentionParams/parameters/softcap",
        ),
        (("python", "Selection", "methods", "report"), "/python/Selection/methods/report"),
        (("rules", "CUDNN204"), "/rules/CUDNN204"),
    ],
)
def test_what_vanishes_is_named(path, gone, now):
    less = copy.deepcopy(now)
    *above, name = path
    held = less
    for key in above:
        held = held[key]
    held.remove(name) if isinstance(held, list) else held.pop(name)
    assert missing(now, less) == [gone]
    assert missing(now, joined(now, less)) == [], "an update of the record takes nothing out"


def test_another_exit_code_under_the_same_name_is_named(now):
    other = copy.deepcopy(now)
    other["exit_codes"]["NO_BACKEND"]["code"] = 5
    assert missing(now, other) == ["/exit_codes/NO_BACKEND/code was 3 and is 5"]


def test_an_update_says_what_has_gone(monkeypatch, tmp_path, capsys, now):
    record = tmp_path / "surface.json"
    record.write_text(json.dumps({**now, "rules": {**now["rules"], "CUDNN999": {}}}))
    monkeypatch.setattr("surface.RECORD", record)
    assert main() == 1
    assert capsys.readouterr().err == "in the record, and not there: /rules/CUDNN999\n"
    assert "CUDNN999" in json.loads(record.read_text())["rules"]


def test_every_code_that_ever_was_is_still_answered(recorded):
    for code in recorded["rules"]:
        assert find_rule(code).code == code


def test_a_deprecated_rule_names_what_took_over_and_that_exists():
    load_families()
    pages: list[Any] = [*REGISTRY.rules.values(), *REGISTRY.removed.values()]
    for page in pages:
        if page.replaced_by:
            assert page.replaced_by in REGISTRY.pages, page.code


# ---- the changelog ------------------------------------------------------------------------------------

SECTIONS = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.M)
KINDS_OF_CHANGE = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_changelog_begins_with_what_is_not_released_and_with_this_version():
    assert SECTIONS[0] == ("Unreleased", "")
    assert SECTIONS[1][0] == attnsel.__version__


def test_sections_of_the_changelog_are_releases_newest_first():
    released = [tuple(map(int, version.split("."))) for version, _ in SECTIONS[1:]]
    assert released == sorted(released, reverse=True)
    assert len(set(released)) == len(released)


def test_only_the_newest_may_wait_for_its_date():
    assert all(date for _, date in SECTIONS[2:])


def test_headings_of_the_changelog_are_those_of_keep_a_changelog():
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.M)) <= KINDS_OF_CHANGE


def test_commands_that_the_changelog_names_exist(recorded):
    named = set(re.findall(r"`attnsel ([a-z][\w-]*)", CHANGELOG))
    assert len(named) > 8
    assert named <= set(recorded["commands"])

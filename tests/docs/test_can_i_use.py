"""The pages of "Can I use it?": made from the rules alone, with every sign leading to its reasons."""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("griffe", reason="pages are made with it: pip install --group docs")

from attnsel.pages.can_i_use.features import FEATURES
from attnsel.pages.can_i_use.words import LOOKS
from attnsel.rules import REGISTRY
from json_schemas import path_of
from sitegen import can_i_use
from sitegen.can_i_use import anchor, files, matrix

NAMES = ("sliding-window", "softcap", "mla", "paged-kv", "deterministic", "fp8-delayed", "long-128k")
GPUS = ("sm75", "sm90")


@pytest.fixture
def small(monkeypatch):
    """A matrix of a few features on two architectures; everything else is as it is."""
    monkeypatch.setattr(can_i_use, "FEATURES", {name: FEATURES[name] for name in NAMES})
    monkeypatch.setattr(can_i_use, "GPUS", GPUS)
    matrix.cache_clear()
    yield
    matrix.cache_clear()


def made() -> dict[str, str]:
    return {file.path.removeprefix("can-i-use/"): file.content for file in files()}


def cell_of(data, feature, kernel, gpu):
    found = (c for c in data["cells"] if (c["feature"], c["kernel"], c["gpu"]) == (feature, kernel, gpu))
    return next(found)


def test_a_rule_that_is_added_is_in_its_cell_on_its_pages_and_in_the_json(small, added_rule):
    before = made()
    old = cell_of(json.loads(before["matrix.json"]), "sliding-window", "cudnn", "sm90")
    assert old["state"] == "yes"
    assert not any("CUDNN999" in text for text in before.values())

    added_rule()
    after = made()
    data = json.loads(after["matrix.json"])
    new = cell_of(data, "sliding-window", "cudnn", "sm90")
    assert (new["state"], new["unlocked_at"]) == ("version", "9.7.1")  # the rule holds since 9.8.0
    assert new["modes"][0]["spans"][-1]["codes"] == ["CUDNN999"]
    assert [rule["title"] for rule in data["rules"] if rule["code"] == "CUDNN999"]
    page = after["sliding-window.md"]
    assert "[CUDNN999](../rules/CUDNN999.md)" in page
    assert "but with 9.2.0 to 9.7.1" in page
    assert {name for name, text in after.items() if "CUDNN999" in text} == {
        "sliding-window.md",
        "matrix.json",
    }
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"sliding-window.md", "index.md", "matrix.json", "matrix.markdown"}
    assert "#cudnn-sm90" in next(
        line for line in after["index.md"].splitlines() if "△" in line and "sliding-window" in line
    )


def test_every_sign_leads_to_an_answer_that_is_there_once(small):
    pages = made()
    for cell in matrix():
        page = pages[f"{cell.feature.name}.md"]
        assert page.count(f'<span id="{anchor(cell)}"></span>') == 1
        assert f"(#{anchor(cell)})" in page  # from its own table
        overview = pages["index.md" if cell.gpu == "sm90" else f"{cell.gpu}.md"]
        assert f"({cell.feature.name}.md#{anchor(cell)})" in overview


def test_every_rule_that_is_named_has_a_page(small):
    named = {code for text in made().values() for code in re.findall(r"\.\./rules/(\w+)\.md", text)}
    assert named
    assert named <= set(REGISTRY.pages)


def test_a_sign_says_in_a_word_what_its_colour_says(small):
    signs = re.findall(
        r"\[(.)[^\]]*\]\([^)]*\)\{ \.ciu \.ciu-(\w+) title=\"(\w+)\" \}", "".join(made().values())
    )
    assert signs
    for mark, state, word in signs:
        assert (mark, word) == (LOOKS[state].mark, LOOKS[state].word)


def test_an_answer_has_the_question_to_ask_again(small):
    page = made()["softcap.md"]
    answers = page.count("</span>**")
    assert answers == page.count('??? ciu-ask "Ask it again"') > 0
    assert page.count("    attnsel explain --gpu ") == 2 * answers  # training and inference


def test_the_json_is_as_its_schema_says(small):
    jsonschema = pytest.importorskip("jsonschema")
    data = json.loads(made()["matrix.json"])
    jsonschema.validate(data, json.loads(path_of("can-i-use").read_text(encoding="utf-8")))
    assert [feature["name"] for feature in data["features"]] == list(NAMES)
    assert data["gpus"] == list(GPUS)


def test_the_markdown_is_a_table_of_each_architecture(small):
    text = made()["matrix.markdown"]
    assert text.count("| feature |") == len(GPUS)
    assert "| softcap |" in text


@pytest.mark.slow
def test_the_whole_is_a_page_for_each_feature_and_architecture():
    matrix.cache_clear()
    pages = made()
    assert {f"{name}.md" for name in FEATURES} <= set(pages)
    assert {f"{gpu}.md" for gpu in can_i_use.GPUS if gpu != "sm90"} <= set(pages)
    assert max(len(text.encode()) for name, text in pages.items() if name.endswith(".md")) < 150_000

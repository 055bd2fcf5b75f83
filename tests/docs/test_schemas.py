"""Every JSON that is printed says which shape it has, and has it; a shape changes only with its version."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, select
from attnsel.base.records import versions
from json_schemas import FOLDER, path_of, samples

jsonschema = pytest.importorskip("jsonschema")

# Of documents that were released. A changed shape is a new version and a new line, never another digest.
DIGESTS: dict[str, str] = {
    "can-i-use-1": "6c860a21becc5570",
    "conformance-1": "93a90ff1e0d535fa",
    "conformance-2": "5eed008d1f800415",
    "conformance-cudnn-1": "42821ff0adf943ab",
    "conformance-cudnn-2": "def772d533e8f6ef",
    "conformance-executed-1": "d7f8b98661cc4c95",
    "conformance-flash-1": "bbdbf9cec25fa546",
    "debug-1": "5039f177b0ab790c",
    "debug-2": "43891f48936e481d",
    "debug-3": "bc19ca99fc75dc61",
    "debug-4": "fd0fff9eacd3184e",
    "debug-5": "a404441819e76630",
    "debug-6": "4c650cd829208149",
    "doctor-1": "90dff5c68c961a77",
    "doctor-2": "e6f294fc70411862",
    "doctor-3": "70a0680a60effaa8",
    "doctor-4": "2fb85058509108e7",
    "doctor-5": "f7a0cfb150175482",
    "doctor-6": "2f05d90a43137606",
    "doctor-7": "7b4ac77b1bc48ea1",
    "gpus-1": "53cec192689fe52a",
    "grid-1": "478e3d7728fb4446",
    "grid-2": "94678f2d479441b0",
    "log-1": "fd77b6c6b4955ec4",
    "plan-1": "add36dc149372ce3",
    "plan-2": "6c207cf3184cb743",
    "ranges-1": "d5ef5f2308334630",
    "removed-rule-1": "b98596fcbc7efd36",
    "replay-1": "2e58a9d3bed3612f",
    "replay-2": "c82175f44cd7959c",
    "report-1": "d597227b1191d068",
    "rule-1": "5d1cd04a2a6b06d6",
    "rule-2": "9b48189ec423cd81",
    "rules-1": "2b688c6699a6dd42",
    "selection-1": "93d4ef03ea61c55f",
    "selection-2": "18403a175e5c907c",
    "selection-3": "57e6c7931bc3d112",
    "selection-4": "f683f328fa01114f",
    "selection-5": "ed3fbcda8616afb4",
    "selection-6": "cd399bc7cd983c6e",
    "watch-1": "873bec41354900d9",
    "watch-2": "c02d6d015a797ef2",
    "watch-process-1": "0f7f4f25bae3cafc",
    "watch-site-1": "c25ed9ac0de0e613",
    "watch-site-2": "11a5e93fbe90089c",
}


def validator(name: str) -> Any:
    document = json.loads(path_of(name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_a_shape_changes_only_with_its_version() -> None:
    files = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in FOLDER.glob("*.json")}
    assert files == DIGESTS


def test_what_is_printed_has_the_shape_of_its_version() -> None:
    pytest.importorskip("torch")
    printed = samples()
    assert list(printed) == list(versions())
    for name, answers in printed.items():
        holds = validator(name)
        assert answers
        for answer in answers:
            assert next(iter(answer.items())) == ("schema", f"attnsel.{name}/{versions()[name]}")
            holds.validate(answer)


def test_a_field_more_or_less_is_another_shape() -> None:
    answer = json.loads(select(AttentionParams(), Environment.describe("H100")).to_json())
    holds = validator("selection")
    assert holds.is_valid(answer)
    first, *others = answer["candidates"]
    less = {name: value for name, value in first.items() if name != "placed_by"}
    for changed in (
        {"new": 1},
        {"params": {**answer["params"], "new": 1}},
        {"candidates": [less, *others]},
        {"candidates": [{**first, "unproven": "no"}, *others]},
        {"schema": "attnsel.selection/0"},
    ):
        assert not holds.is_valid({**answer, **changed})

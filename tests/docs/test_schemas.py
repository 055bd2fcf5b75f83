"""Every JSON that is printed says which shape it has, and has it; a shape changes only with its version."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, select
from attnsel.base.records import versions
from json_schemas import FOLDER, path_of, samples
from tables import rows_of

jsonschema = pytest.importorskip("jsonschema")


def validator(name: str) -> Any:
    document = json.loads(path_of(name).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(document)
    return jsonschema.Draft202012Validator(document)


def test_a_shape_changes_only_with_its_version() -> None:
    files = {file.stem: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in FOLDER.glob("*.json")}
    assert files == {row["document"]: row["sha256"] for row in rows_of(__file__, "schema_digests.csv")}


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

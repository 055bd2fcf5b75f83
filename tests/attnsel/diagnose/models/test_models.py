"""Whole models: the table of families beside what transformers' own code hands on, and the answer."""

from __future__ import annotations

import json

import model_families
from attnsel import Environment, plan
from attnsel.cli import main
from attnsel.diagnose.models import source, table
from attnsel.diagnose.models.plan import PHASES
from tables import each

NAMED = ("qwen2_moe", "gemma2", "gemma4_text", "deepseek_v2", "gpt_oss", "modernbert", "t5")


@each("model_type", NAMED)
def test_the_table_says_what_transformers_hands_to_attention(model_type) -> None:
    """The first of the configurations; all of every row are asked by tests/proof/model_families.py."""
    config = next(model_families.configs(model_type))
    wanted = model_families.told(model_families.recorded(config))
    assert wanted
    assert [model_families.told(table.tabled(form)) for form in model_families.forms(config)] == [wanted] * 3


@each("name", ("gemma-3-27b", "gpt-oss-20b", "qwen3-next-80b-a3b"))
def test_a_preset_is_planned_alike_with_and_without_transformers(name) -> None:
    config = source.preset(name)
    assert model_families.told(table.tabled(config)) == model_families.told(source.layers_of(config))


def test_layers_that_are_no_softmax_attention_are_named_and_not_planned(monkeypatch) -> None:
    monkeypatch.setattr(source, "_asks_transformers", lambda: False)
    found = plan("qwen3-next-80b-a3b", Environment.describe("H100"))
    assert {cell.phase for cell in found.cells} == set(PHASES)
    assert [len(call.layers) for call in found.layers.calls] == [12]
    assert [(len(other.layers), other.kind) for other in found.layers.other] == [(36, "GatedDeltaNet")]


BAD = (
    ("{", "is no JSON"),
    ("[]", "must hold a JSON object"),
    ('{"model_type": "llama", "num_attention_heads": -1}', "num_attention_heads"),
    ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads"),
    ('{"model_type": "llama", "num_hidden_layers": "many"}', "num_hidden_layers"),
    ('{"model_type": "llama", "head_dim": true}', "head_dim"),
    ('{"layer_types": [1], "num_attention_heads": 8, "hidden_size": 64}', "layer_types"),
    ("[" * 100_000, "nested too deeply"),
    (" " * (17 << 20), "longer than"),
)


@each(("text", "said"), BAD)
def test_a_bad_config_is_one_clear_error(text, said, tmp_path, capsys) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["explain", "--model", str(path), "--gpu", "H100"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_answer_as_json(capsys) -> None:
    assert main(["explain", "--model", "gpt-oss-20b", "--gpu", "T4", "--tp-size", "8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "attnsel.model/1"
    windows = {(call["phase"], call["window"]): call for call in said["calls"]}
    assert windows["decode", 128]["params"]["num_gqa_groups"] == 1
    assert windows["prefill", 128]["sinks"]
    assert windows["prefill", None]["kv_heads"] == 8

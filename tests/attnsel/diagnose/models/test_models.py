"""Whole models: the table of families beside what transformers' own code hands on, and the answer."""

from __future__ import annotations

import json
from pathlib import Path

import model_families
from attnsel import Environment, plan, recommend
from attnsel.cli import main
from attnsel.diagnose.models import source, table
from attnsel.diagnose.models.document import model_document
from attnsel.diagnose.models.plan import PHASES
from attnsel.report.text import to_text
from tables import cells_of, each

NAMED = ("qwen2_moe", "gemma2", "gemma4_text", "deepseek_v2", "gpt_oss", "modernbert", "t5", "whisper", "cwm")


@each("model_type", NAMED)
def test_the_table_says_what_transformers_hands_to_attention(model_type) -> None:
    """The first of the configurations; all of every row are asked by tests/proof/model_families.py."""
    config, given = next(model_families.configs(model_type))
    wanted = model_families.told(model_families.recorded(config))
    assert wanted
    for form in model_families.forms(config, given):
        assert model_families.told(table.tabled(form)) == wanted


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


HUB = json.loads(Path(__file__).with_name("hub.json").read_text())


@each("public", HUB)
def test_a_config_of_a_hub_is_read_as_its_family_says(public) -> None:
    """tests/proof/model_families.py asks transformers' code about them too."""
    found = table.tabled(public["config"])
    fields = ("stack", "q_heads", "kv_heads", "head_dim_qk", "head_dim_v", "window", "sinks")
    told = [
        [len(call.layers), *(getattr(call, name) for name in fields), round(call.scale, 4)]
        for call in found.calls
    ]
    assert told == public["calls"]
    assert [[len(other.layers), other.kind] for other in found.other] == public["other"]
    assert list(found.unread) == public["unread"]


def test_attention_that_is_written_out_reaches_no_kernel(capsys, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "bloom", "n_layer": 2, "n_head": 8, "hidden_size": 1024}')
    assert main(["explain", "--model", str(path), "--gpu", "H100"]) == 0
    said = capsys.readouterr().out
    assert "by hand · slow" in said
    assert "no attn_implementation reaches a kernel" in said
    assert recommend("transformers", {"model_type": "bloom"}, Environment.describe("H100")) == "eager"


@each("gpu", ("H100", "B200", "RTX 4090", "T4"))
@each(
    ("name", "thread"),
    (
        ("gemma-4-26b-a4b", "vllm/issues/38887"),
        ("deepseek-v3", "cudnn-frontend/issues/242"),
        ("gpt-oss-20b", "flash-attention/issues/1797"),
        ("qwen3-next-80b-a3b", "unsloth/pull/6850"),
    ),
)
def test_a_layer_that_few_kernels_take_has_its_thread_beside_it(name, thread, gpu, monkeypatch) -> None:
    monkeypatch.setattr(source, "_asks_transformers", lambda: False)
    found = plan(name, Environment.describe(gpu))
    assert thread in to_text(model_document(found), 200)
    taken: dict[str, set[str | None]] = {}
    for cell in found.cells:
        taken.setdefault(cell.phase, set()).add(cell.kernel)
    if any(len(kernels) > 1 for kernels in taken.values()):
        assert any(thread in cell.as_dict()["thread"] for cell in found.cells)


def test_a_diffusion_transformer_is_of_the_picture_that_is_asked_for() -> None:
    config = {"_class_name": "SD3Transformer2DModel", "num_layers": 24, "dual_attention_layers": [0, 1]}
    found = plan(config, Environment.describe("H100"), image_size=512)
    lengths = {(len(cell.call.layers), cell.selection.params.max_seqlen_q) for cell in found.cells}
    assert lengths == {(24, 1024 + 333), (2, 1024)}
    assert found.layers.assumed == ("1024 tokens of a picture of 512 x 512 pixels, 333 of text",)


LONG = [["[" * 100_000, "nested too deeply"], [" " * (17 << 20), "longer than"]]


@each(("text", "said"), cells_of(__file__, "bad_configs.txt") + LONG)
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
    assert said["schema"] == "attnsel.model/2"
    windows = {(call["phase"], call["window"]): call for call in said["calls"]}
    assert windows["decode", 128]["params"]["num_gqa_groups"] == 1
    assert windows["prefill", 128]["sinks"]
    assert windows["prefill", None]["kv_heads"] == 8

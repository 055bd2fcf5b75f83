"""``attnsel compare`` of environments: every answer that changes, with the codes that change it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from attnsel import AttentionParams, Environment, select
from attnsel.cli import main
from attnsel.diagnose.compare import Answered, Side, compared, merged_words
from rank_files import answer, debug_line


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("attnsel.diagnose.models.source._asks_transformers", lambda: False)

    def call(*words: Any) -> tuple[int, str, str]:
        code = main(["compare", *map(str, words)])
        return (code, *capsys.readouterr())

    return call


UPGRADES = [
    ("H100,torch=2.6", "H100,torch=2.15"),
    ("H100,cudnn=9.1", "H100,cudnn=9.13"),
    ("A100", "B200"),
    ("H100", "RTX 5090"),
]


@pytest.mark.parametrize(
    "asked", [(), ("--as", "torch"), *(("--model", m) for m in ("llama-3-8b", "gemma-3-4b"))]
)
@pytest.mark.parametrize(("before", "after"), UPGRADES)
def test_every_answer_that_changes_is_explained(told: Any, before: str, after: str, asked: Any) -> None:
    found = json.loads(told(before, after, *asked, "--json")[1])
    (share,) = found["changed"]
    assert share["questions"] == sum(len(change["questions"]) for change in found["changes"])
    for change in found["changes"]:
        reasons = change["kept_away_before"] + change["keeps_away_now"]
        assert reasons, change
        assert all(one["code"] or "--as" in asked for one in reasons)
        assert all(one["text"] for one in reasons)
    assert share["questions"] or "llama-3-8b" in asked


def test_an_upgrade_is_told_in_a_line_for_each_cause(told: Any) -> None:
    code, out, _ = told("H100,cudnn=9.1", "H100,cudnn=9.13", "--head-dim", "192,128")
    assert code == 0
    assert out.startswith("The answer changes from H100,cudnn=9.1 to H100,cudnn=9.13.")
    assert "sdpa.flash → cudnn: 1 question" in out
    assert "against cudnn before: CUDNN204; against sdpa.flash now: PREF005" in out
    assert "CUDNN204  Backward above head_dim 128 needs cuDNN 9.5.0" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_odd_one_of_many_is_named(told: Any) -> None:
    code, out, _ = told("H100", "A100", "H200", "B200")
    assert code == 0
    assert out.startswith("A100 is the odd one out: alone in ")
    assert told("H100", "H200", "GH200")[1].startswith("All 168 answers are the same: H100, H200, GH200.")
    env = Environment.describe("H100")
    selections = [select(AttentionParams(dtype=dtype), env) for dtype in ("bf16", "fp32")]
    sides = [Side(name, env) for name in "abcd"]
    two_and_two = [[Answered(("x",), selections[n // 2])] for n in range(4)]
    assert compared(sides, two_and_two).odd is None, "nobody is alone"


def test_questions_are_merged_into_lines_that_say_all_and_no_other() -> None:
    every = list(product(("d64", "d128"), ("causal", "bias"), ("training",)))
    assert list(merged_words(every)) == [("d64, d128", "causal, bias", "training")]
    assert list(merged_words(every[:3])) == [
        ("d64", "causal, bias", "training"),
        ("d128", "causal", "training"),
    ]


def test_questions_of_a_file_are_asked(told: Any, tmp_path: Any) -> None:
    file, question = tmp_path / "rank0.jsonl", AttentionParams(head_dim_qk=192, head_dim_v=128)
    lines = [debug_line(answer(p), 0) for p in (question, question, AttentionParams(head_dim_qk=64))]
    file.write_text("\n".join(("step 1", *lines, '{"schema": "attnsel.debug/99"}')))
    found = json.loads(told("H100,cudnn=9.1", "H100,cudnn=9.13", "--questions", file, "--json")[1])
    assert found["questions"] == 2
    assert ["d192/128" in change["questions"][0][0] for change in found["changes"]] == [True]
    for text in (question.model_dump_json(), f"[{question.model_dump_json()}]"):
        file.write_text(text)
        assert json.loads(told("H100", "A100", "--questions", file, "--json")[1])["questions"] == 1


MISTAKES = json.loads(Path(__file__).with_name("compare_mistakes.json").read_text())


@pytest.mark.parametrize(("said", "words"), [(said, w) for said, ways in MISTAKES.items() for w in ways])
def test_a_mistake_is_one_line(told: Any, said: str, words: Any) -> None:
    code, out, err = told(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_an_upgrade_of_a_file_brings_what_its_wheel_does(told: Any, tmp_path: Any) -> None:
    file = tmp_path / "doctor.json"
    env = Environment.describe("H100", torch="2.6").replace(detected=True, assumed=())
    file.write_text(json.dumps({"schema": "attnsel.doctor/9", "devices": [env.model_dump(mode="json")]}))
    before, after = json.loads(told(file, f"{file},torch=2.15", "--json")[1])["environments"]
    assert (before["name"], after["name"]) == ("doctor.json", "doctor.json,torch=2.15")
    assert (before["environment"]["cudnn"], after["environment"]["cudnn"]) == ("9.1.0", "9.26.0")
    assert (before["environment"]["detected"], after["environment"]["assumed"]) == (
        True,
        ["cuda", "cudnn", "triton"],
    )

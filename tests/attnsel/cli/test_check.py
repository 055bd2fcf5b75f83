"""``attnsel check``: green, red after an upgrade, green once it is written; never green by mistake."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from attnsel import AttentionParams
from attnsel.cli import main
from attnsel.cli.check import github_lines
from attnsel.diagnose.baseline import Failure

BEGIN = ("--update", "--env", "gpu=H100,torch=2.6", "--env", "A100,torch=2.6", "--model", "gemma-3-4b")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """A sample repository, and ``attnsel check attention.json`` in it."""
    monkeypatch.setattr("attnsel.diagnose.models.source._asks_transformers", lambda: False)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["check", "attention.json", *words])
        return (code, *capsys.readouterr())

    return call


def changed(**parts: Any) -> None:
    file = Path("attention.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}, indent=2))


def test_green_then_red_after_an_upgrade_then_green_once_it_is_written(repository: Any) -> None:
    assert repository(*BEGIN)[:2] == (0, "attention.json written: 12 questions, all as expected.\n")
    Path("attention.json").chmod(0o600)
    assert repository()[:2] == (0, "attention.json: 12 questions, all as expected.\n")
    code, out, _ = repository("--upgrade", "torch=2.15", "--github", "--junit", "out.xml")
    assert code == 4
    assert out.startswith("attention.json: 3 of 12 questions not as expected.")
    assert "✖ H100: kernel: sdpa.varlen → cudnn (PREF005)" in out
    found = re.findall(
        r"^::error file=attention.json,line=(\d+),title=attnsel check::(.*)$", out, re.MULTILINE
    )
    lines = Path("attention.json").read_text().splitlines()
    assert len(found) == 3
    for line, text in found:
        assert text.split(": kernel:")[0].removeprefix("H100: ") in lines[int(line) - 1]
    suites = ElementTree.parse("out.xml").getroot()
    assert [(s.get("name"), s.get("tests"), s.get("failures")) for s in suites] == [
        ("H100", "6", "3"),
        ("A100", "6", "0"),
    ]
    assert repository("--upgrade", "torch=2.15", "--update")[0] == 0
    assert repository()[0] == 0
    held = json.loads(Path("attention.json").read_text())
    assert held["environments"] == {"H100": "gpu=H100,torch=2.15", "A100": "A100,torch=2.15"}
    assert stat.S_IMODE(Path("attention.json").stat().st_mode) == 0o600
    assert sorted(path.name for path in Path().iterdir()) == ["attention.json", "out.xml"]


def test_each_thing_that_does_not_hold_is_told(repository: Any) -> None:
    repository(*BEGIN)
    Path("asked.json").write_text(AttentionParams(dtype="fp32", head_dim_qk=96).model_dump_json())
    code, out, _ = repository("--update", "--questions", "asked.json", "--env", "T4", "--json")
    found = json.loads(out)
    assert (code, {one["what"] for one in found["failures"]}) == (4, {"scores"})
    held = json.loads(Path("attention.json").read_text())
    expected = held["expected"]["A100"]
    first, second, third, *_ = expected
    expected[first] = {"kernel": expected[first], "allow": ["memory"]}
    expected[second] = "cudn"
    expected["gone"] = expected.pop(third)
    limits = {"known_bugs": False, "max_score_bytes": None, "max_memory": "1KiB"}
    changed(expected=held["expected"], limits=limits)
    found = json.loads(repository("--json")[1])["failures"]
    there = {(one["question"], one["what"]) for one in found if one["environment"] == "A100"}
    assert {(second, "kernel"), (third, "not expected yet"), ("gone", "not asked any more")} <= there
    assert any(one["what"] == "memory" for one in found)
    assert (first, "memory") not in there
    changed(dispatcher="torch", switches={"enable_gqa": "true"})
    assert {"math", "flash"} & {one["now"] for one in json.loads(repository("--json")[1])["failures"]}


BROKEN = json.loads(Path(__file__).with_name("broken_baselines.json").read_text())


def test_what_is_no_baseline_is_one_clear_error_and_never_green(repository: Any) -> None:
    repository("--update", "--env", "H100", "--model", "llama-3-8b")
    whole = Path("attention.json").read_text()
    for said, text in BROKEN.items():
        Path("attention.json").write_text(text if isinstance(text, str) else whole)
        if isinstance(text, dict):
            changed(**text)
        before = Path("attention.json").read_text()
        for words in ((), ("--update",)):
            code, out, err = repository(*words)
            assert (code, out, err.count("\n")) == (2, "", 1), (said, out, err)
            assert said in err, (said, err)
        assert Path("attention.json").read_text() == before
    assert "goes with --update" in repository("--env", "H100")[2]
    Path("attention.json").unlink()
    assert repository()[::2] == (2, "attnsel: FILE = attention.json: No such file or directory\n")


def test_no_text_of_a_failure_ends_an_annotation() -> None:
    failure = Failure("a:b", "50%\n::error::x,y", "kernel", "a\rb", "\x1b[31mc", ("X001",), "fix")
    (line,) = github_lines("a,b:c%.json", [failure])
    assert line.isprintable()
    assert line.startswith(
        "::error file=a%2Cb%3Ac%25.json,line=1,title=attnsel check::a:b: 50%25\\n::error::x,y"
    )
